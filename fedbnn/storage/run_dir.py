"""A run directory as a whole: whose it is, whether it is complete, what was measured, with what.

config.json     in state/: the configuration it belongs to; without it there is no run
finished.json   in state/: the round it was complete with
metrics.jsonl   one line per round and each round once
env.json        versions and hardware: no variables, names of people or machines, or paths
"""

import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fedbnn.errors import RunDirectoryError
from fedbnn.storage import files
from fedbnn.storage.files import as_json, write_atomic
from fedbnn.storage.ledger import Ledger

Config = Mapping[str, Any]
Record = dict[str, Any]
METRICS = "metrics.jsonl"
_CONFIG, _FINISHED = "config.json", "finished.json"
_PACKAGES = """fedbnn torch torchvision pytorch-lightning pyro-ppl torchmetrics numpy scikit-learn
    safetensors jsonargparse rich matplotlib jinja2 wandb flwr"""


def start(ledger: Ledger, config: Config, beside: Mapping[str, bytes] | None = None) -> None:
    """Make a directory a run: first the files `beside`, last the configuration.

    One that holds rounds is refused untouched; one stopped before its first round begins anew.
    """
    if ledger.round:
        fix = f"resume it with --resume {ledger.run_dir}, or choose another name"
        raise RunDirectoryError("this directory holds a run already", str(ledger.run_dir), fix)
    with files.writing(ledger.root):
        (ledger.root / _CONFIG).unlink(missing_ok=True)
        files.sync(ledger.root)
    for name, payload in (beside or {}).items():
        write_atomic(ledger.run_dir / name, payload)
    write_atomic(ledger.root / _CONFIG, as_json(_plain(config)))


def resume(ledger: Ledger, config: Config, may_differ: Collection[str] = ()) -> None:
    """Check that a run goes on with the configuration it was started with.

    `may_differ` names keys, or whole sections (`track.wandb`), that do not change the result.
    """
    path = _begun(ledger.run_dir) / "state" / _CONFIG
    try:
        then = dict(flat(json.loads(path.read_bytes())))
    except (ValueError, AttributeError) as error:
        what = "the stored configuration is damaged"
        raise RunDirectoryError(what, str(path), "restore it from a copy") from error
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
    """Mark the run complete with its newest round."""
    write_atomic(ledger.root / _FINISHED, as_json({"round": ledger.round}))


def finished(ledger: Ledger) -> bool:
    """Whether the run is already complete; one that had to fall back is not."""
    path = ledger.root / _FINISHED
    return path.exists() and path.read_bytes() == as_json({"round": ledger.round})


def find(which: str, root: Path) -> Path:
    """The run directory behind `--resume`: a path, or `last` for the newest run under `root`."""
    if which != "last":
        return _begun(Path(which))
    runs = [path.parent.parent for path in root.glob(f"**/state/{_CONFIG}")]
    if not runs:
        fix = "start one without --resume"
        raise RunDirectoryError("there is no run to resume", str(root), fix)
    return max(runs, key=lambda run: ((run / "state").stat().st_mtime_ns, str(run)))


def _begun(run_dir: Path) -> Path:
    """The directory, if a run has begun in it."""
    if (run_dir / "state" / _CONFIG).is_file():
        return run_dir
    if (run_dir / "state").is_dir():
        what, fix = "this run was stopped before it began", "start it again without --resume"
    else:
        what, fix = "there is no run to resume", "give the directory of a run, or `last`"
    raise RunDirectoryError(what, str(run_dir), fix)


def records(run_dir: Path) -> list[Record]:
    """The rounds on record, in order; a last line cut short by a crash is left out."""
    path, found = run_dir / METRICS, []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict) and "round" in record]


def append_record(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Add one round; when this returns, the line survives a power cut."""
    files.write(run_dir / METRICS, _line(record), "ab")


def reconcile(run_dir: Path, committed: int, record: Mapping[str, Any] | None) -> list[Record]:
    """Make the records end with the last committed round, each round once."""
    kept = {line["round"]: line for line in records(run_dir) if line["round"] <= committed}
    if record is not None:
        kept[committed] = dict(record)
    lines = [kept[number] for number in sorted(kept)]
    write_atomic(run_dir / METRICS, b"".join(map(_line, lines)))
    return lines


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(finite(record), allow_nan=False).encode() + b"\n"


def finite(value: Any) -> Any:
    """The same value with null for every number that JSON does not have (NaN and infinities)."""
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
