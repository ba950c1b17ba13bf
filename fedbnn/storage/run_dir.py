"""A run directory as a whole: whose it is, whether it is complete, what was measured, with what.

config.json     in state/: the configuration it belongs to; without it there is no run
finished.json   in state/: the round it was complete with, and the digest of every file it left
metrics.jsonl   one line per round and each round once, as the ledger has them
env.json        versions and hardware: no variables, names of people or machines, or paths
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fedbnn.config.schema import Count
from fedbnn.errors import RunDirectoryError, called
from fedbnn.protocol.state import State, digest
from fedbnn.storage import files
from fedbnn.storage.files import Damaged, as_json, finite, write_atomic
from fedbnn.storage.ledger import CONFIG, MANIFEST, METRICS, STATE, Ledger, Manifest

Config = Mapping[str, Any]
Record = dict[str, Any]
FORMAT, FINISHED, LAST = 1, "finished.json", ".last"
UNSEALED = ("state", "rejected", "wandb", "wandb.json", "log.txt", "beside")
"""What a run directory holds that may change when the run is complete."""
_PACKAGES = """fedbnn torch torchvision pytorch-lightning pyro-ppl torchmetrics numpy scikit-learn
    safetensors jsonargparse rich matplotlib jinja2 wandb flwr"""


@dataclass(frozen=True)
class Retention:
    """What of the past stays on disk: as far back as that, a client can be taken out again.

    Args:
        keep_rounds: how many of the newest rounds can be gone back to.
    """

    keep_rounds: Count = 3


def start(ledger: Ledger, config: Config, beside: Mapping[str, bytes] | None = None) -> None:
    """Make a directory a run: first the files `beside`, last the configuration.

    One that holds rounds is refused untouched; one stopped before its first round begins anew.
    """
    if ledger.round:
        fix = f"resume it with --resume {ledger.run_dir}, or choose another name"
        raise RunDirectoryError("this directory holds a run already", str(ledger.run_dir), fix)
    with files.writing(ledger.root):
        (ledger.root / CONFIG).unlink(missing_ok=True)
        files.sync(ledger.root)
    for name, payload in (beside or {}).items():
        write_atomic(ledger.run_dir / name, payload)
    write_atomic(ledger.root / CONFIG, as_json(_plain(config)))


def resume(ledger: Ledger, config: Config, may_differ: Collection[str] = ()) -> None:
    """Check that a run goes on with the configuration it was started with.

    `may_differ` names keys, or whole sections (`track.wandb`), that do not change the result.
    """
    path = _begun(ledger.run_dir) / "state" / CONFIG
    try:
        then = dict(flat(files.read_json(path)))
    except Damaged as damage:
        what = "the stored configuration is damaged"
        raise RunDirectoryError(what, str(path), "restore it from a copy") from damage
    now = dict(flat(_plain(config)))
    for key in sorted(then.keys() | now.keys()):
        covered = any(f"{key}.".startswith(f"{name}.") for name in may_differ)
        if then.get(key) != now.get(key) and not covered:
            was, today = (json.dumps(one[key]) if key in one else "absent" for one in (then, now))
            what = f"cannot resume with another configuration: {key} was {was}, now it is {today}"
            fix = "resume with the value it was started with, or start a new run"
            raise RunDirectoryError(what, fix=fix)


def _plain(config: Config) -> dict[str, Any]:
    """The configuration as JSON holds it: tuples are lists, paths are strings."""
    return dict(json.loads(json.dumps(config, default=str)))


def flat(config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"a": {"b": 1}}` -> `a.b: 1`; an empty section has nothing to show."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def finish(ledger: Ledger) -> None:
    """Mark the run complete with its newest round, and with every file as it is now."""
    body = {"round": ledger.round, "files": _digests(ledger.run_dir)}
    write_atomic(ledger.root / FINISHED, files.sealed(FORMAT, body))


def finished(ledger: Ledger) -> bool:
    """Whether the run is already complete; one that had to fall back is not."""
    return (ledger.root / FINISHED).exists() and _left(ledger.run_dir)["round"] == ledger.round


def reopen(ledger: Ledger) -> None:
    """Forget that the run was complete: it goes on."""
    with files.writing(ledger.root):
        (ledger.root / FINISHED).unlink(missing_ok=True)


def sealed_again(run_dir: Path, written: Iterable[Path]) -> None:
    """Take note that a complete run has these files anew."""
    if (run_dir / "state" / FINISHED).exists():
        left, now = _left(run_dir), _digests(run_dir)
        names = {str(path.relative_to(run_dir)) for path in written}
        body = {**left, "files": left["files"] | {name: now[name] for name in names & now.keys()}}
        write_atomic(run_dir / "state" / FINISHED, files.sealed(FORMAT, body))


def changed(run_dir: Path) -> list[str]:
    """Files of a complete run that are gone, or not as it left them; none if it never ended."""
    if not (run_dir / "state" / FINISHED).exists():
        return []
    left, now = _left(run_dir)["files"], _digests(run_dir)
    return sorted(name for name, sha256 in left.items() if now.get(name) != sha256)


def intact(run_dir: Path, *names: str) -> Path:
    """The directory, if it holds nothing but files and these are as a complete run left them."""
    for name in set(names) & {*changed(files.plain(run_dir))}:
        fix = f"{called()} --resume {run_dir} makes it again"
        raise RunDirectoryError(f"{name} is not as the run left it", str(run_dir / name), fix)
    return run_dir


def _left(run_dir: Path) -> dict[str, Any]:
    """What the run said when it was complete; damaged, or of other types, it said nothing."""
    with suppress(Damaged):
        match files.unsealed(run_dir / "state" / FINISHED)[1]:
            case {"round": int(), "files": dict()} as body:
                return dict(body)
    return {"round": None, "files": {}}


def _digests(run_dir: Path) -> dict[str, str]:
    """Every file that a complete run leaves, but its state, logs and mirrors."""
    names = [path for path in files.below(run_dir) if path.is_file()]
    found = {path.relative_to(run_dir): path for path in names}
    kept = {name: path for name, path in found.items() if name.parts[0] not in UNSEALED}
    return {str(name): files.digest(path) for name, path in sorted(kept.items())}


def find(which: str, root: Path) -> Path:
    """The run directory behind `--resume`: a path, or `last` for the newest run under `root`."""
    if which != "last":
        return _begun(Path(which))
    runs = {str(path.parents[1]): path.parent for path in root.glob(f"**/state/{CONFIG}")}
    if not runs:
        fix = "start one without --resume"
        raise RunDirectoryError("there is no run to resume", str(root), fix)
    with suppress(OSError, ValueError):
        if (named := files.read(root / LAST).decode()) in runs:
            return _begun(Path(named))
    return _begun(Path(max(runs, key=lambda run: (runs[run].stat().st_mtime_ns, run))))


def note_last(run_dir: Path, root: Path) -> None:
    """Remember which run under `root` was begun or resumed last, whatever the clock says.

    Runs that begin at the same moment all write this one file.
    """
    if run_dir.is_relative_to(root):
        root.mkdir(parents=True, exist_ok=True)
        write_atomic(root / LAST, str(run_dir).encode(), f"{os.getpid()}-")


def _begun(run_dir: Path) -> Path:
    """The directory, if a run has begun in it."""
    files.plain(run_dir)
    if (run_dir / "state" / CONFIG).is_file():
        return run_dir
    if (run_dir / "state").is_dir():
        what, fix = "this run was stopped before it began", "start it again without --resume"
    else:
        what, fix = "there is no run to resume", "give the directory of a run, or `last`"
    raise RunDirectoryError(what, str(run_dir), fix)


def records(run_dir: Path) -> list[Record]:
    """The rounds on record, in order; a last line cut short by a crash is left out."""
    found: list[Record] = []
    for number, line in enumerate(lines := _lines(run_dir), 1):
        try:
            found.append(dict(json.loads(line)))
            if type(found[-1]["round"]) is not int:
                raise TypeError("a round has a number")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if number < len(lines):
                what, fix = f"line {number} of {METRICS} cannot be read", "resume the run"
                raise RunDirectoryError(what, str(run_dir / METRICS), fix) from error
            return found[: number - 1]
    return found


def kept(run_dir: Path, number: int) -> State:
    """The state after a round that has a directory, if its digest is the one in its manifest."""
    directory = run_dir / "state" / f"round-{number:06d}"
    with suppress(OSError, ValueError):
        payload = files.read(directory / STATE)
        if digest(payload) == Manifest.read(directory / MANIFEST).state:
            return State.from_bytes(payload)
    what, fix = f"round {number} is damaged", "restore the directory from a copy"
    raise RunDirectoryError(what, str(directory), fix)


def _lines(run_dir: Path) -> list[bytes]:
    try:
        return files.read(run_dir / METRICS, files.TEXT).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        what, fix = f"{METRICS} cannot be read: {error.strerror}", "remove it and resume the run"
        raise RunDirectoryError(what, str(run_dir / METRICS), fix) from error


def reconcile(ledger: Ledger) -> list[Record]:
    """Make metrics.jsonl what the ledger has of every committed round, each once, and say so.

    A record that the ledger has lost is taken from its line, if that is the one it names. A crash
    between a commit and its line is nothing to speak of.
    """
    found, kept = _lines(ledger.run_dir), []
    for number, (sha256, line) in enumerate(ledger.records(), 1):
        there = found[number - 1] if number <= len(found) else b""
        if digest(there) != sha256:
            crashed = number == ledger.round and line.startswith(there)
            if not line:
                what, fix = f"the record of round {number} is lost", "restore it from a copy"
                raise RunDirectoryError(what, str(ledger.run_dir / METRICS), fix)
            if not crashed:
                what = "is missing" if not there else "is not what the round recorded"
                ledger.warn(f"line {number} of {METRICS} {what}: put back from the ledger")
        kept.append(line or there)
    if len(found) > len(kept):
        more = f"{len(found) - len(kept)} lines of no committed round"
        ledger.warn(f"{METRICS} had {more}: removed")
    try:
        read = [dict(json.loads(line)) for line in kept]
    except (ValueError, TypeError, RecursionError) as error:
        what, fix = "a record of the ledger is no record of ours", "do not trust this directory"
        raise RunDirectoryError(what, str(ledger.root / "records"), fix) from error
    write_atomic(ledger.run_dir / METRICS, b"".join(kept))
    return read


def write_json(path: Path, value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write a JSON file in one piece: a reader sees the old file or the new one."""
    write_atomic(path, pretty(value))


def pretty(value: Mapping[str, Any] | Sequence[Any]) -> bytes:
    """A JSON file for people."""
    return (json.dumps(finite(value), indent=2, allow_nan=False) + "\n").encode()


def environment() -> dict[str, Any]:
    """Everything worth knowing to repeat a run elsewhere."""
    accelerators, versions = range(torch.cuda.device_count()), {}
    for name in _PACKAGES.split():
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(number) for number in accelerators],
        "packages": versions,
        "commit": _commit(),
    }


def _cpu() -> str:
    """The processor's own name, where the system tells."""
    info = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    return name[1] if name else platform.processor()


def _commit() -> str | None:
    """The commit of the source tree this package runs from, `-dirty` if files have changed."""
    here = Path(__file__)
    described = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    options: dict[str, Any] = {"cwd": here.parent, "capture_output": True, "text": True}
    try:
        for command in (["git", "ls-files", "--error-unmatch", here.name], described):
            done = subprocess.run(command, timeout=10, check=True, **options)
    except (OSError, subprocess.SubprocessError):
        return None
    return str(done.stdout).strip()
