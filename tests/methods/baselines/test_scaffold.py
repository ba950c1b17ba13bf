"""SCAFFOLD: identical clients are one SGD, controls average to the server's, and who is not heard keeps its own."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedbnn.errors import ConfigError
from lightning_modules.client_trainer import LocalTraining
from fedbnn.methods import FedAvg, Scaffold
from fedbnn.networks import MLP, Classifier
from fedbnn.seeds import forked
from lightning_modules.point_client import PointClient

WHOLE = LocalTraining(epochs=3, batch_size=64, warmup_epochs=0, momentum=0.9)


def by_hand(stream, lr: float, steps: int) -> torch.Tensor:
    """Plain gradient descent on the images of client 0, written out."""
    with forked(0):
        network = Classifier(MLP(stream.image_shape, (8,)), 2)
    with torch.no_grad():
        network.head.weight.zero_(), network.head.bias.zero_()
    images, labels = next(stream.train(1, 0).batches(64))
    for _ in range(steps):
        gradients = torch.autograd.grad(
            cross_entropy(network(images), labels), list(network.parameters())
        )
        with torch.no_grad():
            for weight, gradient in zip(network.parameters(), gradients, strict=True):
                weight -= lr * gradient
    return torch.cat([weight.detach().reshape(-1) for weight in network.backbone.parameters()])


def test_identical_clients_are_one_plain_sgd(toy, played) -> None:
    stream = toy(rounds=4, alike=True)
    after_two = played(Scaffold(lr=0.05), stream, WHOLE).states[1]
    assert torch.allclose(after_two["backbone"], by_hand(stream, 0.05, 2 * 3), atol=1e-6)
    assert after_two["scaffold.backbone"].abs().max() > 1e-3


def test_the_mean_of_client_controls_is_the_server_control_under_full_participation(
    toy, played
) -> None:
    run = played(Scaffold(lr=0.05), toy(skewed=True))
    own = [run.privates[client] for client in range(4)]
    assert torch.allclose(
        torch.stack([one["backbone"] for one in own]).mean(0),
        run.last["scaffold.backbone"],
        atol=1e-6,
    )
    for number, name in enumerate(run.last.classes):
        rows = torch.stack([one["prototypes"][one.classes.index(name)] for one in own])
        assert torch.allclose(rows.mean(0), run.last["scaffold.prototypes"][number], atol=1e-6)


def test_after_one_round_the_control_is_the_mean_gradient_of_the_path(toy, played) -> None:
    stream = toy(rounds=2, alike=True)
    run = played(Scaffold(lr=0.05), stream, LocalTraining(epochs=1, batch_size=64, warmup_epochs=0))
    first = run.states[0]
    moved = by_hand(stream, 0.05, 0) - first["backbone"]
    assert torch.allclose(first["scaffold.backbone"], moved / 0.05, atol=1e-5)


def test_different_clients_are_corrected(toy, played) -> None:
    stream = toy(rounds=2, skewed=True)
    plain = played(
        FedAvg(lr=0.5),
        stream,
        LocalTraining(optimizer="sgd", epochs=3, batch_size=64, warmup_epochs=0),
    )
    controlled = played(Scaffold(lr=0.5), stream, WHOLE)
    assert torch.allclose(plain.states[0]["backbone"], controlled.states[0]["backbone"], atol=1e-6)
    assert (plain.states[1]["backbone"] - controlled.states[1]["backbone"]).abs().max() > 1e-4


def test_a_client_that_failed_keeps_its_control(toy, played) -> None:
    healthy, unwell = (
        played(Scaffold(), toy(rounds=2)),
        played(Scaffold(), toy(rounds=2), ill={(2, 1)}),
    )
    first = played(Scaffold(), toy(rounds=2), ill={(2, 1), (2, 0)})
    assert torch.equal(unwell.privates[1]["backbone"], first.privates[1]["backbone"])
    assert not torch.equal(unwell.privates[1]["backbone"], healthy.privates[1]["backbone"])
    total = torch.stack([unwell.privates[client]["backbone"] for client in range(4)]).sum(0)
    assert torch.allclose(total / 4, unwell.last["scaffold.backbone"], atol=1e-6)


def test_ten_thousand_registered_clients_cost_nothing(toy, played) -> None:
    run = played(Scaffold(), toy(rounds=2, num_clients=10_000, per_round=10, images=4))
    assert run.files <= 20
    assert sum(tensor.numel() for tensor in run.last.tensors.values()) < 1000


def test_momentum_is_off_whatever_the_budget_says() -> None:
    network = Classifier(MLP((1, 4, 4), (8,)), 2)
    client = PointClient(network, None, Scaffold(), LocalTraining(momentum=0.9))
    optimiser = client.configure_optimizers()
    assert isinstance(optimiser, torch.optim.SGD)
    assert optimiser.defaults["momentum"] == 0
    assert (
        PointClient(network, None, FedAvg(), LocalTraining(optimizer="sgd", momentum=0.9)).momentum
        == 0.9
    )


def test_a_run_that_was_interrupted_goes_on_as_if_nothing_had_happened(toy, played) -> None:
    stream = toy(rounds=4, num_clients=6, per_round=3)
    whole = played(Scaffold(), stream)
    short = played(Scaffold(), _Cut(stream, 2), name="cut")
    assert len(short.states) == 2
    rest = played(Scaffold(), stream, name="cut")
    assert len(rest.states) == 2
    for name, tensor in whole.last.tensors.items():
        assert torch.equal(tensor, rest.last[name]), name


class _Cut:
    """A stream that ends early."""

    def __init__(self, stream, rounds: int) -> None:
        self.stream, self.rounds = stream, rounds

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def test_the_rows_must_be_shared() -> None:
    with pytest.raises(ConfigError, match="library"):
        Scaffold(share="backbone_only")
