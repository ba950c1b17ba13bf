"""The numbers printed in the paper ("Variational Bayes for Federated Continual Learning"), to stand beside ours."""

import csv
from collections.abc import Sequence
from importlib.resources import files

from fedbnn.report.tables import MOMENTS, Cell, Results, Row, Table, by_method, spread

NUMBERS = "published.csv"
NOTE = "taken as task-aware: where a method has forgotten, the paper's numbers are near one over the classes of a task"
PRESETS = ("fedbnn_paper", "fedbnn_authors")


def beside(runs: Sequence[Results]) -> list[Table]:
    """The paper's lines on this scenario, ours under each; nothing where it has none or another number of tasks.

    A scenario is known by the name in its configuration: whoever changes more than that has other tasks than the paper.
    """
    lines = [line for line in _lines() if {line["scenario"]} == {run["scenario"] for run in runs}]
    measured = by_method(runs)
    tables = []
    for moment in MOMENTS:
        printed = {line["method"]: _cells(line) for line in lines if line["moment"] == moment}
        known = {
            name: cells
            for name, cells in printed.items()
            if len(cells) == len(runs[0]["task_names"]) + 1
        }
        if any(_base(method) in known for method in measured):
            tables.append(_table(known, measured, moment))
    return tables


def _lines() -> list[dict[str, str]]:
    """One line for each scenario, method and moment: mean±deviation of every task, and of their average."""
    with files("fedbnn.report").joinpath(NUMBERS).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _cells(line: dict[str, str]) -> tuple[Cell, ...]:
    """The tasks the scenario has, then the average."""
    pairs = [
        line[column].split("±")
        for column in line
        if column.startswith("task ") or column == "average"
    ]
    return tuple(Cell(float(pair[0]), float(pair[1]), digits=2) for pair in pairs if pair != [""])


def _table(
    printed: dict[str, tuple[Cell, ...]], measured: dict[str, list[Results]], moment: str
) -> Table:
    """Each line of the paper, and what was measured here for the same method."""
    rows = []
    for method, cells in printed.items():
        rows.append(Row(f"paper: {method}", cells, quiet=True))
        rows += [
            Row(name, _own(mine, moment))
            for name, mine in measured.items()
            if _base(name) == method
        ]
    names = next(iter(measured.values()))[0]["task_names"]
    title = f"task-aware accuracy {MOMENTS[moment]} beside the paper, in percent"
    return Table(title, ("method", *names, "average"), tuple(rows), (NOTE,))


def _own(runs: Sequence[Results], moment: str) -> tuple[Cell, ...]:
    parts = [run["task_aware"] for run in runs]
    per_task = [
        spread([part[moment][task] for part in parts]) for task in range(len(runs[0]["task_names"]))
    ]
    return (*per_task, spread([part[f"avg_{moment}"] for part in parts]))


def _base(name: str) -> str:
    """The paper's name of a method, whichever head it was read off; two presets of ours are the paper's method, too."""
    method = name.partition(",")[0]
    return "fedbnn" if method in PRESETS else method
