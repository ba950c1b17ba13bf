"""The negative ELBO of a mean-field posterior over all weights at once, fast.

    -ELBO / n = -1/n sum_i log p(y_i | x_i, w) + sum_j c_j KL_j(q || p),      w ~ q

Networks have millions of weights, so every pass over memory counts: the draw and the weighted KL
make their gradients where the terms are at hand. Stock `TraceMeanField_ELBO` is their specification
in the tests.
"""

from typing import Any, cast

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import ELBO
from torch import Tensor

from fedbnn.bayes.gaussian import spans

SITE = "weights"
"""The one latent site: all weights in one vector."""
PIECE = 2**16
"""Weights whose part in the KL is found at once."""


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


class WeightedKL(torch.autograd.Function):
    """sum_j c_j KL_j(q || p), with both gradients made in the forward pass.

    With r = log s - log s_0,  KL = 1/2 (exp(2r) - 1 - 2r) + 1/2 ((m - m_0) / s_0)^2,  exactly 0
    where q = p, and

        d/dm = c (m - m_0) / s_0^2        d/d(log s) = c (exp(2r) - 1)

    Autograd would keep a dozen vectors as long as the network to find the same. Where scales of q
    are held, the first half is constant and left out: all that is left is the pull on the means.
    """

    @staticmethod
    def forward(
        ctx: Any, loc: Tensor, log_scale: Tensor | None, prior: Weights, weight: Tensor
    ) -> Tensor:
        """The weighted sum, and its gradients for later: on a CPU some weights at a time."""
        weights = torch.as_tensor(weight, dtype=loc.dtype, device=loc.device).expand_as(loc)
        gradients = [torch.empty_like(one) for one in (loc, log_scale) if one is not None]
        total = loc.new_zeros(())
        for here in spans(len(loc), PIECE if loc.device.type == "cpu" else len(loc)):
            pull, scale = gradients[0][here], prior.scale[here]
            distance = (loc[here] - prior.loc[here]).div_(scale)
            total += torch.dot(torch.mul(distance, weights[here], out=pull), distance)
            pull.div_(scale)
            if log_scale is not None:
                assert prior.log_scale is not None
                twice = (log_scale[here] - prior.log_scale[here]).mul_(2)
                growth = torch.expm1(twice, out=gradients[1][here])
                total += torch.dot(torch.sub(growth, twice, out=twice), weights[here])
                growth.mul_(weights[here])
        ctx.save_for_backward(*gradients)
        return total.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The saved gradients, scaled where they lie if they need it: they are used once.

        An accelerator is not asked whether they do: the step would wait for the answer.
        """
        saved = ctx.saved_tensors
        by_loc, by_log_scale = saved if len(saved) > 1 else (*saved, None)
        for found in saved if gradient.device.type != "cpu" or gradient != 1 else ():
            found.mul_(gradient)
        return by_loc, by_log_scale, None, None


class ClosedFormELBO(ELBO):
    """The negative ELBO per image with the closed-form KL; only observed sites are scored.

    `kl_weight` is a number or a vector c (temperature / N for the backbone, by class for
    prototypes); `kl` is the second term of the last loss.
    """

    kl: Tensor

    def __init__(self, kl_weight: Tensor | float = 1.0) -> None:
        super().__init__()
        self.kl_weight = kl_weight

    def differentiable_loss(self, model: Any, guide: Any, images: Tensor, labels: Tensor) -> Tensor:
        """The negative ELBO per image."""
        scored, drawn = self._get_trace(model, guide, (images, labels), {})
        sites: list[Any] = [site for site in scored.nodes.values() if site.get("is_observed")]
        logs = [site["fn"].log_prob(site["value"]).sum() for site in sites]
        misfit = torch.stack(logs).sum().neg() / len(labels)
        q, p = (cast(Any, trace.nodes[SITE]["fn"]).base_dist for trace in (drawn, scored))
        kl = WeightedKL.apply(q.loc, q.log_scale, p, self.kl_weight)
        self.kl = kl.detach()
        loss: Tensor = misfit + kl
        return loss

    def _get_trace(
        self, model: Any, guide: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> tuple[poutine.Trace, poutine.Trace]:
        """One trace of the guide and of the model replayed against it."""
        drawn = poutine.trace(guide).get_trace(*args, **kwargs)
        scored = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(*args, **kwargs)
        return scored, drawn
