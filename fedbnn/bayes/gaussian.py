"""Diagonal Gaussians as values, in natural parameters, where Bayes' rule is addition.

A density N(m, s^2) is kept as precision L = 1 / s^2 and information e = L m. Then

    product   p * q    ->  (L_p + L_q, e_p + e_q)
    quotient  p / q    ->  (L_p - L_q, e_p - e_q)
    power     p ** a   ->  (a L_p, a e_p)

A quotient may honestly have negative precision: it is a likelihood factor, not a density.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Gaussian:
    """A diagonal Gaussian, or a Gaussian factor, with natural parameters of any one shape."""

    precision: Tensor
    info: Tensor

    @classmethod
    def from_moments(cls, loc: Tensor, scale: Tensor) -> "Gaussian":
        """N(loc, scale^2): L = 1 / scale^2, e = L loc. Computed in float64."""
        precision = scale.double().pow(-2)
        return cls(precision, precision * loc.double())

    @property
    def loc(self) -> Tensor:
        """m = e / L."""
        return self.info / self.precision

    @property
    def scale(self) -> Tensor:
        """s = L^(-1/2)."""
        return self.precision.rsqrt()

    def __mul__(self, other: "Gaussian") -> "Gaussian":
        return Gaussian(self.precision + other.precision, self.info + other.info)

    def __truediv__(self, other: "Gaussian") -> "Gaussian":
        return Gaussian(self.precision - other.precision, self.info - other.info)

    def __pow__(self, power: float | Tensor) -> "Gaussian":
        return Gaussian(self.precision * power, self.info * power)

    def __getitem__(self, index: Any) -> "Gaussian":
        return Gaussian(self.precision[index], self.info[index])

    def moved(self, factor: "Gaussian", floor: float) -> "Gaussian":
        """This density times a factor, but never less certain than `floor` of itself.

        L = max(L_0 + dL, floor L_0),  m = m_0 + (de - dL m_0) / L:  the plain product where that is
        certain enough. Where it is not, e / L would run away and change its sign; so the step from
        m_0 is taken with the precision that is kept.
        """
        precision = torch.maximum(self.precision + factor.precision, floor * self.precision)
        loc = self.loc + (factor.info - factor.precision * self.loc) / precision
        return Gaussian(precision, precision * loc)


def spans(length: int, most: int) -> Iterator[slice]:
    """All places of a long vector, some at a time: what is made of few stays in the cache."""
    return (slice(at, at + most) for at in range(0, length, most))
