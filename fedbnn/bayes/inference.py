"""How a posterior is found: means by gradients of the ELBO, precisions too, or from the curvature.

    -ELBO / n = -1/n sum_i log p(y_i | x_i, w) + sum_j c_j KL_j(q || p),      w ~ q

is the negative ELBO of a mean-field posterior over all weights at once. Networks have millions of
weights, so every pass over memory counts: the draw (`fedbnn.bayes.model`) and the weighted KL make
their gradients where the terms are at hand. Stock `TraceMeanField_ELBO` is their specification in
the tests.

What labels say about each weight is the curvature of the likelihood, its diagonal Fisher matrix:

    F = 1/n sum_i E_y (d log p(y | x_i, w) / dw)^2,      y ~ p(y | x_i, w)

Labels are drawn from the model, so each gradient has mean 0 and those of different images are
independent. Hence the square of their sum over a group of images is, in the mean, the sum of their
squares, and one backward pass a group does:

    backbone     F ~ 1/n sum_groups (sum_{i in group} d log p(y_i | x_i, w) / dw)^2
    prototypes   F = 1/n sum_i p_c (1 - p_c) (f, 1)^2      no draw: logits are linear in their rows

without bias, never negative, exactly 0 where the likelihood does not depend on a weight, and for
about the price of an epoch. A Gaussian prior with precision L_0 then becomes a posterior with, in
closed form (a natural-gradient step of length 1 on the ELBO),

    L = L_0 + F / c,      c the weight of the KL beside the mean cross-entropy (1 / n is full Bayes)
"""

from typing import Any, cast

import torch
from pyro import poutine
from pyro.infer import ELBO
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from fedbnn.bayes.gaussian import Gaussian, spans
from fedbnn.bayes.model import SITE, BayesianModel, Weights

PIECE = 2**16
"""Weights whose part in the KL is found at once."""
GROUPS = 8


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


def fisher(model: BayesianModel, loc: Tensor, images: Tensor) -> Tensor:
    """F of every weight at the means, under a network that measures (batch norm in eval mode)."""
    flat = loc.detach().clone().requires_grad_()
    total, rows = torch.zeros_like(loc), loc.new_zeros(())
    for group in images.chunk(GROUPS):
        features, logits = model.outputs(flat, group)
        shares = logits.detach().softmax(1)
        misfit = cross_entropy(logits, shares.multinomial(1)[:, 0], reduction="sum")
        (gradient,) = torch.autograd.grad(misfit, flat)
        total.addcmul_(gradient, gradient)
        rows = rows + (shares * (1 - shares)).T @ pad(features.detach(), (0, 1), value=1.0).square()
    total[model.layout.size :] = rows.reshape(-1)
    return total / len(images)


def informed(prior: Gaussian, loc: Tensor, fisher: Tensor, kl_weight: Tensor) -> Gaussian:
    """The posterior at these means: L = L_0 + F / c, e = L m."""
    precision = prior.precision + fisher.double() / kl_weight.double()
    return Gaussian(precision, precision * loc.double())
