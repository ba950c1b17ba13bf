"""metrics.jsonl is the truth; Weights & Biases mirrors it if asked. Nothing that W&B does can stop training.

The mirror keeps `wandb.json` in the run directory: the id of the W&B run, and the last round it was given. So a resumed
run goes on under the same id and no round is sent twice.
"""

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from fedbnn.storage import run_dir
from fedbnn.tracking.cursor import Cursor

if TYPE_CHECKING:
    from wandb import Run

Result = TypeVar("Result")
Say = Callable[[str], None]
Mode = Literal["auto", "online", "offline", "off"]
PLAIN_FAILURES = (
    ImportError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
)
CURVES = ("fon", "shares", "posterior", "bytes_by_round")
FOREIGN = ("wandb.", "google.protobuf.")
KEY = re.compile(r"[0-9A-Za-z_-]{40,}")
"""What an API key looks like; nothing like it is ever shown."""


@dataclass(frozen=True)
class Track:
    """Where a run is followed besides its own files.

    Args:
        wandb: `auto` is online when logged in and offline otherwise; YAML's bare `off` (false) is understood.
        project: W&B project.
        entity: W&B user or team; null means the default of the account.
        group: W&B group; null is the name of the configuration. `fedbnn compare` gives the name of its directory.
        name: name of the W&B run; null is METHOD-SEED. `fedbnn compare` gives the name of the run's directory.
        tags: W&B tags.
        patience: seconds to wait for the W&B server at the start and at the end of a run.
    """

    wandb: Mode | bool = "auto"
    project: str = "fedbnn"
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    patience: float = 30.0

    @property
    def mode(self) -> Mode:
        """The wish in one word."""
        if isinstance(self.wandb, bool):
            return "auto" if self.wandb else "off"
        return self.wandb


class Tracker:
    """The records of one run: every round to metrics.jsonl, then to the mirror."""

    def __init__(self, track: Track, run_dir: Path, say: Say) -> None:
        self.run_dir = run_dir
        self.mirror = Mirror(track, run_dir, say)

    def start(
        self,
        config: Mapping[str, Any],
        group: str,
        name: str,
        committed: int,
        record: Mapping[str, Any] | None,
    ) -> None:
        """Begin, or go on after the last committed round, whose line is put back if a crash lost it.

        The mirror is called `group` and `name` where the user did not choose.
        """
        lines = run_dir.reconcile(self.run_dir, committed, record)
        self.mirror.open(config, group, name)
        for line in lines:
            self.mirror.round(line)

    def round(self, record: Mapping[str, Any]) -> None:
        """One more round."""
        run_dir.append_record(self.run_dir, record)
        self.mirror.round(record)

    def finish(self, results: Mapping[str, Any], figures: Sequence[Path]) -> None:
        """Hand over what stands at the end, and close."""
        self.mirror.finish(results, figures)

    def close(self) -> None:
        """Let go of the mirror without an end, so that the run can be resumed."""
        self.mirror.close()


class Mirror:
    """A W&B run that says once what is wrong with it and is silent from then on."""

    def __init__(self, track: Track, run_dir: Path, say: Say) -> None:
        self._track, self._run_dir, self._say = track, run_dir, say
        self._run: Run | None = None
        self._cursor = Cursor(run_dir / "wandb.json")

    def open(self, config: Mapping[str, Any], group: str, name: str) -> None:
        """Open the W&B run in the mode that is wished and possible."""

        def begin(mode: Literal["online", "offline"]) -> "Run":
            return self._begin(mode, config, group, name)

        mode = self._attempt("is not used", lambda: _mode(self._track))
        if mode == "online":
            self._run = self._online(lambda: begin("online"))
        if mode in ("online", "offline") and self._run is None:
            self._run = self._attempt("is not used", lambda: begin("offline"))
            if self._run is not None:
                self._say(
                    f"W&B is offline; to upload this run later: wandb sync {self._run_dir}/wandb/offline-run-*"
                )

    def _online(self, begin: "Callable[[], Run]") -> "Run | None":
        """An online run if the server answers; if it answers and refuses, the next run needs a new id."""
        if not self._attempt("cannot be reached", lambda: _knock(self._track.patience)):
            return None
        run = self._attempt("did not accept the run", begin)
        if run is None:
            self._cursor.renew()
        return run

    def _begin(
        self, mode: Literal["online", "offline"], config: Mapping[str, Any], group: str, name: str
    ) -> "Run":
        import wandb

        settings = _settings(self._track.patience)
        wandb.termsetup(settings, None)
        run = wandb.init(
            project=self._track.project,
            entity=self._track.entity,
            tags=self._track.tags,
            group=self._track.group or group,
            name=self._track.name or name,
            id=self._cursor.id,
            resume="allow",
            mode=mode,
            dir=self._run_dir,
            config=dict(config),
            settings=settings,
        )
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        return run

    def round(self, record: Mapping[str, Any]) -> None:
        """Mirror one line of metrics.jsonl, unless it was mirrored before."""
        run = self._run
        if run is not None and record["round"] > self._cursor.last:
            self._cursor.advance(record["round"])
            self._attempt("stopped following", lambda: run.log(run_dir.numbers(record)))

    def finish(self, results: Mapping[str, Any], figures: Sequence[Path]) -> None:
        """Figures and the final numbers, then close."""
        run = self._run
        if run is not None:
            self._attempt("did not get the figures", lambda: _hand_over(run, results, figures))
        self.close()

    def close(self) -> None:
        """Close the W&B run; what could not be uploaded stays on disk for `wandb sync`."""
        run, self._run = self._run, None
        if run is not None:
            self._attempt("did not close", run.finish)

    def _attempt(self, trouble: str, act: Callable[[], Result]) -> Result | None:
        """The result of the act; or None, and say what failed, and go on without the mirror."""
        try:
            return act()
        except _failures() as error:
            self._run = None
            reason = KEY.sub("***", " ".join(str(error).split()))[:200]
            self._say(
                f"W&B {trouble} ({type(error).__name__}: {reason}); training goes on, metrics.jsonl has everything"
            )
            return None


def _hand_over(run: "Run", results: Mapping[str, Any], figures: Sequence[Path]) -> None:
    """Pictures, and the numbers of results.json that are not curves."""
    import wandb

    run.log({f"figures/{path.stem}": wandb.Image(str(path)) for path in figures})
    run.summary.update(
        run_dir.numbers({key: value for key, value in results.items() if key not in CURVES})
    )


def _mode(track: Track) -> Mode:
    """`auto` is online only when logged in; W&B's own WANDB_MODE decides before that."""
    told = os.environ.get("WANDB_MODE", "")
    if track.mode != "auto":
        return track.mode
    if told in ("offline", "dryrun", "disabled"):
        return "off" if told == "disabled" else "offline"
    import wandb

    wandb.setup(settings=_settings(track.patience))
    wandb.termsetup(_settings(track.patience), None)
    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def _knock(patience: float) -> bool:
    """True when the W&B server takes a connection, or a proxy stands in between; raises OSError otherwise."""
    import wandb

    server = urlsplit(wandb.setup().settings.base_url)
    if not getproxies():
        socket.create_connection(
            (server.hostname or "", server.port or 443), timeout=patience
        ).close()
    return True


def _settings(patience: float) -> Any:
    """Quiet, no capture of the console, no source code, no machine statistics, bounded waiting."""
    import wandb

    return wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        save_code=False,
        x_disable_stats=True,
        x_disable_machine_info=True,
        init_timeout=patience,
        finish_timeout=patience,
    )


def _failures() -> tuple[type[BaseException], ...]:
    """Everything W&B is known to raise: plain errors, and each exception class of its own that is loaded."""
    own = [kind for kind in Exception.__subclasses__() if kind.__module__.startswith(FOREIGN)]
    return (*PLAIN_FAILURES, *own)
