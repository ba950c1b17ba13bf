"""SCAFFOLD: identical clients are one SGD, different ones are corrected with the right sign.

Controls average to the server's, and who is not heard keeps its own.
"""

import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedbnn.methods.base import LocalObjective
from fedbnn.methods.fedavg import FedAvg
from fedbnn.methods.scaffold import BACKBONE, PROTOTYPES, Controlled, Scaffold
from fedbnn.networks import MLP, Classifier
from fedbnn.protocol.state import State
from fedbnn.seeds import forked
from lightning_modules.client_trainer import LocalTraining
from lightning_modules.point_client import PointClient

WHOLE = LocalTraining(epochs=3, batch_size=64, warmup_epochs=0, momentum=0.9)
Weights = dict[str, torch.Tensor]


def first_network(stream) -> Classifier:
    """What every client of the first task starts from: the toy's backbone, two rows of zeros."""
    with forked(0):
        network = Classifier(MLP(stream.image_shape, (8,)), 2)
    with torch.no_grad():
        network.head.weight.zero_(), network.head.bias.zero_()
    return network


def flat(weights: Weights) -> torch.Tensor:
    """The backbone's part of them as one vector."""
    parts = [value for name, value in weights.items() if name.startswith("backbone.")]
    return torch.cat([part.detach().reshape(-1) for part in parts])


def rows(weights: Weights) -> torch.Tensor:
    """The prototypes' part of them."""
    return torch.cat([weights["head.weight"], weights["head.bias"][:, None]], 1).detach()


def gradient(network: Classifier, weights: Weights, images, labels) -> Weights:
    leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
    loss = cross_entropy(functional_call(network, leaves, (images,)), labels)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def by_hand(stream, lr: float, steps: int) -> torch.Tensor:
    """Plain gradient descent on the images of client 0, written out."""
    network, data = first_network(stream), next(iter(stream.train(1, 0).loader(64, shuffle=False)))
    weights = dict(network.named_parameters())
    for _ in range(steps):
        found = gradient(network, weights, *data)
        weights = {name: value - lr * found[name] for name, value in weights.items()}
    return flat(weights)


def test_identical_clients_are_one_plain_sgd(toy, played) -> None:
    stream = toy(rounds=4, alike=True)
    after_two = played(Scaffold(lr=0.05), stream, WHOLE).states[1]
    assert torch.allclose(after_two["backbone"], by_hand(stream, 0.05, 2 * 3), atol=1e-6)
    assert after_two[BACKBONE].abs().max() > 1e-3


class Bowl(Controlled):
    """a/2 |theta - b|^2 instead of the cross-entropy: its gradient is a (theta - b)."""

    def __init__(self, a: float, b: float, assignment, network, columns) -> None:
        super().__init__(assignment, network, columns)
        self.a, self.b, self.weights = a, b, list(network.parameters())

    def loss(self, images, features, logits, labels) -> torch.Tensor:
        return sum(self.a / 2 * (weight - self.b).square().sum() for weight in self.weights)


class Bowls(Scaffold):
    """SCAFFOLD from theta = 0 on two clients, with g_0 = theta - 2 and g_1 = 2 (theta + 1)."""

    def start(self, state, layout, clients) -> State:
        zero = {"backbone": torch.zeros_like(state["backbone"])}
        return super().start(state.having(zero), layout, clients)

    def objective(self, assignment, network) -> LocalObjective:
        bowl = [(1.0, 2.0), (2.0, -1.0)][assignment.client]
        return Bowl(*bowl, assignment, network, len(assignment.classes))


def test_two_skewed_rounds_are_those_worked_out_by_hand(toy, played) -> None:
    """lr = 1/2 and two steps, so t lr = 1, and every number is exact; all weights are alike.

    Round 1, with x = 0 and all controls 0:
        client 0   g = y - 2:                           y = 0, 1, 3/2
                   c_0 = 0 - 3/2 = -3/2
        client 1   g = 2 y + 2:                         y = 0, -1, -1
                   c_1 = 0 + 1 = 1
        server     x = (3/2 - 1) / 2 = 1/4,             c = (-3/2 + 1) / 2 = -1/4
    Round 2, with g - c_k + c:
        client 0   g = y - 2 + 3/2 - 1/4 = y - 3/4:     y = 1/4, 1/2, 5/8
                   c_0 = -3/2 + 1/4 + (1/4 - 5/8) = -13/8
        client 1   g = 2 y + 2 - 1 - 1/4 = 2 y + 3/4:   y = 1/4, -3/8, -3/8
                   c_1 = 1 + 1/4 + (1/4 + 3/8) = 15/8
        server     x = (5/8 - 3/8) / 2 = 1/8,           c = (-13/8 + 15/8) / 2 = 1/8
    """
    budget, pair = LocalTraining(epochs=2, batch_size=64, warmup_epochs=0), toy(4, 2, 2)
    worked_out = {1: (1 / 4, -1 / 4, (-3 / 2, 1)), 2: (1 / 8, 1 / 8, (-13 / 8, 15 / 8))}
    for rounds, (x, c, own) in worked_out.items():
        run = played(Bowls(lr=0.5), _Cut(pair, rounds), budget)
        _all_are(run.last, backbone=x, prototypes=x, **{BACKBONE: c, PROTOTYPES: c})
        for client, control in enumerate(own):
            _all_are(run.privates[client], **{BACKBONE: control, PROTOTYPES: control})


def _all_are(state: State, **wanted: float) -> None:
    for name, value in wanted.items():
        assert state[name].numel()
        assert torch.equal(state[name], torch.full_like(state[name], value)), name


def by_the_paper(stream, lr: float, steps: int, rounds: int) -> tuple[Weights, Weights]:
    """Algorithm 1 of Karimireddy et al. with option II, everybody taking part: x and c."""
    network = first_network(stream)
    x = {name: weight.detach() for name, weight in network.named_parameters()}
    c, sets = _zeros(x), [stream.train(1, client) for client in range(stream.num_clients)]
    own = [_zeros(x) for _ in sets]
    for _ in range(rounds):
        ends = []
        for images, c_k in zip(sets, own, strict=True):
            ends.append(x)
            for _ in range(steps):
                g = gradient(network, ends[-1], *next(iter(images.loader(64, shuffle=False))))
                ends[-1] = {n: y - lr * (g[n] - c_k[n] + c[n]) for n, y in ends[-1].items()}
        own = [
            {n: c_k[n] - c[n] + (x[n] - y[n]) / (steps * lr) for n in x}
            for c_k, y in zip(own, ends, strict=True)
        ]
        x = {n: _averaged(n, [y[n] for y in ends], sets) for n in x}
        c = {n: torch.stack([c_k[n] for c_k in own]).mean(0) for n in x}
    return x, c


def _zeros(like: Weights) -> Weights:
    return {name: torch.zeros_like(value) for name, value in like.items()}


def _averaged(name: str, values: list[torch.Tensor], sets) -> torch.Tensor:
    """The backbone by images, every row by the images of its class."""
    counts = torch.tensor([[images.counts()[c] for c in ("toy/0", "toy/1")] for images in sets])
    weights = counts if name.startswith("head.") else counts.sum(1, keepdim=True)
    stacked = torch.stack(values)
    shares = (weights / weights.sum(0)).reshape(len(sets), -1, *[1] * (stacked.dim() - 2))
    return (shares * stacked).sum(0)


def test_skewed_clients_follow_the_algorithm_of_the_paper(toy, played) -> None:
    stream = toy(rounds=6, num_clients=3, per_round=3, skewed=True)
    run = played(Scaffold(lr=0.5), _Cut(stream, 3), WHOLE)
    x, c = by_the_paper(stream, 0.5, 3, 3)
    assert torch.allclose(run.last["backbone"], flat(x), atol=1e-5)
    assert torch.allclose(run.last["prototypes"], rows(x), atol=1e-5)
    assert torch.allclose(run.last[BACKBONE], flat(c), atol=1e-5)
    assert torch.allclose(run.last[PROTOTYPES], rows(c), atol=1e-5)


def test_the_mean_of_client_controls_is_the_server_control_under_full_participation(
    toy, played
) -> None:
    run = played(Scaffold(lr=0.05), toy(skewed=True))
    own = [run.privates[client] for client in range(4)]
    backbones = torch.stack([one[BACKBONE] for one in own])
    assert backbones.std(0).max() > 1e-3
    assert torch.allclose(backbones.mean(0), run.last[BACKBONE], atol=1e-6)
    for number, name in enumerate(run.last.classes):
        mean = torch.stack([one[PROTOTYPES][one.classes.index(name)] for one in own]).mean(0)
        assert torch.allclose(mean, run.last[PROTOTYPES][number], atol=1e-6)


def test_after_one_round_the_control_is_the_mean_gradient_of_the_path(toy, played) -> None:
    stream = toy(rounds=2, alike=True)
    run = played(Scaffold(lr=0.05), stream, LocalTraining(epochs=1, batch_size=64, warmup_epochs=0))
    first = run.states[0]
    moved = by_hand(stream, 0.05, 0) - first["backbone"]
    assert torch.allclose(first[BACKBONE], moved / 0.05, atol=1e-5)


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
    assert torch.equal(unwell.privates[1][BACKBONE], first.privates[1][BACKBONE])
    assert not torch.equal(unwell.privates[1][BACKBONE], healthy.privates[1][BACKBONE])
    total = torch.stack([unwell.privates[client][BACKBONE] for client in range(4)]).sum(0)
    assert torch.allclose(total / 4, unwell.last[BACKBONE], atol=1e-6)


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
