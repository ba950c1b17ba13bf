"""From the lines of metrics.jsonl to results.json: what a run achieved, in one small dictionary.

Every task's @TS is read at that task's end round, @Fin at the last round; both are None where a run
has not got there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

from fedbnn.evaluation.evaluate import REGIMES, UNCERTAINTIES

Line = Mapping[str, Any]
Row = Sequence[float | None]
CALIBRATION = ("nll", "brier", "ece")
QUIET = 0.5
"""Seconds of a run count as such while others keep less than half a core busy."""


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

    `linear` is what the linear head would have said where class posteriors predict.
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
        "surprise": [line.get("surprise") for line in lines],
        "train": _by_round(lines, "train"),
    }


def _by_round(lines: Sequence[Line], key: str) -> list[dict[str, Any]]:
    """What the lines have under a key, each with its round."""
    return [{"round": line["round"], **line[key]} for line in lines if line.get(key)]


def _qualities(lines: Sequence[Line], facts: Facts) -> dict[str, Any]:
    """Everything that evaluation found: both regimes, Focus-on-Now, calibration, novelty."""
    regimes = {name: _regime(lines, facts, name) for name in REGIMES}
    now = {line["round"]: line.get("fon") or {} for line in lines}
    rounds, found = range(1, facts.rounds + 1), _by_round(lines, "novelty")
    novelty = {name: average([one[name] for one in found]) for name in UNCERTAINTIES}
    return {
        **regimes,
        "fon": {name: [now.get(one, {}).get(name) for one in rounds] for name in REGIMES},
        **{name: regimes["class_agnostic"][name] for name in CALIBRATION},
        "novelty": {**novelty, "by_round": found} if found else None,
    }


def _regime(lines: Sequence[Line], facts: Facts, regime: str) -> dict[str, Any]:
    """Accuracy matrix and what follows from it; calibration at the end, of all images together."""
    matrix, moments = _moments(lines, facts, regime, "accuracy")
    lost = forgetting_by_task(matrix, moments["fin"])
    last = [line for line in lines if line["round"] == facts.rounds and line.get("pooled")]
    errors = last[0]["pooled"][regime] if last else {}
    return {
        **moments,
        "forgetting": average(lost[:-1]),
        "forgetting_by_task": lost,
        "backward_transfer": backward_transfer(matrix, moments["fin"]),
        "matrix": matrix,
        **{name: errors.get(name) for name in CALIBRATION},
    }


def _moments(
    lines: Sequence[Line], facts: Facts, part: str, name: str
) -> tuple[Sequence[Row], dict[str, Any]]:
    """One number of every task at every task's end; @TS is a task's at its own end."""
    nothing = [None] * len(facts.task_names)
    tasks = {line["round"]: line["tasks"] for line in lines}
    *matrix, fin = (
        [task and task[part][name] for task in tasks.get(round, nothing)]
        for round in (*facts.task_ends, facts.rounds)
    )
    own = [row[task] for task, row in enumerate(matrix)]
    return matrix, {"ts": own, "fin": fin, "avg_ts": average(own), "avg_fin": average(fin)}


def average(values: Row) -> float | None:
    """Mean of the values that are there."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def forgetting_by_task(matrix: Sequence[Row], final: Row) -> list[float | None]:
    """max_{i<T} a_ij - a_j^final for each task j; row i of the matrix is the end of task i."""
    earlier = [[row[task] for row in matrix[:-1]] for task in range(len(final))]
    best = [max((value for value in row if value is not None), default=None) for row in earlier]
    return list(map(_difference, best, final))


def backward_transfer(matrix: Sequence[Row], final: Row) -> float | None:
    """1/(T-1) sum_{j<T} a_j^final - a_jj: what later tasks did to earlier ones."""
    return average([_difference(final[j], row[j]) for j, row in enumerate(matrix[:-1])])


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _costs(lines: Sequence[Line]) -> dict[str, Any]:
    """Time and bytes, summed over the rounds; `quiet`: nobody else kept the machine busy."""
    by_part = _totals([line.get("seconds", {}) for line in lines])
    busy = [line["load"] for line in lines if line.get("load")]
    others = [load["machine"] - load["own"] for load in busy]
    sent = {way: [line.get(f"bytes_{way}", {}) for line in lines] for way in ("up", "down")}
    by_round = {way: [sum(some.values()) for some in rounds] for way, rounds in sent.items()}
    return {
        "seconds": by_part.get("round", 0.0),
        "quiet": bool(others) and mean(others) < QUIET,
        "seconds_by_part": by_part,
        "bytes_up": sum(by_round["up"]),
        "bytes_down": sum(by_round["down"]),
        "bytes_by_round": by_round,
        "bytes_by_exchange": {way: _totals(rounds) for way, rounds in sent.items()},
    }


def _totals(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each part over the rounds."""
    names = sorted({name for some in parts for name in some})
    return {name: sum(some.get(name, 0) for some in parts) for name in names}


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
