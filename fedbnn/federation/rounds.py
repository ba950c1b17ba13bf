"""The server loop: broadcast the prior, collect factors, gate, fold, commit, evaluate. The same for every engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, TypeVar

from torch import Tensor

from fedbnn.bayes.layout import Layout
from fedbnn.defense.gate import Admission, Call, Gate
from fedbnn.errors import NumericalError
from fedbnn.federation.audience import Audience
from fedbnn.federation.engines import Engine
from fedbnn.heads.places import EXCHANGE, PlacesExchange, without_places
from fedbnn.messages import Order, Reply, Update
from fedbnn.methods import BoundaryMethod, Method
from fedbnn.methods.base import Fold, Spec
from fedbnn.state import State
from fedbnn.storage.ledger import Ledger
from fedbnn.storage.rejected import Rejected
from fedbnn.storage.spool import Spool
from fedbnn.wire import digest

Record = dict[str, Any]
Roll = dict[int, dict[str, int]]
Result = TypeVar("Result")


class Watcher(Protocol):
    """Somebody who wants to know how the rounds go."""

    def round_started(self, round: int, clients: Sequence[int]) -> None: ...
    def client_done(self, client: int) -> None: ...
    def round_done(self, record: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Federation:
    """All a run is made of. `evaluate` gives the evaluated part of a round's record; `watchers` see every round."""

    run: str
    stream: Audience
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
    """What one round cost and who did not count, summed over its exchanges.

    `seconds` of every exchange by its name (`train`, `statistics`, ...), and of what is inside them: `fold`, and `inner`,
    which is forward, backward and optimiser on the clients.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"inner": 0.0, "fold": 0.0})


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
    roll, traffic, before = roll_call(federation, number, clients), Traffic(), state
    classes = {name for counts in roll.values() for name in counts}
    state = started = federation.method.prepare(state, number, sorted(classes), federation.layout)
    with federation.ledger.spool(number, "private") as privates:
        for name in exchanges(federation, number):
            this = Exchange(number, name, roll, party(federation, name, before))
            state, roll = exchange(federation, state, this, privates, traffic)
        state = _finite(settled(federation, started, state, number), number)
        evaluated, evaluation = _timed(lambda: federation.evaluate(state, number, privates))
        traffic.seconds |= {"evaluate": evaluation, "round": perf_counter() - start}
        record = _record(federation, number, clients, roll, traffic) | evaluated
        federation.ledger.commit(number, state, privates, record)
    for watcher in federation.watchers:
        watcher.round_done(record)
    return state


def roll_call(federation: Federation, number: int, clients: Sequence[int]) -> Roll:
    """Images by class of every participant; in the privacy mode only how many there are."""
    counts = {client: _held(federation, number, client) for client in clients}
    if federation.method.share == "global":
        return counts
    return {client: {"": sum(by_class.values())} for client, by_class in counts.items()}


def _held(federation: Federation, number: int, client: int) -> dict[str, int]:
    """What one client announces: the images of the round, and those it replays from its own memory."""
    method = federation.method
    private = federation.ledger.private(client) if method.replay else None
    return method.holds(federation.stream.counts(number, client), State.from_bytes(private) if private else None)


def exchanges(federation: Federation, number: int) -> tuple[str, ...]:
    """The exchanges of a round; only a `BoundaryMethod` learns whether a task ends here."""
    method = federation.method
    statistics = (EXCHANGE,) if method.head == "gaussian" else ()
    if isinstance(method, BoundaryMethod):
        return method.exchanges_at(number, number in federation.stream.task_ends()) + statistics
    return method.exchanges(number) + statistics


def settled(federation: Federation, before: State, state: State, number: int) -> State:
    """The state a round ends with; only a `BoundaryMethod` learns whether a task ends here."""
    method = federation.method
    if isinstance(method, BoundaryMethod) and method.consolidates(number, number in federation.stream.task_ends()):
        state = method.consolidate(state)
    return method.settle(before, state, federation.layout)


class Party(Protocol):
    """Who defines an exchange: what goes down, what may come up, and how it is folded."""

    def broadcast(self, state: State, exchange: str) -> State: ...
    def expected(self, state: State, exchange: str, classes: Sequence[str]) -> Spec: ...
    def defect(self, state: State, update: Update) -> str | None: ...
    def influence(self, state: State, update: Update) -> Tensor: ...
    def fold(self, state: State, exchange: str) -> Fold: ...


def party(federation: Federation, name: str, before: State) -> Party:
    """The method, or the class posteriors for the exchange of their statistics."""
    method = federation.method
    if name != EXCHANGE:
        return method
    width = before["rows"].shape[1] - 1
    return PlacesExchange(before, width, method.head_decay, method.head_memory, method.head_ridge, method.head_drift)


@dataclass(frozen=True)
class Exchange:
    """One exchange of a round with the clients on the roll."""

    round: int
    name: str
    roll: Roll
    party: Party

    def totals(self) -> tuple[int, dict[str, int]]:
        """N, and N_c by class."""
        by_class: dict[str, int] = {}
        for counts in self.roll.values():
            for name, count in counts.items():
                by_class[name] = by_class.get(name, 0) + count
        return sum(by_class.values()), {name: by_class[name] for name in sorted(by_class) if name}


def exchange(federation: Federation, state: State, this: Exchange, privates: Spool, traffic: Traffic) -> tuple[State, Roll]:
    """Send the state down, let the answers through the gate, fold them in client order."""
    start, party = perf_counter(), this.party
    sent = without_places(party.broadcast(state, this.name))
    payload = Order(federation.run, this.round, this.name, sent, *this.totals()).to_bytes()
    call = Call(
        federation.run, this.round, this.name, digest(payload), this.roll,
        expected=lambda classes: party.expected(state, this.name, classes),
        defect=lambda update: party.defect(state, update),
        influence=lambda update: party.influence(state, update),
        known=lambda update: federation.method.known(state, update),
    )  # fmt: skip
    with federation.ledger.spool(this.round, this.name) as spool:
        admission = Admission(federation.gate, call, spool, federation.rejected)
        _collect(federation, payload, this, admission, privates, traffic)
        folded, folding = _timed(lambda: _fold(party, state, this.name, admission))
    for client in set(privates) - set(admission.trust):
        privates.drop(client)
    traffic.bytes_down += len(payload) * len(this.roll)
    traffic.bytes_up += admission.bytes_up
    traffic.failed |= admission.failed
    traffic.refused |= admission.refused
    traffic.seconds["fold"] += folding
    traffic.seconds[this.name] = perf_counter() - start
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


def _fold(party: Party, state: State, name: str, admission: Admission) -> State:
    """Compare the accepted with each other, then fold them one by one."""
    admission.close()
    fold = party.fold(state, name)
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
