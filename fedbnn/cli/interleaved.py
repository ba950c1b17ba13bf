"""Time several things in turn, so that a slow moment of the machine hits all of them alike."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from fedbnn.storage.run_dir import environment, write_json

Seconds = dict[str, list[float]]


def interleaved(work: Mapping[str, Callable[[], object]], repeats: int, warm: int = 2) -> Seconds:
    """Seconds of each piece of work, `repeats` times in turn after `warm` turns that do not count."""
    seconds: Seconds = {name: [] for name in work}
    for turn in range(warm + repeats):
        for name, action in work.items():
            start = perf_counter()
            action()
            if turn >= warm:
                seconds[name].append(perf_counter() - start)
    return seconds


def ratio(seconds: Seconds, name: str, reference: str) -> float:
    """Median over the turns of one time over the other of the same turn."""
    return median(
        mine / theirs for mine, theirs in zip(seconds[name], seconds[reference], strict=True)
    )


def summary(seconds: Seconds, reference: str) -> list[dict[str, Any]]:
    """For each: median and quartiles in milliseconds, and the ratio to the reference."""
    rows = []
    for name, values in seconds.items():
        low, middle, high = (
            1000 * value for value in quantiles(values * 2 if len(values) == 1 else values, n=4)
        )
        rows.append(
            {
                "name": name,
                "median_ms": middle,
                "quartiles_ms": [low, high],
                "ratio": ratio(seconds, name, reference),
            }
        )
    return rows


def publish(title: str, rows: Sequence[Mapping[str, Any]], out: Path | None) -> None:
    """Print rows as a table; write them as JSON with the machine they were measured on."""
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*(_short(value) for value in row.values()))
    Console(highlight=False).print(table)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(
            out, {"title": title, "rows": list(rows), "environment": environment()}
        )
        print(f"written  {out}")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return " - ".join(map(_short, value)) if isinstance(value, list) else str(value)
