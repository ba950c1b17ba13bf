"""The Bayesian neural network in Pyro: one flat latent site and a mean-field guide.

    w ~ N(loc_0, scale_0^2)              the prior: last round's posterior
    y ~ Categorical(softmax(f(x; w)))    the likelihood; with distillation times p(f_0 | f)

The vector `w` holds the weights of the backbone, then the prototypes of the classifier row by row.
Prior and guide live as long as the process: `swap` puts those of the next client in place.

Feature distillation: what the last global model saw in an image stays readable. With f_0 the
features under the weights a client was sent and f those under the weights it trains, every image
adds to the loss, for points and for posteriors alike,

    lambda |f + V f + b - f_0|^2 / E |f_0|^2

V and b begin at 0 on every client and are fitted with the weights: features may turn and grow,
which the server follows (`fedbnn.heads.gaussian`), but nothing that earlier classes need is lost
from them. To a posterior it is a prior on the function: a factor p(f_0 | f) beside the likelihood.
"""

from copy import deepcopy
from typing import Any, cast

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.func import functional_call

from fedbnn.bayes.flatten import Layout
from fedbnn.networks import Classifier

SITE = "weights"
"""The one latent site: all weights in one vector."""
SMALLEST = 1e-6
pyro.settings.set(module_local_params=True)  # two clients must never share a parameter


class Draw(torch.autograd.Function):
    """w = m + s * noise, differentiable in m and log s, in the fewest passes over memory.

    d/dm = 1        d/d(log s) = s * noise
    """

    @staticmethod
    def forward(ctx: Any, loc: Tensor, log_scale: Tensor, scale: Tensor) -> Tensor:
        """One draw; the scaled noise is kept for the gradient."""
        noise = torch.randn_like(loc).mul_(scale)
        ctx.save_for_backward(noise)
        return loc + noise

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradient itself, and the gradient times the scaled noise, which is used once."""
        (noise,) = ctx.saved_tensors
        return gradient, noise.mul_(gradient), None


class Weights(dist.Normal):
    """N(loc, exp(log_scale)^2); draws and KL differentiate in the log scale.

    Without a log scale the scale given is held.
    """

    def __init__(self, loc: Tensor, log_scale: Tensor | None, scale: Tensor | None = None) -> None:
        self.log_scale = log_scale
        if scale is None:
            assert log_scale is not None
            scale = log_scale.detach().exp()
        super().__init__(loc, scale, validate_args=False)

    def rsample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """One draw of the whole vector."""
        assert not sample_shape
        if self.log_scale is None or not self.log_scale.requires_grad:
            return torch.randn_like(self.loc).mul_(self.scale).add_(self.loc)
        drawn: Tensor = Draw.apply(self.loc, self.log_scale, self.scale)
        return drawn


class FeatureDistillation(nn.Module):
    """A frozen copy of the backbone as it was sent, and the map that reads its features."""

    def __init__(self, backbone: nn.Module, layout: Layout, weight: float) -> None:
        super().__init__()
        self.layout, self.weight = layout, weight
        frozen = deepcopy(backbone).requires_grad_(False).eval()
        self.outside = (frozen,)  # in a tuple it is no submodule: nobody can train it
        self.reader = nn.Linear(int(backbone.width), int(backbone.width))  # type: ignore[arg-type]
        self.swap(*layout.read(backbone))

    @property
    def teacher(self) -> nn.Module:
        """The backbone as it was sent, in eval mode."""
        return self.outside[0]

    def swap(self, weights: Tensor, buffers: Tensor) -> None:
        """The backbone sent to the next client, with a map that changes nothing yet."""
        self.layout.write(self.teacher, weights, buffers)
        for parameter in self.reader.parameters():
            parameter.data.zero_()
            parameter.grad = None

    def forward(self, images: Tensor, features: Tensor) -> Tensor:
        """The mean over a batch of what its images add to the loss."""
        with torch.no_grad():
            wanted = self.teacher.to(images.device, images.dtype)(images)
        misread = (features + self.reader(features) - wanted).square().sum(1).mean()
        unit = wanted.square().sum(1).mean().clamp_min(SMALLEST)
        return cast(Tensor, self.weight * misread / unit)


class FeatureClassifier(Classifier):
    """A classifier that shows its features too."""

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Features and logits of a batch."""
        return self.outputs(images)


class BayesianModel(PyroModule):
    """p(y | x, w) p(w) over one flat site, for any backbone."""

    def __init__(self, backbone: nn.Module, layout: Layout, distillation: float = 0.0) -> None:
        super().__init__()
        part = FeatureDistillation(backbone, layout, distillation) if distillation else None
        self.distillation, self.distils = part, part is not None
        self.network = FeatureClassifier(backbone, 1).requires_grad_(False)
        self.layout, self.features = layout, int(backbone.width)  # type: ignore[arg-type]
        self.moments = nn.Module()  # a plain module: its buffers are read without Pyro's handlers
        self.swap(torch.zeros(0), torch.ones(0))

    def swap(self, loc: Tensor, scale: Tensor) -> None:
        """Make N(loc, scale^2) the prior; copied, so that nothing outside shares its memory."""
        loc, scale = loc.detach().clone(), scale.detach().clone()
        for name, value in (("loc", loc), ("scale", scale), ("log", scale.log())):
            self.moments.register_buffer(name, value)

    def prior(self) -> Weights:
        """The prior over the flat vector."""
        moments = self.moments
        return Weights(moments.loc, moments.log, moments.scale)  # type: ignore[arg-type]

    def trained(self) -> list[nn.Parameter]:
        """What is trained beside the posterior: the map of the distillation, while it distils."""
        if self.distillation is None or not self.distils:
            return []
        return list(self.distillation.parameters())

    def outputs(self, flat: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features and f(x; w)."""
        named = self.layout.by_parameter_of(flat)
        found = functional_call(self.network, named, (images,), tie_weights=False)
        return cast(tuple[Tensor, Tensor], found)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Draw w from the prior and the labels from the likelihood."""
        flat = pyro.sample(SITE, self.prior().to_event(1))
        features, logits = self.outputs(flat, images)
        likelihood = dist.Categorical(logits=logits, validate_args=False).to_event(1)
        pyro.sample("labels", likelihood, obs=labels)
        if self.distillation is not None and self.distils:
            pyro.factor("features", -len(images) * self.distillation(images, features))
        return logits


class MeanFieldGuide(AutoGuide):
    """q(w) = N(loc, exp(log_scale)^2), drawn from the Normal itself, one number each a weight.

    Scales that are not learned are held, as they were swapped in: draws have them, and the KL is
    that of the means alone, for its other term does not change. Stock `AutoNormal` draws through an
    auxiliary site and a Delta, which would turn the closed-form KL into a sampled one.
    """

    def __init__(self, model: BayesianModel, learned: bool = True) -> None:
        super().__init__(model)
        self.loc = nn.Parameter(torch.zeros(0))
        self.log_scale = nn.Parameter(torch.zeros(0)) if learned else None
        self.held = nn.Module()  # a plain module, as that of the prior

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Draw the flat vector."""
        return {SITE: pyro.sample(SITE, self.posterior().to_event(1))}

    def posterior(self) -> Weights:
        """q(w) as a distribution."""
        if self.log_scale is not None:
            return Weights(self.loc, self.log_scale)
        return Weights(self.loc, None, cast(Tensor, self.held.scale))

    def swap(self, loc: Tensor, scale: Tensor) -> None:
        """Start from N(loc, scale^2); copied, so that the optimiser can never move a prior."""
        self.loc.data, self.loc.grad = loc.detach().clone(), None
        if self.log_scale is not None:
            self.log_scale.data, self.log_scale.grad = scale.detach().log(), None
        else:
            self.held.register_buffer("scale", scale.detach().clone())
