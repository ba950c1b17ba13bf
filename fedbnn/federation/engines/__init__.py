"""Where clients run: an engine takes one instruction to its clients and brings their answers back.

Here is what every engine does around one client (one thread, and an exception costs that client
only), and the engine that runs them one after the other in this process.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

import torch

from fedbnn.errors import FedBNNError
from fedbnn.protocol.messages import Failure, FitResult

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


class Overdue(BaseException):
    """A client is past its deadline. Not an `Exception`, so that no library catches it."""


class SerialEngine:
    """Runs every client here. `deadline` is how many seconds one client may take.

    A single process can end a client only between two Python instructions of its main thread: one
    long call into compiled code is ended when it returns, and in another thread the deadline is not
    kept. Use `processes` where a deadline must hold against anything.
    """

    def __init__(self, worker: Worker, deadline: float | None = None) -> None:
        self._worker, self._deadline = worker, deadline

    def gather(self, payload: bytes, clients: Sequence[int], private: Private) -> Iterator[Answer]:
        """One answer of each client, in the order given."""
        for client in clients:
            yield self._ask(payload, client, private(client))

    def _ask(self, payload: bytes, client: int, private: bytes | None) -> Answer:
        try:
            with _limited(self._deadline), one_thread():
                return answer(self._worker, payload, client, private)
        except Overdue:
            return Failure(client, f"no answer within {self._deadline:g} s")

    def close(self) -> None:
        """Nothing to let go of."""


@contextmanager
def _limited(seconds: float | None) -> Iterator[None]:
    """Raise `Overdue` in the main thread after so many seconds, and each second from then on."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _overdue)
    try:
        with _ticking(seconds):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _ticking(seconds: float) -> Iterator[None]:
    """The alarm may go off while it is being stopped here; the caller stops it once more."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _overdue(_signal: int, frame: FrameType | None) -> None:
    """Time is up. In a finaliser an exception would be lost: it is tried again right afterwards."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            signal.setitimer(signal.ITIMER_REAL, 0.01, 1.0)
            return
        frame = frame.f_back
    raise Overdue
