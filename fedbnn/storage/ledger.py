"""One committed round is one renamed directory; the only writer of run state.

    state/lock                  held by the one process that writes here, its pid inside
    state/round-000007/         manifest.json, state.safetensors, record.json
    state/clients/3-r7.safetensors   what client 3 kept for itself in round 7; one file per change
    state/spool/                answers that wait to be folded; scratch

A manifest names every file its round needs. A round is written aside, flushed to the disk, and renamed: before
the rename it does not exist, after it nothing is missing. Only participants are written, so the cost of a commit
does not depend on how many clients are registered.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbnn.errors import ConfigError, RunDirectoryError
from fedbnn.state import State
from fedbnn.storage import manifests
from fedbnn.storage.files import ASIDE, remove_tree, sync_directory, write_through, writing
from fedbnn.storage.locks import Lock
from fedbnn.storage.manifests import CLIENTS, MANIFEST, RECORD, STATE, ClientFile, Damaged, Manifest
from fedbnn.storage.spool import Spool
from fedbnn.wire import digest

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Committed:
    """The newest round that is whole: the state after it, and what was measured in it."""

    round: int
    state: State
    record: dict[str, Any]


class Ledger:
    """The state of one run on disk. The newest `keep` rounds stay; `warnings` are what a user should be told."""

    def __init__(self, run_dir: Path | str, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError("the ledger must keep at least 1 round", f"keep: {keep}")
        self.run_dir, self.keep = Path(run_dir), keep
        self.warnings: list[str] = []
        self._root, self._clients = self.run_dir / "state", self.run_dir / "state" / CLIENTS
        with ExitStack() as opening:
            with writing(self.run_dir):
                self._clients.mkdir(parents=True, exist_ok=True)
                self._lock = Lock(self._root / "lock")
            opening.callback(self.close)
            self._manifest = self._newest_whole()
            self._retire()
            self._sweep()
            opening.pop_all()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process write here."""
        self._lock.release()

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
        entry = self._manifest.clients.get(client)
        if entry is None:
            return None
        payload = (self._clients / entry.name).read_bytes()
        if digest(payload) != entry.sha256:
            fix = "resume the run: it falls back to a round that is whole"
            raise RunDirectoryError(
                f"the private state of client {client} is damaged",
                str(self._clients / entry.name),
                fix,
            )
        return payload

    def _newest_whole(self) -> Manifest:
        """The newest manifest whose files are all there and intact; raises if there are rounds but none is."""
        rounds = manifests.rounds(self._root)
        for number in reversed(rounds):
            try:
                return manifests.load(self._root, number)
            except Damaged as damage:
                self._warn(
                    f"round {number} is damaged ({damage}); falling back to the round before it"
                )
        if rounds:
            fix = "restore the directory from a copy, or start again under another name"
            raise RunDirectoryError("every kept round is damaged", str(self._root), fix)
        return Manifest(0, {}, {})

    def _warn(self, text: str) -> None:
        LOG.warning("%s: %s", self._root, text)
        self.warnings.append(text)

    def commit(
        self, round: int, state: State, privates: Mapping[int, bytes], record: Mapping[str, Any]
    ) -> None:
        """Make `round` the newest round, all or nothing; `privates` are those of the clients that changed theirs."""
        if round != self.round + 1:
            raise ValueError(f"round {round} cannot follow round {self.round}")
        with writing(self._root):
            changed = {
                client: self._keep_private(round, client, privates[client]) for client in privates
            }
            sync_directory(self._clients)
            payloads = {STATE: state.to_bytes(), RECORD: json.dumps(record).encode()}
            digests = {name: digest(payload) for name, payload in payloads.items()}
            manifest = Manifest(round, digests, {**self._manifest.clients, **changed})
            self._publish(round, {**payloads, MANIFEST: manifest.to_bytes()})
        self._manifest = manifest
        self._retire()

    def _keep_private(self, round: int, client: int, payload: bytes) -> ClientFile:
        """Write one client's private state under the name of its round."""
        entry = ClientFile(client, round, digest(payload))
        aside = self._clients / (ASIDE + entry.name)
        write_through(aside, payload)
        os.replace(aside, self._clients / entry.name)
        return entry

    def _publish(self, round: int, payloads: Mapping[str, bytes]) -> None:
        """Write the directory of a round aside and rename it; damaged rounds in its place make way."""
        target = self._directory(round)
        aside = target.with_name(ASIDE + target.name)
        try:
            aside.mkdir()
            for name, payload in payloads.items():
                write_through(aside / name, payload)
            sync_directory(aside)
        except OSError:
            remove_tree(aside)
            raise
        for number in manifests.rounds(self._root):
            if number >= round:
                remove_tree(self._directory(number))
        os.rename(aside, target)
        sync_directory(self._root)

    def _retire(self) -> None:
        """Remove rounds beyond the newest `keep`, and the client files that no kept round needs."""
        rounds = [number for number in manifests.rounds(self._root) if number <= self.round]
        retired, kept = rounds[: -self.keep], rounds[-self.keep :]
        if not retired:
            return
        unneeded = self._needed(retired) - self._needed(kept)
        with writing(self._root):
            for number in retired:
                remove_tree(self._directory(number))
            for name in unneeded:
                (self._clients / name).unlink(missing_ok=True)

    def _needed(self, rounds: Iterable[int]) -> set[str]:
        """The client files that these rounds name; a damaged round needs none."""
        names: set[str] = set()
        for number in rounds:
            try:
                names.update(
                    entry.name for entry in manifests.peek(self._root, number).clients.values()
                )
            except Damaged:
                continue
        return names

    def _sweep(self) -> None:
        """Remove what an interrupted process left: names with a dot, spools, client files that no round names."""
        needed = self._needed(
            number for number in manifests.rounds(self._root) if number <= self.round
        )
        with writing(self._root):
            for path in [*self._root.glob(".*"), self._root / "spool"]:
                remove_tree(path) if path.is_dir() else path.unlink(missing_ok=True)
            for path in self._clients.iterdir():
                if path.name not in needed:
                    path.unlink()

    @contextmanager
    def spool(self, round: int, name: str) -> Iterator[Spool]:
        """A place on disk where answers wait until they are folded; gone afterwards."""
        directory = self._root / "spool" / f"{round}-{name}"
        try:
            yield Spool(directory)
        finally:
            remove_tree(directory)

    def _directory(self, round: int) -> Path:
        return self._root / manifests.directory_name(round)
