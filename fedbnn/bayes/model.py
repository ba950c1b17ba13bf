"""The Bayesian neural network in Pyro: one flat latent site, a mean-field guide, an ELBO with the closed-form KL.

    w ~ N(loc_0, scale_0^2)              the prior: last round's posterior, one location and scale per weight
    y ~ Categorical(softmax(f(x; w)))    the likelihood; perhaps times a prior on the function (`fedbnn.bayes.function_prior`)

The vector `w` holds the latent weights of the backbone, then the rows of the classifier (weights and bias, row by
row). Prior and guide live as long as the process: `BayesianModel.swap` puts the prior of the next client in place.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import constraints
from torch.func import functional_call

from fedbnn.bayes import flipout
from fedbnn.bayes.flatten import Layout
from fedbnn.bayes.function_prior import FunctionPrior
from fedbnn.bayes.mean_field import Draw, WeightedKL
from fedbnn.networks import Classifier

pyro.settings.set(
    module_local_params=True
)  # two clients in one process must never share a parameter
SITE = "weights"


class Weights(dist.Normal):
    """N(loc, exp(log_scale)^2), which remembers its log scale: draws and the KL are differentiable in that."""

    def __init__(self, loc: Tensor, log_scale: Tensor, scale: Tensor | None = None) -> None:
        self.log_scale = log_scale
        super().__init__(
            loc, log_scale.detach().exp() if scale is None else scale, validate_args=False
        )

    def rsample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """One draw of the whole vector."""
        assert not sample_shape
        drawn: Tensor = Draw.apply(self.loc, self.log_scale, self.scale)
        return drawn


def kl_by_weight(posterior: Weights, prior: Weights) -> Tensor:
    """KL(q || p) of each weight; exactly 0 where q = p, also in float32.

    1/2 (exp(2r) - 1 - 2r) + 1/2 ((m - m_0) / s_0)^2  with  r = log s - log s_0
    """
    twice = 2 * (posterior.log_scale - prior.log_scale)
    return 0.5 * (torch.expm1(twice) - twice + ((posterior.loc - prior.loc) / prior.scale).square())


class FeatureClassifier(Classifier):
    """A classifier that shows its features too."""

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Features and logits of a batch."""
        features = self.backbone(images)
        return features, self.head(features)


class BayesianModel(PyroModule):
    """p(y | x, w) p(w) over one flat site, for any backbone of the project."""

    def __init__(
        self,
        backbone: nn.Module,
        layout: Layout,
        use_flipout: bool = False,
        function_prior: float = 0.0,
    ) -> None:
        super().__init__()
        self.function_prior = (
            FunctionPrior(backbone, layout, function_prior) if function_prior else None
        )
        self.network = FeatureClassifier(backbone, 1)
        if use_flipout:
            flipout.prepare(self.network)
        self.layout, self.features = layout, int(backbone.width)  # type: ignore[arg-type]
        self.free_points()
        self.register_buffer("loc", torch.zeros(0))
        self.register_buffer("log_scale", torch.zeros(0))
        self.register_buffer("scale", torch.zeros(0))
        self.centre: Tensor | None = None

    def free_points(self) -> None:
        """Let gradients reach only the parameters that stay points (norm layers with `bayes_norm: false`)."""
        points = {
            f"backbone.{slot.name}"
            for slot in self.layout.slots
            if slot.start >= self.layout.latent
        }
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(name in points)

    def points(self) -> list[nn.Parameter]:
        """What is trained beside the posterior: points of the network, and the map of the function prior."""
        reader = (
            [] if self.function_prior is None else list(self.function_prior.reader.parameters())
        )
        return [
            parameter for parameter in self.network.parameters() if parameter.requires_grad
        ] + reader

    def swap(self, loc: Tensor, scale: Tensor) -> None:
        """Make N(loc, scale^2) the prior. The tensors are copied: nothing outside shares their memory."""
        self.loc = loc.detach().clone()
        self.scale = scale.detach().clone()
        self.log_scale = self.scale.log()

    def prior(self) -> Weights:
        """The prior over the flat vector; read past Pyro's attribute access, which runs effect handlers each time."""
        table: Any = self._buffers
        return Weights(table["loc"], table["log_scale"], table["scale"])

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Parameters of the network by name, as views into the flat vector."""
        body, head = flat.split([self.layout.latent, len(flat) - self.layout.latent])
        rows = head.view(-1, self.features + 1)
        backbone = {f"backbone.{name}": view for name, view in self.layout.views(body).items()}
        return {**backbone, "head.weight": rows[:, :-1], "head.bias": rows[:, -1]}

    def outputs(self, flat: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features and f(x; w); with flipout each image sees its own perturbation around `centre`."""
        parameters: Mapping[str, Tensor] = self.by_name(flat)
        if self.centre is not None:
            parameters = {**parameters, **flipout.centres(self.by_name(self.centre), self.network)}
        found: tuple[Tensor, Tensor] = functional_call(
            self.network, dict(parameters), (images,), tie_weights=False
        )
        return found

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Draw w from the prior and the labels from the likelihood."""
        flat = pyro.sample(SITE, self.prior().to_event(1))
        features, logits = self.outputs(flat, images)
        pyro.sample(
            "labels", dist.Categorical(logits=logits, validate_args=False).to_event(1), obs=labels
        )
        if self.function_prior is not None:
            pyro.factor("function", self.function_prior.log_density(images, features))
        return logits


class MeanFieldGuide(AutoNormal):
    """q(w) = N(loc, exp(log_scale)^2), drawn from the Normal itself.

    Stock `AutoNormal` draws through an auxiliary site and a Delta, which would turn the closed-form KL into a
    sampled one.
    """

    scale_constraint = constraints.positive  # type: ignore[assignment]

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Draw the flat vector."""
        if self.prototype_trace is None:
            self._setup_prototype(images, labels)
        return {SITE: pyro.sample(SITE, self.posterior().to_event(1))}

    @property
    def loc(self) -> nn.Parameter:
        """The means, one per weight."""
        table: Any = self.locs._parameters
        return cast(nn.Parameter, table[SITE + "_unconstrained"])

    @property
    def log_scale(self) -> nn.Parameter:
        """The logarithms of the scales, one per weight."""
        table: Any = self.scales._parameters
        return cast(nn.Parameter, table[SITE + "_unconstrained"])

    def posterior(self) -> Weights:
        """q(w) as a distribution."""
        return Weights(self.loc, self.log_scale)

    def swap(self, loc: Tensor, scale: Tensor) -> None:
        """Start from N(loc, scale^2). The tensors are copied, so the optimiser can never move a prior."""
        self.loc.data, self.loc.grad = loc.detach().clone(), None
        self.log_scale.data, self.log_scale.grad = scale.detach().log(), None


def guide_for(model: BayesianModel, image_shape: tuple[int, int, int]) -> MeanFieldGuide:
    """A mean-field guide of this model, set up by one prototype run in eval mode (batch norm must not see it)."""
    guide = MeanFieldGuide(model, init_loc_fn=_zeros)
    was_training = model.network.training
    model.network.eval()
    model.swap(
        torch.zeros(model.layout.latent + model.features + 1),
        torch.ones(model.layout.latent + model.features + 1),
    )
    guide(torch.zeros(1, *image_shape), torch.zeros(1, dtype=torch.long))
    model.network.train(was_training)
    return guide


def _zeros(site: Mapping[str, object]) -> Tensor:
    """A start of its own memory; `swap` overwrites it."""
    prior: Weights = site["fn"].base_dist  # type: ignore[attr-defined]
    return torch.zeros_like(prior.loc)


class ClosedFormELBO(ELBO):
    """-1/n sum_i log p(y_i | x_i, w) + sum_j kl_weight_j KL_j, the first averaged over `num_particles` draws of w.

    Only observed sites are scored, and the KL is computed once, not once per particle. `kl_weight` is a number
    or a vector (temperature / N for the backbone, by class for rows).
    """

    def __init__(self, kl_weight: Tensor | float = 1.0, num_particles: int = 1) -> None:
        super().__init__(num_particles=num_particles)
        self.kl_weight = kl_weight

    def differentiable_loss(
        self, model: BayesianModel, guide: MeanFieldGuide, images: Tensor, labels: Tensor
    ) -> Tensor:
        """The negative ELBO per image."""
        fits = [self._misfit(model, guide, images, labels) for _ in range(self.num_particles)]
        kl: Tensor = WeightedKL.apply(guide.loc, guide.log_scale, model.prior(), self.kl_weight)
        return torch.stack(fits).mean() + kl

    def _misfit(
        self, model: BayesianModel, guide: MeanFieldGuide, images: Tensor, labels: Tensor
    ) -> Tensor:
        """-1/n sum log p(y | x, w) for one draw of w from the guide."""
        scored, _ = self._get_trace(model, guide, (images, labels), {})
        return torch.stack(list(_observed(scored))).sum().neg() / len(labels)

    def _get_trace(
        self,
        model: BayesianModel,
        guide: MeanFieldGuide,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
    ) -> tuple[poutine.Trace, poutine.Trace]:
        """One trace of the guide and of the model replayed against it."""
        drawn = poutine.trace(guide).get_trace(*args, **kwargs)
        scored = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(*args, **kwargs)
        return scored, drawn

    def loss(
        self, model: BayesianModel, guide: MeanFieldGuide, images: Tensor, labels: Tensor
    ) -> float:
        """The negative ELBO per image as a number."""
        with torch.no_grad():
            return self.differentiable_loss(model, guide, images, labels).item()


def _observed(trace: poutine.Trace) -> Iterator[Tensor]:
    """Log-probabilities of the observed sites of a trace."""
    for site in trace.nodes.values():
        if site["type"] == "sample" and site["is_observed"]:
            likelihood: Any = site["fn"]
            yield likelihood.log_prob(site["value"]).sum()
