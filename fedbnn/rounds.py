"""The server loop: broadcast the prior, collect factors, gate, fold, commit, evaluate. The same for every engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, TypeVar

from fedbnn.engines import Engine
from fedbnn.errors import NumericalError
from fedbnn.gate import Admission, Call, Gate
from fedbnn.layout import Layout
from fedbnn.ledger import Ledger
from fedbnn.messages import Order, Reply
from fedbnn.methods import BoundaryMethod, Method
from fedbnn.rejected import Rejected
from fedbnn.spool import Spool
from fedbnn.state import State
from fedbnn.wire import digest

Record = dict[str, Any]
Roll = dict[int, dict[str, int]]
Result = TypeVar("Result")


class Stream(Protocol):
    """What the server knows of the clients: who takes part, and how many images of which class they hold."""

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        ...

    def participants(self, round: int) -> tuple[int, ...]:
        """The clients of a round."""
        ...

    def counts(self, round: int, client: int) -> dict[str, int]:
        """Images by class of one client in one round."""
        ...

    def shares(self, round: int) -> tuple[float, ...]:
        """Share of the clients on each task."""
        ...

    def task_ends(self) -> tuple[int, ...]:
        """Last round of each task; told to a `BoundaryMethod` only."""
        ...


class Watcher(Protocol):
    """Somebody who wants to know how the rounds go."""

    def round_started(self, round: int, clients: Sequence[int]) -> None: ...
    def client_done(self, client: int) -> None: ...
    def round_done(self, record: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Federation:
    """All a run is made of. `evaluate` gives the evaluated part of a round's record; `watchers` see every round."""

    run: str
    stream: Stream
    method: Method
    layout: Layout
    engine: Engine
    gate: Gate
    ledger: Ledger
    rejected: Rejected
    evaluate: Callable[[State, int, Mapping[int, bytes]], Record]
    watchers: Sequence[Watcher]


@dataclass
class Traffic:
    """What one round cost and who did not count, summed over its exchanges."""

    bytes_up: int = 0
    bytes_down: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"train": 0.0, "inner": 0.0, "fold": 0.0})


def run(federation: Federation, initial: State) -> State:
    """Play all rounds that are not committed yet; the state after the last one."""
    committed = federation.ledger.latest()
    state, done = (committed.state, committed.round) if committed else (initial, 0)
    for number in range(done + 1, federation.stream.rounds + 1):
        state = play(federation, state, number)
    return state


def play(federation: Federation, state: State, number: int) -> State:
    """One round: train, fold, settle, evaluate, commit. After the commit a crash loses nothing."""
    start, clients = perf_counter(), federation.stream.participants(number)
    for watcher in federation.watchers:
        watcher.round_started(number, clients)
    roll, traffic = roll_call(federation, number, clients), Traffic()
    classes = {name for counts in roll.values() for name in counts}
    state = federation.method.prepare(state, number, sorted(classes), federation.layout)
    with federation.ledger.spool(number, "private") as privates:
        for name in exchanges(federation, number):
            state, roll = exchange(federation, state, Exchange(number, name, roll), privates, traffic)
        state = _finite(federation.method.settle(state, federation.layout), number)
        evaluated, evaluation = _timed(lambda: federation.evaluate(state, number, privates))
        traffic.seconds |= {"evaluate": evaluation, "round": perf_counter() - start}
        record = _record(federation, number, clients, roll, traffic) | evaluated
        federation.ledger.commit(number, state, privates, record)
    for watcher in federation.watchers:
        watcher.round_done(record)
    return state


def roll_call(federation: Federation, number: int, clients: Sequence[int]) -> Roll:
    """Images by class of every participant; in the privacy mode only how many there are."""
    counts = {client: federation.stream.counts(number, client) for client in clients}
    if federation.method.share == "global":
        return counts
    return {client: {"": sum(by_class.values())} for client, by_class in counts.items()}


def exchanges(federation: Federation, number: int) -> tuple[str, ...]:
    """The exchanges of a round; only a `BoundaryMethod` learns whether a task ends here."""
    method = federation.method
    if isinstance(method, BoundaryMethod):
        return method.exchanges_at(number, number in federation.stream.task_ends())
    return method.exchanges(number)


@dataclass(frozen=True)
class Exchange:
    """One exchange of a round with the clients on the roll."""

    round: int
    name: str
    roll: Roll

    def totals(self) -> tuple[int, dict[str, int]]:
        """N, and N_c by class."""
        by_class: dict[str, int] = {}
        for counts in self.roll.values():
            for name, count in counts.items():
                by_class[name] = by_class.get(name, 0) + count
        return sum(by_class.values()), {name: by_class[name] for name in sorted(by_class) if name}


def exchange(federation: Federation, state: State, this: Exchange, privates: Spool, traffic: Traffic) -> tuple[State, Roll]:
    """Send the state down, let the answers through the gate, fold them in client order."""
    method, total = federation.method, this.totals()
    payload = Order(federation.run, this.round, this.name, method.broadcast(state, this.name), *total).to_bytes()
    call = Call(
        federation.run, this.round, this.name, digest(payload), this.roll,
        expected=lambda classes: method.expected(state, this.name, classes),
        defect=lambda update: method.defect(state, update),
        influence=lambda update: method.influence(state, update),
    )  # fmt: skip
    with federation.ledger.spool(this.round, this.name) as spool:
        admission = Admission(federation.gate, call, spool, federation.rejected)
        _, waited = _timed(lambda: _collect(federation, payload, this, admission, privates, traffic))
        folded, folding = _timed(lambda: _fold(method, state, this.name, admission))
    for client in set(privates) - set(admission.trust):
        privates.drop(client)
    traffic.bytes_down += len(payload) * len(this.roll)
    traffic.bytes_up += admission.bytes_up
    traffic.failed |= admission.failed
    traffic.refused |= admission.refused
    traffic.seconds["train"] += waited
    traffic.seconds["fold"] += folding
    return folded, {client: this.roll[client] for client in admission.trust}


def _collect(
    federation: Federation, payload: bytes, this: Exchange, admission: Admission, privates: Spool, traffic: Traffic
) -> None:
    """Every answer of the engine through the gate; private state waits until the round is committed."""

    def remembered(client: int) -> bytes | None:
        return privates.get(client) or federation.ledger.private(client)

    for answer in federation.engine.gather(payload, sorted(this.roll), remembered):
        if admission.admit(answer) and isinstance(answer, Reply):
            traffic.seconds["inner"] += answer.inner
            if answer.private is not None:
                privates.put(answer.client, answer.private)
        for watcher in federation.watchers:
            watcher.client_done(answer.client)


def _fold(method: Method, state: State, name: str, admission: Admission) -> State:
    """Compare the accepted with each other, then fold them one by one."""
    admission.close()
    fold = method.fold(state, name)
    for update, trust in admission:
        fold.add(update, trust)
    return fold.close()


def _finite(state: State, number: int) -> State:
    """The state, if every number in it is one."""
    for name, tensor in state.tensors.items():
        if not bool(tensor.isfinite().all()):
            fix = "lower client.lr or method.scale_lr; the rounds before it are kept"
            raise NumericalError(f"{name} is not finite after round {number}", "fold", fix)
    return state


def _record(federation: Federation, number: int, clients: Sequence[int], roll: Roll, traffic: Traffic) -> Record:
    """The part of a round's record that does not come from evaluation."""
    return {
        "round": number,
        "clients": list(clients),
        "failed": {str(client): reason for client, reason in sorted(traffic.failed.items())},
        "refused": {str(client): reason for client, reason in sorted(traffic.refused.items())},
        "shares": list(federation.stream.shares(number)),
        "samples": sum(sum(counts.values()) for counts in roll.values()),
        "bytes_up": traffic.bytes_up,
        "bytes_down": traffic.bytes_down,
        "seconds": traffic.seconds,
    }


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What the work gives, and its seconds."""
    start = perf_counter()
    return work(), perf_counter() - start
