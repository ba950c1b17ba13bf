"""One exchange of a round: an instruction goes down, answers come up through the gate, and fold.

Late is not lost: a likelihood does not expire, so the answer of a slow client is folded later.

    on time   q_1 = q_0 l_a l_b,    q_2 = q_1 l_c
    late      q_1 = q_0 l_a,        q_2 = q_1 l_b l_c       the same, where factors are multiplied

An answer that comes after its exchange has ended is compared with what was asked then, written to
the ledger, and folded with those of the next round, through the same gate. It is on disk before it
counts, so a round that is played again after a crash finds it where it was.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fedbnn.defense.gate import Candidates, ExpectedUpdate, Spec
from fedbnn.defense.privacy import Protection, Question, unit
from fedbnn.defense.robust import Moves, moves_of_means
from fedbnn.federation.parts import COUNTS, Federation, Order, RoundStats, SampleCounts
from fedbnn.heads.exact import ExactAggregator
from fedbnn.heads.gaussian import EXCHANGE as STATISTICS
from fedbnn.heads.gaussian import StatisticsAggregator, without_posteriors
from fedbnn.methods.aggregation import TRAIN, Aggregator
from fedbnn.protocol.messages import FitInstruction, FitResult, Refused, read_update
from fedbnn.protocol.state import State, content_digest
from fedbnn.storage.files import Spool

Exchange = Aggregator | StatisticsAggregator | ExactAggregator


def exchange(
    federation: Federation, state: State, aggregator: Exchange, privates: Spool, stats: RoundStats
) -> State:
    """Send the state down, let the answers through the gate, fold them in client order."""
    this, counts = (federation.run, stats.round, aggregator.exchange), stats.counts
    if isinstance(aggregator, StatisticsAggregator):
        counts = {**counts, **stats.more}
    whole, counts = totals(counts), _asked(federation, aggregator, counts)
    waiting = federation.ledger.late(stats.round) if aggregator.exchange == TRAIN else {}
    if not (counts or waiting):
        return state
    with stats.timing(aggregator.exchange), federation.ledger.spool(*this[1:]) as spool:
        sent = without_posteriors(aggregator.broadcast(state))
        payload = FitInstruction(*this, sent, *whole).to_bytes()
        stats.bytes_down[aggregator.exchange] = len(payload) * len(counts)
        call = _expected(federation, state, aggregator, (*this, content_digest(payload)), counts)
        candidates = Candidates(federation.gate, call, spool, federation.rejected)
        order = Order(call.prior, set(counts))
        if aggregator.exchange == TRAIN:
            federation.asked[stats.round] = order
        _admit_late(federation, waiting, candidates)
        _collect(federation, payload, candidates, privates, stats)
        order.owing -= candidates.heard
        with stats.timing("fold"):
            folded = _fold(aggregator, state, candidates)
        moves = _moves(aggregator, state, folded, candidates)
    for client in set(privates) & set(counts) - set(candidates.trust):
        privates.drop(client)
    stats.add(candidates, moves)
    return folded


def _expected(
    federation: Federation,
    state: State,
    aggregator: Exchange,
    this: tuple[str, int, str, str],
    counts: SampleCounts,
) -> ExpectedUpdate:
    """What may come up in answer to `this`: run, round, exchange, and the digest of the payload."""
    private = _protection(federation, aggregator, state, counts, this[1])
    noisy = private is not None and federation.privacy.at == "client"
    return ExpectedUpdate(
        *(*this, counts),
        expected=partial(aggregator.expected, state),
        defect=private.defect if private and noisy else partial(aggregator.defect, state),
        influence=partial(aggregator.influence, state),
        known=partial(aggregator.known, state),
        apart=partial(aggregator.apart, state),
        kept=partial(_kept, federation, state),
        receipts=not federation.method.server_reads,
        forgets=federation.method.replay is not None and aggregator.exchange != TRAIN,
        **_in_numbers(aggregator, state),
        private=private,
        calm=_calm(aggregator, state),
    )


def _asked(federation: Federation, aggregator: Exchange, counts: SampleCounts) -> SampleCounts:
    """Whom an exchange asks about which images; of statistics not about classes with too few."""
    if aggregator.exchange != STATISTICS or federation.privacy.on:
        return counts
    enough = {client: federation.privacy.enough(held) for client, held in counts.items()}
    return {client: held for client, held in enough.items() if held}


def _calm(aggregator: Exchange, state: State) -> Callable[[int], float]:
    """By client, the distance to others that is none to speak of."""
    if not isinstance(aggregator, Aggregator):
        return lambda _client: 0.0
    least = aggregator.calm(state)
    return lambda client: max(least, aggregator.walked(state, client))


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
            keep_late(federation, answer, candidates)
            continue
        if candidates.admit(answer) and isinstance(answer, FitResult):
            stats.heard(answer)
            if answer.private is not None:
                privates.put(answer.client, answer.private)
        for watcher in federation.watchers:
            watcher.client_done(answer.client)


def keep_late(federation: Federation, answer: FitResult, candidates: Candidates) -> None:
    """An answer to an earlier round waits on disk for the next one, unless that is too late."""
    folded = candidates.call.round + 1
    try:
        candidates.sized(answer.update)
        order = owed(answer, federation.asked, folded, federation.late.rounds)
        federation.ledger.keep_late(folded, answer.client, answer.update)
        order.owing.discard(answer.client)
    except Refused as refusal:
        candidates.refuse(answer.client, answer.update, str(refusal))


def owed(answer: FitResult, asked: Mapping[int, Order], folded: int, most: int) -> Order:
    """The order it answers; raises `Refused` unless it owes that, and is not too many rounds late.

    `asked` has the orders by round, `folded` is the round in which it would count. Who was not
    asked, or has answered, on time or late, owes nothing: nobody counts twice.
    """
    update = read_update(answer.update)
    if (update.client, update.exchange) != (answer.client, TRAIN):
        raise Refused("late, and not an answer to train")
    order = asked.get(update.round)
    if order is None or order.prior != update.prior:
        raise Refused(f"late, and not an answer to what was asked in round {update.round}")
    if answer.client not in order.owing:
        raise Refused(f"late, and owes no answer of round {update.round}")
    if folded - update.round > most:
        raise Refused(f"{folded - update.round} rounds late, the most is {most}")
    return order


def _admit_late(
    federation: Federation, waiting: Mapping[int, bytes], candidates: Candidates
) -> None:
    """Late answers of this round: they answer another instruction, and are folded on this state."""
    for client, payload in waiting.items():
        try:
            update = read_update(payload)
        except Refused as refusal:
            candidates.refuse(client, payload, str(refusal))
            continue
        counts = sample_counts(federation, update.round, [client])
        then = replace(
            candidates.call, round=update.round, prior=update.prior, sample_counts=counts
        )
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
    settings = federation.privacy
    if not settings.on:
        return None
    same = next(iter(counts.values()))
    statistics, length = aggregator.exchange == STATISTICS, 1.0
    if statistics:
        sent, shape = aggregator.broadcast(state), federation.stream.image_shape
        length = unit(federation.head, federation.backbone, federation.layout, sent, shape)
    classes = tuple(name for name in same if name)
    question = Question(state, classes, federation.layout, length)
    seed = federation.budget.seed(round, aggregator.exchange) if federation.budget else 0
    return Protection(settings, question, tuple(sorted(counts)), same, statistics, seed)


def sample_counts(federation: Federation, number: int, clients: Sequence[int]) -> SampleCounts:
    """Images by class of every participant, or only how many where prototypes stay with them.

    Of private clients the same for all: the classes are those of the tasks of the round.
    """
    if federation.privacy.on:
        tasks = zip(federation.stream.tasks, federation.stream.shares(number), strict=True)
        classes = sorted({name for task, share in tasks if share for name in task.classes})
        held = classes if federation.method.shares_prototypes else ()
        return dict.fromkeys(clients, federation.privacy.announced(held))
    shown = _shown(federation, number, clients)
    counts = {client: _held(federation, client, held) for client, held in shown.items()}
    if federation.method.shares_prototypes:
        return counts
    return {client: {"": sum(by_class.values())} for client, by_class in counts.items()}


def _shown(federation: Federation, number: int, clients: Sequence[int]) -> SampleCounts:
    """The images of a round, as the stream has them or as these clients announced them."""
    if not federation.stream.held:
        return {client: federation.stream.counts(number, client) for client in clients}
    said = (federation.ledger.roll(number) or {}).get(COUNTS, {})
    return {client: said[client] for client in clients if client in said}


def _held(federation: Federation, client: int, shown: dict[str, int]) -> dict[str, int]:
    """What one client trains on: the images of the round, and those it replays."""
    replay = federation.method.replay
    if replay is None:
        return shown
    private = federation.ledger.private(client)
    return replay.counts(shown, State.from_bytes(private) if private else None)
