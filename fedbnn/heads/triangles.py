"""Symmetric matrices without their mirror image: the upper triangle, row by row, which is all that need be sent."""

from functools import lru_cache

import torch
from torch import Tensor


def length(width: int) -> int:
    """Numbers in the triangle of a matrix with so many rows."""
    return width * (width + 1) // 2


@lru_cache(8)
def _upper(width: int) -> Tensor:
    """Places of the triangle in the flat matrix."""
    rows, columns = torch.triu_indices(width, width)
    places: Tensor = rows * width + columns
    return places


def folded(square: Tensor) -> Tensor:
    """The triangle of a symmetric matrix."""
    return square.reshape(-1)[_upper(len(square))]


def unfolded(triangle: Tensor, width: int) -> Tensor:
    """The symmetric matrix of a triangle."""
    upper = (
        triangle.new_zeros(width * width).index_copy_(0, _upper(width), triangle).view(width, width)
    )
    return upper + upper.triu(1).T


def diagonal(triangle: Tensor, width: int) -> Tensor:
    """The diagonal of the matrix of a triangle: row i begins after w + (w - 1) + ... numbers."""
    return triangle[torch.arange(width, 0, -1).cumsum(0) - torch.arange(width, 0, -1)]
