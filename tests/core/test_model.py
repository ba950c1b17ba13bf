"""The Pyro model: it works for every network, and none of the four known traps is in it."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_mean
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from fedbnn.layout import layout_of
from fedbnn.local import LocalTraining
from fedbnn.methods import FedBNN
from fedbnn.model import SITE, BayesianModel, ClosedFormELBO, MeanFieldGuide, WeightedKL, Weights, guide_for, kl_by_weight
from fedbnn.networks import MLP, NETWORKS, Classifier
from lightning_modules.svi_client import Start, SVIClient

SHAPE = (1, 4, 4)
BATCH = (torch.linspace(-1, 1, 6 * 16).view(6, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2]))


def small(rows: int = 3, flipout: bool = False, scale: float = 0.1) -> tuple[BayesianModel, MeanFieldGuide]:
    """A model over a small MLP with a random prior, and a guide that starts there."""
    trunk = MLP(SHAPE, (5,))
    model = BayesianModel(trunk, layout_of(trunk), flipout)
    guide = guide_for(model, SHAPE)
    size = model.layout.latent + rows * 6
    start = torch.randn(size), torch.full((size,), scale)
    model.swap(*start)
    guide.swap(*start)
    return model, guide


def steps(model: nn.Module, guide: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], count: int = 5, lr: float = 0.05) -> None:
    """A few steps of Adam on whatever the guide offers."""
    optimizer = torch.optim.Adam([parameter for parameter in guide.parameters() if parameter.requires_grad], lr)
    for _ in range(count):
        optimizer.zero_grad()
        loss(*BATCH).backward()
        optimizer.step()


class Textbook(PyroModule):
    """The model as a tutorial would write it, to put the traps back: one flat site, stock tools around it."""

    def __init__(self, inner: BayesianModel) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor, labels: Tensor) -> None:
        flat = pyro.sample(SITE, dist.Normal(self.inner.loc, self.inner.scale).to_event(1))
        logits = self.inner.logits(flat, images)
        with pyro.plate("images", len(labels)):
            pyro.sample("labels", dist.Categorical(logits=logits), obs=labels)


# Trap 1: a guide that shares memory with the prior.


def prior_moves(guide_of: Callable[[BayesianModel], nn.Module]) -> bool:
    """Whether a fit changes the prior."""
    model, _ = small()
    before = model.loc.clone()
    guide = guide_of(model)
    elbo = TraceMeanField_ELBO()
    elbo.differentiable_loss(Textbook(model), guide, *BATCH)
    steps(model, guide, lambda *batch: elbo.differentiable_loss(Textbook(model), guide, *batch))
    return not torch.equal(model.loc, before)


def test_the_prior_is_unchanged_after_a_fit() -> None:
    model, guide = small()
    before = [getattr(model, name).clone() for name in ("loc", "scale", "log_scale")]
    start = guide.loc.detach().clone()
    steps(model, guide, lambda *batch: ClosedFormELBO().differentiable_loss(model, guide, *batch))
    assert not torch.equal(guide.loc, start)
    assert all(
        torch.equal(getattr(model, name), value) for name, value in zip(("loc", "scale", "log_scale"), before, strict=True)
    )


def test_the_stock_start_at_the_prior_moves_the_prior() -> None:
    """The trap itself: the test above would fail with it."""
    assert prior_moves(lambda model: AutoNormal(Textbook(model), init_loc_fn=init_to_mean))


def test_swaps_copy_what_they_are_given() -> None:
    model, guide = small()
    loc, scale = torch.zeros(len(guide.loc)), torch.ones(len(guide.loc))
    model.swap(loc, scale)
    guide.swap(loc, scale)
    loc.fill_(5), scale.fill_(5)
    assert bool((model.loc == 0).all())
    assert bool((model.scale == 1).all())
    assert bool((guide.loc == 0).all())
    assert bool((guide.log_scale == 0).all())
    pointers = [tensor.data_ptr() for tensor in (model.loc, model.scale, model.log_scale, guide.loc, guide.log_scale)]
    assert len(set(pointers)) == 5


def test_the_prior_is_no_parameter() -> None:
    model, guide = small()
    trained = {id(parameter) for parameter in guide.parameters() if parameter.requires_grad}
    assert trained == {id(guide.loc), id(guide.log_scale)}
    assert not any(parameter.requires_grad for parameter in model.network.parameters())


# Trap 2: a KL that is sampled instead of computed.


def kl_of_loss(loss: Callable[[], Tensor], misfit: Callable[[], Tensor], seed: int) -> float:
    """The KL inside a loss: the loss minus the misfit of the same draw."""
    torch.manual_seed(seed)
    total = loss().item()
    torch.manual_seed(seed)
    return total - misfit().item()


def test_the_kl_in_the_loss_is_exact_and_not_sampled() -> None:
    model, guide = small()
    guide.swap(guide.loc + 0.3 * torch.randn(len(guide.loc)), 0.1 * torch.rand(len(guide.loc)) + 0.05)
    exact = kl_divergence(Normal(guide.loc, guide.log_scale.exp()), Normal(model.loc, model.scale)).sum().item()
    elbo, free = ClosedFormELBO(), ClosedFormELBO()
    elbo.kl_weight, free.kl_weight = 1.0, 0.0
    found = {
        kl_of_loss(
            lambda: elbo.differentiable_loss(model, guide, *BATCH), lambda: free.differentiable_loss(model, guide, *BATCH), seed
        )
        for seed in range(4)
    }
    assert all(value == pytest.approx(exact, rel=1e-5) for value in found)


def test_stock_autonormal_has_the_sampled_kl() -> None:
    """The trap itself: with the auxiliary Delta of the stock guide, the 'closed-form' ELBO varies from draw to draw."""
    model, _ = small()
    book = Textbook(model)
    guide = AutoNormal(book, init_scale=0.05)
    guide(*BATCH)

    def spread(blocked: nn.Module | Callable[..., object]) -> float:
        elbo = TraceMeanField_ELBO()
        quiet = poutine.block(book, hide=["labels"])
        values = []
        for seed in range(6):
            torch.manual_seed(seed)
            values.append(elbo.loss(quiet, blocked, *BATCH))
        return max(values) - min(values)

    def direct(*batch: Tensor) -> None:
        pyro.sample(SITE, dist.Normal(guide.locs.weights, guide.scales.weights).to_event(1))

    assert spread(guide) > 1
    assert spread(direct) < 1e-2


def test_the_guide_draws_from_its_normal_without_an_auxiliary_site() -> None:
    _, guide = small()
    trace = poutine.trace(guide).get_trace(*BATCH)
    samples = [name for name, site in trace.nodes.items() if site["type"] == "sample"]
    assert samples == [SITE]
    assert isinstance(trace.nodes[SITE]["fn"].base_dist, dist.Normal)


def test_the_loss_with_fixed_noise_is_the_same_twice() -> None:
    model, guide = small()
    losses = []
    for _ in range(2):
        torch.manual_seed(1)
        losses.append(ClosedFormELBO().loss(model, guide, *BATCH))
    assert losses[0] == losses[1]


def test_the_closed_form_is_the_stock_elbo_when_that_is_not_sampled() -> None:
    model, guide = small()
    guide.swap(guide.loc + 0.1, 0.07 * torch.ones(len(guide.loc)))
    torch.manual_seed(3)
    stock = TraceMeanField_ELBO().loss(model, guide, *BATCH)
    torch.manual_seed(3)
    elbo = ClosedFormELBO()
    elbo.kl_weight = 1 / 6
    assert 6 * elbo.loss(model, guide, *BATCH) == pytest.approx(stock, rel=1e-5)


# Trap 3: two clients that share parameters through the global store.


def test_two_clients_share_nothing_and_the_store_stays_empty() -> None:
    pyro.clear_param_store()
    pairs = [small(), small()]
    before = pairs[1][1].loc.detach().clone()
    steps(*pairs[0], lambda *batch: ClosedFormELBO().differentiable_loss(*pairs[0], *batch))
    assert torch.equal(pairs[1][1].loc, before)
    assert list(pyro.get_param_store().keys()) == []
    assert {parameter.data_ptr() for parameter in pairs[0][1].parameters()}.isdisjoint(
        p.data_ptr() for p in pairs[1][1].parameters()
    )


def test_with_the_global_store_two_guides_are_one() -> None:
    """The trap itself: the setting that `fedbnn.model` makes is what keeps clients apart."""
    model, _ = small()
    model.eval()
    with pyro.settings.context(module_local_params=False):
        guides = [MeanFieldGuide(model, init_loc_fn=lambda site: torch.zeros_like(site["fn"].base_dist.loc)) for _ in range(2)]
        for guide in guides:
            guide(*BATCH)
            getattr(guide.locs, SITE)
        assert list(pyro.get_param_store().keys()) != []
    pyro.clear_param_store()
    assert pyro.settings.get("module_local_params") is True


# Trap 4: a copied guide breaks the original; so nothing copies guides, only tensors.


def test_no_file_that_knows_a_guide_copies_or_pickles_anything() -> None:
    folder = Path(__file__).parents[2]
    files = [folder / "fedbnn" / "model.py", *(folder / "lightning_modules").glob("*.py")]
    assert len(files) > 5
    for path in files:
        assert not {"copy", "deepcopy", "pickle"} & set(
            re.findall(r"\w+", re.sub(r"def \w*copy\w*|\.copy_", "", path.read_text()))
        ), path


def test_swapping_tensors_restores_a_guide_where_a_deep_copy_would_break_it() -> None:
    model, guide = small()
    kept = guide.loc.detach().clone(), guide.log_scale.detach().exp()
    losses = []
    for _ in range(2):
        guide.swap(*kept)
        torch.manual_seed(0)
        losses.append(ClosedFormELBO().loss(model, guide, *BATCH))
        steps(model, guide, lambda *batch: ClosedFormELBO().differentiable_loss(model, guide, *batch))
    assert losses[0] == losses[1]


def test_a_deep_copy_takes_the_model_away_from_the_original() -> None:
    """The trap itself: so the state of a client has to travel as tensors."""
    _, guide = small()
    assert guide.model is not None
    copy.deepcopy(guide)
    with pytest.raises(TypeError):
        guide.model  # noqa: B018


# The KL of a million weights, and its gradient.


def test_kl_is_exactly_zero_at_the_prior_for_a_million_weights_in_float32() -> None:
    loc, log_scale = torch.randn(1_000_000), (0.05 * torch.rand(1_000_000) + 1e-3).log()
    q, p = Weights(loc.clone(), log_scale.clone()), Weights(loc, log_scale)
    assert kl_by_weight(q, p).abs().max().item() == 0
    assert WeightedKL.apply(q.loc, q.log_scale, p, 1.0).item() == 0


def test_kl_is_exactly_zero_when_a_client_begins() -> None:
    model, guide = small()
    assert kl_by_weight(guide.posterior(), model.prior()).abs().max().item() == 0


def test_kl_by_weight_is_that_of_torch_also_close_to_the_prior() -> None:
    for step in (1.0, 1e-2, 1e-4):
        loc, scale = torch.randn(50).double(), torch.rand(50).double() + 0.01
        other, wider = loc + step * torch.randn(50).double(), scale * (1 + step * torch.rand(50).double())
        found = kl_by_weight(Weights(other, wider.log()), Weights(loc, scale.log(), scale))
        reference = kl_divergence(Normal(other, wider), Normal(loc, scale))
        torch.testing.assert_close(found, reference, rtol=1e-7, atol=1e-15)


def test_kl_in_float32_keeps_its_digits_where_the_usual_form_loses_them() -> None:
    """The usual form, log s_0 - log s + (s^2 + (m - m_0)^2) / 2 s_0^2 - 1/2, is a difference of large terms."""
    loc, log_scale = torch.randn(100_000), (0.05 * torch.rand(100_000) + 1e-3).log()
    wider = log_scale + 1e-4 * torch.randn(100_000)
    exact = kl_by_weight(Weights(loc.double(), wider.double()), Weights(loc.double(), log_scale.double())).sum().item()
    ours = kl_by_weight(Weights(loc, wider), Weights(loc, log_scale)).sum().item()
    usual = (log_scale - wider + wider.exp() ** 2 / (2 * log_scale.exp() ** 2) - 0.5).sum().item()
    assert ours == pytest.approx(exact, rel=1e-2)
    assert usual != pytest.approx(exact, rel=1e-2)


def random_kl(count: int = 6) -> tuple[Tensor, Tensor, Weights, Tensor]:
    loc, log_scale = torch.randn(count).double().requires_grad_(), torch.randn(count).double().requires_grad_()
    return loc, log_scale, Weights(torch.randn(count).double(), torch.randn(count).double()), torch.rand(count).double()


def test_the_gradient_of_the_weighted_kl_is_that_of_finite_differences() -> None:
    loc, log_scale, prior, weight = random_kl()
    found = torch.autograd.grad(WeightedKL.apply(loc, log_scale, prior, weight), (loc, log_scale))
    for place, gradient in enumerate(found):
        for entry in range(6):
            step = torch.zeros(6).double().index_fill_(0, torch.tensor([entry]), 1e-5)
            pair = (loc.detach(), log_scale.detach())
            moved = [[value + sign * step if spot == place else value for spot, value in enumerate(pair)] for sign in (1, -1)]
            above, below = (WeightedKL.apply(*one, prior, weight).item() for one in moved)
            assert gradient[entry].item() == pytest.approx((above - below) / 2e-5, rel=1e-6, abs=1e-8)


def test_a_draw_is_mean_plus_scale_times_noise_with_the_gradients_of_that() -> None:
    loc, log_scale = torch.randn(50).double().requires_grad_(), torch.randn(50).double().requires_grad_()
    direction = torch.randn(50).double()
    torch.manual_seed(9)
    drawn = Weights(loc, log_scale).rsample()
    torch.manual_seed(9)
    reference = loc + log_scale.exp() * torch.randn(50, dtype=torch.float64)
    torch.testing.assert_close(drawn, reference)
    for one, other in zip(*(torch.autograd.grad(draw @ direction, (loc, log_scale)) for draw in (drawn, reference)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("scalar", [True, False])
def test_weighted_kl_is_the_sum_that_autograd_knows(scalar: bool) -> None:
    loc, log_scale, prior, weight = random_kl()
    factor: Tensor | float = 0.3 if scalar else weight
    found = 2 * WeightedKL.apply(loc, log_scale, prior, factor)
    reference = 2 * (factor * kl_by_weight(Weights(loc, log_scale), prior)).sum()
    torch.testing.assert_close(found, reference)
    torch.testing.assert_close(torch.autograd.grad(found, (loc, log_scale)), torch.autograd.grad(reference, (loc, log_scale)))


# The model itself.

EVERY = [("mlp", {}), ("lenet", {})] + [
    (name, {"norm": norm}) for name in ("paper_resnet", "cifar_resnet18") for norm in ("batch", "group")
]


@pytest.mark.parametrize(("name", "options"), EVERY)
@pytest.mark.parametrize("bayes_norm", [True, False])
def test_every_network_trains(name: str, options: dict[str, str], bayes_norm: bool) -> None:
    side = 32 if name == "lenet" else 16
    trunk = NETWORKS[name]((3, side, side), **options)
    layout = layout_of(trunk, bayes_norm)
    statistics = layout.read(trunk)[1]
    model = BayesianModel(trunk, layout)
    guide = guide_for(model, (3, side, side))
    assert torch.equal(layout.read(trunk)[1], statistics), "the prototype run must not reach batch norm"
    size = layout.latent + 2 * (trunk.width + 1)
    loc = torch.cat([layout.read(trunk)[0][: layout.latent], torch.zeros(2 * (trunk.width + 1))])
    model.swap(loc, torch.full((size,), 0.01))
    guide.swap(loc, torch.full((size,), 0.01))
    loss = ClosedFormELBO().differentiable_loss(model, guide, torch.randn(4, 3, side, side), torch.tensor([0, 1, 0, 1]))
    loss.backward()
    assert guide.loc.grad is not None
    assert bool(guide.loc.grad.isfinite().all())
    assert bool((guide.loc.grad[: layout.latent] != 0).any())
    assert bool((guide.log_scale.grad[: layout.latent] != 0).any())
    points = [parameter for parameter in model.network.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in points) == layout.size - layout.latent
    assert all(bool((parameter.grad != 0).any()) for parameter in points)
    assert torch.equal(layout.read(trunk)[1], statistics) == (not layout.buffers)


def test_swap_takes_any_number_of_rows() -> None:
    model, guide = small(rows=3)
    for rows in (7, 1, 4):
        size = model.layout.latent + rows * 6
        model.swap(torch.zeros(size), torch.ones(size))
        guide.swap(torch.zeros(size), torch.ones(size))
        images, labels = BATCH[0], torch.zeros(6, dtype=torch.long)
        assert model.logits(guide.loc, images).shape == (6, rows)
        ClosedFormELBO().differentiable_loss(model, guide, images, labels).backward()
        assert guide.loc.grad.shape == (size,)


def test_the_flat_vector_is_the_trunk_then_the_rows_with_their_bias() -> None:
    model, guide = small()
    network = Classifier(MLP(SHAPE, (5,)), 3)
    rows = guide.loc[model.layout.latent :].view(3, 6)
    model.layout.write(network.trunk, guide.loc[: model.layout.latent].detach(), torch.zeros(0))
    with torch.no_grad():
        network.head.weight.copy_(rows[:, :5]), network.head.bias.copy_(rows[:, 5])
    torch.testing.assert_close(model.logits(guide.loc, BATCH[0]), network(BATCH[0]))


def test_at_no_width_the_loss_is_the_cross_entropy_of_the_means() -> None:
    model, guide = small(scale=1e-20)
    loss = ClosedFormELBO().loss(model, guide, *BATCH)
    reference = nn.functional.cross_entropy(model.logits(guide.loc, BATCH[0]), BATCH[1]).item()
    assert loss == pytest.approx(reference, rel=1e-5)


def test_more_particles_average_the_misfit_and_count_the_kl_once() -> None:
    model, guide = small()
    guide.swap(guide.loc + 0.1, torch.full((len(guide.loc),), 0.05))
    one, four = ClosedFormELBO(), ClosedFormELBO(num_particles=4)
    torch.manual_seed(0)
    singles = torch.tensor([one.loss(model, guide, *BATCH) for _ in range(4)])
    torch.manual_seed(0)
    assert four.loss(model, guide, *BATCH) == pytest.approx(singles.mean().item(), rel=1e-5)


# Flipout.


def logits_of(model: BayesianModel, guide: MeanFieldGuide, draws: int) -> Tensor:
    return torch.stack([model.logits(guide.posterior().rsample(), BATCH[0]) for _ in range(draws)])


def test_flipout_without_centres_is_the_plain_network() -> None:
    model, guide = small(flipout=True)
    plain = Classifier(MLP(SHAPE, (5,)), 3)
    model.layout.write(plain.trunk, guide.loc[: model.layout.latent].detach(), torch.zeros(0))
    rows = guide.loc[model.layout.latent :].view(3, 6).detach()
    with torch.no_grad():
        plain.head.weight.copy_(rows[:, :5]), plain.head.bias.copy_(rows[:, 5])
    torch.testing.assert_close(model.logits(guide.loc, BATCH[0]), plain(BATCH[0]))


def linear_pair(flipout: bool) -> tuple[BayesianModel, MeanFieldGuide]:
    """A model without hidden layers, where the mean of the logits is known: f(x; m)."""
    trunk = nn.Flatten()
    trunk.width = 16
    model = BayesianModel(trunk, layout_of(trunk), flipout)
    guide = guide_for(model, SHAPE)
    torch.manual_seed(5)
    start = torch.randn(3 * 17), torch.full((3 * 17,), 0.5)
    model.swap(*start)
    guide.swap(*start)
    return model, guide


def test_flipout_keeps_mean_and_variance_of_the_logits_and_decorrelates_images() -> None:
    plain, flipped = linear_pair(False), linear_pair(True)
    flipped[0].centre = flipped[1].loc
    with torch.no_grad():
        centre = plain[0].logits(plain[1].loc, BATCH[0])
        ours, theirs = logits_of(*flipped, 1500), logits_of(*plain, 1500)
    torch.testing.assert_close(ours.mean(0), centre, rtol=0, atol=0.25)
    torch.testing.assert_close(ours.std(0), theirs.std(0), rtol=0.12, atol=0)
    shared = [torch.corrcoef(draws[:, :2, 0].T)[0, 1].abs().item() for draws in (ours, theirs)]
    assert shared[0] < 0.5 * shared[1]


def gradient_variance(model: BayesianModel, guide: MeanFieldGuide, draws: int = 150) -> tuple[Tensor, Tensor]:
    images = torch.randn(256, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(256) % 3
    elbo, found = ClosedFormELBO(), []
    elbo.kl_weight = 0.0
    for _ in range(draws):
        guide.loc.grad = None
        elbo.differentiable_loss(model, guide, images, labels).backward()
        found.append(guide.loc.grad.clone())
    stacked = torch.stack(found)
    return stacked.mean(0), stacked.var(0).sum()


def test_flipout_cuts_the_variance_of_the_gradient_and_not_its_mean() -> None:
    plain, flipped = linear_pair(False), linear_pair(True)
    flipped[0].centre = flipped[1].loc
    (mean, variance), (flipped_mean, flipped_variance) = gradient_variance(*plain), gradient_variance(*flipped)
    assert flipped_variance < 0.5 * variance
    error = (variance / 150).sqrt() + (flipped_variance / 150).sqrt()
    assert (mean - flipped_mean).norm() < 3 * error


def test_flipout_works_for_convolutions_with_batch_norm() -> None:
    trunk = NETWORKS["paper_resnet"]((3, 16, 16))
    layout = layout_of(trunk, bayes_norm=False)
    weights, _ = layout.read(trunk)
    model = BayesianModel(trunk, layout, use_flipout=True)
    guide = guide_for(model, (3, 16, 16))
    loc = torch.cat([weights[: layout.latent], torch.zeros(2 * 1001)])
    model.swap(loc, torch.full_like(loc, 0.01))
    guide.swap(loc, torch.full_like(loc, 0.01))
    model.centre = guide.loc
    ClosedFormELBO().differentiable_loss(model, guide, torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 0, 1])).backward()
    assert bool(guide.loc.grad.isfinite().all())
    assert bool(guide.log_scale.grad.isfinite().all())


def test_an_svi_client_puts_prior_and_start_in_place() -> None:
    model, guide = small()
    loc = torch.randn(len(guide.loc))
    start = Start(loc, torch.full_like(loc, 0.2), loc + 1)
    client = SVIClient(model, guide, start, torch.ones_like(loc), FedBNN(), LocalTraining())
    assert torch.equal(model.loc, loc)
    assert torch.equal(guide.loc, loc + 1)
    groups = client.configure_optimizers().param_groups
    assert [group["lr"] for group in groups] == [1e-3, 1e-3 * FedBNN().scale_lr]
    assert [parameter is guide.log_scale for parameter in groups[1]["params"]] == [True]
