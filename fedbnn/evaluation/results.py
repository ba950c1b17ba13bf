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
    second = [{**line, **line["linear"]} for line in lines if line.get("linear")]
    return {
        **asdict(facts),
        "rounds_done": max((line["round"] for line in lines), default=0),
        "chance": {name: _moments(lines, facts, "chance", name)[1] for name in REGIMES},
        **_qualities(lines, facts),
        **({"linear": _qualities(second, facts)} if second else {}),
        **_costs(lines),
        "failed": _incidents(lines, "failed", "reason"),
        "refused": _incidents(lines, "refused", "reason"),
        "down_weighted": _incidents(lines, "trust", "trust"),
        "shares": [list(line.get("shares") or []) for line in lines],
        "posterior": _by_round(lines, "posterior"),
    }


def _by_round(lines: Sequence[Line], key: str) -> list[dict[str, Any]]:
    """What the lines have under a key, each with its round."""
    return [{"round": line["round"], **line[key]} for line in lines if line.get(key)]


def _qualities(lines: Sequence[Line], facts: Facts) -> dict[str, Any]:
    """Everything that evaluation found: both regimes, Focus-on-Now, calibration, novelty."""
    regimes = {name: _regime(lines, facts, name) for name in REGIMES}
    now = {line["round"]: line.get("fon") or {} for line in lines}
    rounds = range(1, facts.rounds + 1)
    found = _by_round(lines, "novelty")
    novelty = {name: metrics.average([one[name] for one in found]) for name in UNCERTAINTIES}
    return {
        **regimes,
        "fon": {name: [now.get(one, {}).get(name) for one in rounds] for name in REGIMES},
        **{name: regimes["class_agnostic"][name] for name in CALIBRATION},
        "novelty": {**novelty, "by_round": found} if found else None,
    }


def _regime(lines: Sequence[Line], facts: Facts, regime: str) -> dict[str, Any]:
    """Accuracy matrix and what follows from it, and calibration at the end, in one regime."""
    matrix, moments = _moments(lines, facts, regime, "accuracy")
    fin = moments["fin"]
    errors = {name: _moments(lines, facts, regime, name)[1]["avg_fin"] for name in CALIBRATION}
    return {
        **moments,
        "forgetting": metrics.forgetting(matrix, fin),
        "forgetting_by_task": metrics.forgetting_by_task(matrix, fin),
        "backward_transfer": metrics.backward_transfer(matrix, fin),
        "matrix": matrix,
        **errors,
    }


def _moments(
    lines: Sequence[Line], facts: Facts, part: str, name: str
) -> tuple[list[Values], dict[str, Any]]:
    """One number of every task at every task's end; and from it @TS, @Fin and their averages."""
    nothing = [None] * len(facts.task_names)
    tasks = {line["round"]: line["tasks"] for line in lines}
    *matrix, fin = (
        [task and task[part][name] for task in tasks.get(round, nothing)]
        for round in (*facts.task_ends, facts.rounds)
    )
    own = metrics.diagonal(matrix)
    averages = {"avg_ts": metrics.average(own), "avg_fin": metrics.average(fin)}
    return matrix, {"ts": own, "fin": fin, **averages}


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
        for line in lines
        for client, value in (line.get(key) or {}).items()
    ]


def diagnostics(lines: Sequence[Line]) -> dict[str, Any]:
    """diagnostics.json: calibration at the end, uncertainty when classes were last unseen."""
    evaluated = [line for line in lines if line.get("diagnostics")]
    unseen = [line for line in evaluated if line.get("novelty")] or evaluated
    return {
        "reliability": _last(evaluated, "reliability"),
        "uncertainty": _last(unseen, "uncertainty"),
    }


def _last(lines: Sequence[Line], part: str) -> dict[str, Any] | None:
    """One part of the last line's diagnostics, with the round it was taken in."""
    return {"round": lines[-1]["round"], **lines[-1]["diagnostics"][part]} if lines else None
