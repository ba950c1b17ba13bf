"""The posterior over where each class lies in feature space, and the scores that it gives.

Features of class c are N(m_c, S) with one covariance S for all. With a Normal-inverse-Wishart
posterior the sums of sufficient statistics are the product of likelihoods, exactly and in any
order, over clients and rounds alike, as long as the features stay the same.

Scores are those of a linear discriminant with Student-t tails. With covariance S shrunk towards a
multiple of the identity, by the closed form of Chen et al. (OAS, 2010) or by more, and v degrees of
freedom, the predictive density of class c at features f is a multivariate Student-t:

    d_c = (f - m_c)^T S^-1 (f - m_c) / (1 + 1/n_c)
    log p(f | c) = -(v + d)/2 log(1 + d_c / v) - d/2 log(1 + 1/n_c) + const

n_c is the count of the class posterior, in which old visits count less. Where classes are not met
equally often (`prior: frequency`), p(c) is the mean of the Dirichlet posterior of these counts,
else all are alike:

    log p(c) = log(n_c + 1) + const

A class that nobody has met has its mean where class means are: around their own mean m with their
own covariance B. So what speaks for one, in nats and without a label, in the span of class means
(elsewhere it is explained as well as any known class), is

    log p(f | unknown) - log p(f | known) = log N(f; m, S + B) - log 1/C sum_c N(f; m_c, S + S/n_c)
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedbnn.heads import ExactHead, GaussianHead
from fedbnn.heads.prototypes import padded
from fedbnn.protocol.state import State

NAMES = ("mean", "count", "scatter", "weight")
SMALLEST = 1e-300
ADDED = 1e-9


@dataclass(frozen=True)
class ClassPosteriors:
    """What the server knows of C classes in d features: means, counts, scatter within classes."""

    mean: Tensor
    count: Tensor
    scatter: Tensor
    weight: Tensor

    @classmethod
    def of(cls, state: State, width: int, prefix: str = "posteriors") -> "ClassPosteriors":
        """Those that a state has under a name, with empty ones for classes that have none yet."""
        if f"{prefix}.count" not in state:
            rows = torch.zeros(len(state.classes), width, dtype=torch.float64)
            scatter = torch.zeros(width, width, dtype=torch.float64)
            return cls(rows, rows.sum(1), scatter, torch.zeros(1, dtype=torch.float64))
        mean, count, scatter, weight = (state[f"{prefix}.{name}"] for name in NAMES)
        classes = len(state.classes)
        return cls(padded(mean, classes), padded(count, classes), scatter, weight)

    def tensors(self, prefix: str = "posteriors") -> dict[str, Tensor]:
        """As they stand in a state."""
        return {f"{prefix}.{name}": value for name, value in vars(self).items()}

    def merge(self, count: Tensor, sums: Tensor, moment: Tensor) -> "ClassPosteriors":
        """With statistics of more images of the same features: the parallel-variance formula.

        n = n_old + n_new,   m = (n_old m_old + s_new) / n
        S = S_old + S_new + sum_c (n_old n_new / n) (m_old - m_new)(m_old - m_new)^T
        """
        met, old = count > 0, self.count
        some = (old + count).clamp_min(SMALLEST)
        fresh = sums / count.clamp_min(SMALLEST)[:, None]
        joined = (old[:, None] * self.mean + sums) / some[:, None]
        gap = (self.mean - fresh) * (old * count / some).sqrt()[:, None]
        more = (count.sum() - met.sum()).clamp_min(0) + ((old > 0) & met).sum()
        mean = torch.where(met[:, None], joined, self.mean)
        scatter = self.scatter + moment - sums.T @ fresh + gap.T @ gap
        return ClassPosteriors(mean, old + count, scatter, self.weight + more)


def shrinkage(covariance: Tensor, samples: float) -> float:
    """OAS: ((1 - 2/d) tr(S^2) + tr(S)^2) / ((n + 1 - 2/d) (tr(S^2) - tr(S)^2 / d)), at most 1."""
    width = len(covariance)
    squares, trace = float(covariance.square().sum()), float(covariance.trace())
    below = (samples + 1 - 2 / width) * (squares - trace**2 / width)
    return min(1.0, ((1 - 2 / width) * squares + trace**2) / below) if below > 0 else 1.0


def root(posteriors: ClassPosteriors, least: float) -> Tensor:
    """L with L L^T = S, which is shrunk by at least `least`.

    What rounding took from its smallest eigenvalues is put back: as little as makes L exist.
    """
    weight = float(posteriors.weight.clamp_min(1.0))
    covariance = (posteriors.scatter + posteriors.scatter.T) / (2 * weight)
    share, level = max(shrinkage(covariance, weight), least), float(covariance.diagonal().mean())
    added = ADDED * level if level > 0 else 1.0
    shrunk = covariance.mul_(1 - share)
    shrunk.diagonal().add_(max(share * level, added))
    while (found := torch.linalg.cholesky_ex(shrunk)).info:
        shrunk.diagonal().add_(added)
        added *= 10
    lower: Tensor = found.L
    return lower


def whitened(features: Tensor, lower: Tensor) -> Tensor:
    """L^-1 f of features (n, d): within a class they have the covariance 1."""
    solved: Tensor = torch.linalg.solve_triangular(lower, features.to(lower).T, upper=False)
    return solved.T


def span_of(means: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Principal directions (d, k) of whitened class means, and the variance of means along each.

    From C means with the squared errors e_c: s_j^2 / (C - 1) - mean e_c, at least 0.
    """
    most = len(means) - 1
    _, long, directions = torch.linalg.svd(means - means.mean(0), full_matrices=False)
    between = long[:most].square() / max(most, 1) - errors.mean()
    return directions[:most].T, between.clamp_min(0)


@dataclass(frozen=True)
class Discriminant:
    """Class means in whitened coordinates: any number of images is one matrix product."""

    lower: Tensor
    means: Tensor
    spread: Tensor
    freedom: float
    temperature: float
    log_prior: Tensor
    span: Tensor
    between: Tensor

    @classmethod
    def of(
        cls, posteriors: ClassPosteriors, rows: Tensor, head: GaussianHead | ExactHead
    ) -> "Discriminant":
        """For the classes in these rows."""
        lower, count = root(posteriors, head.shrinkage), posteriors.count[rows]
        log_prior = count.log1p() if head.prior == "frequency" else torch.zeros_like(count)
        spread, means = 1 + 1 / count.clamp_min(1e-6), whitened(posteriors.mean[rows], lower)
        freedom, span = float(posteriors.weight.clamp_min(1.0)), span_of(means, spread - 1)
        return cls(lower, means, spread, freedom, head.temperature, log_prior, *span)

    def on(self, device: torch.device) -> "Discriminant":
        """The same where the features are, if float64 is known there."""
        if device.type == "mps":
            return self
        there: Any = {k: one.to(device) for k, one in vars(self).items() if isinstance(one, Tensor)}
        return replace(self, **there)

    def log_densities(self, white: Tensor) -> Tensor:
        """log p(f | c) + const (n, C) of whitened features (n, d)."""
        cross = white.square().sum(1, keepdim=True) - 2 * white @ self.means.T
        distance = (cross + self.means.square().sum(1)).clamp_min(0) / self.spread
        width = white.shape[1]
        tails = -0.5 * (self.freedom + width) * torch.log1p(distance / self.freedom)
        return tails - 0.5 * width * self.spread.log()

    def log_odds(self, white: Tensor) -> Tensor:
        """log p(f | unknown) - log p(f | known) (n,) of whitened features (n, d)."""
        centre = self.means.mean(0)
        here, there = (white - centre) @ self.span, (self.means - centre) @ self.span
        wide, width = 1 + self.between, len(self.between)
        unknown = -0.5 * (here.square() / wide).sum(1) - 0.5 * wide.log().sum()
        gaps = torch.cdist(here, there).square() / self.spread + width * self.spread.log()
        return unknown - torch.logsumexp(-0.5 * gaps, 1) + math.log(len(self.means))

    def read(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Of features (n, d) the log-scores (n, C), and what speaks for a class not met yet (n,).

        log p(f | c) / temperature + log p(c) + const
        """
        white = whitened(features, self.lower)
        scores = self.log_densities(white) / self.temperature + self.log_prior
        return scores.float().to(features.device), self.log_odds(white).float()

    def scores(self, features: Tensor) -> Tensor:
        """Log-scores (n, C) of features (n, d)."""
        return self.read(features)[0]

    def rows(self) -> Tensor:
        """The scores of few features as rows (C, d + 1) of weights and bias, without the tails.

        w_c = S^-1 m_c / temperature,        b_c = log p(c) - m_c^T w_c / 2
        """
        weights = torch.linalg.solve_triangular(self.lower.T, self.means.T, upper=True).T
        bias = -0.5 * self.means.square().sum(1, keepdim=True)
        rows = torch.cat([weights, bias], 1) / self.temperature
        rows[:, -1] += self.log_prior
        return rows.float()
