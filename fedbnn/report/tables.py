"""Tables as values: of a run, of methods by seeds, of a sweep, and beside the paper's own numbers.

The page and the console write them. Numbers come with their spread over the seeds, and the best of
a column is marked.
"""

import csv
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from statistics import mean

from fedbnn.evaluation.evaluate import REGIMES, UNCERTAINTIES
from fedbnn.report.values import (
    Cell,
    Path,
    Results,
    Row,
    Runs,
    Table,
    Varied,
    at,
    by_method,
    clear,
    competes,
    over_seeds,
    spread,
    task_names,
)

REFERENCE = "fedbnn"
SPOKEN = {"task_aware": "task-aware", "class_agnostic": "class-agnostic"}
MOMENTS = {"ts": "@TS", "fin": "@Fin"}
ERRORS = ("NLL", "Brier", "ECE")
FINE = ("nll", "brier", "ece")
LOW_IS_GOOD = ("forgetting", *FINE)
INCIDENTS = ("refused", "failed", "down_weighted")
EXPLAINED = "@TS: each task at its own end; @Fin: every task at the end of the run"
POOLED = "over all test images together; ECE: 15 equal bins of the highest probability"
COUNTED = "refused, failed and down-weighted updates: the sum over the seeds"
BUSY = "seconds are left out: others used the machine, or several runs at a time"
LEARNT = 0.5
"""Who learns less than this part of what the best learns above chance has nothing to forget."""
AVERAGES: dict[str, Path] = {
    f"{short} {said}": (regime, name)
    for regime, short in {"task_aware": "aware", "class_agnostic": "agnostic"}.items()
    for name, said in {"avg_ts": "@TS", "avg_fin": "@Fin", "forgetting": "forgetting"}.items()
}
OF_A_RUN: dict[str, Path] = {
    "aware @TS": ("task_aware", "ts"),
    "aware @Fin": ("task_aware", "fin"),
    "aware chance": ("chance", "task_aware", "fin"),
    "agnostic @TS": ("class_agnostic", "ts"),
    "chance @TS": ("chance", "class_agnostic", "ts"),
    "agnostic @Fin": ("class_agnostic", "fin"),
    "chance @Fin": ("chance", "class_agnostic", "fin"),
}
PUBLISHED = "taken as task-aware: what is forgotten is printed near one over the classes of a task"
PRESETS = ("fedbnn_paper", "fedbnn_paper_damped", "fedbnn_authors")
"""More names of the paper's method."""
PAIRED = (
    "differences on the same seeds, in points: mean ± standard deviation over the pairs; "
    "marked where 0 lies outside the 95 % interval of Student"
)
LINEAR = ", linear head"


def every(results: Runs, reference: str = REFERENCE, sweep: Varied | None = None) -> list[Table]:
    """Of one run the accuracies of its tasks; of several all that they can be compared by."""
    if len(results) == 1:
        return [of_run(results[0])]
    runs = sweep.named(results) if sweep else results
    made = [*main(runs, reference), *_further(_both_heads(runs))]
    if sweep and reference not in by_method(runs):
        points = {f" at {value}": some for value, some in sweep.points(results).items()}
        made[1:1] = differences(points, reference, f" at each value of {sweep.key}")
    return made


def main(results: Runs, reference: str = REFERENCE) -> list[Table]:
    """The accuracies: averages, paired differences, ours beside the paper's, and every task."""
    runs = _both_heads(results)
    per_task = [_per_task(runs, regime, moment) for regime in REGIMES for moment in MOMENTS]
    paired, printed = differences({"": runs}, reference), beside_the_paper(runs)
    return [averages(results), *paired, *printed, *per_task]


def of_run(results: Results) -> Table:
    """Per task @TS and @Fin with the chance level beside each, in both regimes."""
    paths = OF_A_RUN.values()
    tasks = [
        Row(name, tuple(Cell(at(results, *path, task)) for path in paths))
        for task, name in enumerate(results["task_names"])
    ]
    average = tuple(Cell(at(results, *path, f"avg_{moment}")) for *path, moment in paths)
    rows, notes = (*tasks, Row("average", average)), [_story(results, one) for one in REGIMES]
    return Table("Accuracy in percent", ("task", *OF_A_RUN), rows, (*notes, EXPLAINED))


def _story(results: Results, regime: str) -> str:
    """What the accuracies do not show."""
    part = results[regime]
    lost, moved = Cell(part["forgetting"]), Cell(part["backward_transfer"], signed=True)
    errors = [f"{name} {Cell(part[name.lower()], digits=3).text()}" for name in ERRORS]
    fall = f"forgetting {lost.text()}, backward transfer {moved.text()}"
    return f"{SPOKEN[regime]}: {', '.join([fall, *errors])}"


def _both_heads(results: Runs) -> list[Results]:
    """Each run, and after it the same run read off its linear head where both heads were tested."""
    runs: list[Results] = []
    for run in results:
        linear = {**run, **run.get("linear", {}), "method": run["method"] + LINEAR}
        runs += map(_with_sums, [run, linear] if "linear" in run else [run])
    return runs


def _with_sums(run: Results) -> Results:
    """The run with the mean Focus-on-Now accuracy as `now` and what it took as `costs`."""
    ways = {way: run.get("bytes_by_exchange", {}).get(way, {}) for way in ("up", "down")}
    sent = {f"MB {way}": run[f"bytes_{way}"] / 1e6 for way in ways}
    for way, parts in ways.items():
        sent |= {f"{name} {way}": total / 1e6 for name, total in parts.items()}
    counts = {kind.replace("_", "-"): len(run[kind]) for kind in INCIDENTS}
    now = {regime: spread(run["fon"][regime]).value for regime in REGIMES}
    return {**run, "now": now, "costs": {"seconds": run["seconds"], **sent}, "counts": counts}


def by_columns(title: str, runs: Runs, paths: Mapping[str, Path]) -> Table:
    """Methods by columns, each the number at a path of the results; the best rivals are marked."""
    grouped = by_method(runs)
    stored = {method: mine[0]["replay_images"] for method, mine in grouped.items()}
    names = [f"{method} [{count}]" if count else method for method, count in stored.items()]
    columns = [_column(grouped, path) for path in paths.values()]
    rows = tuple(map(Row, names, zip(*columns, strict=True)))
    return Table(title, ("method", *paths), rows, _footnotes(grouped))


def _column(grouped: Mapping[str, Runs], path: Path) -> list[Cell]:
    """One number of each method; rivals that print the same as the best are best, costs never."""
    if path[0] == "counts":
        counts = [[at(run, *path) or 0 for run in mine] for mine in grouped.values()]
        return [Cell(sum(mine), digits=0) for mine in counts]
    digits = 3 if path[0] == "novelty" or path[-1] in FINE else 1
    cells = {one: over_seeds(mine, *path, digits=digits) for one, mine in grouped.items()}
    rivals = _rivals(grouped, path)
    values = sorted(value for one in rivals if (value := cells[one].value) is not None)
    if path[0] != "costs" and len(values) > 1:
        top = Cell(values[0 if path[-1] in LOW_IS_GOOD else -1], digits=digits).text()
        for one in rivals:
            best = replace(cells[one], spread=None).text() == top
            cells[one] = replace(cells[one], best=best)
    return list(cells.values())


def _rivals(grouped: Mapping[str, Runs], path: Path) -> list[str]:
    """Who may win a column: in forgetting, only those who trained something they might forget."""
    rivals = [method for method, mine in grouped.items() if competes(mine[0])]
    if path[-1] != "forgetting":
        return rivals
    rivals = [method for method in rivals if "training" not in grouped[method][0]["notes"]]
    gains = {one: [_gain(run, str(path[0])) for run in grouped[one]] for one in rivals}
    learnt = {one: mean(values) for one, values in gains.items()}
    return [one for one in rivals if learnt[one] >= LEARNT * max(learnt.values(), default=0.0)]


def _gain(run: Results, regime: str) -> float:
    """How far above chance the tasks stood at their own ends."""
    return (at(run, regime, "avg_ts") or 0.0) - (at(run, "chance", regime, "avg_ts") or 0.0)


def _footnotes(grouped: Mapping[str, Runs]) -> tuple[str, ...]:
    """How many seeds stand behind the numbers, and who may win a column."""
    counts = sorted({len(runs) for runs in grouped.values()})
    over = f"mean ± standard deviation over {' or '.join(map(str, counts))} seeds"
    first = [runs[0] for runs in grouped.values()]
    some = any(map(competes, first)) and not all(map(competes, first))
    apart = ", but no bound and no method that stores images" if some else ""
    marked = f"{over if counts[-1] > 1 else 'one seed'}; the best is marked{apart}"
    stores = any(run["replay_images"] for run in first)
    return (marked, "[n]: stores n images of the past") if stores else (marked,)


def _accuracies(title: str, runs: Runs, paths: Mapping[str, Path]) -> Table:
    """Columns of accuracy and forgetting, with the level of chance as the last line."""
    table, chance = by_columns(f"{title}, in percent", runs, paths), runs[0]["chance"]
    known = [path if path[-1] != "forgetting" else None for path in paths.values()]
    floor = tuple(Cell(at(chance, *path) if path else None) for path in known)
    rows, notes = (*table.rows, Row("chance", floor, quiet=True)), (*table.notes, EXPLAINED)
    return replace(table, rows=rows, notes=notes)


def averages(results: Runs) -> Table:
    """One line a method: the averages over the tasks and the forgetting, above chance."""
    return _accuracies("Averages over the tasks", _both_heads(results), AVERAGES)


def _per_task(runs: Runs, regime: str, moment: str) -> Table:
    names = task_names(runs)
    paths: dict[str, Path] = {name: (regime, moment, task) for task, name in enumerate(names)}
    title = f"{SPOKEN[regime]} accuracy {MOMENTS[moment]}"
    return _accuracies(title, runs, {**paths, "average": (regime, f"avg_{moment}")})


def _further(runs: Runs) -> list[Table]:
    """Calibration in both regimes, Focus-on-Now as the mean over the rounds, novelty, and costs."""
    now = {said: ("now", regime) for regime, said in SPOKEN.items()}
    unseen = {name.replace("_", " "): ("novelty", name) for name in UNCERTAINTIES}
    trained = [run for run in runs if not run["method"].endswith(LINEAR)]
    return [
        *(_calibration(runs, regime) for regime in REGIMES),
        by_columns("Focus-on-Now accuracy, mean over the rounds, in percent", runs, now),
        by_columns("AUROC for telling unseen from seen classes", runs, unseen),
        *_costs(trained),
    ]


def _calibration(runs: Runs, regime: str) -> Table:
    paths = {name: (regime, name.lower()) for name in ERRORS}
    table = by_columns(f"Calibration at the end, {SPOKEN[regime]}", runs, paths)
    return replace(table, notes=(*table.notes, POOLED))


def _costs(runs: Runs) -> list[Table]:
    """What was sent by exchange; in all, with the time if it means something, and who was lost."""
    every = dict.fromkeys(name for run in runs for name in run["costs"])
    paths: dict[str, Path] = {name: ("costs", name) for name in every}
    exchanges = {name: path for name, path in paths.items() if name.endswith((" up", " down"))}
    totals = {name: exchanges.pop(name) for name in ("MB up", "MB down")}
    quiet = all(run.get("quiet") for run in runs)
    time = {"seconds": paths["seconds"]} if quiet else {}
    lost: dict[str, Path] = {name: ("counts", name) for name in runs[0]["counts"]}
    notes = (*(() if quiet else (BUSY,)), COUNTED)
    made = replace(by_columns("Cost of a run", runs, {**time, **totals, **lost}), notes=notes)
    parts = by_columns("Megabytes by exchange", runs, exchanges)
    return [replace(parts, notes=()), made] if exchanges else [made]


def differences(points: Mapping[str, Runs], reference: str, where: str = "") -> list[Table]:
    """What the choice of a method changes, among the runs of each point, as one table."""
    paths = {head: path for head, path in AVERAGES.items() if path[-1] != "forgetting"}
    rows = []
    for point, runs in points.items():
        grouped = by_method(runs)
        own = grouped.pop(reference, [])
        for method, others in grouped.items():
            found = [paired(own, others, path) for path in paths.values()]
            cells = tuple(replace(spread(v, signed=True), best=clear(v)) for v in found)
            rows += [Row(f"{reference} − {method}{point}", cells)] if any(found) else []
    title = f"Paired differences against {reference}{where}"
    return [Table(title, ("pair", *paths), tuple(rows), (PAIRED,))] if rows else []


def paired(own: Runs, others: Runs, path: Path) -> list[float]:
    """a_s - b_s of one number on each seed s that both have, hence on the same stream of images."""
    mine = {run["seed"]: at(run, *path) for run in own}
    pairs = [(mine.get(run["seed"]), at(run, *path)) for run in others]
    return [one - other for one, other in pairs if one is not None and other is not None]


def beside_the_paper(runs: Runs) -> list[Table]:
    """The lines of "Variational Bayes for Federated Continual Learning", ours under each.

    A scenario is known by the name in its configuration and by its number of tasks: whoever
    changes more has nothing to stand beside.
    """
    scenarios, names = {run["scenario"] for run in runs}, task_names(runs)
    lines = [one for one in published() if {one[0]} == scenarios and len(one[3]) == len(names) + 1]
    made = []
    for moment, said in MOMENTS.items():
        known = {method: cells for _, method, when, cells in lines if when == moment}
        rows = [row for line in known.items() for row in _beside(*line, runs, moment)]
        title = f"task-aware accuracy {said} beside the paper, in percent"
        table = Table(title, ("method", *names, "average"), tuple(rows), (PUBLISHED,))
        made += [table] if len(rows) > len(known) else []
    return made


def _beside(method: str, printed: tuple[Cell, ...], runs: Runs, moment: str) -> list[Row]:
    """A line of the paper, and what was measured here for its method, whichever head was read."""
    tasks, rows = range(len(printed) - 1), [Row(f"paper: {method}", printed, quiet=True)]
    for name, mine in by_method(runs).items():
        preset = name.partition(",")[0]
        if method == ("fedbnn" if preset in PRESETS else preset):
            own = [over_seeds(mine, "task_aware", moment, task) for task in tasks]
            rows.append(Row(name, (*own, over_seeds(mine, "task_aware", f"avg_{moment}"))))
    return rows


def published() -> list[tuple[str, str, str, tuple[Cell, ...]]]:
    """The paper's lines: scenario, method, moment, and the numbers of each task and their mean."""
    found = []
    with files("fedbnn.report").joinpath("published.csv").open(encoding="utf-8") as file:
        for scenario, method, moment, *texts in list(csv.reader(file))[1:]:
            pairs = [text.split("±") for text in texts if text]
            cells = tuple(Cell(float(value), float(wide), digits=2) for value, wide in pairs)
            found.append((scenario, method, moment, cells))
    return found
