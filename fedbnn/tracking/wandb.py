"""metrics.jsonl is the truth; W&B and any Lightning logger mirror it as curves a person reads, if
they are asked to. None of them can ever stop training.

`wandb.json` in the run directory keeps the id of the W&B run and the last round it was given, so a
resumed run goes on under the same id and no round is sent twice.
"""

import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies

from fedbnn.config.schema import Positive
from fedbnn.evaluation.evaluate import REGIMES
from fedbnn.storage import files, run_dir
from fedbnn.storage.files import Damaged
from fedbnn.storage.ledger import METRICS
from fedbnn.tracking.console import Watcher

if TYPE_CHECKING:
    from wandb import Run

Json = Mapping[str, Any]
Mode = Literal["auto", "online", "offline", "off"]
DISABLED = ("silent", "disable_git", "x_disable_stats", "x_disable_machine_info")
QUIET: dict[str, Any] = {"console": "off", "save_code": False, **dict.fromkeys(DISABLED, True)}
ID = re.compile(r"[0-9a-z]{1,64}")
SHOWN = ("fon", "train", "pooled", "novelty", "seconds", "privacy")
COUNTED = ("clients", "failed", "refused", "trust")
ENDS = ("avg_ts", "avg_fin", "forgetting", "backward_transfer", "nll", "brier", "ece")
COSTS = ("rounds_done", "bytes_up", "bytes_down", "seconds", "replay_images")
KEY = re.compile(r"[0-9A-Za-z_-]{40,}")
"""What an API key looks like; nothing like it is ever shown."""


@dataclass(frozen=True)
class Track:
    """Where a run is followed besides its own files. W&B reads WANDB_ENTITY and WANDB_TAGS itself.

    Args:
        wandb: `auto` is online when logged in, else offline; a bare `off` (false) is understood.
        project: W&B project.
        group: W&B group; null is the name of the configuration, or of the comparison's directory.
        name: name of the W&B run; null is METHOD-SEED, or the name of a compared run's directory.
        patience: seconds to wait for the W&B server at the start and at the end of a run.
        logger: any Lightning logger, or several, by class_path and init_args: the same curves.
    """

    wandb: Mode | bool = "auto"
    project: str = "fedbnn"
    group: str | None = None
    name: str | None = None
    patience: Positive = 30.0
    logger: Any = None


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


class Tracker(Watcher):
    """The records of one run: every round to metrics.jsonl, then to W&B and other loggers."""

    def __init__(self, track: Track, run_dir: Path, say: Callable[[str], None]) -> None:
        self._track, self._run_dir, self._say = track, run_dir, say
        self._run: Run | None = None
        chosen = track.logger if isinstance(track.logger, list) else [track.logger]
        self._loggers = Loggers([one for one in chosen if one is not None], say)
        self._file = run_dir / "wandb.json"
        self._id, self._sent = self._remembered()

    def _remembered(self) -> tuple[str, int]:
        """Id and last round of the mirror; a new one where nothing, or nonsense, is remembered."""
        if self._file.exists():
            with suppress(Damaged):
                match files.read_json(self._file):
                    case {"id": str(one), "last": int(last)} if ID.fullmatch(one):
                        return one, last
            self._say(f"{self._file} is damaged: W&B gets the run under a new id")
        return secrets.token_hex(4), 0

    def start(self, config: Json, group: str, name: str, records: Sequence[Json]) -> None:
        """Begin, or go on after the rounds on record; those that W&B does not have are sent.

        The W&B run is called `group` and `name` where the user did not choose.
        """
        group, name = self._track.group or group, self._track.name or name
        self._open({"config": dict(config), "group": group, "name": name})
        for record in records:
            self._mirror(record)
        self._loggers.start(config, records)

    def round_done(self, record: Json) -> None:
        """The line of the round, on disk before anybody else sees it."""
        files.append_line(self._run_dir / METRICS, record)
        self._mirror(record)
        self._loggers.round_done(record)

    def finish(self, results: Json, figures: Sequence[Path]) -> None:
        """Hand over the figures and what the run reached, and close."""
        if self._run is not None:
            with self._forgiving("did not get the figures"):
                from wandb import Image

                self._run.log({f"figures/{path.stem}": Image(str(path)) for path in figures})
                self._run.summary.update(ends(results))
        self.close()

    def close(self) -> None:
        """Close all; what could not be uploaded to W&B stays on disk for `wandb sync`."""
        self._loggers.close()
        run, self._run = self._run, None
        if run is not None:
            with self._forgiving("did not close"):
                run.finish()

    def _mirror(self, record: Json) -> None:
        """Send one round, unless it was sent before.

        It is remembered first: a crash in between loses a point of a curve, and doubles none.
        """
        if self._run is not None and record["round"] > self._sent:
            self._sent = record["round"]
            run_dir.write_json(self._file, {"id": self._id, "last": self._sent})
            with self._forgiving("stopped following"):
                self._run.log(curves(record))

    def _open(self, named: Json) -> None:
        """Online if that is wished and the server answers, else offline.

        A server that answers and refuses does not want the id: it gets another one.
        """
        mode = "off"
        with self._forgiving("is not used"):
            mode = _mode(self._track)
        if mode == "online":
            with self._forgiving("cannot be reached"):
                _knock(self._track.patience)
                with self._forgiving("did not accept the run"):
                    self._begin("online", named)
                if self._run is None:
                    self._id, self._sent = secrets.token_hex(4), 0
        if mode != "off" and self._run is None:
            with self._forgiving("is not used"):
                self._begin("offline", named)
                later = f"wandb sync {self._run_dir}/wandb/offline-run-*"
                self._say(f"W&B is offline; to upload this run later: {later}")

    def _begin(self, mode: Literal["online", "offline"], named: Json) -> None:
        import wandb

        settings = _settings(self._track.patience)
        wandb.termsetup(settings, None)
        mine: Json = {"id": self._id, "dir": self._run_dir, "project": self._track.project, **named}
        self._run = wandb.init(mode=mode, resume="allow", settings=settings, **mine)
        self._run.define_metric("*", step_metric="round")

    @contextmanager
    def _forgiving(self, trouble: str) -> Iterator[None]:
        """Whatever W&B raises in here is said in one line, and ends nothing but the mirror."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (W&B may raise anything)
            self._run = None
            why = f"{type(error).__name__}: {KEY.sub('***', ' '.join(str(error).split()))[:200]}"
            self._say(f"W&B {trouble} ({why}); training goes on, metrics.jsonl has everything")


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


def _mode(track: Track) -> str:
    """`auto` is online only when logged in; W&B's own WANDB_MODE decides before that."""
    wish = track.wandb if isinstance(track.wandb, str) else "auto" if track.wandb else "off"
    told = {"disabled": "off", "dryrun": "offline", "offline": "offline"}
    if wish != "auto" or os.environ.get("WANDB_MODE") in told:
        return told[os.environ["WANDB_MODE"]] if wish == "auto" else wish
    import wandb

    wandb.setup(settings=_settings(track.patience))
    wandb.termsetup(_settings(track.patience), None)
    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def _knock(patience: float) -> None:
    """An OSError unless the server takes a connection, or a proxy stands in between."""
    import wandb

    server = urlsplit(wandb.setup().settings.base_url)
    if not getproxies():
        place = server.hostname or "", server.port or 443
        socket.create_connection(place, timeout=patience).close()


def _settings(patience: float) -> Any:
    """Quiet, no capture of the console, no source code, no machine statistics, bounded waiting."""
    import wandb

    return wandb.Settings(**QUIET, init_timeout=patience, finish_timeout=patience)
