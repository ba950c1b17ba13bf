"""How differently features of a client lie under two backbones, beside what others say of theirs.

Class means have checks of their own (`fedbnn.heads.checks`). What else the map from one backbone to
the other is made of is where images lie about the means of their classes, x under the one and y
under the other. All clients look through the same two backbones, so for all about the same part of
both is what tells x from y,

    d_k = sum_i |x_i - y_i|_M^2 / sum_i (|x_i|_M^2 + |y_i|_M^2)        |x|_M^2 = x M^-1 x^T
    u_k = d_k / max(median_j d_j, median over its peers, 1/50)         limit 5

0 is the same, 1 has nothing in common, 2 is the opposite. M are the second moments of all clients
under both, and the ridge of the map: in its metric a direction in which features hardly scatter
counts like any other, for that is where class posteriors tell classes apart. Peers hold classes of
at least half of its images: a class that is new moves farther than one that is known. Honest
clients were at 2.1 with FedBNN, and at 4.1 where learning rates are so high that a round throws a
backbone about."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedbnn.heads import checks
from fedbnn.heads.checks import Apart, ClassMeans

LEAST = 0.02


def apart_in_drifts(
    rows: Mapping[int, Sequence[Tensor]],
    means: Mapping[int, ClassMeans],
    between: tuple[int, int],
    ridge: float,
) -> Apart:
    """u_k of every client between two spaces, given the columns of R for all; two others needed."""
    root, found = _root(rows, between, ridge), Apart()
    shares = [_share(one, means[client], between, root) for client, one in rows.items()]
    held = [dict(zip(one.classes, one.count.tolist(), strict=True)) for one in means.values()]
    for k, (client, alike) in enumerate(zip(rows, checks.peers(held), strict=True)):
        others = [share for j, share in enumerate(shares) if j != k]
        if len(others) > 1:
            near = checks.voted([shares[j] for j in alike])
            usual = max(checks.lower_median(others), near, LEAST)
            found[client] = shares[k] / usual / checks.LONG, "ways of images about their classes"
    return found


def _root(
    rows: Mapping[int, Sequence[Tensor]], between: tuple[int, int], ridge: float
) -> Tensor:
    """L with L L^T = M."""
    seen = (one[space] for one in rows.values() for space in between)
    nothing = torch.zeros(1, dtype=torch.float64)
    metric = sum((features.T @ features for features in seen), nothing)
    metric.diagonal().add_(ridge * metric.diagonal().mean() + checks.TINY)
    root: Tensor = torch.linalg.cholesky(metric)
    return root


def _share(
    rows: Sequence[Tensor], means: ClassMeans, between: tuple[int, int], root: Tensor
) -> float:
    """d_k, from R and n_c^(1/2) m_c: sum_i |x_i|^2 is what the rows of R have more than those."""
    roots = means.count.sqrt()[:, None, None] * means.mean

    def length(of: Tensor) -> Tensor:
        solved: Tensor = torch.linalg.solve_triangular(root, of.T, upper=False)
        return solved.square().sum()

    def within(features: Tensor, centres: Tensor) -> Tensor:
        return (length(features) - length(centres)).clamp_min(0)

    (x, here), (y, there) = ((rows[space], roots[:, space]) for space in between)
    both = within(x, here) + within(y, there)
    rounded = checks.ROUNDING * (length(x) + length(y))
    return float(within(x - y, here - there) / torch.maximum(both, rounded).clamp_min(checks.TINY))
