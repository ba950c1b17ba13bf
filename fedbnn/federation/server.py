"""The server loop: broadcast the prior, collect factors, gate, fold, commit, evaluate. The same for every engine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, TypeVar

from torch import Tensor

from fedbnn.bayes.flatten import Layout
from fedbnn.defense.gate import Candidates, ExpectedUpdate, Gate
from fedbnn.errors import NumericalError
from fedbnn.federation.engines import Engine
from fedbnn.federation.stream import Stream
from fedbnn.heads.places import EXCHANGE, PlacesExchange, without_places
from fedbnn.messages import FitInstruction, FitResult, Update
from fedbnn.methods import BoundaryMethod, Method
from fedbnn.methods.base import Fold, Spec
from fedbnn.state import State, content_digest
from fedbnn.storage.ledger import Ledger
from fedbnn.storage.spool import Rejected, Spool

Record = dict[str, Any]
SampleCounts = dict[int, dict[str, int]]
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
class RoundStats:
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
    sample_counts, stats, before = call_for_counts(federation, number, clients), RoundStats(), state
    classes = {name for counts in sample_counts.values() for name in counts}
    state = started = federation.method.prepare(state, number, sorted(classes), federation.layout)
    with federation.ledger.spool(number, "private") as privates:
        for name in exchanges(federation, number):
            this = Exchange(number, name, sample_counts, party(federation, name, before))
            state, sample_counts = exchange(federation, state, this, privates, stats)
        state = _finite(settled(federation, started, state, number), number)
        evaluated, evaluation = _timed(lambda: federation.evaluate(state, number, privates))
        stats.seconds |= {"evaluate": evaluation, "round": perf_counter() - start}
        record = _record(federation, number, clients, sample_counts, stats) | evaluated
        federation.ledger.commit(number, state, privates, record)
    for watcher in federation.watchers:
        watcher.round_done(record)
    return state


def call_for_counts(federation: Federation, number: int, clients: Sequence[int]) -> SampleCounts:
    """Images by class of every participant; in the privacy mode only how many there are."""
    counts = {client: _held(federation, number, client) for client in clients}
    if federation.method.share == "global":
        return counts
    return {client: {"": sum(by_class.values())} for client, by_class in counts.items()}


def _held(federation: Federation, number: int, client: int) -> dict[str, int]:
    """What one client announces: the images of the round, and those it replays from its own memory."""
    method = federation.method
    private = federation.ledger.private(client) if method.replay else None
    return method.holds(
        federation.stream.counts(number, client), State.from_bytes(private) if private else None
    )


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
    if isinstance(method, BoundaryMethod) and method.consolidates(
        number, number in federation.stream.task_ends()
    ):
        state = method.consolidate(state)
    return method.end_round(before, state, federation.layout)


class Aggregator(Protocol):
    """Who defines an exchange: what goes down, what may come up, and how it is folded."""

    def broadcast(self, state: State, exchange: str) -> State: ...
    def expected(self, state: State, exchange: str, classes: Sequence[str]) -> Spec: ...
    def defect(self, state: State, update: Update) -> str | None: ...
    def influence(self, state: State, update: Update) -> Iterator[Tensor]: ...
    def fold(self, state: State, exchange: str) -> Fold: ...


def party(federation: Federation, name: str, before: State) -> Aggregator:
    """The method, or the class posteriors for the exchange of their statistics."""
    method = federation.method
    if name != EXCHANGE:
        return method
    width = before["rows"].shape[1] - 1
    return PlacesExchange(
        before, width, method.head_decay, method.head_memory, method.head_ridge, method.head_drift
    )


@dataclass(frozen=True)
class Exchange:
    """One exchange of a round with the clients on the sample_counts."""

    round: int
    name: str
    sample_counts: SampleCounts
    party: Aggregator

    def totals(self) -> tuple[int, dict[str, int]]:
        """N, and N_c by class."""
        by_class: dict[str, int] = {}
        for counts in self.sample_counts.values():
            for name, count in counts.items():
                by_class[name] = by_class.get(name, 0) + count
        return sum(by_class.values()), {name: by_class[name] for name in sorted(by_class) if name}


def exchange(
    federation: Federation, state: State, this: Exchange, privates: Spool, stats: RoundStats
) -> tuple[State, SampleCounts]:
    """Send the state down, let the answers through the gate, fold them in client order."""
    start, party = perf_counter(), this.party
    sent = without_places(party.broadcast(state, this.name))
    payload = FitInstruction(federation.run, this.round, this.name, sent, *this.totals()).to_bytes()
    call = ExpectedUpdate(
        federation.run,
        this.round,
        this.name,
        content_digest(payload),
        this.sample_counts,
        expected=lambda classes: party.expected(state, this.name, classes),
        defect=lambda update: party.defect(state, update),
        influence=lambda update: party.influence(state, update),
        known=lambda update: federation.method.known(state, update),
    )
    with federation.ledger.spool(this.round, this.name) as spool:
        candidates = Candidates(federation.gate, call, spool, federation.rejected)
        _collect(federation, payload, this, candidates, privates, stats)
        folded, folding = _timed(lambda: _fold(party, state, this.name, candidates))
    for client in set(privates) - set(candidates.trust):
        privates.drop(client)
    stats.bytes_down += len(payload) * len(this.sample_counts)
    stats.bytes_up += candidates.bytes_up
    stats.failed |= candidates.failed
    stats.refused |= candidates.refused
    stats.seconds["fold"] += folding
    stats.seconds[this.name] = perf_counter() - start
    return folded, {client: this.sample_counts[client] for client in candidates.trust}


def _collect(
    federation: Federation,
    payload: bytes,
    this: Exchange,
    candidates: Candidates,
    privates: Spool,
    stats: RoundStats,
) -> None:
    """Every answer of the engine through the gate; private state waits until the round is committed."""

    def remembered(client: int) -> bytes | None:
        return privates.get(client) or federation.ledger.private(client)

    for answer in federation.engine.gather(payload, sorted(this.sample_counts), remembered):
        if candidates.admit(answer) and isinstance(answer, FitResult):
            stats.seconds["inner"] += answer.inner
            if answer.private is not None:
                privates.put(answer.client, answer.private)
        for watcher in federation.watchers:
            watcher.client_done(answer.client)


def _fold(party: Aggregator, state: State, name: str, candidates: Candidates) -> State:
    """Compare the accepted with each other, then fold them one by one."""
    candidates.close()
    fold = party.fold(state, name)
    for update, trust in candidates:
        fold.add(update, trust)
    return fold.close()


def _finite(state: State, number: int) -> State:
    """The state, if every number in it is one."""
    for name, tensor in state.tensors.items():
        if not bool(tensor.isfinite().all()):
            fix = "lower client.lr or method.scale_lr; the rounds before it are kept"
            raise NumericalError(f"{name} is not finite after round {number}", "fold", fix)
    return state


def _record(
    federation: Federation,
    number: int,
    clients: Sequence[int],
    sample_counts: SampleCounts,
    stats: RoundStats,
) -> Record:
    """The part of a round's record that does not come from evaluation."""
    return {
        "round": number,
        "clients": list(clients),
        "failed": {str(client): reason for client, reason in sorted(stats.failed.items())},
        "refused": {str(client): reason for client, reason in sorted(stats.refused.items())},
        "shares": list(federation.stream.shares(number)),
        "samples": sum(sum(counts.values()) for counts in sample_counts.values()),
        "bytes_up": stats.bytes_up,
        "bytes_down": stats.bytes_down,
        "seconds": stats.seconds,
    }


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What the work gives, and its seconds."""
    start = perf_counter()
    return work(), perf_counter() - start
