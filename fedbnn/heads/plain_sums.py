"""Class statistics as plain sums, of which a part can be taken and to which noise can be added.

Of features x (n, w) of a client's images, under one backbone or several side by side,

    n_c,     s_c = sum x  by class,     M = sum x^T x         in place of R with R^T R = M

as private clients send them (`fedbnn.defense.privacy`): a shorter R is no shorter sum, and noise on
R is none on M. With noise M is no second moment of any images any more; the nearest within classes
that could be one has

    M + V max(-D, 0) V^T,        V D V^T = M - sum_c s_c s_c^T / n_c
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedbnn.heads.factor import length, square, triangle, unpacked
from fedbnn.protocol.messages import Update, class_counts

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]
HEADS = ("exact", "posteriors")


def names(head: str) -> tuple[str, str, str]:
    """What n_c, s_c and M of a head are called."""
    return f"{head}.count", f"{head}.sum", f"{head}.moment"


def expected(head: str, classes: int, width: int) -> Spec:
    """Counts, sums by class, and the triangle of the second moment."""
    shapes = ((classes,), (classes, width), (length(width, width),))
    return {name: (one, torch.float32) for name, one in zip(names(head), shapes, strict=True)}


def summed(update: Update) -> Update:
    """A client's statistics as sums."""
    [head] = (one for one in HEADS if f"{one}.factor" in update.tensors)
    sums = update.tensors[f"{head}.sum"]
    upper = unpacked(update.tensors[f"{head}.factor"], update.samples, sums.shape[1]).double()
    found = class_counts(update), sums, triangle(upper.T @ upper)
    return replace(update, tensors=dict(zip(names(head), found, strict=True)))


def read(head: str, update: Update) -> tuple[Tensor, Tensor, Tensor]:
    """n_c, s_c and M of an update, in float64."""
    count, sums, moment = (update.tensors[name].double() for name in names(head))
    return count, sums, square(moment, sums.shape[1])


def counted(count: Tensor) -> Tensor:
    """Noisy counts: a class that was asked for has at least one image."""
    return torch.where(count != 0, count.clamp_min(1.0), count)


def possible(count: Tensor, sums: Tensor, moment: Tensor) -> Tensor:
    """The second moment nearest to this one that images with these counts and sums could have."""
    within = moment - sums.T @ (sums / count.clamp_min(1.0)[:, None])
    values, vectors = torch.linalg.eigh((within + within.T) / 2)
    missing: Tensor = (vectors * (-values).clamp_min(0)) @ vectors.T
    return moment + missing
