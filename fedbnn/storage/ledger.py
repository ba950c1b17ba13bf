"""One committed round is one renamed directory; the only writer of run state.

    state/lock                       held by the one process that writes here, its pid inside
    state/config.json                the configuration of the run; its digest is the run's identity
    state/round-000007/              manifest.json, state.safetensors
    state/records/000007.json        what was measured in round 7: its line of metrics.jsonl
    state/clients/3-r7.safetensors   what client 3 kept for itself in round 7; one file per change
    state/late/8-3.safetensors       a late answer of client 3 that is folded in round 8
    state/rolls/000008.json          what clients announced when round 8 began, where they do
    state/spool/                     answers that wait to be folded; scratch

A manifest names its run, the manifest before it, every file its round needs and the records of all
rounds, each by its digest: so a round of another run, or a record that was changed, is found. A
round is written aside, flushed to the disk, and renamed: before the rename it does not exist, after
it nothing is missing. Only participants are written, so the cost of a commit does not depend on how
many clients are registered.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from fedbnn.errors import ConfigError, RunDirectoryError
from fedbnn.protocol.state import State, digest
from fedbnn.storage import files
from fedbnn.storage.files import Damaged, Spool, locked, remove_tree, writing

FORMAT = 2
CONFIG, METRICS = "config.json", "metrics.jsonl"
MANIFEST, STATE = "manifest.json", "state.safetensors"
EVERY = 10**9
"""For `keep`: who opens a run to look removes no round."""
LOG = logging.getLogger(__name__)
_ROUND = re.compile(r"round-(\d{6,})")
_OWN, _WAITS = re.compile(r"\d+-r\d+\.safetensors"), re.compile(r"(\d+)-(\d+)\.safetensors")


@dataclass(frozen=True)
class Manifest:
    """Digests: of the run, of the manifest before, of the state, of the records of all rounds.

    Also the name and the digest of the newest file of every client, and how often the round after
    it was `begun`, where that is counted.
    """

    run: str = ""
    round: int = 0
    previous: str = ""
    state: str = ""
    records: tuple[str, ...] = ()
    clients: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    begun: int = 0

    def to_bytes(self) -> bytes:
        """As it stands in manifest.json."""
        clients = {str(client): entry for client, entry in self.clients.items()}
        return files.sealed(FORMAT, {**vars(self), "clients": clients})

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """The manifest that was written; raises `Damaged`, or an error for a newer format."""
        format, body = files.unsealed(path)
        if format != FORMAT:
            what = f"the run was written in format {format}, this version reads {FORMAT}"
            fix = "resume it with the version of fedbnn that began it"
            raise RunDirectoryError(what, str(path.parent), fix)
        try:
            clients = {int(client): tuple(entry) for client, entry in body["clients"].items()}
            found = cls(**{**body, "records": tuple(body["records"]), "clients": clients})
            found._check()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Damaged("its manifest is not one of ours") from error
        return found

    def _check(self) -> None:
        """A digest proves that a file is whole, not who wrote it: types, numbers and names."""
        texts = [self.run, self.previous, self.state, *self.records]
        texts += [text for entry in self.clients.values() for text in entry]
        plain = all(type(text) is str for text in texts)
        plain = plain and type(self.round) is type(self.begun) is int
        if not plain or len(self.records) != self.round:
            raise ValueError("types, or a record too few")
        if not all(_OWN.fullmatch(name) for name, _ in self.clients.values()):
            raise ValueError("a file that no client has")


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


def _waiting(folder: Path) -> dict[tuple[int, int], Path]:
    """Late answers by round and client, in this order; files of other names are none."""
    there = folder.iterdir() if folder.is_dir() else ()
    named = [(_WAITS.fullmatch(path.name), path) for path in there]
    return dict(sorted(((int(name[1]), int(name[2])), path) for name, path in named if name))


class Ledger(AbstractContextManager["Ledger"]):
    """The newest `keep` rounds of a run on disk; `warnings` are what a user should be told."""

    def __init__(self, run_dir: Path | str, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError("the ledger must keep at least 1 round", f"keep: {keep}")
        self.run_dir, self.keep = Path(run_dir), keep
        self.root = files.plain(self.run_dir) / "state"
        self._clients, self._records = self.root / "clients", self.root / "records"
        self._late, self._rolls = self.root / "late", self.root / "rolls"
        self.warnings: list[str] = []
        with ExitStack() as opening:
            with writing(self.run_dir):
                self._clients.mkdir(parents=True, exist_ok=True)
                self._records.mkdir(exist_ok=True)
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

    @property
    def begun(self) -> int:
        """How often the round after the newest was begun, as far as that was counted."""
        return self._manifest.begun

    def begin(self) -> None:
        """Count, in the chain of the rounds, that the one after the newest is begun once more.

        Before the first commit there is no chain, nor anything that would outlive its loss.
        """
        if self.round:
            manifest = replace(self._manifest, begun=self.begun + 1)
            files.write_atomic(self._directory(self.round) / MANIFEST, manifest.to_bytes())
            self._manifest = manifest

    def latest(self) -> Committed | None:
        """The newest round that is whole, or None when no round was ever committed."""
        if not self.round:
            return None
        place = self._directory(self.round)
        try:
            state = State.from_bytes(files.read(place / STATE))
            record = dict(json.loads(files.read(self._record(self.round))))
        except (ValueError, TypeError, RecursionError) as error:
            what, fix = f"round {self.round} is whole, but no round of ours", "do not trust it"
            raise RunDirectoryError(what, str(place), fix) from error
        return Committed(self.round, state, record)

    def records(self) -> list[tuple[str, bytes]]:
        """Of every committed round the digest of its record, and the record, empty if damaged."""
        found = []
        for number, sha256 in enumerate(self._manifest.records, 1):
            path = self._record(number)
            line = files.read(path) if path.is_file() else b""
            found.append((sha256, line if digest(line) == sha256 else b""))
        return found

    def clients(self) -> tuple[int, ...]:
        """The clients that keep something for themselves."""
        return tuple(sorted(self._manifest.clients))

    def private(self, client: int) -> bytes | None:
        """What this client kept for itself when it last took part; None if never, or if damaged."""
        if client not in self._manifest.clients:
            return None
        name, sha256 = self._manifest.clients[client]
        with suppress(OSError):
            if digest(payload := files.read(self._clients / name)) == sha256:
                return payload
        self.warn(f"the private state of client {client} is damaged ({name}): it begins anew")
        return None

    def warn(self, what: str) -> None:
        """Tell the user, and the log."""
        LOG.warning("%s: %s", self.root, what)
        self.warnings.append(what)

    def keep_late(self, round: int, client: int, update: bytes) -> None:
        """Keep an answer that is folded in a later round; when this returns, it is on disk."""
        with writing(self.root):
            self._late.mkdir(exist_ok=True)
        files.write_atomic(self._late / f"{round}-{client}.safetensors", update)

    def late(self, round: int) -> dict[int, bytes]:
        """The late answers that are folded in this round, in client order."""
        found = _waiting(self._late).items()
        return {who: files.read(path) for (when, who), path in found if when == round}

    def keep_roll(self, round: int, roll: Mapping[str, Mapping[int, Any]]) -> None:
        """Keep what was announced for a round: by what it is, and by client."""
        with writing(self.root):
            self._rolls.mkdir(exist_ok=True)
        path = self._rolls / f"{round:06d}.json"
        files.write_atomic(path, files.sealed(FORMAT, files.finite(roll)))

    def roll(self, round: int) -> dict[str, dict[int, Any]] | None:
        """What was announced for a round, or None if nobody was asked yet."""
        path = self._rolls / f"{round:06d}.json"
        if not path.exists():
            return None
        try:
            parts = files.unsealed(path)[1].items()
            return {what: {int(who): said for who, said in part.items()} for what, part in parts}
        except (Damaged, AttributeError, ValueError) as damage:
            self.warn(f"the roll call of round {round} is damaged ({damage}): asked again")
        return None

    def branch(self, source: "Ledger", round: int) -> None:
        """Begin as another run was after one of its kept rounds, with the records up to it.

        Late answers that wait for the next round come along, with what was announced for them.
        """
        try:
            then = source._verified(source._peek(round), client_files=True)
            lines = [line for _, line in source.records()[:round]]
        except Damaged as damage:
            what = f"round {round} is damaged ({damage})"
            raise RunDirectoryError(what, str(source.root), "choose another round") from damage
        if not all(lines):
            what = f"the record of round {lines.index(b'') + 1} is lost"
            raise RunDirectoryError(what, str(source.root), "resume the run first")
        for client, payload in source.late(round + 1).items():
            self.keep_late(round + 1, client, payload)
        for number in range(1, round + 1):
            if roll := source.roll(number):
                self.keep_roll(number, roll)
        with writing(self.root):
            for name, _ in then.clients.values():
                files.write(self._clients / name, files.read(source._clients / name))
            for number, line in enumerate(lines, 1):
                files.write(self._record(number), line)
            link = files.digest(source._directory(round) / MANIFEST)
            manifest = replace(then, run=self._identity(), previous=link, begun=0)
            state = files.read(source._directory(round) / STATE)
            self._publish(round, {STATE: state, MANIFEST: manifest.to_bytes()})
        self._manifest = manifest

    def _newest_whole(self) -> Manifest:
        """The newest manifest whose files are all intact; raises if no round is.

        If every one lacks the files of some clients, these clients lose what they kept.
        """
        found, damage = rounds(self.run_dir), Damaged("")
        for client_files, number in product((True, False), found[::-1]):
            try:
                return self._verified(self._peek(number), client_files)
            except Damaged as error:
                damage = error
                what = f"round {number} is damaged ({damage}); falling back to the round before it"
                if client_files:
                    self.warn(what)
        fix = "restore the directory from a copy, or start again under another name"
        if found:
            what = f"every kept round is damaged (round {found[0]}: {damage})"
            raise RunDirectoryError(what, str(self.root), fix)
        if (metrics := self.run_dir / METRICS).is_file() and metrics.stat().st_size:
            what = f"the rounds of this run are gone, though {METRICS} has records of them"
            raise RunDirectoryError(what, str(self.root), fix)
        return Manifest()

    def _identity(self) -> str:
        """The digest of the configuration that the run was started with."""
        path = self.root / CONFIG
        return files.digest(path) if path.is_file() else ""

    def _peek(self, number: int) -> Manifest:
        """The manifest of a round, without a look at the files it names."""
        manifest = Manifest.read(self._directory(number) / MANIFEST)
        if manifest.round != number:
            raise Damaged(f"its manifest is that of round {manifest.round}")
        if manifest.run != self._identity():
            raise Damaged("it is a round of another run")
        return manifest

    def _verified(self, manifest: Manifest, client_files: bool) -> Manifest:
        """The manifest, after every file it names has been checked; raises `Damaged` otherwise."""
        if not self._follows(manifest):
            raise Damaged("it does not follow the round before it")
        named = {self._directory(manifest.round) / STATE: manifest.state}
        named[self._record(manifest.round)] = manifest.records[-1]
        if client_files:
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
        payload, line = state.to_bytes(), files.as_line(record)
        clients = dict(self._manifest.clients)
        with writing(self.root):
            for client, private in privates.items():
                clients[client] = f"{client}-r{round}.safetensors", digest(private)
                files.write(self._clients / clients[client][0], private)
            files.write(self._record(round), line)
            files.sync(self._clients)
            files.sync(self._records)
            facts = self._identity(), round, self._link(round), digest(payload)
            manifest = Manifest(*facts, (*self._manifest.records, digest(line)), clients)
            self._publish(round, {STATE: payload, MANIFEST: manifest.to_bytes()})
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
            late = _waiting(self._late).items()
            gone += [path for (when, _), path in late if when <= self.round - self.keep]
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

    def _follows(self, manifest: Manifest) -> bool:
        """Whether the round before, if it is here and can be read, is the one it names."""
        with suppress(Damaged):
            self._peek(manifest.round - 1)
            return manifest.previous == self._link(manifest.round)
        return True

    def _link(self, round: int) -> str:
        """The digest of the manifest before this round's; empty before the first."""
        path = self._directory(round - 1) / MANIFEST
        return files.digest(path) if path.is_file() else ""

    def _directory(self, round: int) -> Path:
        return self.root / f"round-{round:06d}"

    def _record(self, round: int) -> Path:
        return self._records / f"{round:06d}.json"
