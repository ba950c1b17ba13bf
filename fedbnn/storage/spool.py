"""What clients send: answers that wait for their turn, and those that were refused.

The first answers wait in memory, the others on disk, so that memory does not grow with them; what
was refused is kept as it came with the reason beside it, for a person to look at.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fedbnn.state import Payload, digest
from fedbnn.storage.files import as_json, write_atomic, writing

MEMORY = 2**30


class Spool(Mapping[int, bytes]):
    """Bytes by client number, `memory` of them at hand and the others in a directory of its own.

    Those on disk are mapped: they can be read like the others, and the system loads and drops
    their pages as it likes. It iterates in client order, whatever the order of arrival.
    """

    def __init__(self, directory: Path, memory: int = MEMORY) -> None:
        self._directory, self._room = directory, memory
        self._at_hand: dict[int, bytes] = {}
        self._on_disk: dict[int, memoryview] = {}
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)

    def put(self, client: int, payload: bytes) -> Payload:
        """Keep the bytes of a client, a second time in the place of the first.

        The answer is where they are kept now: the same object, or the file mapped into memory.
        """
        self.drop(client)
        if len(payload) <= self._room:
            self._room -= len(payload)
            self._at_hand[client] = payload
            return payload
        with writing(self._directory):
            self._path(client).write_bytes(payload)
        self._on_disk[client] = _mapped(self._path(client), len(payload))
        return self._on_disk[client]

    def drop(self, client: int) -> None:
        """Forget what a client sent."""
        self._room += len(self._at_hand.pop(client, b""))
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


def _mapped(path: Path, size: int) -> memoryview:
    """A file as memory that is read when it is needed; it stays when its name goes."""
    return torch.from_file(str(path), size=size, dtype=torch.uint8).numpy().data


@dataclass(frozen=True)
class Rejected:
    """The directory `rejected/` of a run: the newest `most` payloads, each up to `megabytes`."""

    directory: Path
    most: int = 20
    megabytes: float = 512.0

    def keep(self, round: int, exchange: str, client: int, payload: bytes, reason: str) -> None:
        """Write the bytes and the reason; nothing is ever read back by the program."""
        if not self.most:
            return
        with writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
        stem = f"r{round:06d}-{exchange}-client{client}-{digest(payload)[:8]}"
        facts = {"round": round, "exchange": exchange, "client": client, "reason": reason}
        write_atomic(self.directory / f"{stem}.bin", payload[: int(self.megabytes * 2**20)])
        write_atomic(self.directory / f"{stem}.json", as_json({**facts, "bytes": len(payload)}))
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Drop the oldest rounds' payloads beyond `most`."""
        for path in sorted(self.directory.glob("*.bin"))[: -self.most]:
            path.unlink(missing_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)
