"""How far each client moved the model in an exchange, for whoever audits a run afterwards.

Weights. The gate has put the updates as points x_k in units of the prior (`Aggregator.influence`:
for factors |x|^2 = sum_i L_0i (dm_i)^2 and the change of precision likewise, for points the plain
difference) and knows their distances. A fold moves the model by X = sum_k t_k w_k x_k with trust
t_k and weight w_k, so

    part_k = t_k w_k |x_k|,     whole = |X|,     x_j . x_k = (|x_j|^2 + |x_k|^2 - |x_j - x_k|^2) / 2

cost nothing but K^2 numbers. Class statistics. With r_c the mean of class c before the round (the
centre of all classes if it is new), n_c and m_c its images and mean after it,

    part_k = (sum_c |t_k n_kc (m_kc - r_c) / n_c|^2)^(1/2),     whole = (sum_c |m_c - r_c|^2)^(1/2)

over the classes met. What else moved the means, their transport by the drift of the backbone, is in
the whole and in nobody's part. Parts may add up to more than the whole: clients pull apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbnn.protocol.messages import Update, class_counts
from fedbnn.protocol.state import State

SUMS = ("posteriors.sum", "exact.sum")


@dataclass(frozen=True)
class Moves:
    """The length of the whole move of an exchange, and of each client's part in it."""

    whole: float = 0.0
    parts: Mapping[int, float] = field(default_factory=dict)


def moves_of_points(clients: Sequence[int], squares: Tensor, weights: Tensor) -> Moves:
    """From squared distances (K+1, K+1) with the origin last, and t_k w_k."""
    lengths = squares[:-1, -1]
    products = (lengths[:, None] + lengths - squares[:-1, :-1]) / 2
    whole = (weights @ products @ weights).clamp_min(0).sqrt()
    parts = (weights * lengths.sqrt()).tolist()
    return Moves(float(whole), dict(zip(clients, parts, strict=True)))


def moves_of_means(before: State, after: State, updates: Sequence[tuple[Update, float]]) -> Moves:
    """From the class means of a state before and after these updates with their trust."""
    old_count, old = _class_means(before, len(after.classes))
    count, mean = _class_means(after, len(after.classes))
    centre = (count @ mean) / count.sum().clamp_min(1)
    start = torch.where(old_count[:, None] > 0, old, centre)
    met, parts = torch.zeros(len(count), dtype=torch.bool), {}
    for update, trust in updates:
        index, images = after.index(update.classes), class_counts(update)[:, None]
        [sums] = (update.tensors[name].double() for name in SUMS if name in update.tensors)
        sums = sums[:, -start.shape[1] :]  # of several backbones the last is that of now
        pull = trust * (sums - images * start[index]) / count[index, None].clamp_min(1e-300)
        parts[update.client] = float(pull.norm())
        met[index] = True
    return Moves(float((mean - start)[met].norm()), parts)


def _class_means(state: State, classes: int) -> tuple[Tensor, Tensor]:
    """Images and means of all classes, zeros for those that have none yet."""
    if "exact.count" in state:
        count = state["exact.count"]
        mean = state["exact.sum"] / count.clamp_min(1e-300)[:, None]
    elif "posteriors.count" in state:
        count, mean = state["posteriors.count"], state["posteriors.mean"]
    else:
        return torch.zeros(classes, dtype=torch.float64), torch.zeros(classes, 1).double()
    missing = classes - len(count)
    return (
        torch.cat([count, count.new_zeros(missing)]),
        torch.cat([mean, mean.new_zeros(missing, mean.shape[1])]),
    )


def is_statistics(update: Update) -> bool:
    """Whether an update carries sums by class."""
    return any(name in update.tensors for name in SUMS)
