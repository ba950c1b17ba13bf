"""A run directory as a whole: which configuration it belongs to, whether it is complete, which one is the last."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedbnn.errors import RunDirectoryError
from fedbnn.storage.files import as_json, remove, write_atomic
from fedbnn.storage.ledger import Ledger

_CONFIG, _FINISHED = "config.json", "finished.json"


def start(
    ledger: Ledger, config: Mapping[str, Any], beside: Mapping[str, bytes] | None = None
) -> None:
    """Make a directory a run: first the files `beside`, and last the configuration, without which there is no run.

    A directory that holds rounds already is refused untouched; one that was stopped before its first round begins anew.
    """
    if ledger.round:
        fix = f"resume it with --resume {ledger.run_dir}, or choose another name"
        raise RunDirectoryError("this directory holds a run already", str(ledger.run_dir), fix)
    marker = _file(ledger, _CONFIG)
    remove(marker)
    for name, payload in (beside or {}).items():
        write_atomic(ledger.run_dir / name, payload)
    write_atomic(marker, as_json(_plain(config)))


def resume(ledger: Ledger, config: Mapping[str, Any], may_differ: Collection[str] = ()) -> None:
    """Check that a run goes on with the configuration it was started with.

    `may_differ` names keys, or whole sections (`engine`, `track.wandb`), that do not change the result.
    """
    started = dict(flat(_read(ledger)))
    now = dict(flat(_plain(config)))
    for key in sorted(started.keys() | now.keys()):
        if started.get(key) != now.get(key) and not _covered(key, may_differ):
            then, today = (
                json.dumps(table[key]) if key in table else "absent" for table in (started, now)
            )
            fix = "resume with the value it was started with, or start a new run"
            raise RunDirectoryError(
                f"cannot resume with another configuration: {key} was {then}, now it is {today}",
                fix=fix,
            )


def finish(ledger: Ledger) -> None:
    """Mark the run complete with its newest round."""
    write_atomic(_file(ledger, _FINISHED), as_json({"round": ledger.round}))


def finished(ledger: Ledger) -> bool:
    """Whether the run is already complete; one that had to fall back is not."""
    path = _file(ledger, _FINISHED)
    return path.exists() and path.read_bytes() == as_json({"round": ledger.round})


def find(which: str, root: Path) -> Path:
    """The run directory behind `--resume`: a path, or `last` for the newest run under `root`."""
    if which != "last":
        return _begun(Path(which))
    runs = [path.parent.parent for path in root.glob(f"**/state/{_CONFIG}")]
    if not runs:
        raise RunDirectoryError(
            "there is no run to resume", str(root), "start one without --resume"
        )
    return max(runs, key=lambda run: ((run / "state").stat().st_mtime_ns, str(run)))


def _begun(run_dir: Path) -> Path:
    """The directory, if a run has begun in it."""
    state = run_dir / "state"
    if (state / _CONFIG).is_file():
        return run_dir
    if state.is_dir():
        raise RunDirectoryError(
            "this run was stopped before it began", str(run_dir), "start it again without --resume"
        )
    raise RunDirectoryError(
        "there is no run to resume", str(run_dir), "give the directory of a run, or `last`"
    )


def _file(ledger: Ledger, name: str) -> Path:
    return ledger.run_dir / "state" / name


def _read(ledger: Ledger) -> dict[str, Any]:
    """The configuration the run was started with."""
    path = _file(ledger, _CONFIG)
    if not path.exists():
        raise RunDirectoryError(
            "there is no run to resume", str(ledger.run_dir), "start it without --resume"
        )
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise RunDirectoryError(
            "the stored configuration is damaged", str(path), "restore it from a copy"
        ) from error
    return dict(config)


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"a": {"b": 1}}` -> `a.b: 1`; an empty section is a value of its own."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as JSON holds it: tuples are lists, paths are strings."""
    plain: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return plain


def _covered(key: str, names: Collection[str]) -> bool:
    """Whether a key, or a section it lies in, is named."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
