"""Clients in worker processes, several at a time. What happens to a worker costs the client it served, nothing else."""

import select
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbnn.errors import ConfigError, FederationError
from fedbnn.federation.engines import Private
from fedbnn.federation.engines.frames import Frame
from fedbnn.federation.engines.peer import Gone, Peer
from fedbnn.messages import Failure, FitResult

WATCH_SECONDS, IDLE_SECONDS = 0.1, 60.0
STARTS = 2

Answer = FitResult | Failure


class ProcessEngine:
    """Runs clients in `workers` processes of one thread each; the same bytes as `serial`, in any order.

    `entry` is `module:function`, called once in every worker with `config` to compose the client's side. `deadline`
    is how many seconds one client may take, `memory` how many megabytes its worker may hold. A worker that dies,
    raises, or passes a limit is replaced. Use the engine from one thread: workers die with the thread that made them.
    """

    def __init__(
        self,
        entry: str,
        config: Mapping[str, Any],
        workers: int = 2,
        deadline: float | None = None,
        memory: float | None = None,
        log: Path | None = None,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, not {workers}", "engine.workers")
        self._entry, self._config, self._log = entry, dict(config), log
        self._workers, self._deadline, self._memory = workers, deadline, memory
        self._peers: list[Peer] = []
        self._orders = self._failed_starts = 0

    def gather(self, payload: bytes, clients: Sequence[int], private: Private) -> Iterator[Answer]:
        """One answer of each client, as they come. The order goes to each worker once."""
        waiting = deque(clients)
        self._orders += 1
        try:
            while waiting or any(peer.busy for peer in self._peers):
                self._hand_out(payload, waiting, private)
                yield from self._turn(waiting)
        finally:
            for peer in [peer for peer in self._peers if peer.busy]:
                self._dismiss(peer)

    def _hand_out(self, payload: bytes, waiting: deque[int], private: Private) -> None:
        """A client for every idle worker; workers are started as long as there is work for them."""
        for dead in [peer for peer in self._peers if not peer.busy and not peer.alive]:
            self._dismiss(dead)
        while waiting and (peer := self._idle()) is not None:
            if peer.order != self._orders:
                peer.send(Frame({"kind": "order"}, payload))
                peer.order = self._orders
            client = waiting.popleft()
            peer.serve(client, private(client), self._deadline)

    def _idle(self) -> Peer | None:
        """A worker that serves nobody, a new one if there may be one more."""
        idle = next((peer for peer in self._peers if not peer.busy), None)
        if idle is None and len(self._peers) < self._workers:
            idle = Peer(self._entry, self._config, self._log)
            self._peers.append(idle)
        return idle

    def _turn(self, waiting: deque[int]) -> list[Answer]:
        """Wait for something to happen; the answers it brings. Limits are checked on workers that send nothing."""
        answers: list[Answer] = []
        moving = self._wait()
        for peer in list(self._peers):
            try:
                if peer in moving:
                    answers.extend(self._exchange(peer))
                else:
                    self._check_limits(peer)
            except Gone as end:
                answers.extend(self._bury(peer, str(end), waiting))
        return answers

    def _wait(self) -> list[Peer]:
        """The workers whose pipes can be used now; returns at the latest when one is due."""
        poll, pipes = select.poll(), {}
        for peer in self._peers:
            pipes[peer.outlet] = peer
            poll.register(peer.outlet, select.POLLIN)
            if peer.has_mail:
                pipes[peer.inlet] = peer
                poll.register(peer.inlet, select.POLLOUT)
        due = min((peer.due for peer in self._peers if peer.busy), default=0.0)
        rest = min(due - time.monotonic(), WATCH_SECONDS if self._memory else IDLE_SECONDS)
        return [pipes[pipe] for pipe, _ in poll.poll(max(0.0, rest * 1000))]

    def _exchange(self, peer: Peer) -> Iterator[Answer]:
        """Write and read what the pipes of one worker allow."""
        if peer.has_mail:
            peer.write()
        for frame in peer.read():
            if frame.head["kind"] == "broken":
                raise FederationError(
                    "a worker cannot start",
                    frame.head["reason"],
                    "engine: serial shows the whole error",
                )
            if frame.head["kind"] == "ready":
                peer.ready, self._failed_starts = True, 0
                peer.start_clock(self._deadline)
            else:
                yield self._answer(peer, frame)

    def _answer(self, peer: Peer, frame: Frame) -> Answer:
        """What a worker says about the client it served."""
        client, peer.client = peer.client, -1
        head, blob = frame.head, frame.blob
        if head["kind"] == "failure":
            return Failure(client, head["reason"])
        private = blob[head["update"] :] if head["private"] else None
        return FitResult(client, blob[: head["update"]], private, head["seconds"], head["inner"])

    def _check_limits(self, peer: Peer) -> None:
        """Raise `Gone` with the reason when a worker is late or too large."""
        if peer.busy and time.monotonic() >= peer.due:
            raise Gone(
                f"no answer within {self._deadline:g} s"
                if peer.ready
                else "its worker did not start in time"
            )
        if self._memory and peer.megabytes() > self._memory:
            raise Gone(f"its worker used more than {self._memory:g} MB")

    def _bury(self, peer: Peer, reason: str, waiting: deque[int]) -> Iterator[Answer]:
        """The end of a worker is the failure of its client; one that never began gives its client back."""
        client, ready = peer.client, peer.ready
        self._dismiss(peer)
        if ready and client >= 0:
            yield Failure(client, reason)
        if not ready:
            self._failed_starts += 1
            if self._failed_starts >= STARTS:
                raise FederationError(
                    f"workers do not start: {reason}",
                    self._entry,
                    "engine: serial shows the whole error",
                )
            waiting.extendleft([client] if client >= 0 else [])

    def _dismiss(self, peer: Peer) -> None:
        self._peers.remove(peer)
        peer.kill()

    def close(self) -> None:
        """End all workers."""
        while self._peers:
            self._dismiss(self._peers[-1])
