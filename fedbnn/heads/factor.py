"""Second moments as they travel: the R factor, of which a few images give a few rows.

A client with n images has features F (n, d). The server wants only F^T F, and with F = QR

    R^T R = F^T F,        R is upper triangular, min(n, d) rows of d numbers

so what is sent are the numbers on and above the diagonal of R: with n = 125 images of d = 2,700
features 1.3 MB instead of the 15 MB of the triangle of F^T F. Whatever is sent, R^T R is a second
moment: it has no negative eigenvalue, and |(R^T R)_ij|^2 <= (R^T R)_ii (R^T R)_jj.
"""

from functools import lru_cache

import torch
from torch import Tensor


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
