"""The loop of the server, whatever the engine: send the prior, collect, gate, fold, commit."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter, process_time
from typing import Any

from fedbnn import memory
from fedbnn.bayes.flatten import Layout
from fedbnn.defense import privacy
from fedbnn.defense.budget import Budget
from fedbnn.defense.gate import Candidates, ExpectedUpdate, Gate, Spec
from fedbnn.defense.moves import Moves, moves_of_means
from fedbnn.defense.privacy import Privacy, Protection, Question
from fedbnn.errors import ConfigError, NumericalError
from fedbnn.federation import late
from fedbnn.federation.engines import Engine
from fedbnn.federation.late import Late
from fedbnn.heads import ExactHead, GaussianHead, Head, LinearHead
from fedbnn.heads.exact import ExactAggregator, SumsAggregator, unit, width
from fedbnn.heads.gaussian import EXCHANGE as STATISTICS
from fedbnn.heads.gaussian import StatisticsAggregator, without_posteriors
from fedbnn.messages import FitInstruction, FitResult, Refused, Update, read_update
from fedbnn.methods import Method
from fedbnn.methods.aggregation import TRAIN, Aggregator
from fedbnn.methods.base import Consolidation
from fedbnn.methods.fedbnn import FactorAggregator
from fedbnn.state import State, content_digest
from fedbnn.storage.files import Rejected, Spool
from fedbnn.storage.ledger import Ledger
from fedbnn.stream import Stream
from fedbnn.tracking.console import Watcher

Record = dict[str, Any]
SampleCounts = dict[int, dict[str, int]]
Exchange = Aggregator | StatisticsAggregator | ExactAggregator


@dataclass(frozen=True)
class Federation:
    """All that the rounds need; `evaluate` gives a part of a record, `watchers` see every round.

    `asked` has the digest of every instruction to train that was sent, by round; `budget` is the
    account of a run whose clients are private.
    """

    run: str
    stream: Stream
    method: Method
    head: Head
    layout: Layout
    engine: Engine
    gate: Gate
    ledger: Ledger
    rejected: Rejected
    evaluate: Callable[[State, int, Mapping[int, bytes]], Record]
    watchers: Sequence[Watcher]
    late: Late = field(default_factory=Late)
    asked: dict[int, str] = field(default_factory=dict)
    privacy: Privacy = field(default_factory=Privacy)
    budget: Budget | None = None

    def __post_init__(self) -> None:
        privacy.check(self.privacy, self.gate, self.method, self.head, self.layout)
        if self.privacy.on and self.late.late == "fold":
            what, fix = "a late answer would be counted twice", "set federation.late: refuse"
            raise ConfigError(what, "privacy", fix)
        if self.late.late == "fold":
            late.only_factors(self.method)
        _fitting(self.method, self.head, moves=bool(self.layout.size))


def _fitting(method: Method, head: Head, moves: bool) -> None:
    """Refuse a head that a method cannot feed; `moves` says whether the backbone has weights."""
    if not isinstance(head, LinearHead) and not method.shares_prototypes:
        what = "class posteriors are shared, so they cannot stay on the clients"
        raise ConfigError(what, "head.name", "use head: linear")
    if not method.trains and not isinstance(head, ExactHead):
        what = "a method that trains nothing has only class posteriors over fixed features"
        raise ConfigError(what, "head.name", "use head: exact")
    fixed = not (method.trains and moves)
    if isinstance(head, ExactHead) and head.features == "backbone" and not fixed:
        what = "the features of a backbone that is trained move"
        fix = "use random_conv, a frozen network (network.trained: []), or method: exact"
        raise ConfigError(what, "head.features", fix)


@dataclass
class RoundStats:
    """What a round cost and who did not count (in full), summed over its exchanges.

    `counts` has the images by class of those who count so far, `more` of those who are asked for
    statistics without having trained, `trust` the clients folded with less
    than 1, `late` how many rounds ago some were asked; bytes and `seconds` are those of every
    exchange by its name (`train`, `statistics`, ...) and of what is inside them: `fold`, and
    `inner`: forward, backward and optimiser on the clients. `train` is what clients say of their
    training, `load` how many cores the whole machine and this process kept busy: seconds mean
    something where nobody else did. `audit` has of every exchange how far it moved the model in all
    and by client.
    """

    round: int
    counts: SampleCounts
    more: SampleCounts = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    trust: dict[int, float] = field(default_factory=dict)
    late: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"inner": 0.0, "fold": 0.0})
    train: dict[int, Mapping[str, float]] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)
    audit: dict[str, Record] = field(default_factory=dict)

    def add(self, candidates: Candidates, moves: Moves) -> None:
        """Count what came through the gate in one exchange, and what did not."""
        self.audit[candidates.call.exchange] = candidates.audited(moves)
        on_time = candidates.trust.keys() - candidates.late
        spared = self.counts.keys() - candidates.call.sample_counts
        counted = sorted((on_time | spared) & self.counts.keys())
        self.counts = {client: self.counts[client] for client in counted}
        self.bytes_up[candidates.call.exchange] = candidates.bytes_up
        self.failed |= candidates.failed
        self.refused |= candidates.refused
        late = candidates.late.items()
        self.late |= {client: age for client, age in late if client in candidates.trust}
        for client, trust in candidates.trust.items():
            if trust < 1:
                self.trust[client] = min(trust, self.trust.get(client, 1.0))

    def heard(self, answer: FitResult) -> None:
        """What an answer says besides its update."""
        self.seconds["inner"] += answer.inner
        if answer.train:
            self.train[answer.client] = answer.train

    def trained(self) -> dict[str, float]:
        """sum_k n_k x_k / sum_k n_k of loss and KL, over the clients that count and say them."""
        counted = [client for client in sorted(self.train) if client in self.counts]
        images = {client: sum(self.counts[client].values()) for client in counted}
        found: dict[str, float] = {}
        for name in ("loss", "kl"):
            said = [client for client in counted if name in self.train[client]]
            total = sum(images[client] * self.train[client][name] for client in said)
            found |= {name: total / sum(images[client] for client in said)} if said else {}
        return found

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Note how many seconds this takes."""
        began = perf_counter()
        yield
        self.seconds[name] = perf_counter() - began + self.seconds.get(name, 0.0)


def run(federation: Federation, initial: State) -> State:
    """Play all rounds that are not committed yet; the state after the last one."""
    committed = federation.ledger.latest()
    state, done = (committed.state, committed.round) if committed else (initial, 0)
    for number in range(done + 1, federation.stream.rounds + 1):
        state = play(federation, state, number)
        memory.trim()
    return state


def play(federation: Federation, state: State, number: int) -> State:
    """One round: train, fold, evaluate, commit. After the commit a crash loses nothing."""
    began, used, clients = perf_counter(), process_time(), federation.stream.participants(number)
    if federation.budget is not None:
        federation.budget.begin(number)
    for watcher in federation.watchers:
        watcher.round_started(number, clients)
    asked = [client for client in clients if client not in federation.ledger.late(number)]
    stats, before = RoundStats(number, sample_counts(federation, number, asked)), state
    stats.more = _more(federation, number)
    held = (*stats.counts.values(), *stats.more.values())
    classes = sorted({name for by_class in held for name in by_class})
    state = started = federation.method.prepare(state, number, classes, federation.layout)
    with federation.ledger.spool(number, "private") as privates:
        for aggregator in exchanges(federation, number, before, started):
            state = exchange(federation, state, aggregator, privates, stats)
        if due := _due(federation, number):
            state = due.apply(state)
        state = _finite(federation.method.end_round(started, state, federation.layout), number)
        with stats.timing("evaluate"):
            evaluated = federation.evaluate(state, number, privates)
        stats.seconds["round"] = seconds = perf_counter() - began
        stats.load = {"machine": os.getloadavg()[0], "own": (process_time() - used) / seconds}
        record = _record(federation, clients, stats) | evaluated
        federation.ledger.commit(number, state, privates, record)
    for watcher in federation.watchers:
        watcher.round_done(record)
    return state


def sample_counts(federation: Federation, number: int, clients: Sequence[int]) -> SampleCounts:
    """Images by class of every participant, or only how many where prototypes stay with them.

    Of private clients the same for all: the classes are those of the tasks of the round.
    """
    if federation.privacy.on:
        tasks = zip(federation.stream.tasks, federation.stream.shares(number), strict=True)
        classes = sorted({name for task, share in tasks if share for name in task.classes})
        held = classes if federation.method.shares_prototypes else ()
        return dict.fromkeys(clients, federation.privacy.announced(held))
    counts = {client: _held(federation, number, client) for client in clients}
    if federation.method.shares_prototypes:
        return counts
    return {client: {"": sum(by_class.values())} for client, by_class in counts.items()}


def _held(federation: Federation, number: int, client: int) -> dict[str, int]:
    """What one client announces: the images of the round, and those it replays."""
    shown, replay = federation.stream.counts(number, client), federation.method.replay
    if replay is None:
        return shown
    private = federation.ledger.private(client)
    return replay.counts(shown, State.from_bytes(private) if private else None)


def exchanges(
    federation: Federation, number: int, before: State, started: State
) -> Iterator[Exchange]:
    """The exchanges of a round: training, a consolidation that is due, the class statistics.

    Statistics come last: where training starts from what they say, it is of the rounds before.
    """
    method, head = federation.method, federation.head
    if method.trains:
        training = method.aggregator(started)
        yield _noisy(training) if federation.privacy.on else training
    if (due := _due(federation, number)) and due.aggregator:
        yield due.aggregator
    if isinstance(head, GaussianHead):
        yield StatisticsAggregator(head, before)
    if isinstance(head, ExactHead):
        sums = SumsAggregator if federation.privacy.on else ExactAggregator
        yield sums(head, width(head, before))


def _more(federation: Federation, number: int) -> SampleCounts:
    """What clients hold who measure statistics in a round without training in it."""
    head = federation.head
    wanted = head.clients_per_round if isinstance(head, GaussianHead) else None
    more = federation.stream.more_participants(number, wanted) if wanted else ()
    return sample_counts(federation, number, more)


def _noisy(aggregator: Aggregator) -> Aggregator:
    """The same, ready for sums with noise."""
    if not isinstance(aggregator, FactorAggregator):
        return aggregator
    return replace(aggregator, rule=replace(aggregator.rule, noisy=True))


def _due(federation: Federation, number: int) -> Consolidation | None:
    """The consolidation of what was learnt, if due; nobody else is ever told that a task ends."""
    part = federation.method.consolidation
    return part if part and part.due(number, number in federation.stream.task_ends()) else None


def exchange(
    federation: Federation, state: State, aggregator: Exchange, privates: Spool, stats: RoundStats
) -> State:
    """Send the state down, let the answers through the gate, fold them in client order."""
    this, counts = (federation.run, stats.round, aggregator.exchange), stats.counts
    if isinstance(aggregator, StatisticsAggregator):
        counts = {**counts, **stats.more}
    whole, counts = totals(counts), _asked(federation, aggregator, counts)
    if not counts:
        return state
    with stats.timing(aggregator.exchange), federation.ledger.spool(*this[1:]) as spool:
        sent = without_posteriors(aggregator.broadcast(state))
        payload = FitInstruction(*this, sent, *whole).to_bytes()
        stats.bytes_down[aggregator.exchange] = len(payload) * len(counts)
        call = ExpectedUpdate(
            *(*this, content_digest(payload), counts),
            expected=partial(aggregator.expected, state),
            defect=_defect(federation, aggregator, state),
            influence=partial(aggregator.influence, state),
            known=partial(aggregator.known, state),
            apart=partial(aggregator.apart, state),
            kept=partial(_kept, federation, state),
            receipts=not federation.method.server_reads,
            forgets=federation.method.replay is not None and aggregator.exchange != TRAIN,
            **_in_numbers(aggregator, state),
            private=_protection(federation, aggregator, state, counts, stats.round),
            calm=aggregator.calm(state) if isinstance(aggregator, Aggregator) else 0.0,
        )
        candidates = Candidates(federation.gate, call, spool, federation.rejected)
        if aggregator.exchange == TRAIN:
            federation.asked[stats.round] = call.prior
            _admit_late(federation, call, candidates)
        _collect(federation, payload, candidates, privates, stats)
        with stats.timing("fold"):
            folded = _fold(aggregator, state, candidates)
        moves = _moves(aggregator, state, folded, candidates)
    for client in set(privates) & set(counts) - set(candidates.trust):
        privates.drop(client)
    stats.add(candidates, moves)
    return folded


def _asked(federation: Federation, aggregator: Exchange, counts: SampleCounts) -> SampleCounts:
    """Whom an exchange asks about which images; of statistics not about classes with too few."""
    if aggregator.exchange != STATISTICS or federation.privacy.on:
        return counts
    enough = {client: federation.privacy.enough(held) for client, held in counts.items()}
    return {client: held for client, held in enough.items() if held}


def _defect(
    federation: Federation, aggregator: Exchange, state: State
) -> Callable[[Update], str | None]:
    """Why an update cannot be folded; noise of its own makes anything possible."""
    if federation.privacy.on and federation.privacy.at == "client":
        return lambda _update: None
    return partial(aggregator.defect, state)


def _in_numbers(aggregator: Exchange, state: State) -> dict[str, Any]:
    """How rules that go by number read an update; class statistics are judged by client alone."""
    if not isinstance(aggregator, Aggregator):
        return {}
    return {"centred": partial(aggregator.centred, state), "rows": aggregator.shares_prototypes}


def _kept(
    federation: Federation, state: State, own: State, announced: Mapping[str, int]
) -> Spec:
    """What a client may keep: what its method says, or the images it has just trained on."""
    method = federation.method
    if method.replay is not None:
        return method.replay.kept(own, announced, federation.stream.image_shape)
    return method.kept(own, state, federation.layout)


def totals(counts: SampleCounts) -> tuple[int, dict[str, int]]:
    """N, and N_c by class."""
    by_class = Counter[str]()
    for held in counts.values():
        by_class.update(held)
    return by_class.total(), {name: by_class[name] for name in sorted(by_class) if name}


def _collect(
    federation: Federation,
    payload: bytes,
    candidates: Candidates,
    privates: Spool,
    stats: RoundStats,
) -> None:
    """Every answer through the gate; private state waits for the commit."""

    def remembered(client: int) -> bytes | None:
        return privates.get(client) or federation.ledger.private(client)

    asked = sorted(candidates.call.sample_counts)
    for answer in federation.engine.gather(payload, asked, remembered):
        if isinstance(answer, FitResult) and answer.late:
            _keep_late(federation, answer, candidates)
            continue
        if candidates.admit(answer) and isinstance(answer, FitResult):
            stats.heard(answer)
            if answer.private is not None:
                privates.put(answer.client, answer.private)
        for watcher in federation.watchers:
            watcher.client_done(answer.client)


def _keep_late(federation: Federation, answer: FitResult, candidates: Candidates) -> None:
    """An answer to an earlier round waits on disk for the next one, unless that is too late."""
    folded = candidates.call.round + 1
    try:
        late.check(answer, federation.asked, folded, federation.late.rounds)
        federation.ledger.keep_late(folded, answer.client, answer.update)
    except Refused as refusal:
        candidates.refuse(answer.client, answer.update, str(refusal))


def _admit_late(federation: Federation, call: ExpectedUpdate, candidates: Candidates) -> None:
    """Late answers of this round: they answer another instruction, and are folded on this state."""
    for client, payload in federation.ledger.late(call.round).items():
        try:
            update = read_update(payload)
        except Refused as refusal:
            candidates.refuse(client, payload, str(refusal))
            continue
        counts = sample_counts(federation, update.round, [client])
        then = replace(call, round=update.round, prior=update.prior, sample_counts=counts)
        candidates.admit(FitResult(client, payload), then)


def _fold(aggregator: Exchange, state: State, candidates: Candidates) -> State:
    """Compare the accepted with each other, then fold them one by one."""
    candidates.close()
    fold = aggregator.fold(state)
    for update, trust in candidates:
        fold.add(update, trust)
    return fold.close()


def _moves(aggregator: Exchange, before: State, after: State, candidates: Candidates) -> Moves:
    """How far the exchange moved the model, and each client in it."""
    if isinstance(aggregator, Aggregator):
        return candidates.moves(aggregator.weights)
    return moves_of_means(before, after, [*candidates])


def _protection(
    federation: Federation, aggregator: Exchange, state: State, counts: SampleCounts, round: int
) -> Protection | None:
    """What is folded of private clients in place of what they sent."""
    settings, same = federation.privacy, next(iter(counts.values()))
    if not settings.on:
        return None
    head, statistics = federation.head, aggregator.exchange == STATISTICS
    length = unit(head, federation.stream.image_shape) if isinstance(head, ExactHead) else 1.0
    classes = tuple(name for name in same if name)
    question = Question(state, classes, federation.layout, length)
    seed = federation.budget.seed(round, aggregator.exchange) if federation.budget else 0
    return Protection(settings, question, tuple(sorted(counts)), same, statistics, seed)


def _finite(state: State, number: int) -> State:
    """The state, if every number in it is one."""
    for name, tensor in state.tensors.items():
        if not bool(tensor.isfinite().all()):
            fix = "lower client.lr or method.scale_lr; the rounds before it are kept"
            raise NumericalError(f"{name} is not finite after round {number}", "fold", fix)
    return state


def _record(federation: Federation, clients: Sequence[int], stats: RoundStats) -> Record:
    """The part of a round's record that does not come from evaluation."""
    incidents = {name: getattr(stats, name) for name in ("failed", "refused", "trust", "late")}
    return {
        "round": stats.round,
        "clients": list(clients),
        **{name: {str(k): found[k] for k in sorted(found)} for name, found in incidents.items()},
        "shares": list(federation.stream.shares(stats.round)),
        "samples": sum(sum(by_class.values()) for by_class in stats.counts.values()),
        "bytes_up": stats.bytes_up,
        "bytes_down": stats.bytes_down,
        "seconds": stats.seconds,
        "train": {} if federation.privacy.on else stats.trained(),
        "load": stats.load,
        "audit": stats.audit,
        **({"privacy": federation.budget.record(stats.round)} if federation.budget else {}),
    }
