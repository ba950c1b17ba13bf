"""From the lines of metrics.jsonl to results.json: what a run achieved, in one small dictionary.

Every task's @TS is read at that task's end round, @Fin at the last round; both are None where a run has not got there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedbnn.evaluation import metrics
from fedbnn.evaluation.predictions import REGIMES

Line = Mapping[str, Any]
Values = list[float | None]
CALIBRATION = ("nll", "brier", "ece")


@dataclass(frozen=True)
class Facts:
    """What the lines do not say about a run. `replay_images` is how many images of the past its clients store."""

    method: str
    scenario: str
    seed: int
    rounds: int
    task_names: tuple[str, ...]
    task_ends: tuple[int, ...]
    replay_images: int = 0
    notes: Mapping[str, object] = field(default_factory=dict)


def results(lines: Sequence[Line], facts: Facts) -> dict[str, Any]:
    """The whole of results.json; `linear` is what the linear rows would have said where class posteriors predict."""
    by_round = {line["round"]: line for line in lines}
    second = [{**line, **line["linear"]} for line in lines if line.get("linear")]
    return {
        **asdict(facts),
        "rounds_done": max(by_round, default=0),
        "chance": {name: _chance(by_round, facts, name) for name in REGIMES},
        **_qualities(lines, facts),
        **({"linear": _qualities(second, facts)} if second else {}),
        **_costs(lines),
        "shares": [list(line.get("shares") or []) for line in lines],
        "posterior": [
            {"round": line["round"], **line["posterior"]} for line in lines if line.get("posterior")
        ],
    }


def _qualities(lines: Sequence[Line], facts: Facts) -> dict[str, Any]:
    """Everything that evaluation found: both regimes, Focus-on-Now, calibration, novelty."""
    by_round = {line["round"]: line for line in lines}
    regimes = {name: _regime(by_round, facts, name) for name in REGIMES}
    return {
        **regimes,
        "fon": {
            name: [_focus(by_round.get(number), name) for number in range(1, facts.rounds + 1)]
            for name in REGIMES
        },
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
    own = [
        _task_values(by_round.get(end), facts, "chance", regime)[task]
        for task, end in enumerate(facts.task_ends)
    ]
    fin = _task_values(by_round.get(facts.rounds), facts, "chance", regime)
    return {"ts": own, "fin": fin, "avg_ts": metrics.average(own), "avg_fin": metrics.average(fin)}


def _focus(line: Line | None, regime: str) -> float | None:
    return None if line is None or line["fon"] is None else line["fon"][regime]


def _novelty(lines: Sequence[Line]) -> dict[str, Any] | None:
    """Mean AUROC over the evaluations that had unseen classes, and each of them."""
    found = [{"round": line["round"], **line["novelty"]} for line in lines if line.get("novelty")]
    means = {
        name: metrics.average([one[name] for one in found])
        for name in ("entropy", "mutual_information")
    }
    return {**means, "by_round": found} if found else None


def _costs(lines: Sequence[Line]) -> dict[str, Any]:
    """Time, stats, and updates that did not count, summed over the rounds."""
    parts = sorted({part for line in lines for part in line.get("seconds", {})})
    by_part = {
        part: sum(line.get("seconds", {}).get(part, 0.0) for line in lines) for part in parts
    }
    return {
        "seconds": by_part.get("round", 0.0),
        "seconds_by_part": by_part,
        "bytes_up": sum(line.get("bytes_up", 0) for line in lines),
        "bytes_down": sum(line.get("bytes_down", 0) for line in lines),
        "bytes_by_round": {
            way: [line.get(f"bytes_{way}", 0) for line in lines] for way in ("up", "down")
        },
        "refused": [
            _incident(line, client, why)
            for line in lines
            for client, why in (line.get("refused") or {}).items()
        ],
        "failed": [
            _incident(line, client, why)
            for line in lines
            for client, why in (line.get("failed") or {}).items()
        ],
    }


def _incident(line: Line, client: str, reason: str) -> dict[str, Any]:
    return {"round": line["round"], "client": int(client), "reason": reason}
