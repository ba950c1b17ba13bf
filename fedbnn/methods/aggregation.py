"""Where an update stands among the others: its backbone as a point x in a space all clients share.

A point comes in pieces, in the same order from every client, so that those of all clients can be
compared piece by piece (`fedbnn.defense.robust`) and none is ever whole in memory.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

PIECE = 2**15
ROUNDING = 2.0**-20


def largest(tensor: Tensor) -> float:
    """The largest absolute value, NaN if there is one; in one pass without a temporary."""
    low, high = map(float, tensor.aminmax()) if tensor.numel() else (0.0, 0.0)
    return max(-low, high)


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The values of a tensor, some at a time: what is done to a piece stays in the cache."""
    return iter(tensor.reshape(-1).split(PIECE))


def influence_of_point(prior: Tensor, value: Tensor) -> Iterator[Tensor]:
    """x = value - prior, for weights without a posterior.

    It is 0 where float32 may round as much away: up to 2^-20 max |prior|.
    """
    rounded = ROUNDING * largest(prior)
    for before, after in zip(pieces(prior), pieces(value), strict=True):
        yield torch.hardshrink(after - before, rounded).float()


def influence_of_factor(
    prior_loc: Tensor, prior_scale: Tensor, d_precision: Tensor, d_info: Tensor
) -> Iterator[Tensor]:
    """x = ((d_info - d_precision m_0) s_0,  d_precision s_0^2 / sqrt(2)) on the prior m_0, s_0.

    The natural parameters of a Gaussian factor with the prior mean as origin, in units of the
    prior: for a small step |x|^2 / 2 is the divergence between prior and posterior, and the neutral
    factor is 0. Both halves matter: a forged precision at the prior mean moves no mean by itself,
    it stops all others from moving it. What float32 rounds away counts as 0: a mean that moved by
    less than 2^-20 (1 + max |m_0| / min s_0) of its s_0, a precision that changed by less than
    2^-20.
    """
    least = float(prior_scale.amin()) if prior_scale.numel() else 1.0
    rounded = ROUNDING * (1 + largest(prior_loc) / least)
    parts = map(pieces, (prior_loc, prior_scale, d_precision, d_info))
    for loc, scale, precision, info in zip(*parts, strict=True):
        pull = torch.addcmul(info, precision, loc, value=-1).mul_(scale)
        certainty = (precision * scale).mul_(scale)
        yield torch.hardshrink(pull, rounded)
        yield torch.hardshrink(certainty, ROUNDING).mul_(math.sqrt(0.5))


def known_lengths(scales: Tensor) -> list[float]:
    """L_c = |1 / s_c^2| of rows with these scales."""
    return [float(length) for length in scales.square().reciprocal_().norm(dim=1)]
