"""Prediction from class posteriors: a linear discriminant with Student-t tails.

With covariance S shrunk towards a multiple of the identity by the closed form of Chen et al. (OAS, 2010), and v degrees
of freedom, the predictive density of class c at features f is a multivariate Student-t:

    d_c = (f - m_c)^T S^-1 (f - m_c) / (1 + 1/n_c)
    log p(f | c) = -(v + d)/2 log(1 + d_c / v) - d/2 log(1 + 1/n_c) + const

n_c is the count of `fedbnn.heads.places`, in which old visits count less. Where classes are not met equally often
(`frequency`), p(c) is the mean of the Dirichlet posterior of these counts, else all are alike:

    log p(c) = log(n_c + 1) + const
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedbnn.heads.places import Places

SMALLEST = 1e-9
ClassPrior = Literal["uniform", "frequency"]


def shrinkage(covariance: Tensor, samples: float) -> float:
    """OAS: ((1 - 2/d) tr(S^2) + tr(S)^2) / ((n + 1 - 2/d) (tr(S^2) - tr(S)^2 / d)), at most 1."""
    width = len(covariance)
    squares, trace = float(covariance.square().sum()), float(covariance.trace())
    below = (samples + 1 - 2 / width) * (squares - trace**2 / width)
    return min(1.0, ((1 - 2 / width) * squares + trace**2) / below) if below > 0 else 1.0


@dataclass(frozen=True)
class Reading:
    """How a class is read off its posterior: the settings of the head that act on predictions alone.

    log p(c | x) = log p(f | c) / temperature + rows (row_c . f + bias_c) + log p(c) + const
    """

    temperature: float = 1.0
    rows: float = 0.0
    prior: ClassPrior = "uniform"


PLAIN = Reading()


@dataclass(frozen=True)
class Discriminant:
    """Class means in whitened coordinates, ready to score any number of images with one matrix product."""

    whiten: Tensor
    means: Tensor
    spread: Tensor
    freedom: float
    temperature: float
    log_prior: Tensor

    @classmethod
    def of(cls, places: Places, rows: Tensor, reading: Reading = PLAIN) -> "Discriminant":
        """For the classes in these rows.

        Shrinking towards the identity keeps the eigenvectors, so it is done on the eigenvalues; those that rounding
        made negative are 0.
        """
        weight = float(places.weight.clamp_min(1.0))
        values, vectors = torch.linalg.eigh((places.scatter + places.scatter.T) / (2 * weight))
        values = values.clamp_min(0)
        share, level = shrinkage(values.diag(), weight), float(values.mean()) or 1.0
        whiten = (
            vectors * ((1 - share) * values + share * level).clamp_min(SMALLEST * level).rsqrt()
        )
        count = places.count[rows]
        log_prior = count.log1p() if reading.prior == "frequency" else torch.zeros_like(count)
        spread = 1 + 1 / count.clamp_min(1e-6)
        return cls(
            whiten, places.mean[rows] @ whiten, spread, weight, reading.temperature, log_prior
        )

    def scores(self, features: Tensor) -> Tensor:
        """Log-scores (n, C) of features (n, d): log p(f | c) / temperature + log p(c), up to constants."""
        white = features.double() @ self.whiten
        squares = (
            white.square().sum(1, keepdim=True)
            - 2 * white @ self.means.T
            + self.means.square().sum(1)
        )
        distance = squares.clamp_min(0) / self.spread
        width = white.shape[1]
        logs = (
            -0.5 * (self.freedom + width) * torch.log1p(distance / self.freedom)
            - 0.5 * width * self.spread.log()
        )
        return (logs / self.temperature + self.log_prior).float()
