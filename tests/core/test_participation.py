"""Who takes part in a round: only participants count, and those who fail do not."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from datamodules.stream import FederatedStream
from fedbnn.errors import FederationError
from fedbnn.federation import server
from fedbnn.federation.local import LocalTraining
from fedbnn.messages import Failure, FitInstruction, FitResult, read_update
from fedbnn.methods import FedAvg, FedBNN
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
    for name in ("rows", "rows.scale", "rows.samples"):
        assert torch.equal(later[name][absent], before[name][absent])
    for name in held:
        assert later["rows.samples"][later.classes.index(name)] > 0


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
    assert state["rows.samples"].sum().item() == held == committed.record["samples"]
