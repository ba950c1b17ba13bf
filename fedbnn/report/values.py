"""What tables and figures are made of: runs by method, numbers with their spread over the seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev
from typing import Any

Results = Mapping[str, Any]
Runs = Sequence[Results]
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Cell:
    """A number with its spread; `signed` for differences.

    `best` for the winner of its column, or for a difference that is clear.
    """

    value: float | None
    spread: float | None = None
    best: bool = False
    signed: bool = False
    digits: int = 1

    def text(self, plus_minus: str = " ± ") -> str:
        """The number as it is printed; a dash where there is none."""
        if self.value is None:
            return "–"
        sign = "+" if self.signed else ""
        spread = "" if self.spread is None else f"{plus_minus}{self.spread:.{self.digits}f}"
        return f"{self.value:{sign}z.{self.digits}f}{spread}"


@dataclass(frozen=True)
class Row:
    """One line: a name, its cells, and words after them.

    `quiet` is for lines that only give a scale, such as chance.
    """

    name: str
    cells: tuple[Cell, ...]
    quiet: bool = False
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """A title, the heads of its columns (first that of the names), lines, what one must know."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def at(results: Results, *path: str | int) -> float | None:
    """The number at a path of the results; None where the path, or the number, is not there."""
    value: Any = results
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else value and value[key]
    return None if value is None else float(value)


def by_method(runs: Runs) -> dict[str, list[Results]]:
    """The runs of each method, in the order in which methods first appear."""
    grouped: dict[str, list[Results]] = {}
    for run in runs:
        grouped.setdefault(run["method"], []).append(run)
    return grouped


def task_names(runs: Runs) -> list[str]:
    """What the tasks are called; by their number where seeds have different classes in them."""
    names = {tuple(run["task_names"]) for run in runs}
    first = list(runs[0]["task_names"])
    return first if len(names) == 1 else [f"task {place + 1}" for place in range(len(first))]


def competes(run: Results) -> bool:
    """Whether a run may be the best: bounds and methods that store images of the past may not."""
    return not run["replay_images"] and "bound" not in run["notes"]


def spread(values: Sequence[float | None], digits: int = 1, signed: bool = False) -> Cell:
    """Mean and sample standard deviation of the values that are there."""
    present = [value for value in values if value is not None]
    deviation = stdev(present) if len(present) > 1 else None
    return Cell(mean(present) if present else None, deviation, signed=signed, digits=digits)


def clear(differences: Sequence[float]) -> bool:
    """Whether 0 lies outside the 95 % interval of Student: |mean| > t(n - 1) s / sqrt(n).

    One pair is never clear.
    """
    if (pairs := len(differences)) < 2:
        return False
    from scipy.special import stdtrit

    edge = float(stdtrit(pairs - 1, 0.975)) * stdev(differences) / sqrt(pairs)
    return abs(mean(differences)) > edge


def over_seeds(runs: Runs, *path: str | int, digits: int = 1) -> Cell:
    """Mean and spread of the number at a path."""
    return spread([at(run, *path) for run in runs], digits)


@dataclass(frozen=True)
class Varied:
    """One setting of a sweep, and its value in each run; None for a run it is not varied in."""

    key: str
    values: Sequence[str | None]

    def named(self, runs: Runs) -> list[Results]:
        """The runs, with the value beside the name of the method: `fedbnn 10`."""
        pairs = zip(runs, self.values, strict=True)
        return [{**run, "method": f"{run['method']} {own or ''}".rstrip()} for run, own in pairs]

    def points(self, runs: Runs) -> dict[str, list[Results]]:
        """The runs at each value; those that are not varied stand at every one."""
        pairs = list(zip(self.values, runs, strict=True))
        values = dict.fromkeys(value for value in self.values if value is not None)
        return {value: [run for own, run in pairs if own in (value, None)] for value in values}
