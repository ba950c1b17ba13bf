"""What a run, a comparison or a sweep says in plain words."""

from collections.abc import Mapping, Sequence
from statistics import mean

from fedbnn.evaluation.evaluate import REGIMES
from fedbnn.report import tables
from fedbnn.report.values import Results, Runs, Varied, by_method, clear, competes, over_seeds

END = ("class_agnostic", "avg_fin")
MEASURE = "What follows is accuracy at the end, when the task is not told."


def summary(runs: Runs, reference: str, sweep: Varied | None = None) -> str:
    """A few sentences about these runs."""
    if sweep:
        return of_sweep(sweep.key, sweep.points(runs))
    return of_run(runs[0]) if len(runs) == 1 else of_comparison(runs, reference)


def of_run(run: Results) -> str:
    """What was learned, how far above chance, what was lost, who did not count."""
    method, done, rounds = run["method"], run["rounds_done"], run["rounds"]
    if done < rounds or run["task_aware"]["avg_fin"] is None:
        return f"{method} has done {done} of {rounds} rounds; its numbers come with the last one."
    ends = [(run[one]["avg_fin"], run["chance"][one]["avg_fin"]) for one in REGIMES]
    told, free = (f"{right:.1f} % of the images (chance: {odds:.1f} %)" for right, odds in ends)
    text = f"{method} met {_count(len(run['task_names']), 'task')} in {_count(done, 'round')}."
    text += f" At the end it is right about {told} when it is told the task,"
    text += f" and about {free} when it must choose among all classes seen."
    aware, agnostic = (run[regime]["forgetting"] for regime in REGIMES)
    if aware is not None and agnostic is not None:
        text += f" On the way it lost {aware:z.1f} points of the earlier tasks when told the task,"
        text += f" {agnostic:z.1f} when not."
    return f"{text} {incidents(run)}".strip()


def incidents(run: Results) -> str:
    """How many updates did not count, and how many counted less; nothing if all counted."""
    words = {"refused": "update refused", "failed": "client without an answer"}
    missing = [_count(len(run[kind]), said) for kind, said in words.items() if run[kind]]
    less = [_count(len(run["down_weighted"]), "update")] if run["down_weighted"] else []
    said = {"Not counted": missing, "Counted with less weight": less}
    return " ".join(f"{how}: {' and '.join(some)}." for how, some in said.items() if some)


def _count(number: int, words: str) -> str:
    """The number, and the words with the first in the plural unless it is one."""
    first, space, rest = words.partition(" ")
    return f"{number} {first}{'' if number == 1 else 's'}{space}{rest}"


NEAREST = 4
"""Of how many methods, the nearest ones, the words say how far they are from the reference."""


def of_comparison(runs: Runs, reference: str = tables.REFERENCE) -> str:
    """Who ends highest when the task is not told, and how the reference stands against each."""
    grouped = by_method(runs)
    counted, ended = f"{_count(len(grouped), 'method')}, {_count(len(runs), 'run')}", _ends(grouped)
    if not ended:
        return f"{counted}; none has reached its last round yet."
    text = f"{counted}. {MEASURE}"
    rivals = [method for method in ended if competes(grouped[method][0])]
    if rivals:
        winner = max(rivals, key=lambda method: ended[method])
        text += f" {winner} ends {'highest, ' if len(rivals) > 1 else ''}at {ended[winner]:.1f} %."
    apart = [_apart(grouped[one][0], ended[one]) for one in ended if one not in rivals]
    others = [method for method in ended if method != reference and reference in ended]
    pairs = {one: tables.paired(grouped[reference], grouped[one], END) for one in others}
    known = {one: values for one, values in pairs.items() if values}
    nearest = sorted(known, key=lambda one: abs(mean(known[one])))[:NEAREST]
    against = [_against(reference, one, known[one]) for one in known if one in nearest]
    more = ["The paired differences below have the others."] if len(known) > NEAREST else []
    return " ".join([text, *apart, *against, *more])


def _ends(groups: Mapping[str, Runs]) -> dict[str, float]:
    """The mean over the seeds of each group of runs that has come to its end."""
    finals = {name: over_seeds(runs, *END).value for name, runs in groups.items()}
    return {name: value for name, value in finals.items() if value is not None}


def _apart(run: Results, value: float) -> str:
    """A method that does not compete, as what it is."""
    ends = f"ends at {value:.1f} %"
    if run["replay_images"]:
        return f"{run['method']} {ends} with the help of {run['replay_images']} stored images."
    kind, _, meaning = run["notes"]["bound"].partition(": ")
    return f"The {kind} bound {run['method']}{f' ({meaning})' if meaning else ''} {ends}."


def _against(reference: str, other: str, differences: Sequence[float]) -> str:
    """One paired difference, with a word of doubt unless it is clear."""
    size, above = f"{abs(mean(differences)):.1f}", mean(differences) > 0
    if float(size) == 0:
        return f"{reference} and {other} end level."
    doubt = "" if clear(differences) else ", which is within the noise of the seeds"
    doubt = doubt if len(differences) > 1 else " (one seed)"
    return f"{reference} is {size} points {'above' if above else 'below'} {other}{doubt}."


def of_sweep(key: str, points: Mapping[str, Runs]) -> str:
    """What each method makes of the values of one setting, when the task is not told."""
    first = f"{key} takes {_count(len(points), 'value')}: {', '.join(points)}. {MEASURE}"
    methods = dict.fromkeys(run["method"] for runs in points.values() for run in runs)
    return " ".join(filter(None, [first, *(_range(method, points) for method in methods)]))


def _range(method: str, points: Mapping[str, Runs]) -> str:
    """Where a method ends lowest and highest, and at which values."""
    ended = _ends({one: by_method(runs).get(method, []) for one, runs in points.items()})
    if len(set(ended.values())) < 2:
        return "".join(f"{method} ends at {value:.1f} %." for value in set(ended.values()))
    low, high = (choose(ended, key=lambda value: ended[value]) for choose in (min, max))
    ends = f"{ended[low]:.1f} % (at {low}) and {ended[high]:.1f} % (at {high})"
    return f"{method} ends between {ends}."
