"""The tables of a comparison: methods by columns, each number with its spread over the seeds, the best marked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from fedbnn.evaluation.predictions import REGIMES
from fedbnn.report import paired, published
from fedbnn.report.tables import (
    MOMENTS,
    REFERENCE,
    SPOKEN,
    Cell,
    Results,
    Row,
    Table,
    by_method,
    competes,
    spread,
)

Read = Callable[[Results], float | None]


def of_comparison(results: Sequence[Results], reference: str = REFERENCE) -> list[Table]:
    """All tables of methods x seeds on one stream: the main ones, then calibration, Focus-on-Now, novelty and cost."""
    runs = _readings(results)
    calibration = [_calibration(runs, regime) for regime in REGIMES]
    return [*main(results, reference), *calibration, _focus(runs), _novelty(runs), _costs(results)]


def main(results: Sequence[Results], reference: str = REFERENCE) -> list[Table]:
    """The accuracies: averages, paired differences, ours beside the paper's, and every task in both regimes."""
    runs = _readings(results)
    per_task = [_per_task(runs, regime, moment) for regime in REGIMES for moment in MOMENTS]
    return [
        averages(results),
        *paired.differences(runs, reference),
        *published.beside(runs),
        *per_task,
    ]


def _readings(results: Sequence[Results]) -> list[Results]:
    """Each run, and after it the same run read off its linear rows where it was judged by both heads."""
    readings: list[Results] = []
    for run in results:
        second = (
            [{**run, **run["linear"], "method": f"{run['method']}, linear rows"}]
            if "linear" in run
            else []
        )
        readings += [run, *second]
    return readings


def _table(
    title: str, runs: Sequence[Results], columns: Mapping[str, tuple[Read, int]], digits: int = 1
) -> Table:
    """Methods by columns; a column says how a number is read and whether high (+1), low (-1) or nothing (0) is best."""
    grouped = by_method(runs)
    rows = [
        Row(
            _named(method, mine),
            tuple(spread([read(run) for run in mine], digits) for read, _ in columns.values()),
        )
        for method, mine in grouped.items()
    ]
    rivals = [place for place, mine in enumerate(grouped.values()) if competes(mine[0])] or list(
        range(len(rows))
    )
    signs = [sign for _, sign in columns.values()]
    return Table(
        title, ("method", *columns), tuple(_crowned(rows, rivals, signs)), _footnotes(grouped)
    )


def _named(method: str, runs: Sequence[Results]) -> str:
    """The method, marked with the images it stores when it replays the past."""
    stored = runs[0]["replay_images"]
    return f"{method} [{stored}]" if stored else method


def _footnotes(grouped: Mapping[str, Sequence[Results]]) -> tuple[str, ...]:
    """How many seeds stand behind the numbers, and who may win a column."""
    counts = sorted({len(runs) for runs in grouped.values()})
    seeds = (
        f"mean ± standard deviation over {' or '.join(map(str, counts))} seeds"
        if counts[-1] > 1
        else "one seed"
    )
    first = [runs[0] for runs in grouped.values()]
    stores = (
        ("[n]: stores n images of the past",) if any(run["replay_images"] for run in first) else ()
    )
    if all(map(competes, first)) or not any(map(competes, first)):
        return (f"{seeds}; the best is marked", *stores)
    return (f"{seeds}; the best is marked, bounds and methods that store images apart", *stores)


def _crowned(rows: Sequence[Row], rivals: Sequence[int], signs: Sequence[int]) -> list[Row]:
    """The same rows with the best rival of each column marked."""
    best = [
        _best([rows[place].cells[column].value for place in rivals], sign)
        for column, sign in enumerate(signs)
    ]
    return [_row_crowned(row, best) if place in rivals else row for place, row in enumerate(rows)]


def _row_crowned(row: Row, best: Sequence[float | None]) -> Row:
    """Whoever prints the same number as the best is as good."""
    wins = [
        top is not None and _prints(cell) == _prints(cell, top)
        for cell, top in zip(row.cells, best, strict=True)
    ]
    return replace(
        row, cells=tuple(replace(cell, best=win) for cell, win in zip(row.cells, wins, strict=True))
    )


def _prints(cell: Cell, value: float | None = None) -> str:
    """The number of a cell without its spread, or another one as the cell would print it."""
    return replace(cell, value=cell.value if value is None else value, spread=None).text()


def _best(values: Sequence[float | None], sign: int) -> float | None:
    """The winner of a column with at least two numbers."""
    present = [value for value in values if value is not None]
    return max(present, key=lambda value: sign * value) if sign and len(present) > 1 else None


def _field(*path: str | int) -> Read:
    """A reader of one number of the results."""

    def read(results: Results) -> float | None:
        value: Any = results
        for key in path:
            value = None if value is None else value[key]
        return None if value is None else float(value)

    return read


def averages(results: Sequence[Results]) -> Table:
    """One line a method: the averages over the tasks and the forgetting, above chance."""
    runs = _readings(results)
    columns: dict[str, tuple[Read, int]] = {}
    for regime in REGIMES:
        short = SPOKEN[regime].split("-")[-1]
        columns |= {
            f"{short} {MOMENTS[moment]}": (_field(regime, f"avg_{moment}"), 1) for moment in MOMENTS
        }
        columns |= {f"{short} forgetting": (_field(regime, "forgetting"), -1)}
    table = _table("Averages over the tasks, in percent", runs, columns)
    chance = [_field("chance", regime, f"avg_{moment}") for regime in REGIMES for moment in MOMENTS]
    cells = [spread([read(run) for run in runs[:1]]) for read in chance]
    floor = Row("chance", (*cells[:2], Cell(None), *cells[2:], Cell(None)), quiet=True)
    return replace(table, rows=(*table.rows, floor))


def _per_task(runs: Sequence[Results], regime: str, moment: str) -> Table:
    names = runs[0]["task_names"]
    columns = {name: (_field(regime, moment, task), 1) for task, name in enumerate(names)}
    columns["average"] = (_field(regime, f"avg_{moment}"), 1)
    table = _table(f"{SPOKEN[regime]} accuracy {MOMENTS[moment]}, in percent", runs, columns)
    chance = runs[0]["chance"][regime]
    floor = Row(
        "chance",
        tuple(Cell(value) for value in (*chance[moment], chance[f"avg_{moment}"])),
        quiet=True,
    )
    return replace(table, rows=(*table.rows, floor))


def _calibration(runs: Sequence[Results], regime: str) -> Table:
    columns = {name: (_field(regime, name.lower()), -1) for name in ("NLL", "Brier", "ECE")}
    return _table(f"Calibration at the end, {SPOKEN[regime]}", runs, columns, digits=3)


def _focus(runs: Sequence[Results]) -> Table:
    """How well the model does on what is asked at the moment, averaged over the whole run."""
    columns = {SPOKEN[regime]: (_mean_focus(regime), 1) for regime in REGIMES}
    return _table("Focus-on-Now accuracy, mean over the rounds, in percent", runs, columns)


def _mean_focus(regime: str) -> Read:
    """The mean over the rounds that were evaluated, in percent."""

    def read(results: Results) -> float | None:
        values = [value for value in results["fon"][regime] if value is not None]
        return mean(values) if values else None

    return read


def _novelty(runs: Sequence[Results]) -> Table:
    columns = {
        name.replace("_", " "): (_field("novelty", name), 1)
        for name in ("entropy", "mutual_information")
    }
    return _table("AUROC for telling unseen from seen classes", runs, columns, digits=3)


def _costs(runs: Sequence[Results]) -> Table:
    columns = {
        "seconds": (_field("seconds"), 0),
        "MB up": (lambda run: run["bytes_up"] / 1e6, 0),
        "MB down": (lambda run: run["bytes_down"] / 1e6, 0),
        "refused": (lambda run: float(len(run["refused"])), 0),
        "failed": (lambda run: float(len(run["failed"])), 0),
    }
    return replace(_table("Cost of a run", runs, columns), notes=())
