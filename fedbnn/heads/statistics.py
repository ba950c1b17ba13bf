"""Class statistics as they travel: sums by class, and second moments as R factors or as plain sums.

A client with n images has features F (n, d). The server wants only F^T F, and with F = QR

    R^T R = F^T F,        R is upper triangular, min(n, d) rows of d numbers

so what is sent are the numbers on and above the diagonal of R: with n = 125 images of d = 2,700
features 1.3 MB instead of the 15 MB of the triangle of F^T F. Whatever is sent, R^T R is a second
moment: it has no negative eigenvalue, and |(R^T R)_ij|^2 <= (R^T R)_ii (R^T R)_jj.

Private clients (`fedbnn.defense.privacy`) send sums, of which a part can be taken and to which
noise can be added. Of features x (n, w) of a client's images, under one backbone or several side by
side,

    n_c,     s_c = sum x  by class,     M = sum x^T x         in place of R with R^T R = M

for a shorter R is no shorter sum, and noise on R is none on M. With noise M is no second moment of
any images any more; the nearest within classes that could be one has

    M + V max(-D, 0) V^T,        V D V^T = M - sum_c s_c s_c^T / n_c
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fedbnn.protocol.messages import Update, class_counts

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]
HEADS = ("exact", "posteriors")


def factor(features: Tensor) -> Tensor:
    """The numbers of R."""
    upper: Tensor = torch.linalg.qr(features, mode="r").R
    return upper.reshape(-1)[_places(*upper.shape)]


def length(images: int, width: int) -> int:
    """How many numbers so many images send: r rows of d, d - 1, ..., with r = min(n, d)."""
    rows = min(images, width)
    return rows * (2 * width - rows + 1) // 2


def unpacked(numbers: Tensor, images: int, width: int) -> Tensor:
    """R (min(n, d), d) from its numbers."""
    rows = min(images, width)
    flat = numbers.new_zeros(rows * width).index_copy_(0, _places(rows, width), numbers)
    return flat.view(rows, width)


@lru_cache(128)
def _places(rows: int, width: int) -> Tensor:
    """Places on and above the diagonal in the flat matrix, row by row."""
    return torch.ones(rows, width, dtype=torch.bool).triu().view(-1).nonzero()[:, 0]


def triangle(symmetric: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, which is all that need be kept."""
    return symmetric.reshape(-1)[_places(*symmetric.shape)]


def square(numbers: Tensor, width: int) -> Tensor:
    """The symmetric matrix of a triangle."""
    upper = unpacked(numbers, width, width)
    return upper + upper.triu(1).T


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
