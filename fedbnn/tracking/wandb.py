"""metrics.jsonl is the truth; Weights & Biases mirrors it if asked. W&B can never stop training.

`wandb.json` in the run directory keeps the id of the W&B run and the last round it was given, so a
resumed run goes on under the same id and no round is sent twice.
"""

import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from fedbnn.config.ranges import Positive
from fedbnn.storage import files, run_dir
from fedbnn.storage.files import Damaged
from fedbnn.tracking.console import Watcher

if TYPE_CHECKING:
    from wandb import Run

Json = Mapping[str, Any]
Mode = Literal["auto", "online", "offline", "off"]
DISABLED = ("silent", "disable_git", "x_disable_stats", "x_disable_machine_info")
QUIET: dict[str, Any] = {"console": "off", "save_code": False, **dict.fromkeys(DISABLED, True)}
CURVES = ("fon", "shares", "posterior", "bytes_by_round")
ID = re.compile(r"[0-9a-z]{1,64}")
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
    """

    wandb: Mode | bool = "auto"
    project: str = "fedbnn"
    group: str | None = None
    name: str | None = None
    patience: Positive = 30.0


class Tracker(Watcher):
    """The records of one run: every round to metrics.jsonl and log.txt, then to W&B."""

    def __init__(self, track: Track, run_dir: Path, say: Callable[[str], None]) -> None:
        self._track, self._run_dir, self._say = track, run_dir, say
        self._run: Run | None = None
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

    def round_done(self, record: Json) -> None:
        """The line of the round, on disk before anybody else sees it."""
        run_dir.append_record(self._run_dir, record)
        self._mirror(record)

    def finish(self, results: Json, figures: Sequence[Path]) -> None:
        """Hand over the figures and the numbers of results.json that are not curves, and close."""
        numbers = {key: value for key, value in results.items() if key not in CURVES}
        if self._run is not None:
            with self._forgiving("did not get the figures"):
                from wandb import Image

                self._run.log({f"figures/{path.stem}": Image(str(path)) for path in figures})
                self._run.summary.update(run_dir.numbers(numbers))
        self.close()

    def close(self) -> None:
        """Close the W&B run; what could not be uploaded stays on disk for `wandb sync`."""
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
                self._run.log(run_dir.numbers(record))

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
