"""Where clients run: an engine takes one order to its clients and brings their answers back as bytes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from fedbnn.messages import Failure, FitResult

Private = Callable[[int], bytes | None]


class ClientFailed(Exception):
    """A client cannot answer, for the reason given; the round goes on without it."""


class Worker(Protocol):
    """The client's side: all that happens where the data are."""

    def perform(self, payload: bytes, client: int, private: bytes | None) -> FitResult:
        """Answer one order; raises `ClientFailed` with a reason a person can read."""
        ...


class Engine(Protocol):
    """The server's side of wherever the clients are. Answers may come in any order."""

    def gather(
        self, payload: bytes, clients: Sequence[int], private: Private
    ) -> Iterator[FitResult | Failure]:
        """Send the order to these clients and yield one answer (or failure) of each."""
        ...

    def close(self) -> None:
        """Let go of processes and connections."""
        ...
