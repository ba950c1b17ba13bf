"""Where clients run: an engine takes one instruction to its clients and brings their answers back.

What every engine does around one client is here too: one thread, and an exception that costs that
client only.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from fedbnn.errors import FedBNNError
from fedbnn.messages import Failure, FitResult

Answer = FitResult | Failure
Private = Callable[[int], bytes | None]
LOG = logging.getLogger(__name__)


class ClientFailed(Exception):
    """A client cannot answer, for the reason given; the round goes on without it."""


class Worker(Protocol):
    """The client's side: all that happens where the data are."""

    def perform(self, payload: bytes, client: int, private: bytes | None) -> FitResult:
        """Answer one instruction; raises `ClientFailed` with a reason a person can read."""
        ...


class Engine(Protocol):
    """The server's side of wherever the clients are. Answers may come in any order."""

    def gather(self, payload: bytes, clients: Sequence[int], private: Private) -> Iterator[Answer]:
        """Send the instruction to these clients and yield one answer (or failure) of each."""
        ...

    def close(self) -> None:
        """Let go of processes and connections."""
        ...


def answer(worker: Worker, payload: bytes, client: int, private: bytes | None) -> Answer:
    """The client's result, or why there is none. The traceback of a defect goes to the log."""
    try:
        return worker.perform(payload, client, private)
    except (ClientFailed, FedBNNError) as error:
        return Failure(client, str(error))
    except Exception as error:  # the border between one client and the round
        LOG.error("client %d raised", client, exc_info=True)
        return Failure(client, f"{type(error).__name__}: {error}"[:400])


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as worker processes do: the order of sums depends on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
