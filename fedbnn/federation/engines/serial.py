"""Clients one after the other in this process."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from fedbnn.federation.engines import Answer, Private, Worker, answer, one_thread
from fedbnn.messages import Failure


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


def _overdue(_signal: int, _frame: FrameType | None) -> None:
    raise Overdue
