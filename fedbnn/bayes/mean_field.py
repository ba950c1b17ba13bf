"""Two functions over all weights at once that autograd would make slow: the draw, and the weighted KL.

Networks have millions of weights, so every pass over memory counts: both functions make their gradients where the
terms are at hand.
"""

from typing import Any, Protocol

import torch
from torch import Tensor


class Prior(Protocol):
    """N(loc, scale^2), with the logarithm of the scale beside it."""

    loc: Tensor
    scale: Tensor
    log_scale: Tensor


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


class WeightedKL(torch.autograd.Function):
    """sum_j c_j KL_j(q || p), with both gradients made in the forward pass where their terms are at hand.

    d/dm = c (m - m_0) / s_0^2        d/d(log s) = c (exp(2r) - 1)

    Autograd would keep a dozen vectors as long as the network to find the same.
    """

    @staticmethod
    def forward(
        ctx: Any, loc: Tensor, log_scale: Tensor, prior: Prior, weight: Tensor | float
    ) -> Tensor:
        """The weighted sum, and its gradients for later; sums are inner products, which write nothing."""
        weights = torch.as_tensor(weight, dtype=loc.dtype, device=loc.device).expand_as(loc)
        twice = (log_scale - prior.log_scale).mul_(2)
        growth = torch.expm1(twice)
        distance = (loc - prior.loc).div_(prior.scale)
        pull = distance * weights
        total = torch.dot(pull, distance) + torch.dot(torch.sub(growth, twice, out=twice), weights)
        ctx.save_for_backward(pull.div_(prior.scale), growth.mul_(weights))
        return total.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The saved gradients, scaled where they lie if they need it: they are used once."""
        by_loc, by_log_scale = ctx.saved_tensors
        if gradient != 1:
            by_loc, by_log_scale = by_loc.mul_(gradient), by_log_scale.mul_(gradient)
        return by_loc, by_log_scale, None, None
