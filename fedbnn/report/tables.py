"""A table as a value, and the table of a run; `table_formats` writes them for a terminal, a paper or a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from fedbnn.evaluation.predictions import REGIMES

Results = Mapping[str, Any]
SPOKEN = {"task_aware": "task-aware", "class_agnostic": "class-agnostic"}
MOMENTS = {"ts": "@TS", "fin": "@Fin"}
REFERENCE = "fedbnn"


@dataclass(frozen=True)
class Cell:
    """A number with its spread over the seeds; `signed` for differences, `best` for the winner of its column."""

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
    """One line: a name and its cells; `quiet` for lines that only give a scale, such as chance."""

    name: str
    cells: tuple[Cell, ...]
    quiet: bool = False


@dataclass(frozen=True)
class Table:
    """A title, the heads of its columns (the first is that of the names), lines, and what a reader must know."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def of_run(results: Results) -> Table:
    """Per task @TS and @Fin with the chance level beside each, in both regimes."""
    aware, agnostic, chance = results["task_aware"], results["class_agnostic"], results["chance"]
    columns = [
        *((aware, "ts"), (aware, "fin"), (chance["task_aware"], "fin")),
        *(
            (agnostic, "ts"),
            (chance["class_agnostic"], "ts"),
            (agnostic, "fin"),
            (chance["class_agnostic"], "fin"),
        ),
    ]
    heads = (
        "aware @TS",
        "aware @Fin",
        "aware chance",
        "agnostic @TS",
        "chance @TS",
        "agnostic @Fin",
        "chance @Fin",
    )
    names = results["task_names"]
    rows = [
        Row(name, tuple(Cell(part[moment][task]) for part, moment in columns))
        for task, name in enumerate(names)
    ]
    average = Row("average", tuple(Cell(part[f"avg_{moment}"]) for part, moment in columns))
    notes = tuple(_story(SPOKEN[regime], results[regime]) for regime in REGIMES)
    return Table("Accuracy in percent", ("task", *heads), (*rows, average), notes)


def _story(regime: str, part: Mapping[str, Any]) -> str:
    """What the accuracies do not show."""
    texts = [Cell(part["forgetting"]).text(), Cell(part["backward_transfer"], signed=True).text()]
    texts += [Cell(part[name], digits=3).text() for name in ("nll", "brier", "ece")]
    return "{}: forgetting {}, backward transfer {}, NLL {}, Brier {}, ECE {}".format(
        regime, *texts
    )


def by_method(runs: Sequence[Results]) -> dict[str, list[Results]]:
    """The runs of each method, in the order in which methods first appear."""
    grouped: dict[str, list[Results]] = {}
    for run in runs:
        grouped.setdefault(run["method"], []).append(run)
    return grouped


def competes(run: Results) -> bool:
    """Whether a run may be called the best: bounds and methods that store images of the past may not."""
    return not run["replay_images"] and "bound" not in run["notes"]


def spread(values: Sequence[float | None], digits: int = 1, signed: bool = False) -> Cell:
    """Mean and sample standard deviation of the values that are there."""
    present = [value for value in values if value is not None]
    if not present:
        return Cell(None, digits=digits)
    return Cell(
        mean(present), stdev(present) if len(present) > 1 else None, signed=signed, digits=digits
    )
