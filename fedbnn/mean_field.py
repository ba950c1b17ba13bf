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
        """The gradient itself, and the gradient times the scaled noise."""
        (noise,) = ctx.saved_tensors
        return gradient, gradient * noise, None


class WeightedKL(torch.autograd.Function):
    """sum_j c_j KL_j(q || p), with both gradients made in the forward pass where their terms are at hand.

    d/dm = c (m - m_0) / s_0^2        d/d(log s) = c (exp(2r) - 1)

    Autograd would keep a dozen vectors as long as the network to find the same.
    """

    @staticmethod
    def forward(ctx: Any, loc: Tensor, log_scale: Tensor, prior: Prior, weight: Tensor | float) -> Tensor:
        """The weighted sum, and its gradients for later."""
        twice = (log_scale - prior.log_scale).mul_(2)
        growth = torch.expm1(twice)
        distance = (loc - prior.loc).div_(prior.scale)
        total = torch.addcmul(twice.neg_().add_(growth), distance, distance).mul_(weight).sum().mul_(0.5)
        ctx.save_for_backward(distance.div_(prior.scale).mul_(weight), growth.mul_(weight))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The saved gradients, scaled where they lie: they are used once."""
        by_loc, by_log_scale = ctx.saved_tensors
        return by_loc.mul_(gradient), by_log_scale.mul_(gradient), None, None
