"""The loop of the server, whatever the engine: send the prior, collect, gate, fold, commit."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter, process_time

from fedbnn.errors import NumericalError
from fedbnn.federation.exchange import Exchange, exchange, sample_counts
from fedbnn.federation.parts import Federation, Record, RoundStats, SampleCounts
from fedbnn.federation.roll_call import roll_call
from fedbnn.heads import ExactHead, GaussianHead, exact, gaussian
from fedbnn.heads.exact import ExactAggregator
from fedbnn.heads.gaussian import StatisticsAggregator
from fedbnn.machine import memory
from fedbnn.methods.aggregation import Aggregator, largest
from fedbnn.methods.base import Consolidation
from fedbnn.methods.fedbnn import FactorAggregator
from fedbnn.protocol.state import State


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
    stats, before = RoundStats(number, {}), state
    present = roll_call(federation, number, asked, stats)
    stats.counts = sample_counts(federation, number, present)
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
    private = federation.privacy.on
    if isinstance(head, GaussianHead):
        moving = gaussian.SumsAggregator if private else StatisticsAggregator
        yield moving(head, before)
    if isinstance(head, ExactHead):
        fixed = exact.SumsAggregator if private else ExactAggregator
        yield fixed(head, exact.width(head, before))


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


def _finite(state: State, number: int) -> State:
    """The state, if every number in it is one."""
    for name, tensor in state.tensors.items():
        if not math.isfinite(largest(tensor)):
            fix = "lower client.lr or method.scale_lr; the rounds before it are kept"
            raise NumericalError(f"{name} is not finite after round {number}", "fold", fix)
    return state


def _record(federation: Federation, clients: Sequence[int], stats: RoundStats) -> Record:
    """The part of a round's record that does not come from evaluation.

    Of private clients no number that one of them decides.
    """
    private = federation.privacy.on
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
        "train": {} if private else stats.trained(),
        "load": stats.load,
        "audit": {} if private else stats.audit,
        **({"privacy": federation.budget.record(stats.round)} if federation.budget else {}),
    }
