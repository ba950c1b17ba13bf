"""A client from instruction to update: warm-up, odd amounts of data, divergence, what it sends."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from datamodules.stream import ClientData
from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.gaussian import Gaussian
from fedbnn.federation.engines import ClientFailed
from fedbnn.heads import LinearHead, prototypes
from fedbnn.heads.prototypes import Assembly
from fedbnn.images import ImageSet, Preprocess
from fedbnn.methods import FedAvg, FedBNN, Method
from fedbnn.methods.base import Assignment
from fedbnn.networks import MLP
from fedbnn.protocol.messages import FitInstruction, Update, read_update
from fedbnn.protocol.state import State
from lightning_modules.client_runner import ClientRunner
from lightning_modules.client_trainer import ClientTrainer, LocalTraining
from lightning_modules.point_client import Fit

NAMES = ("a", "b", "c")
LOCAL = LocalTraining(epochs=2, batch_size=8, warmup_epochs=2)
BAYES = FedBNN(r_init=0)


class Tiny(nn.Module):
    """A convolution, batch norm on maps of one pixel (as deep in the paper's network), a layer."""

    width = 6

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 8, bias=False),
            nn.BatchNorm2d(4),
            nn.Flatten(),
            nn.Linear(4, 6),
            nn.ReLU(),
        )

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images)
        return features


class Shown:
    """A stream that shows the same images to every client of every round."""

    def __init__(self, images: ImageSet) -> None:
        self.images, self.image_shape = images, tuple(images.pixels.shape[1:])

    def at(self, round: int, client: int, batch_size: int) -> ClientData:
        return ClientData(self.images, batch_size)


def pictures(labels: list[int], side: int = 8, channels: int = 1) -> ImageSet:
    """Bright images of class a, dark ones of class b, grey ones of class c, with noise."""
    source = torch.Generator().manual_seed(1)
    level = torch.tensor([200, 20, 110])[torch.tensor(labels, dtype=torch.long)].view(-1, 1, 1, 1)
    noise = torch.randint(0, 50, (len(labels), channels, side, side), generator=source)
    return ImageSet(
        (level + noise).to(torch.uint8),
        torch.tensor(labels),
        NAMES,
        Preprocess((0.5,), (0.3,)),
    )


def begun(backbone: nn.Module, method: Method, trained: tuple[str, ...] = ()) -> State:
    """The state of a first round in which the rows of the classes `trained` are old."""
    layout = layout_of(backbone)
    weights, buffers = layout.read(backbone)
    state = State({"backbone": weights, "buffers": buffers, **prototypes.empty(backbone.width)})
    state = method.prepare(state, 1, NAMES, layout)
    old = torch.tensor([float(name in trained) for name in NAMES])
    return state.having(
        {
            "prototypes": torch.randn(3, backbone.width + 1) * old[:, None],
            "prototypes.samples": old.double(),
        }
    )


def runner(
    backbone: nn.Module,
    images: ImageSet,
    method: Method,
    local: LocalTraining = LOCAL,
    **trainer: Any,
) -> ClientRunner:
    layout = layout_of(backbone)
    settings = (method, LinearHead(), local, trainer)
    return ClientRunner(Shown(images), backbone, layout, *settings, seed=0)


def answered(client: ClientRunner, state: State, totals: Mapping[str, int] | None = None) -> Update:
    counts = totals or client.stream.images.counts()  # type: ignore[attr-defined]
    sent = FitInstruction("run", 1, "train", state, sum(counts.values()), counts)
    return read_update(client.perform(sent.to_bytes(), 0, None).update)


# Warm-up.


def fit_of(backbone: nn.Module, state: State, images: ImageSet, local: LocalTraining) -> Fit:
    """One client of FedAvg with these images, ready to train from this state."""
    layout, held = layout_of(backbone), tuple(images.counts())
    assembly = Assembly(state, held, len(held))
    network = layout.classifier(backbone, assembly.rows)
    data = ClientData(images.among(held), local.batch_size)
    sent = FitInstruction("run", 1, "train", state)
    assignment = Assignment(sent, layout, 0, held, images, None)
    return Fit(assignment, assembly, network, data, FedAvg(), local, ClientTrainer({}))


def rows_of(fit: Fit) -> Tensor:
    return fit.assignment.layout.from_parameters(dict(fit.network.named_parameters()))["prototypes"]


@pytest.mark.parametrize("trained", [("a",), ()])
def test_warm_up_moves_fresh_rows_and_nothing_else(trained: tuple[str, ...]) -> None:
    backbone = Tiny()
    fit = fit_of(backbone, begun(backbone, FedAvg(), trained), pictures([0, 1] * 8), LOCAL)
    before = fit.assignment.layout.read(backbone)
    assert fit.warm_up() > 0
    after = fit.assignment.layout.read(backbone)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert torch.equal(rows_of(fit)[0], fit.assembly.rows[0]) == ("a" in trained)
    assert not torch.equal(rows_of(fit)[1], fit.assembly.rows[1])


@pytest.mark.parametrize(("trained", "epochs"), [(("a", "b"), 2), ((), 0)])
def test_there_is_no_warm_up_without_fresh_rows_or_epochs(
    trained: tuple[str, ...], epochs: int
) -> None:
    backbone = MLP((1, 8, 8), (6,))
    state, local = begun(backbone, FedAvg(), trained), replace(LOCAL, warmup_epochs=epochs)
    fit = fit_of(backbone, state, pictures([0, 1] * 8), local)
    assert fit.warm_up() == 0.0
    assert torch.equal(rows_of(fit), fit.assembly.rows)


def test_the_prior_of_a_warmed_row_is_its_value_before_warm_up() -> None:
    """With almost no training after it, the factor is the whole way from zero to the warmed row,
    which is the one that points are warmed up to.
    """
    backbone, images = MLP((1, 8, 8), (6,)), pictures([0, 1] * 8)
    state = begun(backbone, BAYES)
    still, points = FedBNN(r_init=0, lr=1e-12), FedAvg(lr=1e-12)
    update = answered(runner(backbone, images, still), state)
    warmed = answered(runner(backbone, images, points), begun(backbone, points))
    prior = Gaussian.from_moments(state["prototypes"][:2], state["prototypes.scale"][:2])
    moved = prior * Gaussian(
        update.tensors["prototypes.precision"].double(), update.tensors["prototypes.info"].double()
    )
    rows = warmed.tensors["prototypes"]
    assert rows.abs().max() > 1e-3
    torch.testing.assert_close(moved.loc.float(), rows, rtol=1e-4, atol=1e-5)
    backbone_prior = Gaussian.from_moments(state["backbone"], state["backbone.scale"])
    still_there = backbone_prior * Gaussian(
        update.tensors["backbone.precision"].double(), update.tensors["backbone.info"].double()
    )
    torch.testing.assert_close(still_there.loc.float(), state["backbone"], rtol=1e-5, atol=1e-6)


# Odd amounts of data.


@pytest.mark.parametrize("method", [FedAvg(), BAYES])
@pytest.mark.parametrize(
    "labels",
    [[0], [1] * 5, [0, 1, 2, 0, 1, 2, 0, 1, 2]],
    ids=["one image", "one class", "a lone last image"],
)
def test_batch_norm_clients_train_on_any_amount_of_data(method: Method, labels: list[int]) -> None:
    backbone = Tiny()
    state = begun(backbone, method)
    update = answered(runner(backbone, pictures(labels), method), state)
    assert update.samples == len(labels)
    assert all(bool(value.isfinite().all()) for value in update.tensors.values())


@pytest.mark.parametrize("method", [FedAvg(), BAYES])
def test_batches_of_one_image_train_too(method: Method) -> None:
    backbone = Tiny()
    state = begun(backbone, method)
    update = answered(
        runner(backbone, pictures([0, 1, 0]), method, replace(LOCAL, batch_size=1)), state
    )
    assert all(bool(value.isfinite().all()) for value in update.tensors.values())


@pytest.mark.parametrize("method", [FedAvg(), BAYES])
def test_a_lone_image_leaves_batch_norm_training_for_the_next_client(method: Method) -> None:
    backbone = Tiny()
    state = begun(backbone, method)
    client = runner(backbone, pictures([0]), method)
    assert torch.equal(answered(client, state).tensors["buffers"], state["buffers"])
    client.stream.images = pictures([0, 1] * 8)  # type: ignore[attr-defined]
    assert not torch.equal(answered(client, state).tensors["buffers"], state["buffers"])


@pytest.mark.parametrize("method", [FedAvg(), BAYES])
def test_measuring_statistics_leaves_batch_norm_training_for_the_next_client(
    method: Method,
) -> None:
    backbone = Tiny()
    state = begun(backbone, method)
    client = runner(backbone, pictures([0, 1] * 8), method)
    first = answered(client, state)
    both = state.only("backbone", "buffers").having(
        {"backbone.before": state["backbone"], "buffers.before": state["buffers"]}
    )
    client.perform(FitInstruction("run", 1, "statistics", both).to_bytes(), 0, None)
    second = answered(client, state)
    assert not torch.equal(first.tensors["buffers"], state["buffers"])
    assert all(torch.equal(value, second.tensors[name]) for name, value in first.tensors.items())


@pytest.mark.parametrize("method", [FedAvg(), BAYES, replace(BAYES, feature_distillation=1.0)])
def test_a_client_answers_the_same_whoever_came_before_it(method: Method) -> None:
    backbone = Tiny()
    state = begun(backbone, method, ("a",))
    first = answered(runner(backbone, pictures([0, 1] * 8), method), state)
    client = runner(backbone, pictures([2, 1, 0] * 3), method)
    answered(client, state)
    client.stream.images = pictures([0, 1] * 8)  # type: ignore[attr-defined]
    second = answered(client, state)
    assert all(torch.equal(value, second.tensors[name]) for name, value in first.tensors.items())


def test_no_data_is_a_failure_with_a_name() -> None:
    backbone = MLP((1, 8, 8), (6,))
    with pytest.raises(ClientFailed, match="no data"):
        answered(runner(backbone, pictures([]), FedAvg()), begun(backbone, FedAvg()), {"a": 1})


def hopeless() -> ImageSet:
    """Noise with labels that do not belong to it: no weights fit, so wrong ones are very wrong."""
    return replace(
        pictures([0, 1, 2] * 16), pixels=torch.randint(0, 256, (48, 1, 8, 8), dtype=torch.uint8)
    )


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("method", [FedAvg(), BAYES])
def test_a_client_that_diverges_says_so_and_sends_nothing(method: Method, optimizer: str) -> None:
    backbone = MLP((1, 8, 8), (6,))
    local = LocalTraining(lr=1e6, optimizer=optimizer, epochs=5, batch_size=8)  # type: ignore[arg-type]
    with pytest.raises(ClientFailed, match="diverged"):
        answered(runner(backbone, hopeless(), method, local), begun(backbone, method))


def test_every_weight_has_a_factor_also_those_of_batch_norm() -> None:
    backbone = Tiny()
    state, layout = begun(backbone, BAYES), layout_of(backbone)
    update = answered(runner(backbone, pictures([0, 1] * 8), BAYES), state)
    for name in ("backbone.precision", "backbone.info"):
        assert update.tensors[name].shape == (layout.size,)
        factors = layout.views(update.tensors[name])
        assert all(bool((factor != 0).any()) for factor in factors.values()), name


def test_scope_seen_puts_all_trained_classes_into_the_softmax_and_sends_only_its_own() -> None:
    backbone, method = MLP((1, 8, 8), (6,)), FedBNN(r_init=0, scope="seen")
    update = answered(
        runner(backbone, pictures([0, 1] * 8), method), begun(backbone, method, ("a", "c"))
    )
    assert update.classes == ("a", "b")
    assert update.tensors["prototypes.info"].shape == (2, 7)
