"""Answers that wait on disk for their turn, so that memory does not grow with the participants."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from fedbnn.files import writing


class Spool(Mapping[int, bytes]):
    """Bytes by client number in a directory of its own; iterates in client order, whatever the order of arrival."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)

    def put(self, client: int, payload: bytes) -> None:
        """Keep the bytes of a client; a second time replaces the first."""
        with writing(self._directory):
            self._path(client).write_bytes(payload)

    def drop(self, client: int) -> None:
        """Forget what a client sent."""
        self._path(client).unlink(missing_ok=True)

    def part(self, client: int, start: int, stop: int) -> bytes:
        """Some of the bytes of a client."""
        with self._path(client).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def beside(self, name: str) -> "Spool":
        """Another spool that lives and dies with this one."""
        return Spool(self._directory / name)

    def _path(self, client: int) -> Path:
        return self._directory / f"{client}.bin"

    def __getitem__(self, client: int) -> bytes:
        try:
            return self._path(client).read_bytes()
        except FileNotFoundError as error:
            raise KeyError(client) from error

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(int(path.stem) for path in self._directory.glob("*.bin")))

    def __len__(self) -> int:
        return sum(1 for _ in self._directory.glob("*.bin"))
