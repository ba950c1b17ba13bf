"""The posterior over where each class lies in feature space.

Features of class c are N(m_c, S) with one covariance S for all. With a Normal-inverse-Wishart
posterior the sums of sufficient statistics are the product of likelihoods, exactly and in any
order, over clients and rounds alike, as long as the features stay the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbnn.heads.prototypes import padded
from fedbnn.protocol.state import State

NAMES = ("mean", "count", "scatter", "weight")
SMALLEST = 1e-300


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
