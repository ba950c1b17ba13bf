"""What a run, or a comparison, says in plain words."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from fedbnn.tables import REFERENCE, Cell, by_method

Results = Mapping[str, Any]


def of_run(results: Results) -> str:
    """A few sentences: what was learned, how far above chance, what was lost, who did not count."""
    done, tasks = results["rounds_done"], len(results["task_names"])
    if done < results["rounds"] or results["task_aware"]["avg_fin"] is None:
        return f"{results['method']} has done {done} of {results['rounds']} rounds; the final numbers come with the last one."
    sentences = [
        f"{results['method']} met {tasks} {'task' if tasks == 1 else 'tasks'} in {done} rounds.",
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
    counts = {"update refused": len(results["refused"]), "client without an answer": len(results["failed"])}
    parts = [f"{count} {word if count == 1 else _plural(word)}" for word, count in counts.items() if count]
    return f"Not counted: {' and '.join(parts)}." if parts else ""


def _plural(words: str) -> str:
    """The first word in the plural."""
    first, rest = words.split(" ", 1)
    return f"{first}s {rest}"


def of_comparison(runs: Sequence[Results], reference: str = REFERENCE) -> str:
    """Who ends highest when the task is not told, and how the reference stands against each other method."""
    grouped = by_method(runs)
    finals = {method: _finals(mine) for method, mine in grouped.items()}
    ended = {method: mean(by_seed.values()) for method, by_seed in finals.items() if by_seed}
    if not ended:
        return f"{len(runs)} runs of {len(grouped)} methods; none has reached its last round yet."
    winner = max(ended, key=lambda method: ended[method])
    stored = grouped[winner][0]["replay_images"]
    means = f", with the help of {stored} stored images" if stored else ""
    first = (
        f"{len(grouped)} methods, {len(runs)} runs. Not told the task, {winner} ends highest, at {ended[winner]:.1f} %{means}."
    )
    rest = [_against(reference, other, finals) for other in ended if other != reference] if reference in ended else []
    return " ".join([first, *(sentence for sentence in rest if sentence)])


def _finals(runs: Sequence[Results]) -> dict[int, float]:
    """Class-agnostic accuracy at the end, by seed."""
    found = {run["seed"]: run["class_agnostic"]["avg_fin"] for run in runs}
    return {seed: value for seed, value in found.items() if value is not None}


def _against(reference: str, other: str, finals: Mapping[str, Mapping[int, float]]) -> str:
    """One paired difference, called clear only when it is more than twice its standard error."""
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
    error = stdev(differences) / len(differences) ** 0.5
    clear = "" if abs(mean(differences)) > 2 * error else ", which is within the noise of the seeds"
    return f"{reference} is {size} points {word} {other}{clear}."
