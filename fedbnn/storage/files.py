"""Files that are whole or absent: written aside, flushed to the disk, renamed. The operating system's refusals become ours."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from fedbnn.errors import RunDirectoryError

ASIDE, GONE = ".aside-", ".gone-"


@contextmanager
def writing(where: Path) -> Iterator[None]:
    """Turn a full disk, a read-only directory and the like into a `RunDirectoryError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        fix = "make room or choose another run_dir; what was committed is intact"
        raise RunDirectoryError(
            f"cannot write: {reason}", str(error.filename or where), fix
        ) from error


def sync_directory(directory: Path) -> None:
    """Make the names in a directory as durable as the files behind them."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_through(path: Path, payload: bytes, mode: Literal["wb", "ab"] = "wb") -> None:
    """Write a file, or add to it, and wait until it is on the disk."""
    with path.open(mode) as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def append_through(path: Path, payload: bytes) -> None:
    """Add to a file; when this returns, what was added survives a power cut."""
    with writing(path):
        write_through(path, payload, "ab")


def write_atomic(path: Path, payload: bytes) -> None:
    """Write a file so that a crash leaves the old content or the new one, never a part."""
    aside = path.with_name(ASIDE + path.name)
    with writing(path):
        try:
            write_through(aside, payload)
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def remove(path: Path) -> None:
    """Remove a file for good, if it is there: when this returns, it does not come back after a power cut."""
    with writing(path):
        path.unlink(missing_ok=True)
        sync_directory(path.parent)


def as_json(value: Mapping[str, object]) -> bytes:
    """One line of JSON, the same for equal values."""
    return json.dumps(value, sort_keys=True).encode()


def remove_tree(path: Path) -> None:
    """Remove a directory: first its name in one step, then what it holds. One that is gone already is fine."""
    if path.exists():
        gone = path.with_name(GONE + path.name)
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        shutil.rmtree(gone)
