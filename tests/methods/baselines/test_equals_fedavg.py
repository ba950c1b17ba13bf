"""With its own term off each method is FedAvg, bit for bit; rows of absent classes never move."""

import pytest
import torch

from fedbnn.methods.fedavg import FedAvg, FedProx
from fedbnn.methods.importance import EWC, MAS
from fedbnn.methods.lwf import LwF
from fedbnn.methods.scaffold import Scaffold
from fedbnn.networks import MLP, Classifier
from lightning_modules.client_trainer import LocalTraining

OFF = [
    FedProx(mu=0),
    EWC(strength=0),
    MAS(strength=0),
    LwF(strength=0),
    EWC(strength=0, every=1),
    LwF(strength=0, every=1),
]
ON = [FedAvg(), FedProx(mu=1), EWC(strength=100), MAS(strength=10), LwF(strength=3), Scaffold()]
ADAM = LocalTraining(epochs=2, batch_size=8, warmup_epochs=1)


@pytest.mark.parametrize(
    "method", OFF, ids=lambda method: f"{type(method).__name__}-{getattr(method, 'every', None)}"
)
def test_without_its_term_it_is_fedavg_bit_for_bit(method, toy, played) -> None:
    plain, other = played(FedAvg(), toy(), ADAM), played(method, toy(), ADAM)
    for one, two in zip(plain.states, other.states, strict=True):
        for name in ("backbone", "prototypes", "prototypes.samples", "buffers"):
            assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("method", ON[1:], ids=lambda method: type(method).__name__)
def test_with_its_term_it_is_not_fedavg(method, toy, played) -> None:
    assert not torch.equal(
        played(FedAvg(), toy(), ADAM).last["backbone"], played(method, toy(), ADAM).last["backbone"]
    )


@pytest.mark.parametrize("method", ON, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("scope", ["local", "seen"])
def test_rows_of_absent_classes_are_unchanged_bit_for_bit(method, scope, toy, played) -> None:
    states = played(type(method)(scope=scope), toy()).states
    old = states[1].index(("toy/0", "toy/1"))
    assert torch.equal(states[1]["prototypes"][old], states[-1]["prototypes"][old])
    assert not torch.equal(states[2]["prototypes"], states[-1]["prototypes"])


def test_the_pull_of_fedprox_is_mu_times_the_way_from_where_it_began() -> None:
    network = Classifier(MLP((1, 4, 4), (8,)), 2)
    terms = FedProx(mu=0.3).objective(None, network)
    for weight in network.parameters():
        weight.data += 0.1
        weight.grad = torch.zeros_like(weight)
    terms.correct(network, lr=0.01)
    for weight in network.parameters():
        torch.testing.assert_close(weight.grad, torch.full_like(weight, 0.03))
