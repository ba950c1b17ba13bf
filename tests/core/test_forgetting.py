"""Forgetting between rounds: means stay, and precision returns towards the initial one."""

from dataclasses import replace

import pytest
import torch

from datamodules.stream import FederatedStream
from fedbnn.federation import server
from fedbnn.methods import FedBNN
from tests.core.playing import FAST, Federate, Short, after


@pytest.mark.parametrize("retention", [0.5])
def test_forgetting_keeps_the_mean_and_that_part_of_what_was_learnt(
    federate: Federate, digits: FederatedStream, retention: float
) -> None:
    method, kept = FedBNN(r_init=0), FedBNN(r_init=0, retention=retention)
    federation, initial = federate(method, local=FAST, stream=Short(digits, 1))
    state = after(federation, initial)
    found = kept.end_round(initial, state, federation.layout)
    first = federation.layout.initial_scale(method.scale_gain).double().pow(-2)
    learnt = state["backbone.scale"].double().pow(-2)
    torch.testing.assert_close(
        found["backbone.scale"].double().pow(-2),
        first + retention * (learnt - first),
        rtol=1e-5,
        atol=0,
    )
    assert torch.equal(found["backbone"], state["backbone"])
    assert torch.equal(found["prototypes"], state["prototypes"])
    assert method.end_round(initial, state, federation.layout) is state


def test_forgetting_leaves_rows_of_absent_classes_alone(
    federate: Federate, digits: FederatedStream
) -> None:
    federation, initial = federate(
        FedBNN(r_init=0, retention=0.5), local=FAST, stream=Short(digits, 3)
    )
    before = after(replace(federation, stream=Short(digits, 2)), initial)
    later = server.play(federation, before, 3)
    held = {name for client in digits.participants(3) for name in digits.counts(3, client)}
    absent = [row for row, name in enumerate(before.classes) if name not in held]
    assert torch.equal(later["prototypes.scale"][absent], before["prototypes.scale"][absent])


def test_forgetting_everything_but_a_little_returns_to_the_initial_scale(
    federate: Federate, digits: FederatedStream
) -> None:
    method = FedBNN(r_init=0, retention=1e-9)
    federation, initial = federate(method, local=FAST, stream=Short(digits, 1))
    state = after(federation, initial)
    torch.testing.assert_close(
        state["backbone.scale"], federation.layout.initial_scale(method.scale_gain)
    )
