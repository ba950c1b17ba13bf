"""One committed round is one renamed directory; the only writer of run state.

    state/lock                       held by the one process that writes here, its pid inside
    state/round-000007/              manifest.json, state.safetensors, record.json
    state/clients/3-r7.safetensors   what client 3 kept for itself in round 7; one file per change
    state/late/8-3.safetensors       a late answer of client 3 that is folded in round 8
    state/spool/                     answers that wait to be folded; scratch

A manifest names every file its round needs. A round is written aside, flushed to the disk, and
renamed: before the rename it does not exist, after it nothing is missing. Only participants are
written, so the cost of a commit does not depend on how many clients are registered.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbnn.errors import ConfigError, RunDirectoryError
from fedbnn.state import State, digest
from fedbnn.storage import files
from fedbnn.storage.files import Damaged, Spool, locked, remove_tree, writing

FORMAT = 1
MANIFEST, STATE, RECORD = "manifest.json", "state.safetensors", "record.json"
LOG = logging.getLogger(__name__)
_ROUND = re.compile(r"round-(\d{6,})")


@dataclass(frozen=True)
class Manifest:
    """The sha256 of every file of a round; name and sha256 of the newest file of every client."""

    round: int
    files: Mapping[str, str]
    clients: Mapping[int, tuple[str, str]]

    def to_bytes(self) -> bytes:
        """As it stands in manifest.json."""
        clients = {str(client): entry for client, entry in self.clients.items()}
        body = {"round": self.round, "files": self.files, "clients": clients}
        return files.sealed(FORMAT, body)

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """The manifest that was written; raises `Damaged`, or an error for a newer format."""
        format, body = files.unsealed(path)
        if format != FORMAT:
            what = f"the run was written in the newer format {format}, this version reads {FORMAT}"
            raise RunDirectoryError(what, fix="upgrade fedbnn to resume it")
        clients = {int(client): tuple(entry) for client, entry in body["clients"].items()}
        return cls(body["round"], body["files"], clients)


@dataclass(frozen=True)
class Committed:
    """The newest round that is whole: the state after it, and what was measured in it."""

    round: int
    state: State
    record: dict[str, Any]


def rounds(run_dir: Path) -> list[int]:
    """The rounds of a run that have a directory, oldest first."""
    root = run_dir / "state"
    matches = (_ROUND.fullmatch(path.name) for path in (root.iterdir() if root.is_dir() else ()))
    return sorted(int(match[1]) for match in matches if match)


def _numbers(path: Path) -> tuple[int, int]:
    """Round and client in the name of a late answer."""
    round, _, client = path.stem.partition("-")
    return int(round), int(client)


class Ledger(AbstractContextManager["Ledger"]):
    """The newest `keep` rounds of a run on disk; `warnings` are what a user should be told."""

    def __init__(self, run_dir: Path | str, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError("the ledger must keep at least 1 round", f"keep: {keep}")
        self.run_dir, self.keep = Path(run_dir), keep
        self.root, self._clients = self.run_dir / "state", self.run_dir / "state" / "clients"
        self._late = self.root / "late"
        self.warnings: list[str] = []
        with ExitStack() as opening:
            with writing(self.run_dir):
                self._clients.mkdir(parents=True, exist_ok=True)
                opening.enter_context(locked(self.root / "lock"))
            self._manifest = self._newest_whole()
            self._retire()
            self._sweep()
            self._opened = opening.pop_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process write here."""
        self._opened.close()

    @property
    def round(self) -> int:
        """The newest committed round; 0 before the first."""
        return self._manifest.round

    def latest(self) -> Committed | None:
        """The newest round that is whole, or None when no round was ever committed."""
        if not self.round:
            return None
        directory = self._directory(self.round)
        state = State.from_bytes((directory / STATE).read_bytes())
        return Committed(self.round, state, json.loads((directory / RECORD).read_bytes()))

    def clients(self) -> tuple[int, ...]:
        """The clients that keep something for themselves."""
        return tuple(sorted(self._manifest.clients))

    def private(self, client: int) -> bytes | None:
        """What this client kept for itself when it last took part, or None if it never did."""
        if client not in self._manifest.clients:
            return None
        name, sha256 = self._manifest.clients[client]
        payload = (self._clients / name).read_bytes()
        if digest(payload) != sha256:
            what = f"the private state of client {client} is damaged"
            fix = "resume the run: it falls back to a round that is whole"
            raise RunDirectoryError(what, str(self._clients / name), fix)
        return payload

    def keep_late(self, round: int, client: int, update: bytes) -> None:
        """Keep an answer that is folded in a later round; when this returns, it is on disk."""
        with writing(self.root):
            self._late.mkdir(exist_ok=True)
        files.write_atomic(self._late / f"{round}-{client}.safetensors", update)

    def late(self, round: int) -> dict[int, bytes]:
        """The late answers that are folded in this round, in client order."""
        found = {_numbers(path): path for path in self._late.glob("*-*.safetensors")}
        return {who: found[when, who].read_bytes() for when, who in sorted(found) if when == round}

    def _newest_whole(self) -> Manifest:
        """The newest manifest whose files are all intact; raises if no round is."""
        found = rounds(self.run_dir)
        for number in reversed(found):
            try:
                return self._verified(self._peek(number))
            except Damaged as damage:
                what = f"round {number} is damaged ({damage}); falling back to the round before it"
                LOG.warning("%s: %s", self.root, what)
                self.warnings.append(what)
        if found:
            fix = "restore the directory from a copy, or start again under another name"
            raise RunDirectoryError("every kept round is damaged", str(self.root), fix)
        return Manifest(0, {}, {})

    def _peek(self, number: int) -> Manifest:
        """The manifest of a round, without a look at the files it names."""
        manifest = Manifest.read(self._directory(number) / MANIFEST)
        if manifest.round != number:
            raise Damaged(f"its manifest is that of round {manifest.round}")
        return manifest

    def _verified(self, manifest: Manifest) -> Manifest:
        """The manifest, after every file it names has been checked; raises `Damaged` otherwise."""
        directory = self._directory(manifest.round)
        named = {directory / name: sha256 for name, sha256 in manifest.files.items()}
        named |= {self._clients / name: sha256 for name, sha256 in manifest.clients.values()}
        for path, sha256 in named.items():
            try:
                found = files.digest(path)
            except OSError as error:
                raise Damaged(f"{path.name} cannot be read") from error
            if found != sha256:
                raise Damaged(f"the digest of {path.name} does not match")
        return manifest

    def commit(
        self, round: int, state: State, privates: Mapping[int, bytes], record: Mapping[str, Any]
    ) -> None:
        """Make `round` the newest, all or nothing; `privates` are those of clients that changed."""
        if round != self.round + 1:
            raise ValueError(f"round {round} cannot follow round {self.round}")
        payloads = {STATE: state.to_bytes(), RECORD: json.dumps(record).encode()}
        digests = {name: digest(payload) for name, payload in payloads.items()}
        clients = dict(self._manifest.clients)
        with writing(self.root):
            for client, payload in privates.items():
                clients[client] = f"{client}-r{round}.safetensors", digest(payload)
                files.write(self._clients / clients[client][0], payload)
            files.sync(self._clients)
            manifest = Manifest(round, digests, clients)
            self._publish(round, {**payloads, MANIFEST: manifest.to_bytes()})
        self._manifest = manifest
        self._retire()

    def _publish(self, round: int, payloads: Mapping[str, bytes]) -> None:
        """Write the directory of a round; damaged rounds after it make way."""
        with files.whole_directory(self._directory(round)) as aside:
            for name, payload in payloads.items():
                (aside / name).write_bytes(payload)
            for number in rounds(self.run_dir):
                if number > round:
                    remove_tree(self._directory(number))

    def _retire(self) -> None:
        """Remove rounds beyond the newest `keep`, and client files that no kept round names."""
        needed: set[str] = set()
        found = [number for number in rounds(self.run_dir) if number <= self.round]
        for number in found[-self.keep :]:
            with suppress(Damaged):
                needed |= {name for name, _ in self._peek(number).clients.values()}
        with writing(self.root):
            for number in found[: -self.keep]:
                remove_tree(self._directory(number))
            gone = [path for path in self._clients.iterdir() if path.name not in needed]
            for path in self._late.glob("*-*.safetensors"):
                gone += [path] if _numbers(path)[0] <= self.round - self.keep else []
            for path in gone:
                path.unlink()

    def _sweep(self) -> None:
        """Remove what an interrupted process left: names with a dot, spools."""
        with writing(self.root):
            for path in [*self.root.glob(".*"), self.root / "spool"]:
                remove_tree(path) if path.is_dir() else path.unlink(missing_ok=True)

    @contextmanager
    def spool(self, round: int, name: str) -> Iterator[Spool]:
        """A place on disk where answers wait until they are folded; gone afterwards."""
        directory = self.root / "spool" / f"{round}-{name}"
        try:
            yield Spool(directory)
        finally:
            remove_tree(directory)

    def _directory(self, round: int) -> Path:
        return self.root / f"round-{round:06d}"
