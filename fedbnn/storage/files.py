"""Files and directories that are whole or absent: written aside, flushed to the disk, renamed.

The operating system's refusals become ours, and one process writes in a place at a time.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal

from fedbnn.errors import RunDirectoryError

ASIDE, GONE = ".aside-", ".gone-"


class Lock(AbstractContextManager["Lock"]):
    """Held from construction to `release`, or until its process dies; the file says which that is.

    Child processes do not inherit it. Who does not `wait` is refused while somebody else holds it.
    """

    def __init__(self, path: Path, wait: bool = False) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            self.release()
            what = f"the run directory is in use by pid {path.read_text().strip() or 'unknown'}"
            fix = "wait until it ends, or choose another run_dir"
            raise RunDirectoryError(what, str(path.parent.parent), fix) from error
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Let go; a second time does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def writing(where: Path) -> Iterator[None]:
    """Turn a full disk, a read-only directory and the like into a `RunDirectoryError`."""
    try:
        yield
    except OSError as error:
        what, place = f"cannot write: {error.strerror or error}", str(error.filename or where)
        fix = "make room or choose another run_dir; what was committed is intact"
        raise RunDirectoryError(what, place, fix) from error


def digest(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, payload: bytes, mode: Literal["wb", "ab"] = "wb") -> None:
    """Write a file, or add to it; when this returns, that survives a power cut."""
    with writing(path), path.open(mode) as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, payload: bytes) -> None:
    """Write a file so that a crash leaves the old content or the new one, never a part."""
    aside = path.with_name(ASIDE + path.name)
    with writing(path):
        try:
            write(aside, payload)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        sync(path.parent)


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A directory to fill, which then takes the place of `target`; gone if something goes wrong."""
    aside = target.with_name(ASIDE + target.name)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        yield aside
        for path in (*aside.iterdir(), aside):
            sync(path)
        remove_tree(target)
        os.rename(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sync(target.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory, if it is there: first its name in one step, then what it holds."""
    if path.exists():
        gone = path.with_name(GONE + path.name)
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        shutil.rmtree(gone)


def as_json(value: Mapping[str, object]) -> bytes:
    """One line of JSON, the same for equal values."""
    return json.dumps(value, sort_keys=True).encode()
