"""Robust rules of the literature, beside ours (`gate.robust`).

Of K clients, f = ceil(`gate.forgers` K) but fewer than half are taken to lie, less those whom the
gate has refused already; rules by client look for the others alone. By coordinate, of the
values x_k that the clients have for one number (of a prototype: the clients that hold its class):

    trimmed_mean   the mean without the f smallest and the f largest           Yin et al., 2018
    median         the middle one, or the mean of the two in the middle        Yin et al., 2018

By client, from the squared distances between their points x_k, as our own rule has them:

    krum           the one client with the least  s_k = sum |x_k - x_j|^2  over its K - f - 2
                   nearest others                                             Blanchard et al., 2017
    multi_krum     the K - f clients with the least s_k
    clipping       everybody, with x_k shortened to the median length of all   Sun et al., 2019

What is folded must be something that a client could have sent. The middle of natural parameters
about the prior mean is a factor; of second moments it is no second moment. So class statistics are
combined by client under every rule: `trimmed_mean` leaves out the f clients farthest from the
geometric median of all, `median` is that median (Pillutla et al., 2022): clients count as

    w_k = 1 / |x_k - z|,   z = sum_k w_k x_k / sum_k w_k,   the largest w_k as 1     (Weiszfeld)

All clients have one vote, whatever their images. Whoever is not chosen has the trust 0: it is not
refused, and is asked again in the next exchange.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fedbnn.protocol.messages import Update

Rule = Literal["influence", "trimmed_mean", "median", "krum", "multi_krum", "clipping"]
BY_COORDINATE = ("trimmed_mean", "median")
STEPS, NEAR, PIECE = 100, 1e-9, 2**16
Cut = Callable[[int], int]


def liars(share: float, clients: int) -> int:
    """f: so many of the clients are taken to lie, always fewer than half."""
    return min(math.ceil(share * clients - 1e-9), (clients - 1) // 2)


def trusts(rule: Rule, squares: Tensor, share: float, refused: int = 0) -> list[float]:
    """Trust by client, from squared distances (K+1, K+1) whose last row is the origin.

    So many more have answered and are `refused`.
    """
    between, norms = squares[:-1, :-1], squares[:-1, -1].sqrt()
    count = len(between)
    lying = max(0, liars(share, count + refused) - refused)
    if rule == "clipping":
        usual = norms.sort().values[(count - 1) // 2]
        return [min(1.0, float(usual / norm)) if norm else 1.0 for norm in norms]
    if rule == "median":
        return geometric_median(between)[0].tolist()
    if rule == "trimmed_mean":
        return _chosen(geometric_median(between)[1], count - lying)
    return _chosen(krum_scores(between, lying), 1 if rule == "krum" else count - lying)


def krum_scores(between: Tensor, lying: int) -> Tensor:
    """s_k: squared distances to the K - f - 2 nearest others, at least one if there is any."""
    nearest = max(1, len(between) - lying - 2)
    return between.sort(1).values[:, 1 : 1 + nearest].sum(1)


def _chosen(scores: Tensor, count: int) -> list[float]:
    """1 for so many clients with the least scores, the first of equals; 0 for all others."""
    best = scores.sort(stable=True).indices[:count].tolist()
    return [1.0 if k in best else 0.0 for k in range(len(scores))]


def geometric_median(between: Tensor) -> tuple[Tensor, Tensor]:
    """Weights w_k of the geometric median z, the largest 1, and the distances |x_k - z|.

    With sum_k w_k = 1:  |x_k - z|^2 = sum_j w_j d_kj^2 - sum_ij w_i w_j d_ij^2 / 2.
    """
    weights, scale = torch.ones(len(between), dtype=between.dtype), between.max().sqrt()
    distances = torch.zeros_like(weights)
    for _ in range(STEPS if scale else 0):
        share = weights / weights.sum()
        spread = between @ share
        distances = (spread - share @ spread / 2).clamp_min(0).sqrt()
        weights = distances.clamp_min(NEAR * scale).reciprocal()
        weights = weights / weights.max()
    return weights, distances


def cut(rule: Rule, share: float) -> Cut:
    """How many values are left out at each end, of so many."""
    return lambda count: (count - 1) // 2 if rule == "median" else liars(share, count)


def middle(values: Tensor, left_out: int) -> Tensor:
    """The mean over clients (K, ...) without so many values at each end, number by number."""
    flat, kept = values.reshape(len(values), -1), slice(left_out, len(values) - left_out)
    parts = [part.double().sort(0).values[kept].mean(0) for part in flat.split(PIECE, 1)]
    return (torch.cat(parts) if parts else flat[0]).to(values.dtype).view(values.shape[1:])


def agreed(updates: Sequence[Update], rows: bool, left_out: Cut) -> list[Update]:
    """The updates with, in place of its own numbers, those that all clients agree on.

    Each keeps its images. With `rows`, tensors of prototypes have a row for each class it holds.
    """
    voters = [update for update in updates if update.samples]
    if not voters:
        return [*updates]
    whole, by_class = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
    for name in voters[0].tensors:
        if rows and name.startswith("prototypes"):
            by_class[name] = _rows(voters, name, left_out)
        else:
            values = torch.stack([update.tensors[name] for update in voters])
            whole[name] = middle(values, left_out(len(values)))
    return [replace(u, tensors=whole | _of(u, by_class)) if u.samples else u for u in updates]


def _rows(updates: Sequence[Update], name: str, left_out: Cut) -> dict[str, Tensor]:
    """By class the row that its holders agree on."""
    held: dict[str, list[Tensor]] = {}
    for update in updates:
        for one, row in zip(update.classes, update.tensors[name], strict=True):
            held.setdefault(one, []).append(row)
    return {one: middle(torch.stack(rows), left_out(len(rows))) for one, rows in held.items()}


def _of(update: Update, by_class: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of one update."""
    return {
        name: torch.stack([found[one] for one in update.classes])
        if update.classes
        else update.tensors[name]
        for name, found in by_class.items()
    }
