"""A late factor is not lost: folded later it gives the posterior it would have given in time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from datamodules.stream import FederatedStream
from fedbnn.defense.gate import Gate
from fedbnn.errors import ConfigError
from fedbnn.federation import exchange, server
from fedbnn.federation.engines import Engine, Private
from fedbnn.federation.parts import Federation, Late, Order
from fedbnn.methods import FedAvg, FedBNN, Method
from fedbnn.protocol.messages import (
    Failure,
    FitInstruction,
    FitResult,
    Refused,
    Update,
    read_update,
)
from fedbnn.protocol.state import State
from fedbnn.seeds import generator
from tests.core.playing import FAST, Federate, Short, sha

ROUNDS = 6
PRODUCT = FedBNN(fold_by="product", r_init=0)
Answer = FitResult | Failure


def likelihood(answer: Answer) -> Answer:
    """The conjugate case: a factor that is the same whatever the prior."""
    if isinstance(answer, Failure):
        return answer
    update = read_update(answer.update)
    random = generator(0, "likelihood", update.round, update.client)
    tensors = {
        name: torch.rand(value.shape, generator=random) if "precision" in name else value * 0
        for name, value in update.tensors.items()
    }
    for name in [name for name in tensors if "info" in name]:
        tensors[name] = torch.randn(tensors[name].shape, generator=random)
    return replace(answer, update=replace(update, tensors=tensors).to_bytes())


class Slow:
    """An engine whose client needs so many rounds for what it was asked in one of them.

    Then it comes with so many `more` numbers.
    """

    def __init__(
        self, engine: Engine, round: int, client: int, delay: int, stop: int = 0, more: int = 0
    ) -> None:
        self.engine, self.slow, self.comes, self.stop = engine, (round, client), round + delay, stop
        self.more = more
        self.held: list[Answer] = []

    def gather(self, payload: bytes, clients: Sequence[int], private: Private) -> Iterator[Answer]:
        number = FitInstruction.from_bytes(payload).round
        if number == self.stop:
            raise KeyboardInterrupt
        for answer in map(likelihood, self.engine.gather(payload, clients, private)):
            if (number, answer.client) == self.slow and self.comes > number:
                self.held.append(answer)
                yield Failure(answer.client, "no answer in time")
            else:
                yield answer
        if number == self.comes:
            for one in self.held:
                assert isinstance(one, FitResult)
                yield replace(one, late=True, update=_longer(one.update, self.more))

    def close(self) -> None:
        self.engine.close()


def _longer(payload: bytes, more: int) -> bytes:
    """An update with one more tensor, of so many numbers."""
    update = read_update(payload)
    tensors = {**update.tensors, "more": torch.zeros(more)} if more else update.tensors
    return replace(update, tensors=tensors).to_bytes()


@pytest.fixture
def stream(digits: FederatedStream) -> Short:
    return Short(digits, ROUNDS)


@pytest.fixture
def slow(stream: Short) -> tuple[int, int]:
    """A round, and a client of it that takes no part in the two rounds after it."""
    for number in range(1, ROUNDS - 2):
        later = {*stream.participants(number + 1), *stream.participants(number + 2)}
        for client in stream.participants(number):
            if client not in later:
                return number, client
    raise AssertionError("everybody always takes part")


Play = Callable[..., tuple[Federation, State]]
Turns = Callable[..., tuple["Noted", State]]


@pytest.fixture
def play(federate: Federate, stream: Short, slow: tuple[int, int]) -> Play:
    """A federation with one slow client, and the state it ends with."""

    def played(
        delay: int, stop: int = 0, more: int = 0, **parts: object
    ) -> tuple[Federation, State]:
        how = {"gate": Gate(influence_cap=None), "late": Late("fold"), **parts}
        federation, initial = federate(PRODUCT, local=FAST, stream=stream, **how)
        engine = Slow(federation.engine, *slow, delay, stop, more)
        federation = replace(federation, engine=engine)
        try:
            return federation, server.run(federation, initial)
        except KeyboardInterrupt:
            return federation, initial

    return played


def test_late_or_on_time_gives_the_same_posterior(play: Play, slow: tuple[int, int]) -> None:
    _, on_time = play(delay=0)
    federation, folded_later = play(delay=1)
    assert on_time.classes == folded_later.classes
    for name, tensor in on_time.tensors.items():
        torch.testing.assert_close(folded_later[name], tensor, rtol=1e-5, atol=1e-6)
    _, lost = play(delay=1, late=Late("refuse"))
    assert not torch.allclose(lost["backbone"], on_time["backbone"], rtol=1e-3)
    assert federation.ledger.late(slow[0] + 2).keys() == {slow[1]}


def test_a_round_played_again_finds_the_late_answer_where_it_was(
    play: Play, slow: tuple[int, int]
) -> None:
    _, unbroken = play(delay=1)
    stopped, _ = play(delay=1, stop=slow[0] + 2)
    assert stopped.ledger.round == slow[0] + 1
    _, resumed = play(delay=0, ledger=stopped.ledger)
    assert sha(resumed) == sha(unbroken)


class Noted:
    """A watcher that keeps the records."""

    def __init__(self) -> None:
        self.records: dict[int, dict[str, dict[str, object]]] = {}

    def round_started(self, round: int, clients: Sequence[int]) -> None: ...

    def client_done(self, client: int) -> None: ...

    def round_done(self, record: dict[str, object]) -> None:
        self.records[record["round"]] = record  # type: ignore[index, assignment]


def test_a_late_client_is_on_record_with_its_staleness(play: Play, slow: tuple[int, int]) -> None:
    noted, (number, client) = Noted(), slow
    play(delay=1, watchers=[noted])
    assert str(client) in noted.records[number]["failed"]
    assert [one["late"] for one in noted.records.values() if one["late"]] == [{str(client): 2}]
    assert noted.records[number + 2]["late"] == {str(client): 2}


def test_what_comes_too_late_is_refused_by_name(play: Play, slow: tuple[int, int]) -> None:
    noted, (number, client) = Noted(), slow
    play(delay=1, watchers=[noted], late=Late("fold", max_staleness=1))
    assert noted.records[number + 1]["refused"] == {str(client): "2 rounds late, the most is 1"}


def test_what_is_too_large_is_refused_before_it_waits_on_disk(
    play: Play, slow: tuple[int, int]
) -> None:
    noted, number, gate = Noted(), slow[0], Gate(influence_cap=None, max_megabytes=1.0)
    federation, _ = play(delay=1, more=2**19, watchers=[noted], gate=gate)
    [reason] = noted.records[number + 1]["refused"].values()
    assert str(reason).startswith("too large: 2.")
    assert not federation.ledger.late(number + 2)
    assert not any(one["late"] for one in noted.records.values())


TURNS = {1: (0, 1), 2: (0, 2), 3: (0, 3), 4: (1, 2)}
"""Clients 1 and 2 are late for their first rounds, and come together in the third."""


@pytest.fixture
def in_turns(federate: Federate, digits: FederatedStream) -> Turns:
    """So many rounds of those turns, clients 1 and 2 so many late."""

    def played(
        rounds: int, delays: tuple[int, int] = (0, 0), waits: bytes = b""
    ) -> tuple[Noted, State]:
        noted, stream = Noted(), Short(digits, rounds, participants=TURNS.__getitem__)
        how = {"gate": Gate(influence_cap=None), "late": Late("fold"), "watchers": [noted]}
        federation, initial = federate(PRODUCT, local=FAST, stream=stream, **how)
        for client in TURNS[4] if waits else ():
            federation.ledger.keep_late(4, client, waits)
        engine = Slow(Slow(federation.engine, 1, 1, delays[0]), 2, 2, delays[1])
        return noted, server.run(replace(federation, engine=engine), initial)

    return played


def test_a_round_whose_clients_are_all_late_folds_them_and_asks_nobody(in_turns: Turns) -> None:
    """After it the posterior is the one that clients on time have a round before."""
    _, on_time = in_turns(3)
    noted, folded_later = in_turns(4, (2, 1))
    assert noted.records[4]["late"] == {"1": 3, "2": 2}
    for name, tensor in on_time.tensors.items():
        torch.testing.assert_close(folded_later[name], tensor, rtol=1e-5, atol=1e-6)


def test_late_answers_that_are_all_refused_end_no_run(in_turns: Turns) -> None:
    _, before = in_turns(3)
    noted, after = in_turns(4, waits=b"garbage")
    assert noted.records[4]["refused"].keys() == {"1", "2"}
    assert sha(after) == sha(before)


UPDATE = Update("run", 3, "train", 5, "asked", 1, {}, {"x": torch.ones(1)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prior": "another"}, "not an answer to what was asked in round 3"),
        ({"round": 2}, "not an answer to what was asked in round 2"),
        ({"exchange": "statistics"}, "not an answer to train"),
        ({"client": 6}, "not an answer to train"),
        ({}, "4 rounds late, the most is 3"),
        ({"round": 4}, "owes no answer of round 4"),
    ],
)
def test_only_what_was_asked_may_come_late(change: dict[str, object], reason: str) -> None:
    answer = FitResult(5, replace(UPDATE, **change).to_bytes(), late=True)  # type: ignore[arg-type]
    asked = {3: Order("asked", {5}), 4: Order("asked", {6})}
    exchange.owed(FitResult(5, UPDATE.to_bytes()), asked, folded=6, most=3)
    with pytest.raises(Refused, match=reason):
        exchange.owed(answer, asked, folded=7, most=3)


class Again(Slow):
    """Sends what came late once more in the round after it."""

    def gather(self, payload: bytes, clients: Sequence[int], private: Private) -> Iterator[Answer]:
        yield from super().gather(payload, clients, private)
        if FitInstruction.from_bytes(payload).round == self.comes + 1:
            for one in self.held:
                yield replace(one, late=True)  # type: ignore[type-var]


def test_nobody_counts_twice_by_being_late_again(
    federate: Federate, stream: Short, slow: tuple[int, int]
) -> None:
    noted, (number, client) = Noted(), slow
    how = {"gate": Gate(influence_cap=None), "late": Late("fold"), "watchers": [noted]}
    federation, initial = federate(PRODUCT, local=FAST, stream=stream, **how)
    engine = Again(federation.engine, number, client, 1)
    server.run(replace(federation, engine=engine), initial)
    assert noted.records[number + 2]["late"] == {str(client): 2}
    refused = noted.records[number + 2]["refused"]
    assert refused == {str(client): f"late, and owes no answer of round {number}"}
    assert noted.records[number + 3]["late"] == {}


@pytest.mark.parametrize(
    "method", [FedAvg(), FedBNN(fold_by="moments"), FedBNN(share="backbone_only")], ids=str
)
def test_only_factors_can_wait(federate: Federate, method: Method) -> None:
    with pytest.raises(ConfigError, match="only factors may come late"):
        federate(method, late=Late("fold"))
