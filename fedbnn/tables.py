"""The tables of a run and of a comparison, as values; `table_formats` writes them for a terminal, a paper or a page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any

from fedbnn.judging import REGIMES

Results = Mapping[str, Any]
Read = Callable[[Results], float | None]
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
        *((agnostic, "ts"), (chance["class_agnostic"], "ts"), (agnostic, "fin"), (chance["class_agnostic"], "fin")),
    ]
    heads = ("aware @TS", "aware @Fin", "aware chance", "agnostic @TS", "chance @TS", "agnostic @Fin", "chance @Fin")
    names = results["task_names"]
    rows = [Row(name, tuple(Cell(part[moment][task]) for part, moment in columns)) for task, name in enumerate(names)]
    average = Row("average", tuple(Cell(part[f"avg_{moment}"]) for part, moment in columns))
    notes = tuple(_story(SPOKEN[regime], results[regime]) for regime in REGIMES)
    return Table("Accuracy in percent", ("task", *heads), (*rows, average), notes)


def _story(regime: str, part: Mapping[str, Any]) -> str:
    """What the accuracies do not show."""
    texts = [Cell(part["forgetting"]).text(), Cell(part["backward_transfer"], signed=True).text()]
    texts += [Cell(part[name], digits=3).text() for name in ("nll", "brier", "ece")]
    return "{}: forgetting {}, backward transfer {}, NLL {}, Brier {}, ECE {}".format(regime, *texts)


def of_comparison(results: Sequence[Results], reference: str = REFERENCE) -> list[Table]:
    """All tables of methods x seeds on one stream: summary, paired differences, per task, calibration, cost."""
    runs = [reading for run in results for reading in _readings(run)]
    per_task = [_per_task(runs, regime, moment) for regime in REGIMES for moment in MOMENTS]
    calibration = [_calibration(runs, regime) for regime in REGIMES]
    return [_summary(runs), *_paired(runs, reference), *per_task, *calibration, _focus(runs), _novelty(runs), _costs(results)]


def _readings(run: Results) -> list[Results]:
    """A run, and beside it the same run read off its linear rows where it was judged by both heads."""
    second = {**run, **run["linear"], "method": f"{run['method']}, linear rows"} if "linear" in run else None
    return [run, second] if second else [run]


def by_method(runs: Sequence[Results]) -> dict[str, list[Results]]:
    """The runs of each method, in the order in which methods first appear."""
    grouped: dict[str, list[Results]] = {}
    for run in runs:
        grouped.setdefault(run["method"], []).append(run)
    return grouped


def _table(title: str, runs: Sequence[Results], columns: Mapping[str, tuple[Read, int]], digits: int = 1) -> Table:
    """Methods by columns; a column says how a number is read and whether high (+1), low (-1) or nothing (0) is best."""
    grouped = by_method(runs)
    rows = [
        Row(_named(method, mine), tuple(_spread([read(run) for run in mine], digits) for read, _ in columns.values()))
        for method, mine in grouped.items()
    ]
    rivals = [place for place, mine in enumerate(grouped.values()) if _competes(mine[0])] or list(range(len(rows)))
    signs = [sign for _, sign in columns.values()]
    return Table(title, ("method", *columns), tuple(_crowned(rows, rivals, signs)), _footnotes(grouped))


def _competes(run: Results) -> bool:
    """Whether a run may win a column: bounds and methods that store images of the past may not."""
    return not run["replay_images"] and "bound" not in run["notes"]


def _named(method: str, runs: Sequence[Results]) -> str:
    """The method, marked with the images it stores when it replays the past."""
    stored = runs[0]["replay_images"]
    return f"{method} [{stored}]" if stored else method


def _footnotes(grouped: Mapping[str, Sequence[Results]]) -> tuple[str, ...]:
    """How many seeds stand behind the numbers, and who may win a column."""
    counts = sorted({len(runs) for runs in grouped.values()})
    seeds = f"mean ± standard deviation over {' or '.join(map(str, counts))} seeds" if counts[-1] > 1 else "one seed"
    first = [runs[0] for runs in grouped.values()]
    stores = ("[n]: stores n images of the past",) if any(run["replay_images"] for run in first) else ()
    if all(map(_competes, first)) or not any(map(_competes, first)):
        return (f"{seeds}; the best is marked", *stores)
    return (f"{seeds}; the best is marked, bounds and methods that store images apart", *stores)


def _spread(values: Sequence[float | None], digits: int = 1, signed: bool = False) -> Cell:
    """Mean and sample standard deviation of the values that are there."""
    present = [value for value in values if value is not None]
    if not present:
        return Cell(None, digits=digits)
    return Cell(mean(present), stdev(present) if len(present) > 1 else None, signed=signed, digits=digits)


def _crowned(rows: Sequence[Row], rivals: Sequence[int], signs: Sequence[int]) -> list[Row]:
    """The same rows with the best rival of each column marked."""
    best = [_best([rows[place].cells[column].value for place in rivals], sign) for column, sign in enumerate(signs)]
    return [_row_crowned(row, best) if place in rivals else row for place, row in enumerate(rows)]


def _row_crowned(row: Row, best: Sequence[float | None]) -> Row:
    cells = [replace(cell, best=top is not None and cell.value == top) for cell, top in zip(row.cells, best, strict=True)]
    return replace(row, cells=tuple(cells))


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


def _summary(runs: Sequence[Results]) -> Table:
    columns: dict[str, tuple[Read, int]] = {}
    for regime in REGIMES:
        short = SPOKEN[regime].split("-")[-1]
        columns |= {f"{short} {MOMENTS[moment]}": (_field(regime, f"avg_{moment}"), 1) for moment in MOMENTS}
        columns |= {f"{short} forgetting": (_field(regime, "forgetting"), -1)}
    table = _table("Averages over the tasks, in percent", runs, columns)
    chance = [_field("chance", regime, f"avg_{moment}") for regime in REGIMES for moment in MOMENTS]
    cells = [_spread([read(run) for run in runs[:1]]) for read in chance]
    floor = Row("chance", (*cells[:2], Cell(None), *cells[2:], Cell(None)), quiet=True)
    return replace(table, rows=(*table.rows, floor))


def _per_task(runs: Sequence[Results], regime: str, moment: str) -> Table:
    names = runs[0]["task_names"]
    columns = {name: (_field(regime, moment, task), 1) for task, name in enumerate(names)}
    columns["average"] = (_field(regime, f"avg_{moment}"), 1)
    table = _table(f"{SPOKEN[regime]} accuracy {MOMENTS[moment]}, in percent", runs, columns)
    chance = runs[0]["chance"][regime]
    floor = Row("chance", tuple(Cell(value) for value in (*chance[moment], chance[f"avg_{moment}"])), quiet=True)
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
    columns = {name.replace("_", " "): (_field("novelty", name), 1) for name in ("entropy", "mutual_information")}
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


def _paired(runs: Sequence[Results], reference: str) -> list[Table]:
    """reference - baseline, seed by seed: what the choice of method changes when everything else is the same."""
    grouped = by_method(runs)
    own = {run["seed"]: run for run in grouped.get(reference, [])}
    columns = {
        f"{SPOKEN[regime].split('-')[-1]} {MOMENTS[moment]}": (regime, f"avg_{moment}")
        for regime in REGIMES
        for moment in MOMENTS
    }
    rows = []
    for method, others in grouped.items():
        pairs = [(own[other["seed"]], other) for other in others if other["seed"] in own and method != reference]
        if pairs:
            rows.append(Row(f"{reference} − {method}", tuple(_difference(pairs, *path) for path in columns.values())))
    note = "difference of the averages on the same seeds, in points: mean ± standard deviation over the pairs"
    return [Table(f"Paired differences against {reference}", ("pair", *columns), tuple(rows), (note,))] if rows else []


def _difference(pairs: Sequence[tuple[Results, Results]], regime: str, name: str) -> Cell:
    values = [(one[regime][name], other[regime][name]) for one, other in pairs]
    return _spread([None if None in pair else pair[0] - pair[1] for pair in values], signed=True)
