"""metrics.jsonl is the truth; Weights & Biases mirrors it if asked. Nothing that W&B does can stop training.

The mirror keeps `wandb.json` in the run directory: the id of the W&B run, and the last round it was given. So a resumed
run goes on under the same id and no round is sent twice.
"""

import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedbnn import records

if TYPE_CHECKING:
    from wandb import Run

Say = Callable[[str], None]
Mode = Literal["auto", "online", "offline", "off"]
PLAIN_FAILURES = (ImportError, OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
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
        tags: W&B tags.
        patience: seconds to wait for the W&B server at the start and at the end of a run.
    """

    wandb: Mode | bool = "auto"
    project: str = "fedbnn"
    entity: str | None = None
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

    def start(self, config: Mapping[str, Any], group: str, name: str, committed: int, record: Mapping[str, Any] | None) -> None:
        """Begin, or go on after the last committed round, whose line is put back if a crash lost it."""
        lines = records.reconcile(self.run_dir, committed, record)
        self.mirror.open(config, group, name)
        for line in lines:
            self.mirror.round(line)

    def round(self, record: Mapping[str, Any]) -> None:
        """One more round."""
        records.append(self.run_dir, record)
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
        self._cursor = _Cursor(run_dir / "wandb.json")

    def open(self, config: Mapping[str, Any], group: str, name: str) -> None:
        """Open the W&B run in the mode that is wished and possible."""
        if self._track.mode == "off":
            return
        with self._guarded("is not used"):
            mode = _possible(self._track.mode)
            self._run = self._connect(mode, config, group, name) if mode == "online" else None
            if self._run is None and mode != "off":
                self._run = self._begin("offline", config, group, name)
                self._say(f"W&B is offline; to upload this run later: wandb sync {self._run_dir}/wandb/offline-run-*")

    def _connect(self, mode: Mode, config: Mapping[str, Any], group: str, name: str) -> "Run | None":
        """An online run, or None when the server cannot be reached."""
        run = None
        with self._guarded("cannot be reached"):
            run = self._begin(mode, config, group, name)
        return run

    def _begin(self, mode: Mode, config: Mapping[str, Any], group: str, name: str) -> "Run":
        import wandb

        run = wandb.init(
            project=self._track.project,
            entity=self._track.entity,
            tags=self._track.tags,
            group=group,
            name=name,
            id=self._cursor.id,
            resume="allow",
            mode="online" if mode == "online" else "offline",
            dir=self._run_dir,
            config=dict(config),
            settings=_settings(self._track.patience),
        )
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        return run

    def round(self, record: Mapping[str, Any]) -> None:
        """Mirror one line of metrics.jsonl, unless it was mirrored before."""
        if self._run is None or record["round"] <= self._cursor.last:
            return
        with self._guarded("stopped following"):
            self._cursor.advance(record["round"])
            self._run.log(flat(record))

    def finish(self, results: Mapping[str, Any], figures: Sequence[Path]) -> None:
        """Figures and the final numbers, then close."""
        if self._run is None:
            return
        with self._guarded("did not get the figures"):
            import wandb

            self._run.log({f"figures/{path.stem}": wandb.Image(str(path)) for path in figures})
            self._run.summary.update(flat({key: value for key, value in results.items() if key not in ("fon", "shares")}))
        self.close()

    def close(self) -> None:
        """Close the W&B run; what could not be uploaded stays on disk for `wandb sync`."""
        if self._run is not None:
            with self._guarded("did not close"):
                self._run.finish()
        self._run = None

    @contextmanager
    def _guarded(self, trouble: str) -> Iterator[None]:
        """Say what failed, once, and go on without the mirror."""
        try:
            yield
        except _failures() as error:
            self._run = None
            reason = KEY.sub("***", " ".join(str(error).split()))[:200]
            self._say(f"W&B {trouble} ({type(error).__name__}: {reason}); training goes on, metrics.jsonl has everything")


class _Cursor:
    """The id of the W&B run and the last round it was given, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        kept = json.loads(path.read_text()) if path.exists() else {}
        self.id: str = kept.get("id") or secrets.token_hex(4)
        self.last: int = kept.get("last", 0)

    def advance(self, round: int) -> None:
        """Remember before sending: a crash in between loses a point of a curve, and doubles none."""
        self.last = round
        records.write_json(self._path, {"id": self.id, "last": round})


def _possible(wish: Mode) -> Mode:
    """The mode that can be had: `auto` is online only when logged in; W&B's own WANDB_MODE decides before that."""
    if wish != "auto":
        return wish
    told = os.environ.get("WANDB_MODE", "")
    if told in ("offline", "dryrun"):
        return "offline"
    if told == "disabled":
        return "off"
    import wandb

    wandb.setup(settings=_settings(30))
    return "online" if wandb.login(prompt=False, verify=False) else "offline"


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


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries and lists as one level of `a/b/0` names; only numbers and words are kept."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}/")
        elif isinstance(value, list):
            found |= flat({str(place): part for place, part in enumerate(value)}, f"{name}/")
        elif isinstance(value, int | float | str):
            found[name] = value
    return found
