"""The loop of the server, whatever the engine: send the prior, collect, gate, fold, commit.

Where clients alone know what they hold, a round begins with a roll call: they announce it.

    down   run and round, and nothing else
    up     how many images of each class the client will show, at most `stream.held` in all

It is an exchange like every other, through the same gate, with the same deadline and quorum. What
is announced is what the gate holds the client to for the rest of the round, what N and the new rows
of the round follow from, and what the ledger keeps before anybody trains: a run that is resumed
asks nobody again. Of private clients nothing is announced: they only settle which images they show.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter, process_time
from typing import Any

from fedbnn import machine
from fedbnn.defense.gate import Candidates, ExpectedUpdate
from fedbnn.errors import FederationError, NumericalError
from fedbnn.federation.exchange import Exchange, exchange, keep_late, sample_counts
from fedbnn.federation.parts import COUNTS, Federation, Record, RoundStats, SampleCounts
from fedbnn.heads import ExactHead, GaussianHead, exact, gaussian
from fedbnn.heads.exact import ExactAggregator
from fedbnn.heads.gaussian import StatisticsAggregator
from fedbnn.methods.aggregation import Aggregator, largest
from fedbnn.methods.base import Consolidation
from fedbnn.methods.fedbnn import FactorAggregator
from fedbnn.protocol.messages import ANNOUNCE, FitInstruction, FitResult, Update
from fedbnn.protocol.state import State, content_digest

LONGEST_NAME = 200
Roll = dict[str, dict[int, Any]]


def run(federation: Federation, initial: State) -> State:
    """Play all rounds that are not committed yet; the state after the last one."""
    committed = federation.ledger.latest()
    state, done = (committed.state, committed.round) if committed else (initial, 0)
    for number in range(done + 1, federation.stream.rounds + 1):
        state = play(federation, state, number)
        machine.trim_memory()
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


def roll_call(
    federation: Federation, number: int, clients: Sequence[int], stats: RoundStats
) -> list[int]:
    """Those of the clients that take part: who has images, or all of them if they are private."""
    if not federation.stream.held:
        return list(clients)
    roll = federation.ledger.roll(number)
    if roll is None:
        roll = _called(federation, number, clients, stats)
        federation.ledger.keep_roll(number, roll)
    stats.failed |= roll["failed"]
    stats.refused |= roll["refused"]
    if federation.privacy.on:
        return list(clients)
    found = [client for client in clients if sum(roll[COUNTS].get(client, {}).values())]
    if clients and not found:
        what, fix = f"nobody has images in round {number}", "resume it when somebody has"
        raise FederationError(what, "stream.partition: held", fix)
    return found


def _called(federation: Federation, number: int, clients: Sequence[int], stats: RoundStats) -> Roll:
    """Ask them; what is announced, and who did not, or not as agreed."""
    this = federation.run, number, ANNOUNCE
    payload = FitInstruction(*this, State({})).to_bytes()
    call = _announcement(federation, (*this, content_digest(payload)), clients)
    trusting = replace(federation.gate, influence_cap=None, robust="influence")
    with stats.timing(ANNOUNCE), federation.ledger.spool(number, ANNOUNCE) as spool:
        candidates = Candidates(trusting, call, spool, federation.rejected)
        for answer in federation.engine.gather(payload, clients, lambda _: None):
            if isinstance(answer, FitResult) and answer.late:
                keep_late(federation, answer, candidates)
            else:
                candidates.admit(answer)
        candidates.close()
        counts = {update.client: dict(call.announced(update)) for update, _ in candidates}
    stats.bytes_down[ANNOUNCE] = len(payload) * len(clients)
    stats.bytes_up[ANNOUNCE] = candidates.bytes_up
    return {COUNTS: counts, "failed": candidates.failed, "refused": candidates.refused}


def _announcement(
    federation: Federation, this: tuple[str, int, str, str], clients: Sequence[int]
) -> ExpectedUpdate:
    """No tensors, but counts that can be believed."""
    most = federation.stream.held

    def defect(update: Update) -> str | None:
        """Why an announcement is none."""
        if not 0 <= update.samples <= most:
            return f"announces {update.samples} images, the most is {most}"
        if any(count < 1 for count in update.counts.values()):
            return "announces a class without images"
        strange = [name for name in update.counts if not _is_name(name)]
        return f"announces a class that has no name: {strange[0][:60]!r}" if strange else None

    return ExpectedUpdate(
        *this,
        {client: {} for client in clients},
        expected=lambda _counts: {},
        defect=defect,
        influence=lambda _update: [],
        known=lambda _update: {},
        announces=True,
    )


def _is_name(text: str) -> bool:
    """Whether a class may be called so: it can be printed, and reads as it is."""
    return 0 < len(text) <= LONGEST_NAME and text.isprintable()


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
