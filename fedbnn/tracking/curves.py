"""What a person reads of a run as curves, and the Lightning loggers that shall draw them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from fedbnn.evaluation.evaluate import REGIMES
from fedbnn.tracking.console import Watcher

Json = Mapping[str, Any]
SHOWN = ("fon", "train", "pooled", "novelty", "seconds")
COUNTED = ("clients", "failed", "refused", "trust")
ENDS = ("avg_ts", "avg_fin", "forgetting", "backward_transfer", "nll", "brier", "ece")
COSTS = ("rounds_done", "bytes_up", "bytes_down", "seconds", "replay_images")


def curves(record: Json) -> dict[str, float]:
    """One round as numbers with names: how many clients, not which; medians, not whole bands."""
    found: dict[str, float] = {"round": record["round"], "images": record.get("samples", 0)}
    found |= _named({key: record.get(key) for key in SHOWN})
    found |= {f"clients/{kind}": len(record.get(kind) or ()) for kind in COUNTED}
    found |= {f"MB/{way}": _megabytes(record, way) for way in ("up", "down")}
    for place, task in enumerate(record.get("tasks") or (), start=1):
        for regime in REGIMES if task else ():
            found[f"{regime}/task_{place}"] = task[regime]["accuracy"]
    scales = (record.get("posterior") or {}).get("scale", {})
    return found | {f"posterior/{site}_scale": middle for site, (_, middle, _) in scales.items()}


def _megabytes(record: Json, way: str) -> float:
    return float(sum(record.get(f"bytes_{way}", {}).values()) / 1e6)


def ends(results: Json) -> dict[str, float]:
    """The numbers of a finished run that fit into one line of a table of runs."""
    regimes = {name: {end: results.get(name, {}).get(end) for end in ENDS} for name in REGIMES}
    return _named({**regimes, **{cost: results.get(cost) for cost in COSTS}})


def _named(parts: Json, prefix: str = "") -> dict[str, float]:
    """Nested numbers as one level of `a/b` names; what is not there is left out."""
    found: dict[str, float] = {}
    for key, value in parts.items():
        if isinstance(value, Mapping):
            found |= _named(value, f"{prefix}{key}/")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


class Logger(Protocol):
    """What is asked of a Lightning logger."""

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Once, at the beginning."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """The curves of a round."""

    def save(self) -> None:
        """Write what is still in memory."""

    def finalize(self, status: str) -> None:
        """Nothing more comes."""


class Loggers(Watcher):
    """Loggers that follow the rounds; one that fails is said in one line and asked no more."""

    def __init__(self, loggers: Iterable[Logger], say: Callable[[str], None]) -> None:
        self._loggers, self._say = list(loggers), say

    def start(self, config: Json, lines: Sequence[Json]) -> None:
        """The configuration, and the rounds that were played before."""
        self._each(lambda logger: logger.log_hyperparams(dict(config)))
        for line in lines:
            self.round_done(line)

    def round_done(self, record: Json) -> None:
        """The curves of a round, on disk or on their way."""
        told = curves(record)
        self._each(lambda logger: logger.log_metrics(told, record["round"]))
        self._each(lambda logger: logger.save())

    def close(self) -> None:
        """Nothing more comes."""
        self._each(lambda logger: logger.finalize("success"))
        self._loggers = []

    def _each(self, ask: Callable[[Logger], None]) -> None:
        for logger in list(self._loggers):
            try:
                ask(logger)
            except Exception as error:  # noqa: BLE001  (a logger is anybody's code)
                self._loggers.remove(logger)
                why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                self._say(f"{type(logger).__name__} stopped following ({why}); training goes on")
