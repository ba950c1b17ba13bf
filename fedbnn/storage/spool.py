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
        for path in sorted(self.directory.glob("*.bin"))[: -self.most]:
            path.unlink(missing_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)
