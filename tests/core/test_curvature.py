"""Precisions say what the images say: the curvature of the likelihood, and nothing without it."""

from typing import Any, Literal

import pyro
import pytest
import torch
from torch import Tensor
from torchmetrics.functional import spearman_corrcoef

from datamodules.stream import FederatedStream
from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.gaussian import Gaussian
from fedbnn.bayes.inference import GROUPS, ClosedFormELBO, fisher, informed
from fedbnn.bayes.model import BayesianModel, MeanFieldGuide
from fedbnn.errors import ConfigError
from fedbnn.heads import LinearHead, prototypes
from fedbnn.methods import METHODS, FedBNN
from fedbnn.methods.fedbnn import SPEAK_FOR
from fedbnn.methods.importance import fisher_sum
from fedbnn.networks import MLP
from fedbnn.protocol.messages import FitInstruction, Update, read_update
from fedbnn.protocol.state import State
from lightning_modules import svi_client
from lightning_modules.client_runner import ClientRunner
from lightning_modules.client_trainer import LocalTraining
from lightning_modules.svi_client import inferred, kl_weights
from tests.core.posteriors import COUNTS, folded, prior_state, update
from tests.core.small_models import BATCH, SHAPE, small


def exact(model: BayesianModel, flat: Tensor, images: Tensor) -> Tensor:
    """The diagonal Fisher matrix image by image, the expectation over labels taken in full."""
    rows = flat[model.layout.size :].view(-1, model.features + 1)
    model.layout.write(model.network.backbone, flat[: model.layout.size], torch.zeros(0))
    network = model.layout.classifier(model.network.backbone, rows)
    found = model.layout.from_parameters(fisher_sum(network, images, None))
    return torch.cat([found["backbone"], found["prototypes"].reshape(-1)]) / len(images)


def test_sums_over_groups_are_the_fisher_matrix_in_the_mean() -> None:
    """Of prototypes every time; of the backbone within five standard errors."""
    model, guide = small()
    images, flat, size = torch.randn(3 * GROUPS, *SHAPE), guide.loc.detach(), model.layout.size
    found, reference = [fisher(model, flat, images) for _ in range(150)], exact(model, flat, images)
    torch.testing.assert_close(found[0][size:], reference[size:])
    backbone = torch.stack(found)[:, :size]
    error = backbone.std(0) / len(found) ** 0.5
    distance = (backbone.mean(0) - reference[:size]).abs()
    assert float((distance / error.clamp_min(1e-12)).max()) < 5
    assert float(reference[:size].mean()) > 0


def test_what_cannot_be_told_is_exactly_nothing() -> None:
    """One class alone is certain whatever the weights are; a pixel that is always 0 says nothing
    about its weights.
    """
    model, guide = small(rows=1)
    assert bool((fisher(model, guide.loc, BATCH[0]) == 0).all())
    model, guide = small(rows=3)
    images = torch.randn(8, *SHAPE)
    images[:, :, 0, 0] = 0
    found = model.layout.views(fisher(model, guide.loc, images)[: model.layout.size])
    weights = next(value for value in found.values() if value.dim() == 2)
    assert bool((weights[:, 0] == 0).all())
    assert bool((weights[:, 1:] != 0).any())


def test_measuring_changes_neither_means_nor_gradients() -> None:
    model, guide = small()
    before = guide.loc.detach().clone()
    fisher(model, guide.loc, BATCH[0])
    assert torch.equal(guide.loc, before)
    assert guide.loc.grad is None


def test_clients_that_know_their_curvature_fold_to_the_pooled_posterior() -> None:
    """Images x_i ~ N(w, 1 / f) have the curvature f = 2.5, whoever holds them; c is 1 / N for all.
    """
    state, source = prior_state(), torch.Generator().manual_seed(4)
    prior = Gaussian.from_moments(state["backbone"], state["backbone.scale"])
    seen = [torch.randn(sum(c.values()), 5, generator=source).double() for c in COUNTS]
    total, pooled, updates = sum(map(len, seen)), prior, []
    for client, (counts, images) in enumerate(zip(COUNTS, seen, strict=True)):
        evidence, weight = (torch.full((5,), x, dtype=torch.float64) for x in (2.5, 1 / total))
        pooled = pooled * Gaussian(len(images) * evidence, 2.5 * images.sum(0))
        scaled = prior * Gaussian(total * evidence, total * 2.5 * images.mean(0))
        own = informed(prior, scaled.loc, evidence, weight)
        index = state.index(tuple(counts))
        rows = state["prototypes"][index], state["prototypes.scale"][index]
        updates.append(update(state, (own.loc, own.scale), rows, counts, client))
    found = folded(state, updates)
    torch.testing.assert_close(found["backbone"], pooled.loc, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["backbone.scale"], pooled.scale, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("learned", [True, False])
def test_a_factor_of_pieces_is_the_quotient_of_the_whole(
    learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, in float32; the last piece is shorter."""
    monkeypatch.setattr(svi_client, "PIECE", 7)
    backbone = MLP(SHAPE, (5,))
    model = BayesianModel(backbone, layout_of(backbone))
    guide = MeanFieldGuide(model, learned)
    size = model.layout.size + 3 * 6
    start = torch.randn(size), torch.rand(size) + 0.1
    model.swap(*start), guide.swap(start[0] + 0.1, start[1] * 0.9)
    found = inferred(model, guide, start, BATCH[0], torch.rand(size) + 0.1)
    posterior, prior = found.pair(slice(None))
    assert torch.equal(prior.precision, start[1].double().pow(-2))
    whole, factor = posterior / prior, found.factor()
    assert size % 7
    for one, other in zip(vars(factor).values(), vars(whole).values(), strict=True):
        assert torch.equal(one, other.float())


# No information, no certainty.


class Noise(BayesianModel):
    """A term linear in the weights that pulls another way each time: gradients as large as any, and
    no curvature at all. With one class alone the labels say nothing either.
    """

    slope = 0.0

    def outputs(self, flat: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        self.drawn = (flat,)
        return super().outputs(flat, images)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        logits, (flat,) = super().forward(images, labels), self.drawn
        pyro.factor("slope", self.slope * (flat * torch.randn_like(flat)).sum())
        return logits


class Drift:
    """Rounds of ten clients that learn from `Noise`, by hand: two steps of Adam each."""

    def __init__(self, slope: float, learned: bool = False) -> None:
        backbone = MLP(SHAPE, (2,))
        self.model = Noise(backbone, layout_of(backbone))
        self.model.slope = slope
        self.guide = MeanFieldGuide(self.model, learned)
        self.kl_weight = torch.full((self.model.layout.size + 3,), 3e-4 / 20)

    def client(self, state: State) -> Update:
        """What one client finds, from the posterior of the last round."""
        start = state["backbone"], state["backbone.scale"]
        self.model.swap(*start), self.guide.swap(*start)
        rates = [{"params": [self.guide.loc]}]
        rates += [{"params": [p], "lr": 0.02} for p in self.guide.parameters()][1:]
        optimizer = torch.optim.Adam(rates, 1e-3)
        images, labels = BATCH[0][:2], torch.tensor([0, 0])
        for _ in range(2):
            optimizer.zero_grad()
            ClosedFormELBO(self.kl_weight)(self.model, self.guide)(images, labels).backward()
            optimizer.step()
        factor = inferred(self.model, self.guide, start, images, self.kl_weight).factor()
        parts = {"backbone.precision": factor.precision, "backbone.info": factor.info}
        return Update("run", 1, "train", 0, "", 2, {}, {**parts, "buffers": torch.zeros(0)})

    def growth(self, method: FedBNN) -> Tensor:
        """L / L_init of every weight after 40 rounds."""
        first = torch.full_like(self.kl_weight, 0.02)
        tensors = {"backbone": torch.zeros_like(first), "backbone.scale": first}
        state = State({**tensors, "buffers": torch.zeros(0)})
        for _ in range(40):
            state = folded(state, [self.client(state) for _ in range(10)], method.rule)
        return (first / state["backbone.scale"]).square()


@pytest.mark.parametrize(
    ("fold_by", "server_lr", "slope"),
    [
        ("scaled", 3.0, 6.0),
        ("product", 1.0, 6.0),
        ("moments", 1.0, 6.0),
        pytest.param("scaled", 1.0, 6.0, marks=pytest.mark.slow),
        pytest.param("product", 0.1, 6.0, marks=pytest.mark.slow),
        pytest.param("product", 2.0, 6.0, marks=pytest.mark.slow),
        pytest.param("moments", 1.0, 0.0, marks=pytest.mark.slow),
    ],
)
def test_without_information_every_precision_stays_where_it_was(
    fold_by: Literal["scaled", "product", "moments"], server_lr: float, slope: float
) -> None:
    found = Drift(slope).growth(FedBNN(fold_by=fold_by, server_lr=server_lr))
    assert float(found.max()) < 1.05
    assert float(found.min()) > 0.95


def test_scales_that_are_learned_grow_certain_of_noise() -> None:
    """Why curvature is the way of `fedbnn`: the published one, as printed, on the same clients."""
    method = METHODS["fedbnn_paper"]
    found = Drift(6.0, learned=True).growth(method.method(**method.defaults))
    assert float(found.mean()) > 1.5


def test_clients_that_say_the_same_of_precisions_fold_to_it_whatever_their_means_are() -> None:
    """s_k = s for all: with every rule but the mixture's, s is the scale of the fold."""
    state, said = prior_state(), torch.full((5,), 3.0, dtype=torch.float64)
    prior, weight = Gaussian.from_moments(state["backbone"], state["backbone.scale"]), 0 * said + 1
    updates, index = [], state.index(("a",))
    for client in range(4):
        own = informed(prior, prior.loc + client, said, weight)
        rows = state["prototypes"][index], state["prototypes.scale"][index]
        updates.append(update(state, (own.loc, own.scale), rows, {"a": 5}, client))
    for method in (FedBNN(), FedBNN(fold_by="moments")):
        found = folded(state, updates, method.rule)["backbone.scale"]
        torch.testing.assert_close(found, (prior.precision + said).rsqrt(), rtol=1e-12, atol=0)
    mixed = folded(state, updates, FedBNN(fold_by="moments", precision="learned").rule)
    assert bool((mixed["backbone.scale"] > (prior.precision + said).rsqrt()).all())


# What a client's round leaves behind.


def ran(digits: FederatedStream, method: FedBNN) -> tuple[State, ClientRunner, Update]:
    """The posterior a client is sent, the process it ran in, and its answer."""
    backbone, images = MLP(digits.image_shape, (16,)), digits.train(1, 0)
    layout, counts = layout_of(backbone), images.counts()
    points = dict(zip(("backbone", "buffers"), layout.read(backbone), strict=True))
    begun = State({**points, **prototypes.empty(backbone.width)})
    state = method.prepare(begun, method.r_init + 1, list(counts), layout)
    local = LocalTraining(epochs=5, batch_size=16)
    runner = ClientRunner(digits, backbone, layout, method, LinearHead(), local, {}, seed=0)
    sent = FitInstruction("run", 1, "train", state, len(images), counts)
    return state, runner, read_update(runner.perform(sent.to_bytes(), 0, None).update)


def answered(digits: FederatedStream, method: FedBNN) -> tuple[State, Update, Tensor]:
    """The posterior a client is sent, its answer, and the true curvature at the means it found."""
    (state, runner, answer), images = ran(digits, method), digits.train(1, 0)
    backbone, layout = runner.backbone, runner.layout
    found = {site: posterior(state, answer, site).loc for site in ("backbone", "prototypes")}
    layout.write(backbone, found["backbone"].float(), torch.zeros(0))
    network = layout.classifier(backbone, found["prototypes"].float())
    pixels = images.preprocess.normalise(images.pixels)
    true = layout.from_parameters(fisher_sum(network, pixels, None))["backbone"]
    return state, answer, true


def posterior(state: State, answer: Update, site: str) -> Gaussian:
    """Prior times factor."""
    prior = Gaussian.from_moments(state[site], state[f"{site}.scale"])
    return prior * Gaussian(*(answer.tensors[f"{site}.{name}"] for name in ("precision", "info")))


def test_after_one_round_precisions_rank_as_the_true_curvature(digits: FederatedStream) -> None:
    state, answer, true = answered(digits, FedBNN(precision="curvature", temperature=0.03))
    precision = posterior(state, answer, "backbone").precision
    assert float(spearman_corrcoef(precision.float(), true)) > 0.7


def test_a_client_never_becomes_less_certain(digits: FederatedStream) -> None:
    _, answer, _ = answered(digits, FedBNN(precision="curvature"))
    for site in ("backbone", "prototypes"):
        assert float(answer.tensors[f"{site}.precision"].min()) >= 0
        assert float(answer.tensors[f"{site}.precision"].max()) > 0


def test_scales_that_are_held_are_no_parameters_and_do_not_move() -> None:
    model, _ = small()
    guide = MeanFieldGuide(model, learned=False)
    narrow = 0.5 * model.prior().scale
    guide.swap(model.prior().loc, narrow)
    assert [name for name, _ in guide.named_parameters()] == ["loc"]
    assert torch.equal(guide.posterior().scale, narrow)
    ClosedFormELBO(0.3).differentiable_loss(model, guide, *BATCH).backward()
    assert torch.equal(guide.posterior().scale, narrow)


def test_prototypes_of_a_new_class_have_a_wide_prior_and_are_drawn_narrowly(
    digits: FederatedStream,
) -> None:
    """The pull to where they began is weak, and the noise in training that of other weights."""
    state, runner, _ = ran(digits, FedBNN(scale_gain=0.05, prototype_gain=1.0))
    assert runner.posterior is not None
    model, guide, size = runner.posterior.model, runner.posterior.guide, runner.layout.size
    width = state["prototypes"].shape[1]
    for scales, gain in ((model.prior().scale, 1.0), (guide.posterior().scale, 0.05)):
        rows = scales[size:]
        torch.testing.assert_close(rows, torch.full_like(rows, gain * width**-0.5))
        torch.testing.assert_close(scales[:size], state["backbone.scale"])


def test_with_scales_held_the_loss_is_the_one_of_learned_scales_that_have_not_moved() -> None:
    """The same draw, loss and gradient of the means, bit for bit."""
    model, learned = small()
    held, losses = MeanFieldGuide(model, learned=False), []
    held.swap(model.prior().loc + 0.1, model.prior().scale)
    learned.swap(model.prior().loc + 0.1, model.prior().scale)
    for guide in (held, learned):
        torch.manual_seed(5)
        losses.append(ClosedFormELBO(0.3).differentiable_loss(model, guide, *BATCH))
        (2 * losses[-1]).backward()
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(held.loc.grad, learned.loc.grad)


def test_the_presets_of_the_paper_learn_their_scales() -> None:
    presets = [METHODS[name] for name in METHODS if name.startswith("fedbnn_")]
    assert len(presets) > 1
    assert {one.defaults["precision"] for one in presets} == {"learned"}


def test_without_a_temperature_curvature_has_no_measure() -> None:
    with pytest.raises(ConfigError, match="temperature"):
        FedBNN(precision="curvature", temperature=0.0)
    assert FedBNN(temperature=0.0, precision="learned").temperature == 0


@pytest.mark.parametrize(
    ("fold_by", "server_lr", "retention", "each"),
    [
        ("scaled", 1.0, 1.0, 1.0),
        ("scaled", 2.0, 0.8, 1.0),
        ("moments", 1.0, 1.0, 1.0),
        ("product", 0.5, 1.0, 0.5),
        ("product", 2.0, 0.8, 2.0),
    ],
)
def test_the_prior_counts_as_so_many_rounds_of_data(
    fold_by: Any, server_lr: float, retention: float, each: float
) -> None:
    """Five rounds of the same curvature F: tau (L - L_init) / N = p (gamma + ... + gamma^5) F.

    Where p is a step of the mean, it does not count. Two clients have half of the images each.
    """
    how: dict[str, Any] = {"kl_per": SPEAK_FOR[fold_by], "retention": retention}
    method = FedBNN(fold_by=fold_by, server_lr=server_lr, temperature=0.5, **how)
    layout, images, curvature = layout_of(MLP(SHAPE, (2,))), 30, 0.7
    first = layout.initial_scale(method.scale_gain)
    state = State({"backbone": 0 * first, "backbone.scale": first, "buffers": torch.zeros(0)})
    sent = FitInstruction("run", 1, "train", state, images, {})
    weight = kl_weights(method, len(first), 1, {"a": images // 2}, sent)[:-1]
    for _ in range(5):
        prior = Gaussian.from_moments(state["backbone"], state["backbone.scale"])
        factor = informed(prior, 0 * first, torch.full_like(first, curvature), weight) / prior
        parts = {"backbone.precision": factor.precision, "backbone.info": factor.info}
        answer = {**parts, "buffers": torch.zeros(0)}
        updates = [Update("run", 1, "train", k, "", images // 2, {}, answer) for k in range(2)]
        state = method.end_round(state, folded(state, updates, method.rule), layout)
    grown = state["backbone.scale"].double().pow(-2) - first.double().pow(-2)
    strength = each * sum(retention**age for age in range(1, 6))
    expected = torch.full_like(grown, strength * curvature)
    torch.testing.assert_close(method.temperature * grown / images, expected, rtol=1e-3, atol=0)


def test_results_say_how_strong_the_prior_becomes() -> None:
    """Where every image counts once: in a product each client must speak for its own."""
    said = "prior_in_rounds_of_data"
    assert FedBNN(precision="curvature", server_lr=2.0).facts()[said] == "1 a round"
    product = FedBNN(fold_by="product", kl_per="client", server_lr=0.1)
    assert product.facts()[said] == "0.1 a round"
    assert FedBNN(precision="curvature", retention=0.9).facts()[said] == "at most 9"
    assert said not in FedBNN(precision="learned").facts()
    assert said not in FedBNN(fold_by="product").facts()
    assert said not in FedBNN(kl_per="client").facts()
