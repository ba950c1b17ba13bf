"""Answers that wait for their turn: the first few in memory, the others on disk, so that memory does not grow with them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from fedbnn.storage.files import writing

MEMORY = 2**24


class Spool(Mapping[int, bytes]):
    """Bytes by client number, `memory` of them at hand and the others in a directory of its own.

    It iterates in client order, whatever the order of arrival.
    """

    def __init__(self, directory: Path, memory: int = MEMORY) -> None:
        self._directory, self._memory = directory, memory
        self._at_hand: dict[int, bytes | memoryview] = {}
        self._on_disk: set[int] = set()
        self._beside: dict[str, Spool] = {}
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)

    def put(self, client: int, payload: bytes | memoryview) -> None:
        """Keep the bytes of a client, which must not change any more; a second time replaces the first."""
        self.drop(client)
        if sum(map(len, self._at_hand.values())) + len(payload) <= self._memory:
            self._at_hand[client] = payload
            return
        self._on_disk.add(client)
        with writing(self._directory):
            self._path(client).write_bytes(payload)

    def drop(self, client: int) -> None:
        """Forget what a client sent."""
        if self._at_hand.pop(client, None) is None and client in self._on_disk:
            self._on_disk.remove(client)
            self._path(client).unlink()

    def part(self, client: int, start: int, stop: int) -> bytes | memoryview:
        """Some of the bytes of a client."""
        if client in self._at_hand:
            return memoryview(self._at_hand[client])[start:stop]
        with self._path(client).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def beside(self, name: str) -> "Spool":
        """Another spool that lives and dies with this one."""
        if name not in self._beside:
            self._beside[name] = Spool(self._directory / name, self._memory)
        return self._beside[name]

    def _path(self, client: int) -> Path:
        return self._directory / f"{client}.bin"

    def __getitem__(self, client: int) -> bytes:
        if client in self._at_hand:
            return bytes(self._at_hand[client])
        if client in self._on_disk:
            return self._path(client).read_bytes()
        raise KeyError(client)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._on_disk.union(self._at_hand)))

    def __len__(self) -> int:
        return len(self._on_disk) + len(self._at_hand)
