"""The files of a run that hold records: metrics.jsonl, one line per round and each round once; and small JSON files."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbnn.storage.files import append_through, write_atomic

Record = dict[str, Any]
METRICS = "metrics.jsonl"


def read(run_dir: Path) -> list[Record]:
    """The rounds on record, in order; a last line cut short by a crash is left out."""
    path = run_dir / METRICS
    return (
        [record for record in map(_parse, path.read_text().splitlines()) if record]
        if path.exists()
        else []
    )


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and "round" in record else None


def append(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Add one round; when this returns, the line survives a power cut."""
    append_through(run_dir / METRICS, _line(record).encode())


def reconcile(run_dir: Path, committed: int, record: Mapping[str, Any] | None) -> list[Record]:
    """Make the file agree with the last committed round: drop later lines and repeats, add that round if it is missing."""
    kept = {line["round"]: line for line in read(run_dir) if line["round"] <= committed}
    if record is not None:
        kept[committed] = dict(record)
    lines = [kept[number] for number in sorted(kept)]
    write_atomic(run_dir / METRICS, "".join(map(_line, lines)).encode())
    return lines


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite(record), allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """The same value with null in the place of every number that JSON does not have (NaN and infinities)."""
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
