"""How far one update may move the fold: clients are compared with each other, and who stands apart counts less.

Every update is a point x_k in a space all clients share (`influence_of_factor`, `influence_of_point`). With
median_low over the other clients that moved at all,

    s_k = median_j |x_k - x_j|           how far client k stands from a typical other
    r_k = s_k / median_j s_j             the same, measured by how far the others stand from each other
    trust_k = 1 for r_k <= cap,  2 - r_k / cap up to r_k = 2 cap,  0 beyond

So the pull r_k trust_k of one client never exceeds cap, and a gross forgery has none (Hampel's redescending weight).
A norm would not do: a flipped sign has the norm of an honest update, and zeros have less. As long as fewer than
half of the clients lie, every median is an honest distance. Three clients that moved are the least that can be judged.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedbnn.spool import Spool

FLOAT = 4
CHUNK = 2**22
ROUNDING = 2.0**-20
LEAST = 1e-6


def influence_of_point(prior: Tensor, value: Tensor) -> Tensor:
    """x = value - prior, for weights without a posterior."""
    return _beyond_rounding(value - prior, prior).flatten().float()


def influence_of_factor(prior_precision: Tensor, prior_loc: Tensor, d_precision: Tensor, d_info: Tensor) -> Tensor:
    """x = ((d_info - d_precision m_0) / sqrt(L_0),  d_precision / (sqrt(2) L_0)), for a Gaussian factor.

    The natural parameters with the prior mean as origin, in units of the prior: for a small step |x|^2 / 2 is the
    divergence between prior and posterior, and the neutral factor is 0. Both halves matter: a forged precision at
    the prior mean moves no mean by itself, it stops all others from moving it.
    """
    pull = _beyond_rounding(d_info - d_precision * prior_loc, prior_precision * prior_loc) / prior_precision.sqrt()
    certainty = _beyond_rounding(d_precision, prior_precision) / (math.sqrt(2) * prior_precision)
    return torch.cat([pull.flatten(), certainty.flatten()]).float()


def _beyond_rounding(change: Tensor, whole: Tensor) -> Tensor:
    """The change where it is more than what float32 rounds away, 0 elsewhere: a client that learned nothing is at 0."""
    return torch.where(change.abs() > ROUNDING * whole.abs(), change, 0.0)


def squared_distances(points: Spool, clients: Sequence[int]) -> Tensor:
    """|x_j|^2 + |x_k|^2 - 2 x_j.x_k for all pairs, a slice of all points at a time; the last row and column is the origin."""
    size = len(points.part(clients[0], 0, CHUNK * FLOAT)) if clients else 0
    products = torch.zeros(len(clients) + 1, len(clients) + 1, dtype=torch.float64)
    start, width = 0, max(1, CHUNK // max(1, len(clients))) * FLOAT
    while size:
        slices = [points.part(client, start, start + width) for client in clients]
        size = len(slices[0])
        if size:
            matrix = torch.stack([torch.frombuffer(bytearray(part), dtype=torch.float32) for part in slices]).double()
            products[:-1, :-1] += matrix @ matrix.T
        start += width
    norms = products.diagonal()
    return (norms[:, None] + norms[None, :] - 2 * products).clamp_min(0)


def ratios(squares: Tensor, voters: Sequence[bool]) -> list[float]:
    """r_k of every client from squared distances (K+1, K+1); 0 where there is nobody to compare it with."""
    distances = squares.sqrt()
    moved = [k for k, vote in enumerate(voters) if vote and distances[k, -1] > 0]
    others = [[j for j in moved if j != k] for k in range(len(voters))]
    far = [_median([float(distances[k, j]) for j in others[k]]) for k in range(len(voters))]
    norms = distances[:, -1].tolist()
    return [_ratio(far[k], [far[j] for j in others[k]], [norms[j] for j in others[k]]) for k in range(len(voters))]


def _median(values: Sequence[float]) -> float:
    """The lower median: with two values the smaller one, so that one liar of three is outvoted."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def _ratio(far: float, others: Sequence[float], norms: Sequence[float]) -> float:
    """far / median(others); others that agree exactly are measured by their length. Two others at least are needed."""
    return far / (_median(others) or _median(norms)) if len(others) >= 2 else 0.0


def trust(ratio: float, cap: float) -> float:
    """1 up to the cap, falling to 0 at twice the cap."""
    return min(1.0, max(0.0, 2.0 - ratio / cap))


def trusts(squares: Tensor, ratios: Sequence[float], cap: float) -> list[float]:
    """trust of every client. One that did not move at all may count for nothing but has done nothing to be refused for."""
    least = [LEAST if square == 0 else 0.0 for square in squares[:-1, -1].tolist()]
    return [max(floor, trust(ratio, cap)) for floor, ratio in zip(least, ratios, strict=True)]
