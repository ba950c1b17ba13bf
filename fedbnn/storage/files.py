"""Files and directories that are whole or absent: written aside, flushed to the disk, renamed.

The operating system's refusals become ours, and one process writes in a place at a time. Nothing
but regular files is opened: no link is followed, no pipe or device waited for. What clients send
waits here for its turn; what was refused of it is kept for a person to look at.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch

from fedbnn.errors import RunDirectoryError
from fedbnn.protocol import state
from fedbnn.protocol.state import Payload

ASIDE, GONE = ".aside-", ".gone-"
MEMORY, TEXT, DEEPEST = 2**30, 2**28, 32
KINDS = "a run directory holds files and folders, no links, pipes or devices"
LARGE, HOLLOW, BLOCK = 2**30, 64, 512


class Damaged(ValueError):
    """A file is not what was written; the text says what is wrong."""


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[None]:
    """In here, or until this process dies, nobody else holds the lock; its file says who does.

    Child processes do not inherit it. Who does not `wait` is refused while somebody else holds it.
    """
    with open(path, "a+", opener=in_place) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            file.seek(0)
            what = f"the run directory is in use by pid {file.read().strip() or 'unknown'}"
            fix = "wait until it ends, or choose another run_dir"
            raise RunDirectoryError(what, str(path.parent.parent), fix) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def in_place(path: str, flags: int) -> int:
    """For `open`: the regular file that stands under this very name, never what a link names.

    Nor is anything written where the same file stands elsewhere, too, under a hard link.
    """
    emptied, flags = flags & os.O_TRUNC, flags & ~os.O_TRUNC
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    found, reads = os.fstat(descriptor), flags & os.O_ACCMODE == os.O_RDONLY
    if stat.S_ISREG(found.st_mode) and (reads or found.st_nlink <= 1):
        if emptied:
            os.ftruncate(descriptor, 0)
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file of one name", path)


def below(root: Path, aside: Collection[str] = ("wandb",)) -> Iterator[Path]:
    """Everything in a directory and below it, no link followed, 32 folders deep and no deeper.

    What W&B keeps under its own name may be otherwise: only it looks there.
    """
    waiting = [(root, 0)] if root.is_dir() else []
    while waiting:
        folder, depth = waiting.pop()
        if depth > DEEPEST:
            what, fix = f"folders more than {DEEPEST} deep", "do not trust this directory"
            raise RunDirectoryError(what, str(root), fix)
        for path in sorted(folder.iterdir()) if os.access(folder, os.R_OK | os.X_OK) else ():
            yield path
            if path.is_dir() and not path.is_symlink() and path.name not in aside:
                waiting.append((path, depth + 1))


def plain(root: Path) -> Path:
    """The same directory, if there is nothing but files and folders in it, and below it.

    Nor files that say they are large and are not there: they cost nothing to send, but hours to
    read.
    """
    for path in below(root):
        with suppress(FileNotFoundError):
            found = path.lstat()
            usual = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
            what = "" if usual else KINDS
            if found.st_size > LARGE and found.st_size > HOLLOW * BLOCK * found.st_blocks:
                what = f"a file of {found.st_size / 2**30:,.0f} GB, of which hardly any is there"
            if what:
                fix = "remove it, or do not trust this directory"
                raise RunDirectoryError(what, str(path), fix)
    return root


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
    with open(path, "rb", opener=in_place) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(path: Path, most: int | None = None) -> bytes:
    """All of a file, which may not have more than so many bytes."""
    with open(path, "rb", opener=in_place) as file:
        if most is not None and os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
        return file.read()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, payload: bytes, mode: Literal["wb", "ab"] = "wb") -> None:
    """Write a file, or add to it; when this returns, that survives a power cut."""
    with writing(path), open(path, mode, opener=in_place) as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def appending(path: Path) -> Iterator[BinaryIO]:
    """A file that somebody may add to; nothing is written where a link leads."""
    with ExitStack() as stack:
        with writing(path):
            file = stack.enter_context(open(path, "ab", opener=in_place))
        yield file


def folder(path: Path) -> Path:
    """The directory of this name, made if it is not there; never one that a link leads to."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            raise OSError(errno.ELOOP, "a link in the place of a directory", str(path))
    return path


def write_atomic(path: Path, payload: bytes, writer: str = "") -> None:
    """Write a file so that a crash leaves the old content or the new one, never a part.

    A file that several processes write, unlike one of a locked run, names its `writer`.
    """
    aside = path.with_name(ASIDE + writer + path.name)
    with writing(path):
        try:
            write(aside, payload)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        sync(path.parent)


def keep_newest(paths: Iterable[Path], count: int) -> None:
    """Remove all of these files but the newest."""
    aged = sorted(paths, key=lambda path: path.stat().st_mtime_ns)
    for path in aged[:-count]:
        path.unlink()


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


def as_line(record: Mapping[str, Any]) -> bytes:
    """One line of metrics.jsonl, with null for every number that JSON does not have."""
    return json.dumps(finite(record), allow_nan=False).encode() + b"\n"


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Add a line to a file; when this returns, it survives a power cut."""
    write(path, as_line(value), "ab")


def finite(value: Any) -> Any:
    """The same value with null for NaN and infinities."""
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file; raises `Damaged` if there is none."""
    try:
        return dict(json.loads(read(path, TEXT)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise Damaged(f"{path.name} cannot be read") from error


def sealed(format: int, body: Mapping[str, object]) -> bytes:
    """JSON for a file that proves itself: `{"format", "body", "sha256"}`, the digest of both."""
    content = {"format": format, "body": body}
    return as_json({**content, "sha256": state.digest(as_json(content))})


def unsealed(path: Path) -> tuple[int, dict[str, Any]]:
    """Format and body of a file that `sealed` made; raises `Damaged` for any other."""
    content = read_json(path)
    sha256 = content.pop("sha256", None)
    if content.keys() != {"format", "body"} or state.digest(as_json(content)) != sha256:
        raise Damaged(f"the digest of {path.name} does not match")
    return content["format"], content["body"]


class Spool(Mapping[int, bytes]):
    """Bytes by client number, in client order: `memory` of them at hand, the others in a directory.

    Those on disk are mapped: the system loads and drops their pages as it likes.
    """

    def __init__(self, directory: Path, memory: int = MEMORY) -> None:
        self._directory, self._free = directory, memory
        self._at_hand: dict[int, bytes] = {}
        self._on_disk: dict[int, memoryview] = {}
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)

    def put(self, client: int, payload: bytes) -> Payload:
        """Keep the newest bytes of a client: the same object, or the file mapped into memory."""
        self.drop(client)
        if len(payload) <= self._free:
            self._free -= len(payload)
            self._at_hand[client] = payload
            return payload
        with writing(self._directory):
            self._path(client).write_bytes(payload)
        mapped = torch.from_file(str(self._path(client)), size=len(payload), dtype=torch.uint8)
        self._on_disk[client] = mapped.numpy().data
        return self._on_disk[client]

    def drop(self, client: int) -> None:
        """Forget what a client sent; who reads it still may go on."""
        self._free += len(self._at_hand.pop(client, b""))
        if self._on_disk.pop(client, None) is not None:
            self._path(client).unlink()

    def _path(self, client: int) -> Path:
        return self._directory / f"{client}.bin"

    def __getitem__(self, client: int) -> bytes:
        return self._at_hand[client] if client in self._at_hand else bytes(self._on_disk[client])

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._on_disk.keys() | self._at_hand))

    def __len__(self) -> int:
        return len(self._on_disk) + len(self._at_hand)


@dataclass(frozen=True)
class Rejected:
    """The directory `rejected/` of a run: the newest `most` payloads, up to `megabytes` in all."""

    directory: Path
    most: int = 20
    megabytes: float = 512.0

    def keep(self, round: int, exchange: str, client: int, payload: bytes, reason: str) -> None:
        """Write the bytes and the reason; nothing is ever read back by the program."""
        if not self.most:
            return
        with writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
        stem = f"r{round:06d}-{exchange}-client{client}-{state.digest(payload)[:8]}"
        facts = {"round": round, "exchange": exchange, "client": client, "reason": reason}
        room = int(self.megabytes * 2**20)
        write_atomic(self.directory / f"{stem}.bin", payload[:room])
        write_atomic(self.directory / f"{stem}.json", as_json({**facts, "bytes": len(payload)}))
        for number, path in enumerate(sorted(self.directory.glob("*.bin"), reverse=True)):
            room -= path.stat().st_size
            if number >= self.most or room < 0:
                path.unlink(missing_ok=True)
                path.with_suffix(".json").unlink(missing_ok=True)
