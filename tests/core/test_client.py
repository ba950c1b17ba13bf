"""A client from order to update: warm-up, odd amounts of data, divergence, and what it sends."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.gaussian import Gaussian
from fedbnn.federation.engines import ClientFailed
from fedbnn.federation.local import LocalTraining
from fedbnn.heads import library
from fedbnn.images import ImageSet, Preprocess
from fedbnn.messages import FitInstruction, Update, read_update
from fedbnn.methods import FedAvg, FedBNN, Method
from fedbnn.networks import MLP
from fedbnn.state import State
from lightning_modules.assembly import assemble, read_rows
from lightning_modules.client_runner import ClientRunner
from lightning_modules.client_trainer import ClientTrainer
from lightning_modules.point_fit import warm_up

NAMES = ("a", "b", "c")
LOCAL = LocalTraining(epochs=2, batch_size=8, warmup_epochs=2)
BAYES = FedBNN(r_init=0)


class Tiny(nn.Module):
    """A convolution, batch norm on maps of one pixel, as deep in the paper's network, and a linear layer."""

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


class DatasetRegistry:
    """Images that every client of every round finds."""

    def __init__(self, images: ImageSet) -> None:
        self.images, self.image_shape = images, tuple(images.pixels.shape[1:])

    def train(self, round: int, client: int) -> ImageSet:
        return self.images


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
        training=True,
    )


def begun(backbone: nn.Module, method: Method, trained: tuple[str, ...] = ()) -> State:
    """The state of a first round in which the rows of the classes `trained` are old."""
    layout = layout_of(backbone, getattr(method, "bayes_norm", True))
    weights, buffers = layout.read(backbone)
    state = State({"backbone": weights, "buffers": buffers, **library.empty(backbone.width)})
    state = method.prepare(state, 1, NAMES, layout)
    old = torch.tensor([float(name in trained) for name in NAMES])
    return state.having(
        {"rows": torch.randn(3, backbone.width + 1) * old[:, None], "rows.samples": old.double()}
    )


def worker(
    backbone: nn.Module,
    images: ImageSet,
    method: Method,
    local: LocalTraining = LOCAL,
    **trainer: Any,
) -> ClientRunner:
    layout = layout_of(backbone, getattr(method, "bayes_norm", True))
    return ClientRunner(DatasetRegistry(images), backbone, layout, method, local, trainer, seed=0)


def answered(work: ClientRunner, state: State, totals: Mapping[str, int] | None = None) -> Update:
    counts = totals or work.data.images.counts()  # type: ignore[attr-defined]
    order = FitInstruction("run", 1, "train", state, sum(counts.values()), counts)
    return read_update(work.perform(order.to_bytes(), 0, None).update)


# Warm-up.


@pytest.mark.parametrize("trained", [("a",), ()])
def test_warm_up_moves_fresh_rows_and_nothing_else(trained: tuple[str, ...]) -> None:
    backbone = Tiny()
    state = begun(backbone, FedAvg(), trained)
    layout, images = layout_of(backbone), pictures([0, 1] * 8).among(("a", "b"))
    assembly = assemble(state, ("a", "b"), FedAvg(), None, 6)
    network = assembly.classifier(backbone)
    weights, statistics = layout.read(backbone)
    warm_up(network, assembly, images, LOCAL, ClientTrainer({}))
    rows = read_rows(network)
    assert all(
        torch.equal(one, other)
        for one, other in zip(layout.read(backbone), (weights, statistics), strict=True)
    )
    assert torch.equal(rows[0], assembly.rows[0]) == ("a" in trained)
    assert not torch.equal(rows[1], assembly.rows[1])


@pytest.mark.parametrize(("trained", "epochs"), [(("a", "b"), 2), ((), 0)])
def test_there_is_no_warm_up_without_fresh_rows_or_epochs(
    trained: tuple[str, ...], epochs: int
) -> None:
    backbone = MLP((1, 8, 8), (6,))
    assembly = assemble(begun(backbone, FedAvg(), trained), ("a", "b"), FedAvg(), None, 6)
    network = assembly.classifier(backbone)
    assert (
        warm_up(
            network,
            assembly,
            pictures([0, 1] * 8),
            replace(LOCAL, warmup_epochs=epochs),
            ClientTrainer({}),
        )
        == 0.0
    )
    assert torch.equal(read_rows(network), assembly.rows)


def test_the_prior_of_a_warmed_row_is_its_value_before_warm_up() -> None:
    """With almost no training after the warm-up, the factor is the whole way from zero to the warmed row."""
    backbone = MLP((1, 8, 8), (6,))
    state = begun(backbone, BAYES)
    still = FedBNN(r_init=0, lr=1e-12)
    update = answered(worker(backbone, pictures([0, 1] * 8), still), state)
    prior = Gaussian.from_moments(state["rows"][:2], state["rows.scale"][:2])
    moved = prior * Gaussian(
        update.tensors["rows.precision"].double(), update.tensors["rows.info"].double()
    )
    assert moved.loc.abs().max() > 1e-3
    backbone_prior = Gaussian.from_moments(state["backbone"], state["backbone.scale"])
    still_there = backbone_prior * Gaussian(
        update.tensors["backbone.precision"].double(), update.tensors["backbone.info"].double()
    )
    torch.testing.assert_close(still_there.loc.float(), state["backbone"], rtol=1e-5, atol=1e-6)


# Odd amounts of data.


@pytest.mark.parametrize(
    "method",
    [
        FedAvg(),
        BAYES,
        FedBNN(r_init=0, bayes_norm=False),
        FedBNN(r_init=0, flipout=True, mc_samples=2),
    ],
)
@pytest.mark.parametrize(
    "labels",
    [[0], [1] * 5, [0, 1, 2, 0, 1, 2, 0, 1, 2]],
    ids=["one image", "one class", "a lone last image"],
)
def test_batch_norm_clients_train_on_any_amount_of_data(method: Method, labels: list[int]) -> None:
    backbone = Tiny()
    state = begun(backbone, method)
    update = answered(worker(backbone, pictures(labels), method), state)
    assert update.samples == len(labels)
    assert all(bool(value.isfinite().all()) for value in update.tensors.values())


@pytest.mark.parametrize("method", [FedAvg(), BAYES])
def test_batches_of_one_image_train_too(method: Method) -> None:
    backbone = Tiny()
    state = begun(backbone, method)
    update = answered(
        worker(backbone, pictures([0, 1, 0]), method, replace(LOCAL, batch_size=1)), state
    )
    assert all(bool(value.isfinite().all()) for value in update.tensors.values())


@pytest.mark.parametrize("method", [FedAvg(), BAYES])
def test_a_lone_image_leaves_batch_norm_training_for_the_next_client(method: Method) -> None:
    backbone = Tiny()
    state = begun(backbone, method)
    work = worker(backbone, pictures([0]), method)
    assert torch.equal(answered(work, state).tensors["buffers"], state["buffers"])
    work.data.images = pictures([0, 1] * 8)  # type: ignore[attr-defined]
    assert not torch.equal(answered(work, state).tensors["buffers"], state["buffers"])


@pytest.mark.parametrize("method", [FedAvg(), BAYES])
def test_measuring_statistics_leaves_batch_norm_training_for_the_next_client(
    method: Method,
) -> None:
    backbone = Tiny()
    state = begun(backbone, method)
    work = worker(backbone, pictures([0, 1] * 8), method)
    first = answered(work, state)
    both = state.only("backbone", "buffers").having(
        {"backbone.before": state["backbone"], "buffers.before": state["buffers"]}
    )
    work.perform(FitInstruction("run", 1, "statistics", both).to_bytes(), 0, None)
    second = answered(work, state)
    assert not torch.equal(first.tensors["buffers"], state["buffers"])
    assert all(torch.equal(value, second.tensors[name]) for name, value in first.tensors.items())


@pytest.mark.parametrize("method", [FedAvg(), BAYES, replace(BAYES, function_prior=1.0)])
def test_a_client_answers_the_same_whoever_came_before_it(method: Method) -> None:
    backbone = Tiny()
    state = begun(backbone, method, ("a",))
    first = answered(worker(backbone, pictures([0, 1] * 8), method), state)
    work = worker(backbone, pictures([2, 1, 0] * 3), method)
    answered(work, state)
    work.data.images = pictures([0, 1] * 8)  # type: ignore[attr-defined]
    second = answered(work, state)
    assert all(torch.equal(value, second.tensors[name]) for name, value in first.tensors.items())


def test_no_data_is_a_failure_with_a_name() -> None:
    backbone = MLP((1, 8, 8), (6,))
    with pytest.raises(ClientFailed, match="no data"):
        answered(worker(backbone, pictures([]), FedAvg()), begun(backbone, FedAvg()), {"a": 1})


def hopeless() -> ImageSet:
    """Noise with labels that have nothing to do with it: no weights fit it, so wrong ones are very wrong."""
    return replace(
        pictures([0, 1, 2] * 16), pixels=torch.randint(0, 256, (48, 1, 8, 8), dtype=torch.uint8)
    )


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("method", [FedAvg(), BAYES])
def test_a_client_that_diverges_says_so_and_sends_nothing(method: Method, optimizer: str) -> None:
    backbone = MLP((1, 8, 8), (6,))
    local = LocalTraining(lr=1e6, optimizer=optimizer, epochs=5, batch_size=8)  # type: ignore[arg-type]
    with pytest.raises(ClientFailed, match="diverged"):
        answered(worker(backbone, hopeless(), method, local), begun(backbone, method))


def test_bayes_norm_false_sends_points_that_have_been_trained() -> None:
    backbone, method = Tiny(), FedBNN(r_init=0, bayes_norm=False)
    state = begun(backbone, method)
    latent = layout_of(backbone, False).latent
    update = answered(worker(backbone, pictures([0, 1] * 8), method), state)
    assert update.tensors["backbone.info"].shape == (latent,)
    assert update.tensors["points"].shape == (len(state["backbone"]) - latent,)
    assert not torch.equal(update.tensors["points"], state["backbone"][latent:])


def test_scope_seen_puts_all_trained_classes_into_the_softmax_and_sends_only_its_own() -> None:
    backbone, method = MLP((1, 8, 8), (6,)), FedBNN(r_init=0, scope="seen")
    update = answered(
        worker(backbone, pictures([0, 1] * 8), method), begun(backbone, method, ("a", "c"))
    )
    assert update.classes == ("a", "b")
    assert update.tensors["rows.info"].shape == (2, 7)
