"""The four known traps of Pyro: none of them is in the model, and each is real."""

import ast
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

from fedbnn.bayes.inference import ClosedFormELBO
from fedbnn.bayes.model import SITE, BayesianModel, MeanFieldGuide
from tests.core.small_models import BATCH, small


def steps(
    model: nn.Module,
    guide: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    count: int = 5,
    lr: float = 0.05,
) -> None:
    """A few steps of Adam on whatever the guide offers."""
    optimizer = torch.optim.Adam(
        [parameter for parameter in guide.parameters() if parameter.requires_grad], lr
    )
    for _ in range(count):
        optimizer.zero_grad()
        loss(*BATCH).backward()
        optimizer.step()


class Textbook(PyroModule):
    """The model as a tutorial would write it, to put the traps back: one flat site, stock tools
    around it.
    """

    def __init__(self, inner: BayesianModel) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor, labels: Tensor) -> None:
        flat = pyro.sample(
            SITE, dist.Normal(self.inner.prior().loc, self.inner.prior().scale).to_event(1)
        )
        logits = self.inner.outputs(flat, images)[1]
        with pyro.plate("images", len(labels)):
            pyro.sample("labels", dist.Categorical(logits=logits), obs=labels)


# Trap 1: a guide that shares memory with the prior.


def prior_moves(guide_of: Callable[[BayesianModel], nn.Module]) -> bool:
    """Whether a fit changes the prior."""
    model, _ = small()
    before = model.prior().loc.clone()
    guide = guide_of(model)
    elbo = TraceMeanField_ELBO()
    elbo.differentiable_loss(Textbook(model), guide, *BATCH)
    steps(model, guide, lambda *batch: elbo.differentiable_loss(Textbook(model), guide, *batch))
    return not torch.equal(model.prior().loc, before)


def test_the_prior_is_unchanged_after_a_fit() -> None:
    model, guide = small()
    before = [getattr(model.prior(), name).clone() for name in ("loc", "scale", "log_scale")]
    start = guide.loc.detach().clone()
    steps(model, guide, lambda *batch: ClosedFormELBO().differentiable_loss(model, guide, *batch))
    assert not torch.equal(guide.loc, start)
    assert all(
        torch.equal(getattr(model.prior(), name), value)
        for name, value in zip(("loc", "scale", "log_scale"), before, strict=True)
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
    prior = model.prior()
    assert bool((prior.loc == 0).all())
    assert bool((prior.scale == 1).all())
    assert bool((guide.loc == 0).all())
    assert bool((guide.log_scale == 0).all())
    pointers = [
        tensor.data_ptr()
        for tensor in (prior.loc, prior.scale, prior.log_scale, guide.loc, guide.log_scale)
    ]
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
    guide.swap(
        guide.loc + 0.3 * torch.randn(len(guide.loc)), 0.1 * torch.rand(len(guide.loc)) + 0.05
    )
    exact = (
        kl_divergence(
            Normal(guide.loc, guide.log_scale.exp()), Normal(model.prior().loc, model.prior().scale)
        )
        .sum()
        .item()
    )
    elbo, free = ClosedFormELBO(1.0), ClosedFormELBO(0.0)
    found = {
        kl_of_loss(
            lambda: elbo.differentiable_loss(model, guide, *BATCH),
            lambda: free.differentiable_loss(model, guide, *BATCH),
            seed,
        )
        for seed in range(4)
    }
    assert all(value == pytest.approx(exact, rel=1e-5) for value in found)


def test_stock_autonormal_has_the_sampled_kl() -> None:
    """The trap itself: with the auxiliary Delta of the stock guide, the 'closed-form' ELBO varies
    from draw to draw.
    """
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
        losses.append(ClosedFormELBO().differentiable_loss(model, guide, *BATCH).item())
    assert losses[0] == losses[1]


def test_the_closed_form_is_the_stock_elbo_when_that_is_not_sampled() -> None:
    model, guide = small()
    guide.swap(guide.loc + 0.1, 0.07 * torch.ones(len(guide.loc)))
    torch.manual_seed(3)
    stock = TraceMeanField_ELBO().loss(model, guide, *BATCH)
    torch.manual_seed(3)
    ours = ClosedFormELBO(1 / 6).differentiable_loss(model, guide, *BATCH)
    assert 6 * ours.item() == pytest.approx(stock, rel=1e-5)


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
    """The trap itself: the setting that `fedbnn.bayes.model` makes is what keeps clients apart."""
    with pyro.settings.context(module_local_params=False):
        for _ in range(2):
            small()[1](*BATCH)
        names = {f"{MeanFieldGuide.__name__}.{moment}" for moment in ("loc", "log_scale")}
        assert set(pyro.get_param_store().keys()) == names
    pyro.clear_param_store()
    assert pyro.settings.get("module_local_params") is True


# Trap 4: a copied guide breaks the original; so nothing copies guides, only tensors.


def test_no_file_that_knows_a_guide_copies_or_pickles_one() -> None:
    """Copied are a plain backbone, the teacher of the distillation, and Trainers not used yet."""
    folder = Path(__file__).parents[2]
    files = [*(folder / "fedbnn/bayes").glob("*.py"), *(folder / "lightning_modules").glob("*.py")]
    assert len(files) > 5
    found = {path.name: copies(path.read_text()) for path in files}
    copied = {name: calls for name, calls in found.items() if calls}
    assert copied.pop("client_trainer.py")[0].startswith("deepcopy(self._unused[")
    assert copied == {"model.py": ["deepcopy(backbone)"]}
    assert copies("import pickle\ncopy.deepcopy(guide)") == ["pickle", "copy.deepcopy(guide)"]


def copies(source: str) -> list[str]:
    """Calls that copy objects, and modules that pickle them, in a source."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", None)]
            found += [name for name in modules if name in ("pickle", "dill", "cloudpickle")]
        if isinstance(node, ast.Call) and re.search(r"(^|\.)(deep)?copy$", ast.unparse(node.func)):
            found.append(ast.unparse(node))
    return found


def test_swapping_tensors_restores_a_guide_where_a_deep_copy_would_break_it() -> None:
    model, guide = small()
    kept = guide.loc.detach().clone(), guide.log_scale.detach().exp()
    losses = []
    for _ in range(2):
        guide.swap(*kept)
        torch.manual_seed(0)
        losses.append(ClosedFormELBO().differentiable_loss(model, guide, *BATCH).item())
        steps(
            model, guide, lambda *batch: ClosedFormELBO().differentiable_loss(model, guide, *batch)
        )
    assert losses[0] == losses[1]


def test_a_deep_copy_takes_the_model_away_from_the_original() -> None:
    """The trap itself: so the state of a client has to travel as tensors."""
    _, guide = small()
    assert guide.model is not None
    copy.deepcopy(guide)
    with pytest.raises(TypeError):
        _ = guide.model
