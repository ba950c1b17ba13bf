"""From the lines of metrics.jsonl to results.json: what a run achieved, in one small dictionary.

Every task's @TS is read at that task's end round, @Fin at the last round; both are None where a run
has not got there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedbnn.evaluation import metrics
from fedbnn.evaluation.evaluate import REGIMES, UNCERTAINTIES

Line = Mapping[str, Any]
Values = list[float | None]
CALIBRATION = ("nll", "brier", "ece")


@dataclass(frozen=True)
class Facts:
    """What the lines do not say; `replay_images` of the past are stored on the clients."""

    method: str
    scenario: str
    seed: int
    rounds: int
    task_names: tuple[str, ...]
    task_ends: tuple[int, ...]
    replay_images: int = 0
    notes: Mapping[str, object] = field(default_factory=dict)


def results(lines: Sequence[Line], facts: Facts) -> dict[str, Any]:
    """The whole of results.json.

    `linear` is what the linear rows would have said where class posteriors predict.
    """
    by_round = {line["round"]: line for line in lines}
    second = [{**line, **line["linear"]} for line in lines if line.get("linear")]
    scales = [{"round": line["round"], **line["posterior"]} for line in _with(lines, "posterior")]
    return {
        **asdict(facts),
        "rounds_done": max(by_round, default=0),
        "chance": {name: _chance(by_round, facts, name) for name in REGIMES},
        **_qualities(lines, facts),
        **({"linear": _qualities(second, facts)} if second else {}),
        **_costs(lines),
        "failed": _incidents(lines, "failed", "reason"),
        "refused": _incidents(lines, "refused", "reason"),
        "down_weighted": _incidents(lines, "trust", "trust"),
        "shares": [list(line.get("shares") or []) for line in lines],
        "posterior": scales,
    }


def _with(lines: Sequence[Line], key: str) -> list[Line]:
    """The lines that have something under this key."""
    return [line for line in lines if line.get(key)]


def _qualities(lines: Sequence[Line], facts: Facts) -> dict[str, Any]:
    """Everything that evaluation found: both regimes, Focus-on-Now, calibration, novelty."""
    by_round = {line["round"]: line for line in lines}
    regimes = {name: _regime(by_round, facts, name) for name in REGIMES}
    now = [(by_round.get(number) or {}).get("fon") or {} for number in range(1, facts.rounds + 1)]
    return {
        **regimes,
        "fon": {name: [values.get(name) for values in now] for name in REGIMES},
        **{name: regimes["class_agnostic"][name] for name in CALIBRATION},
        "novelty": _novelty(lines),
    }


def _regime(by_round: Mapping[int, Line], facts: Facts, regime: str) -> dict[str, Any]:
    """Accuracy matrix and what follows from it, and calibration at the end, in one regime."""
    matrix = [_task_values(by_round.get(end), facts, regime, "accuracy") for end in facts.task_ends]
    final = by_round.get(facts.rounds)
    fin, own = _task_values(final, facts, regime, "accuracy"), metrics.diagonal(matrix)
    return {
        "ts": own,
        "fin": fin,
        "avg_ts": metrics.average(own),
        "avg_fin": metrics.average(fin),
        "forgetting": metrics.forgetting(matrix, fin),
        "forgetting_by_task": metrics.forgetting_by_task(matrix, fin),
        "backward_transfer": metrics.backward_transfer(matrix, fin),
        "matrix": matrix,
        **{name: metrics.average(_task_values(final, facts, regime, name)) for name in CALIBRATION},
    }


def _task_values(line: Line | None, facts: Facts, regime: str, name: str) -> Values:
    """One number of every task from one line; None for tasks it did not evaluate."""
    tasks = line["tasks"] if line is not None else [None] * len(facts.task_names)
    return [None if task is None else task[regime][name] for task in tasks]


def _chance(by_round: Mapping[int, Line], facts: Facts, regime: str) -> dict[str, Any]:
    """Chance level beside each @TS and each @Fin."""
    rounds = (*facts.task_ends, facts.rounds)
    *ends, fin = (_task_values(by_round.get(one), facts, "chance", regime) for one in rounds)
    own = metrics.diagonal(ends)
    return {"ts": own, "fin": fin, "avg_ts": metrics.average(own), "avg_fin": metrics.average(fin)}


def _novelty(lines: Sequence[Line]) -> dict[str, Any] | None:
    """Mean AUROC over the evaluations that had unseen classes, and each of them."""
    found = [{"round": line["round"], **line["novelty"]} for line in _with(lines, "novelty")]
    means = {name: metrics.average([one[name] for one in found]) for name in UNCERTAINTIES}
    return {**means, "by_round": found} if found else None


def _costs(lines: Sequence[Line]) -> dict[str, Any]:
    """Time and bytes, summed over the rounds."""
    spent = [line.get("seconds", {}) for line in lines]
    parts = sorted({part for seconds in spent for part in seconds})
    by_part = {part: sum(seconds.get(part, 0.0) for seconds in spent) for part in parts}
    sent = {way: [line.get(f"bytes_{way}", 0) for line in lines] for way in ("up", "down")}
    return {
        "seconds": by_part.get("round", 0.0),
        "seconds_by_part": by_part,
        "bytes_up": sum(sent["up"]),
        "bytes_down": sum(sent["down"]),
        "bytes_by_round": sent,
    }


def _incidents(lines: Sequence[Line], key: str, what: str) -> list[dict[str, Any]]:
    """Every client that a round names under this key, with what the round says of it."""
    return [
        {"round": line["round"], "client": int(client), what: value}
        for line in _with(lines, key)
        for client, value in line[key].items()
    ]


def diagnostics(lines: Sequence[Line]) -> dict[str, Any]:
    """diagnostics.json: calibration at the end, uncertainty when classes were last unseen."""
    evaluated = _with(lines, "diagnostics")
    chosen = {"reliability": evaluated, "uncertainty": _with(evaluated, "novelty") or evaluated}
    return {part: _last(some, part) for part, some in chosen.items()}


def _last(lines: Sequence[Line], part: str) -> dict[str, Any] | None:
    """One part of the last line's diagnostics, with the round it was taken in."""
    return {"round": lines[-1]["round"], **lines[-1]["diagnostics"][part]} if lines else None
