"""Who takes part in a round: only participants count, and those who fail do not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from datamodules.stream import FederatedStream
from fedbnn.defense.gate import Gate
from fedbnn.errors import FederationError
from fedbnn.federation import server
from fedbnn.federation.parts import Federation
from fedbnn.heads import GaussianHead
from fedbnn.methods import FedAvg, FedBNN
from fedbnn.protocol.messages import Failure, FitInstruction, FitResult, read_update
from fedbnn.protocol.state import State
from lightning_modules.client_trainer import LocalTraining
from tests.core.playing import FAST, Federate, Overheard, Short, after


def test_only_participants_are_asked_and_rows_of_absent_classes_stay_bit_for_bit(
    federate: Federate, digits: FederatedStream
) -> None:
    method = FedBNN(r_init=0)
    federation, initial = federate(method, local=FAST, stream=Short(digits, 3))
    engine = Overheard(federation.engine)  # type: ignore[arg-type]
    federation = replace(federation, engine=engine)
    before = after(replace(federation, stream=Short(digits, 2)), initial)
    later = server.play(federation, before, 3)
    asked = {
        answer.client
        for answer in engine.up
        if isinstance(answer, FitResult) and read_update(answer.update).round == 3
    }
    assert asked == set(digits.participants(3))
    assert len(asked) == 3 < digits.num_clients
    held = {name for client in asked for name in digits.counts(3, client)}
    absent = [row for row, name in enumerate(before.classes) if name not in held]
    assert absent
    for name in ("prototypes", "prototypes.scale", "prototypes.samples"):
        assert torch.equal(later[name][absent], before[name][absent])
    for name in held:
        assert later["prototypes.samples"][later.classes.index(name)] > 0


def test_more_clients_than_train_measure_statistics(
    federate: Federate, digits: FederatedStream
) -> None:
    head = GaussianHead(clients_per_round=6)
    federation, initial = federate(FedAvg(), local=FAST, stream=Short(digits, 2), head=head)
    engine = Overheard(federation.engine)  # type: ignore[arg-type]
    state = after(replace(federation, engine=engine), initial)
    trained, measured = dict[str, int](), dict[str, int]()
    for answer in engine.up:
        assert isinstance(answer, FitResult)
        update = read_update(answer.update)
        seen = trained if update.exchange == "train" else measured
        seen |= {name: seen.get(name, 0) + count for name, count in update.counts.items()}
    assert len(engine.up) == 2 * (3 + 6)
    for counts, name in ((trained, "prototypes.samples"), (measured, "posteriors.count")):
        assert state[name].tolist() == [counts.get(each, 0) for each in state.classes]
    committed = federation.ledger.latest()
    assert committed is not None
    assert len(committed.record["clients"]) == 3
    assert set(digits.participants(2)).isdisjoint(digits.more_participants(2, 6))


def test_the_totals_of_a_round_are_those_of_its_participants(
    federate: Federate, digits: FederatedStream
) -> None:
    federation, initial = federate(FedAvg(), local=FAST, stream=Short(digits, 1))
    engine = Overheard(federation.engine)  # type: ignore[arg-type]
    after(replace(federation, engine=engine), initial)
    instruction = FitInstruction.from_bytes(engine.down[0])
    counts = [digits.counts(1, client) for client in digits.participants(1)]
    assert instruction.total == sum(sum(one.values()) for one in counts)
    assert instruction.class_totals == {
        name: sum(one.get(name, 0) for one in counts)
        for name in sorted({n for one in counts for n in one})
    }


@pytest.mark.parametrize("method", [FedAvg(), FedBNN(r_init=0)])
def test_a_round_in_which_everybody_diverges_folds_nothing(
    federate: Federate, digits: FederatedStream, method: Any
) -> None:
    federation, initial = federate(
        method, local=LocalTraining(lr=1e30, epochs=3, warmup_epochs=0), stream=Short(digits, 1)
    )
    with pytest.raises(FederationError, match="diverged"):
        after(federation, initial)
    assert federation.ledger.latest() is None


def test_one_failed_client_is_named_and_the_others_are_folded(
    federate: Federate, digits: FederatedStream
) -> None:
    lost = digits.participants(1)[0]
    federation, initial = federate(FedBNN(r_init=0), local=FAST, stream=Short(digits, 1))
    engine = Overheard(
        federation.engine,
        lambda answer: Failure(lost, "diverged") if answer.client == lost else answer,
    )  # type: ignore[arg-type]
    state = after(replace(federation, engine=engine), initial)
    committed = federation.ledger.latest()
    assert committed is not None
    assert committed.record["failed"] == {str(lost): "diverged"}
    held = sum(
        sum(digits.counts(1, client).values())
        for client in digits.participants(1)
        if client != lost
    )
    assert state["prototypes.samples"].sum().item() == held == committed.record["samples"]


# How much each of them counts.


def exaggerated(client: int, times: float) -> Callable[[FitResult | Failure], FitResult | Failure]:
    """One client that goes so many times as far from 0 as it should."""

    def change(answer: FitResult | Failure) -> FitResult | Failure:
        if answer.client != client or not isinstance(answer, FitResult):
            return answer
        update = read_update(answer.update)
        far = {**update.tensors, "backbone": times * update.tensors["backbone"]}
        return replace(answer, update=replace(update, tensors=far).to_bytes())

    return change


def played(
    federate: Federate, stream: Short, times: float, cap: float | None
) -> tuple[Federation, State, Overheard, State]:
    """A round of FedAvg in which the first participant exaggerates: how it began and ended."""
    federation, initial = federate(FedAvg(), stream=stream, gate=Gate(influence_cap=cap))
    first = stream.participants(1)[0]
    engine = Overheard(federation.engine, exaggerated(first, times))  # type: ignore[arg-type]
    state = after(replace(federation, engine=engine), initial)
    return federation, initial, engine, state


def test_the_record_says_who_was_folded_with_less_than_full_trust(
    federate: Federate, digits: FederatedStream
) -> None:
    """The trust in the record is that of the fold: with it, the fold can be done again."""
    stream = Short(digits, 1)
    federation, initial, engine, state = played(federate, stream, 1.05, cap=1.0)
    committed = federation.ledger.latest()
    assert committed is not None
    trust = committed.record["trust"]
    assert trust.keys() == {str(digits.participants(1)[0])}
    assert all(0 < value < 1 for value in trust.values())
    classes = sorted(
        {name for client in digits.participants(1) for name in digits.counts(1, client)}
    )
    began = FedAvg().prepare(initial, 1, classes, federation.layout)
    fold, full = (FedAvg().aggregator(began).fold(began) for _ in range(2))
    for answer in engine.up:
        update = read_update(answer.update)  # type: ignore[union-attr]
        fold.add(update, trust.get(str(update.client), 1.0))
        full.add(update)
    assert torch.equal(fold.close()["backbone"], state["backbone"])
    assert not torch.equal(full.close()["backbone"], state["backbone"])


@pytest.mark.parametrize(("times", "cap"), [(1.0, 3.0), (1.4, None)], ids=["honest", "no cap"])
def test_nobody_is_in_the_record_at_full_trust(
    federate: Federate, digits: FederatedStream, times: float, cap: float | None
) -> None:
    federation, *_ = played(federate, Short(digits, 1), times, cap)
    committed = federation.ledger.latest()
    assert committed is not None
    assert committed.record["trust"] == {}
    assert committed.record["refused"] == {}


def test_a_client_that_is_refused_has_no_trust_to_record(
    federate: Federate, digits: FederatedStream
) -> None:
    federation, *_ = played(federate, Short(digits, 1), 30.0, cap=1.0)
    committed = federation.ledger.latest()
    assert committed is not None
    assert committed.record["refused"].keys() == {str(digits.participants(1)[0])}
    assert committed.record["trust"] == {}
