"""Clients in worker processes, several at a time, each at the other end of a `Connection`.

Messages are JSON, each followed by the bytes it announces; what comes from a worker is never
unpickled, and nothing is read that is longer than it may be. The thread that gathers starts the
workers; for each client one thread asks and listens, and one holds the worker to its limits.
Whatever a worker does (raise, die, hang, flood, drip, break the protocol) costs the client it
serves, nothing else.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from math import inf
from multiprocessing.connection import Pipe
from pathlib import Path
from threading import Event, Thread
from types import MappingProxyType
from typing import Any

from fedbnn import machine
from fedbnn.config.schema import Count, Positive
from fedbnn.devices import pinned
from fedbnn.errors import FederationError
from fedbnn.federation.engines import Answer, Private, worker
from fedbnn.protocol.messages import Failure, FitResult

START_SECONDS, WATCH_SECONDS, STARTS = 300.0, 0.1, 2
MAX_HEAD, MOST_SAID = 2**16, 1e18
FIX = "engine: serial shows the whole error"
BABBLE = "its worker broke the protocol"
SECRET_NAME = re.compile(
    "KEY|TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|JWT|WEBHOOK|_PWD$|(^|_)(PAT|DSN)$"
    "|^(AWS|AZURE|GOOGLE|GCP)_"
)
SECRET_VALUE = re.compile(
    r"://[^/@\s]+@|-----BEGIN |(?i:password|accountkey|secret|token|[?&]sig)="
    r"|\b(gh[a-z]_\w{20}|github_pat_|glpat-|hf_[A-Za-z0-9]{30}|sk-[\w-]{32}|xox[a-z]-|AKIA[A-Z0-9]{16})"
    r"|\beyJ[\w-]+\.eyJ"
)


class Gone(Exception):
    """The worker has ended, or must; the text says how."""


class Unserved(Gone):
    """The client is not to blame: the worker never began, or babbled after another client."""


class ProcessEngine:
    """Runs clients in `workers` processes of one thread each: the same bytes as `serial`.

    `entry` is `module:function`, called once in every worker with `config` to compose the client's
    side. `deadline` is how many seconds one client may take, `max_megabytes` how large its update
    may be. A worker that dies or passes a limit is replaced. The GPUs named in `visible` are dealt
    round the workers, one each. Use the engine from one thread: workers die with the thread that
    made them.

    Args:
        workers: how many processes.
        memory: how many megabytes one of them may hold; null does not look.
    """

    def __init__(
        self,
        entry: str,
        config: Mapping[str, Any],
        workers: Count = 2,
        memory: Positive | None = None,
        deadline: float | None = None,
        max_megabytes: float = inf,
        log: Path | None = None,
        visible: Sequence[str] = (),
    ) -> None:
        hello = json.dumps({"entry": entry, "config": dict(config)}).encode()
        self._start = partial(Peer, hello, deadline or inf, memory or inf, max_megabytes, log)
        self._entry, self._workers, self._failed_starts = entry, workers, 0
        self._visible = visible
        self._threads, self._peers = ThreadPoolExecutor(workers), list[Peer]()

    def gather(self, payload: bytes, clients: Sequence[int], private: Private) -> Iterator[Answer]:
        """One answer of each client, as they come. The instruction goes to each worker once."""
        waiting, asked = deque(clients), dict[Future[Answer], tuple[int, Peer]]()
        try:
            while waiting or asked:
                while waiting and len(asked) < self._workers:
                    peer, client = self._idle(asked.values()), waiting.popleft()
                    question = self._threads.submit(peer.ask, payload, client, private(client))
                    asked[question] = client, peer
                for done in wait(asked, return_when=FIRST_COMPLETED).done:
                    yield from self._outcome(done, *asked.pop(done), waiting)
        finally:
            for _, peer in asked.values():
                peer.kill("nobody waits for it")
            wait(asked)
            for _, peer in asked.values():
                self._dismiss(peer)

    def _idle(self, asked: "Iterable[tuple[int, Peer]]") -> "Peer":
        """A worker that serves nobody and waits for work as it should, or else a new one."""
        busy = [peer for _, peer in asked]
        for peer in [peer for peer in self._peers if peer not in busy]:
            if peer.waits:
                return peer
            self._dismiss(peer)
        taken = {peer.number for peer in self._peers}
        number = next(one for one in count() if one not in taken)
        self._peers.append(self._start(number, pinned(number, self._visible)))
        return self._peers[-1]

    def _outcome(
        self, question: "Future[Answer]", client: int, peer: "Peer", waiting: "deque[int]"
    ) -> Iterator[Answer]:
        """The end of a worker fails its client; one that is not to blame waits again."""
        try:
            yield question.result()
            self._failed_starts = 0
        except Gone as end:
            self._dismiss(peer)
            if not isinstance(end, Unserved):
                yield Failure(client, str(end))
                return
            waiting.appendleft(client)
            self._failed_starts += not peer.ready
            if self._failed_starts == STARTS:
                raise FederationError(f"workers do not start: {end}", self._entry, FIX) from end

    def _dismiss(self, peer: "Peer") -> None:
        self._peers.remove(peer)
        peer.close()

    def close(self) -> None:
        """End all workers."""
        while self._peers:
            self._dismiss(self._peers[-1])
        self._threads.shutdown()


class Peer:
    """A worker process, seen from its parent. It is `ready` once the client's side is composed.

    It has the lowest `number` that no other worker has, and what goes with it in its environment.
    """

    def __init__(
        self,
        hello: bytes,
        deadline: float,
        memory: float,
        max_megabytes: float,
        log: Path | None,
        number: int = 0,
        own: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.number = number
        self._hello, self._instruction, self._reason = hello, b"", ""
        self._deadline, self._memory, self._max_megabytes = deadline, memory, max_megabytes
        self.ready, self._served, self._due = False, False, inf
        self._connection, theirs = Pipe()
        command = [sys.executable, "-P", worker.__file__, str(os.getpid())]
        apart: dict[str, Any] = {"env": {**environment(), **own}, "start_new_session": True}
        with theirs, open(2 if log is None else log, "ab", closefd=log is not None) as output:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=output, stderr=output, **apart
            )

    @property
    def waits(self) -> bool:
        """Whether it lives and says nothing unasked."""
        return self._process.poll() is None and not self._connection.poll()

    def ask(self, payload: bytes, client: int, private: bytes | None) -> Answer:
        """What the worker answers for a client, whose time runs from when the process is ready."""
        with self._watched():
            try:
                if not self.ready:
                    self._begin()
                answer = self._answer(payload, client, private)
            except (EOFError, OSError, ValueError, RecursionError, MemoryError) as error:
                self._due = inf
                end = self._reason or self._end(error)
                blameless = not self.ready or (self._served and end == BABBLE)
                raise (Unserved if blameless else Gone)(end) from error
        self._served = True
        return answer

    def _begin(self) -> None:
        """Let the worker compose the client's side."""
        self._connection.send_bytes(self._hello)
        match json.loads(self._connection.recv_bytes(MAX_HEAD)):
            case {"broken": str(reason)}:
                raise Unserved(reason)
            case {"ready": True}:
                self.ready, self._due = True, time.monotonic() + self._deadline
            case _:
                raise ValueError(BABBLE)

    def _answer(self, payload: bytes, client: int, private: bytes | None) -> Answer:
        """Send what the worker does not have yet; read the answer in the only form it may have."""
        new, self._instruction = self._instruction is not payload, payload
        head = {"client": client, "instruction": new, "private": private is not None}
        for part in (json.dumps(head).encode(), payload if new else None, private):
            if part is not None:
                self._connection.send_bytes(part)
        match json.loads(self._connection.recv_bytes(MAX_HEAD)):
            case ["failure", int(who), str(reason)] if who == client:
                return Failure(client, reason)
            case ["result", int(who), dict(said), int(size), int() | None as kept]:
                if who == client and (numbers := measured(said)):
                    update, own = self._blob(size), None if kept is None else self._blob(kept)
                    return FitResult(client, update, own, *numbers)
        raise ValueError(BABBLE)

    def _blob(self, size: int) -> bytes:
        """Bytes of the size that was announced, unless that is too much."""
        if size > (cap := self._max_megabytes) * 2**20:
            raise Gone(f"too large: {size / 2**20:.1f} MB, the cap is {cap:g} MB")
        blob = self._connection.recv_bytes(size)
        if len(blob) != size:
            raise ValueError(BABBLE)
        return blob

    def _end(self, error: BaseException) -> str:
        """How it ended, in words; a message that is too long is an `OSError` without a number."""
        if not isinstance(error, EOFError | OSError) or getattr(error, "errno", 0) is None:
            return BABBLE
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "its worker hung up"
        return f"its worker died: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Meanwhile a thread kills the process when it is late or too large."""
        self._due = time.monotonic() + (self._deadline if self.ready else START_SECONDS)
        done = Event()
        watch = Thread(target=self._watch, args=(done,), daemon=True)
        watch.start()
        try:
            yield
        finally:
            done.set()
            watch.join()

    def _watch(self, done: Event) -> None:
        while not done.wait(WATCH_SECONDS):
            if time.monotonic() >= self._due:
                late = f"no answer within {self._deadline:g} s"
                self.kill(late if self.ready else "its worker did not start in time")
            elif self._memory < inf and machine.resident(self._process.pid) > self._memory * 2**20:
                self.kill(f"its worker used more than {self._memory:g} MB")

    def kill(self, reason: str) -> None:
        """End the process and all it started; whoever listens to it hears the end at once."""
        self._reason = self._reason or reason
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        with socket.socket(fileno=os.dup(self._connection.fileno())) as ours, suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process, to which nobody listens any more, and wait for it."""
        self.kill("dismissed")
        self._process.wait()
        self._connection.close()


def measured(said: dict[str, Any]) -> tuple[float, float, dict[str, float]] | None:
    """Seconds, those of computing, and what training looked like; None unless all are numbers.

    They are no larger than that means of them stay finite, and no time is negative.
    """
    match said:
        case {"seconds": float(seconds), "inner": float(inner), **train}:
            numbers = all(type(one) is float and abs(one) <= MOST_SAID for one in said.values())
            if numbers and min(seconds, inner) >= 0:
                return seconds, inner, train
    return None


def environment() -> dict[str, str]:
    """The parent's, with one thread each and the same import path, without any secret.

    What a worker prints is in the log at once, not when the worker ends.
    """
    kept = {name: value for name, value in os.environ.items() if not secret(name, value)}
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONUNBUFFERED"), "1")
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**kept, **single, "PYTHONPATH": path}


def secret(name: str, value: str) -> bool:
    """Whether a variable is a key, a token or a password by its name, or holds one by its look."""
    return bool(SECRET_NAME.search(name.upper()) or SECRET_VALUE.search(value))
