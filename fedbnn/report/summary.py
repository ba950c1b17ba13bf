"""What a run, or a comparison, says in plain words."""

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import mean, stdev
from typing import Any

from fedbnn.report.tables import REFERENCE, Cell, by_method, competes

Results = Mapping[str, Any]
MEASURE = "What follows is accuracy at the end, when the task is not told."
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def of_run(results: Results) -> str:
    """A few sentences: what was learned, how far above chance, what was lost, who did not count."""
    done, tasks = results["rounds_done"], len(results["task_names"])
    if done < results["rounds"] or results["task_aware"]["avg_fin"] is None:
        return f"{results['method']} has done {done} of {results['rounds']} rounds; the final numbers come with the last one."
    sentences = [
        f"{results['method']} met {_count(tasks, 'task')} in {_count(done, 'round')}.",
        f"At the end it is right about {_share(results, 'task_aware')} when it is told the task, "
        f"and about {_share(results, 'class_agnostic')} when it must choose among all classes seen.",
        _lost(results),
        _incidents(results),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _share(results: Results, regime: str) -> str:
    return f"{results[regime]['avg_fin']:.1f} % of the images (chance: {results['chance'][regime]['avg_fin']:.1f} %)"


def _lost(results: Results) -> str:
    """Forgetting in both regimes, if there was anything to forget."""
    aware, agnostic = results["task_aware"]["forgetting"], results["class_agnostic"]["forgetting"]
    if aware is None or agnostic is None:
        return ""
    return f"On the way it lost {aware:.1f} points of the earlier tasks when told the task, {agnostic:.1f} when not."


def _incidents(results: Results) -> str:
    counts = {
        "update refused": len(results["refused"]),
        "client without an answer": len(results["failed"]),
    }
    parts = [_count(count, words) for words, count in counts.items() if count]
    return f"Not counted: {' and '.join(parts)}." if parts else ""


def _count(number: int, words: str) -> str:
    """The number, and the words with the first in the plural unless it is one."""
    first, *rest = words.split(" ")
    return " ".join([f"{number} {first}" if number == 1 else f"{number} {first}s", *rest])


def of_comparison(runs: Sequence[Results], reference: str = REFERENCE) -> str:
    """Who ends highest when the task is not told, what the others are, and how the reference stands against each."""
    grouped = by_method(runs)
    finals = {method: _finals(mine) for method, mine in grouped.items()}
    ended = {method: mean(by_seed.values()) for method, by_seed in finals.items() if by_seed}
    counted = f"{_count(len(grouped), 'method')}, {_count(len(runs), 'run')}"
    if not ended:
        return f"{counted}; none has reached its last round yet."
    rivals = {method: value for method, value in ended.items() if competes(grouped[method][0])}
    apart = [
        _apart(method, grouped[method][0], value)
        for method, value in ended.items()
        if method not in rivals
    ]
    against = (
        [_against(reference, other, finals) for other in ended if other != reference]
        if reference in ended
        else []
    )
    return " ".join(filter(None, [f"{counted}. {MEASURE}", _highest(rivals), *apart, *against]))


def _finals(runs: Sequence[Results]) -> dict[int, float]:
    """Class-agnostic accuracy at the end, by seed."""
    found = {run["seed"]: run["class_agnostic"]["avg_fin"] for run in runs}
    return {seed: value for seed, value in found.items() if value is not None}


def _highest(rivals: Mapping[str, float]) -> str:
    """The best of those that compete."""
    if not rivals:
        return ""
    winner = max(rivals, key=lambda method: rivals[method])
    return f"{winner} ends {'highest, ' if len(rivals) > 1 else ''}at {rivals[winner]:.1f} %."


def _apart(method: str, run: Results, value: float) -> str:
    """A method that does not compete, as what it is."""
    if run["replay_images"]:
        return (
            f"{method} ends at {value:.1f} % with the help of {run['replay_images']} stored images."
        )
    kind, _, meaning = run["notes"]["bound"].partition(": ")
    return f"The {kind} bound {method}{f' ({meaning})' if meaning else ''} ends at {value:.1f} %."


def _against(reference: str, other: str, finals: Mapping[str, Mapping[int, float]]) -> str:
    """One paired difference, with a word of doubt unless it is clear."""
    both = sorted(set(finals[reference]) & set(finals[other]))
    differences = [finals[reference][seed] - finals[other][seed] for seed in both]
    if not differences:
        return ""
    size = Cell(abs(mean(differences))).text()
    if float(size) == 0:
        return f"{reference} and {other} end level."
    word = "above" if mean(differences) > 0 else "below"
    if len(differences) < 2:
        return f"{reference} is {size} points {word} {other} (one seed)."
    doubt = "" if clear(differences) else ", which is within the noise of the seeds"
    return f"{reference} is {size} points {word} {other}{doubt}."


def clear(differences: Sequence[float]) -> bool:
    """Whether 0 lies outside the two-sided 95 % interval of Student: |mean| > t(n - 1) s / sqrt(n).

    One pair is never clear. Beyond the quantiles in the table the last one is used, which is a little strict.
    """
    pairs = len(differences)
    if pairs < 2:
        return False
    quantile = STUDENT[min(pairs - 1, len(STUDENT)) - 1]
    return abs(mean(differences)) > quantile * stdev(differences) / sqrt(pairs)


def of_sweep(key: str, points: Mapping[str, Sequence[Results]]) -> str:
    """What each method makes of the values of one setting, when the task is not told."""
    methods = dict.fromkeys(run["method"] for runs in points.values() for run in runs)
    first = f"{key} takes {_count(len(points), 'value')}: {', '.join(points)}. {MEASURE}"
    ranges = [_range(method, points) for method in methods]
    return " ".join([first, *(sentence for sentence in ranges if sentence)])


def _range(method: str, points: Mapping[str, Sequence[Results]]) -> str:
    """Where a method ends lowest and highest, and at which values."""
    finals = {
        value: _finals([run for run in runs if run["method"] == method])
        for value, runs in points.items()
    }
    ended = {value: mean(by_seed.values()) for value, by_seed in finals.items() if by_seed}
    if not ended:
        return ""
    low, high = (choose(ended, key=lambda value: ended[value]) for choose in (min, max))
    if ended[low] == ended[high]:
        return f"{method} ends at {ended[low]:.1f} %."
    return (
        f"{method} ends between {ended[low]:.1f} % (at {low}) and {ended[high]:.1f} % (at {high})."
    )
