"""How far one update may move the fold: clients are compared with each other, and who stands apart counts less.

The backbone of every update is a point x_k in a space all clients share (`influence_of_factor`, `influence_of_point`).
With the lower median over the others of K clients that moved at all, and n_k images,

    s_k = median_j |x_k - x_j|                       how far client k stands from a typical other
    r_k = s_k / median_j s_j                         the same, measured by how far the others stand from each other
    u_k = r_k sqrt(2 / K) min(1, n_k / median_j n_j)^(1/2)    how far it moves the mean of all, measured by its error
    trust_k = 1 for u_k <= cap,  2 - u_k / cap up to u_k = 2 cap,  0 beyond

For if honest clients scatter by sigma, two of them are sqrt(2) sigma apart, their mean errs by sigma / sqrt(K), and one
client at the distance r sqrt(2) sigma moves it by r sqrt(2) sigma / K. Fewer images than usual scatter more, as the root
of their number, and weigh less. So with a cap of u one client makes the error about sqrt(1 + u^2) times as large, however
many there are, and a gross forgery has no pull at all (Hampel's redescending weight). A norm would not do: a flipped sign
has the norm of an honest update, and zeros have less. As long as fewer than half of the clients lie, every median is an
honest distance. Three clients that moved are the least that can be judged.

Rows of classes cannot be compared so: somebody may be the only one who knows a class, and a new class moves far. But
rows are about equally long, and their precisions too. For each of these tensors, with l_kc the length of row c,

    v_k = max_c l_kc / max(median_j median_c l_jc, L_c)    how long its longest row is, measured by a typical one
    trust_k is at most 1 for v_k <= 5,  2 - v_k / 5 up to v_k = 10,  0 beyond

L_c is the length of the precision that the library has for row c already, 0 for points. For where tasks drift, the last
clients of an old task know their rows well, and add as much again as there is, while the first of a new one know little.

A row that is alone wins every softmax and learns nothing, so clients with several classes are measured by each other: by
the larger of their median and that of all. Clients with one class are measured likewise, or by all if fewer than two
others have several.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedbnn.storage.spool import Spool

ROWS, LONG = ("prototypes", "prototypes.precision"), 5.0
FLOAT = 4
CHUNK = 2**22
ROUNDING = 2.0**-20
LEAST = 1e-6


def influence_of_point(prior: Tensor, value: Tensor) -> Tensor:
    """x = value - prior, for weights without a posterior; 0 where float32 may round as much away (2^-20 max |prior|)."""
    return torch.hardshrink(value - prior, ROUNDING * largest(prior)).flatten().float()


def influence_of_factor(
    prior_loc: Tensor, prior_scale: Tensor, d_precision: Tensor, d_info: Tensor
) -> Tensor:
    """x = ((d_info - d_precision m_0) s_0,  d_precision s_0^2 / sqrt(2)), for a Gaussian factor on the prior N(m_0, s_0^2).

    The natural parameters with the prior mean as origin, in units of the prior: for a small step |x|^2 / 2 is the
    divergence between prior and posterior, and the neutral factor is 0. Both halves matter: a forged precision at
    the prior mean moves no mean by itself, it stops all others from moving it. What float32 rounds away counts as 0: a
    mean that moved by less than 2^-20 (1 + max |m_0| / min s_0) of its s_0, a precision that changed by less than 2^-20.
    """
    pull, certainty = point = torch.empty(2, *d_info.shape)
    torch.addcmul(d_info, d_precision, prior_loc, value=-1, out=pull).mul_(prior_scale)
    torch.mul(d_precision, prior_scale, out=certainty).mul_(prior_scale)
    rounded = (
        ROUNDING * (1 + largest(prior_loc) / float(prior_scale.amin()))
        if prior_loc.numel()
        else 0.0
    )
    torch.hardshrink(pull, rounded, out=pull)
    torch.hardshrink(certainty, ROUNDING, out=certainty).mul_(math.sqrt(0.5))
    return point.flatten()


def largest(tensor: Tensor) -> float:
    """The largest absolute value, NaN if there is one; in one pass without a temporary."""
    low, high = map(float, tensor.aminmax()) if tensor.numel() else (0.0, 0.0)
    return max(-low, high)


def squared_distances(points: Spool, clients: Sequence[int]) -> Tensor:
    """|x_j|^2 + |x_k|^2 - 2 x_j.x_k for all pairs, a slice of all points at a time; the last row and column is the origin."""
    products = torch.zeros(len(clients) + 1, len(clients) + 1, dtype=torch.float64)
    start, width = 0, max(1, CHUNK // max(1, len(clients))) * FLOAT
    while clients:
        slices = [
            np.frombuffer(points.part(client, start, start + width), np.float32)
            for client in clients
        ]
        if not slices[0].size:
            break
        matrix = torch.from_numpy(np.array(slices, np.float64))
        products[:-1, :-1] += matrix @ matrix.T
        start += width
    norms = products.diagonal()
    return (norms[:, None] + norms[None, :] - 2 * products).clamp_min(0)


def pulls(squares: Tensor, samples: Sequence[int]) -> list[float]:
    """u_k of every client from squared distances (K+1, K+1) and n_k; 0 where there is nobody to compare it with."""
    distances = squares.sqrt()
    norms, clients = distances[:, -1].tolist(), range(len(samples))
    moved = [k for k in clients if samples[k] and norms[k]]
    others = [[j for j in moved if j != k] for k in clients]
    far = [_median([float(distances[k, j]) for j in others[k]]) for k in clients]
    ratios = [
        _ratio(far[k], [far[j] for j in others[k]], [norms[j] for j in others[k]]) for k in clients
    ]
    few = [min(1.0, samples[k] / (_median([samples[j] for j in others[k]]) or 1)) for k in clients]
    return [ratios[k] * math.sqrt(2 / (len(others[k]) + 1) * few[k]) for k in clients]


def _median(values: Sequence[float]) -> float:
    """The lower median: with two values the smaller one, so that one liar of three is outvoted."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def _ratio(far: float, others: Sequence[float], norms: Sequence[float]) -> float:
    """far / median(others); others that agree exactly are measured by their length. Two others at least are needed."""
    return far / (_median(others) or _median(norms)) if len(others) >= 2 else 0.0


def row_lengths(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """l_c of every row tensor that is judged."""
    return {
        name: tensors[name].norm(dim=1).tolist()
        for name in ROWS
        if name in tensors and len(tensors[name])
    }


def known_lengths(scales: Tensor) -> list[float]:
    """L_c = |1 / s_c^2| of rows with these scales."""
    return [float(length) for length in scales.square().reciprocal_().norm(dim=1)]


def row_ratio(
    lengths: Mapping[int, Mapping[str, Sequence[float]]],
    moved: Sequence[int],
    client: int,
    known: Mapping[str, Sequence[float]],
) -> tuple[float, str]:
    """The largest v_k of a client over its row tensors, and which one it is; 0 with fewer than two to compare it with."""
    found, others = (
        [(0.0, "")],
        [lengths[other] for other in moved if other != client and other in lengths],
    )
    for name, own in lengths.get(client, {}).items():
        typical = _typical_length(
            [theirs[name] for theirs in others if name in theirs], alone=len(own) == 1
        )
        if typical:
            there = known.get(name, [0.0] * len(own))
            found.append(
                (
                    max(length / max(typical, old) for length, old in zip(own, there, strict=True)),
                    name,
                )
            )
    return max(found)


def _typical_length(others: Sequence[Sequence[float]], alone: bool) -> float:
    """The yardstick for a client with one class (`alone`) or several; 0 with fewer than two to take it from."""
    everybody, several = (
        [_median(rows) for rows in others],
        [_median(rows) for rows in others if len(rows) > 1],
    )
    if len(several) >= 2:
        return max(_median(several), _median(everybody))
    return _median(everybody) if alone and len(everybody) >= 2 else 0.0


def trust(pull: float, cap: float) -> float:
    """1 up to the cap, falling to 0 at twice the cap."""
    return min(1.0, max(0.0, 2.0 - pull / cap))
