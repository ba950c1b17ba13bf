"""Files that are whole or absent: written aside, flushed to the disk, renamed. The operating system's refusals become ours."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedbnn.errors import RunDirectoryError

ASIDE = ".aside-"


@contextmanager
def writing(where: Path) -> Iterator[None]:
    """Turn a full disk, a read-only directory and the like into a `RunDirectoryError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        fix = "make room or choose another run_dir; what was committed is intact"
        raise RunDirectoryError(f"cannot write: {reason}", str(error.filename or where), fix) from error


def sync_directory(directory: Path) -> None:
    """Make the names in a directory as durable as the files behind them."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_through(path: Path, payload: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


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


def as_json(value: Mapping[str, object]) -> bytes:
    """One line of JSON, the same for equal values."""
    return json.dumps(value, sort_keys=True).encode()


def remove_tree(path: Path) -> None:
    """Remove a directory: first its name in one step, then what it holds. A name that is gone already is fine."""
    aside = path if path.name.startswith(ASIDE) else path.with_name(ASIDE + path.name)
    if aside != path and path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)
