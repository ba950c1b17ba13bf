"""Diagonal Gaussians as values, in natural parameters, where Bayes' rule is addition.

A density N(m, s^2) is kept as precision L = 1 / s^2 and information e = L m. Then

    product   p * q    ->  (L_p + L_q, e_p + e_q)
    quotient  p / q    ->  (L_p - L_q, e_p - e_q)
    power     p ** a   ->  (a L_p, a e_p)

A quotient may honestly have negative precision: it is a likelihood factor, not a density.
"""

from dataclasses import dataclass

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

    @classmethod
    def neutral(cls, like: Tensor) -> "Gaussian":
        """The factor that says nothing: L = 0, e = 0."""
        zero = torch.zeros_like(like, dtype=torch.float64)
        return cls(zero, zero.clone())

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

    def __getitem__(self, index: slice | Tensor | None) -> "Gaussian":
        return Gaussian(self.precision[index], self.info[index])

    def kl(self, other: "Gaussian") -> Tensor:
        """KL(self || other), summed: 1/2 sum(L_q / L_p - 1 - log(L_q / L_p) + L_q (m_p - m_q)^2)."""
        ratio = other.precision / self.precision
        distance = other.precision * (self.loc - other.loc).square()
        return 0.5 * (ratio - 1 - ratio.log() + distance).sum()

    def positive(self, floor: Tensor | float, fallback: Tensor) -> "Gaussian":
        """Lift precisions below `floor` to it without moving the mean; where L = 0 the mean is `fallback`.

        Clipping L alone would move m = e / L; so e is recomputed: L' = max(L, floor), e' = L' m.
        """
        low = self.precision < floor
        loc = torch.where(self.precision == 0, fallback.double(), self.loc)
        precision = torch.where(low, torch.as_tensor(floor, dtype=self.precision.dtype), self.precision)
        return Gaussian(precision, torch.where(low, precision * loc, self.info))
