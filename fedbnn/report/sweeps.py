"""The runs of a sweep together: a line per method and value, and a plot over the values where they are numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from fedbnn.report import comparison_figures, comparison_tables, paired
from fedbnn.report.tables import REFERENCE, Results, Table, by_method

Swept = Sequence[tuple[str | None, Results]]
"""Results, each with the value that its run had; None for a run that the sweep does not vary."""


def named(runs: Swept) -> list[Results]:
    """The results, with the value beside the name of the method: `fedbnn 10`."""
    return [
        run if value is None else {**run, "method": f"{run['method']} {value}"}
        for value, run in runs
    ]


def points(runs: Swept) -> dict[str, list[Results]]:
    """The runs at each value; those that are not varied stand at every one."""
    values = dict.fromkeys(value for value, _ in runs if value is not None)
    return {value: [run for own, run in runs if own in (value, None)] for value in values}


def tables(key: str, runs: Swept) -> list[Table]:
    """The tables of a comparison of all methods and values, after the first the differences at each value."""
    together = named(runs)
    first, *others = comparison_tables.of_comparison(together)
    return [
        first,
        *([] if REFERENCE in by_method(together) else _differences(key, points(runs))),
        *others,
    ]


def _differences(key: str, at: Mapping[str, Sequence[Results]]) -> list[Table]:
    """The paired differences within each value, as one table."""
    found = [
        (value, table)
        for value, runs in at.items()
        for table in paired.differences(runs, REFERENCE)
    ]
    rows = [
        replace(row, name=f"{row.name} at {value}") for value, table in found for row in table.rows
    ]
    title = f"Paired differences against {REFERENCE} at each value of {key}"
    return [replace(table, title=title, rows=tuple(rows)) for _, table in found[:1]]


def figures(key: str, runs: Swept) -> dict[str, Figure]:
    """The plot over the values, if they are numbers, and all curves together."""
    at = {_number(value): mine for value, mine in points(runs).items()}
    numbers = {value: mine for value, mine in at.items() if value is not None}
    plot = (
        {"sweep": comparison_figures.sweep(key, numbers)} if at and len(numbers) == len(at) else {}
    )
    return plot | {"focus_on_now": comparison_figures.now(named(runs))}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
