"""Class posteriors: where each class lies in feature space (`head: gaussian`).

Features of class c are N(m_c, S) with one covariance S for all; with a Normal-inverse-Wishart
posterior the sums of sufficient statistics over clients are the product of their likelihoods,
exactly and in any order. Clients send, under the new backbone and beside the features g under the
backbone the round began with (of M and A, which are symmetric, the upper triangle),

    n_c, s_c = sum f,     M = sum f f^T,     A = sum [g 1]^T [g 1],     B = sum [g 1]^T f

The backbone moves, so the posteriors of absent classes go stale. The ridge map W from old to new
features, which prefers the identity, carries all of them along: no boundary, no replay, no
generator.

    (A + r I) W = B + r [I; 0]          m_c <- [m_c 1] W          S <- W_d^T S W_d

A class that is visited keeps `decay` of its old count, the scatter `memory` of its old weight.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.devices import CPU, visiting
from fedbnn.heads import GaussianHead, checks
from fedbnn.images import ImageSet
from fedbnn.messages import Update, class_counts
from fedbnn.state import State

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]
Tensors = dict[str, Tensor]
EXCHANGE = "statistics"
SERVER_ONLY = ("posteriors.", "exact.count", "exact.sum", "exact.moment")
SENT = ("sum", "moment", "before", "cross")
BATCH = 500


@dataclass(frozen=True)
class ClassPosteriors:
    """What the server knows of C classes in d features: means, counts, scatter within classes."""

    mean: Tensor
    count: Tensor
    scatter: Tensor
    weight: Tensor

    @classmethod
    def of(cls, state: State, width: int) -> "ClassPosteriors":
        """The class posteriors in a state, with empty ones for classes that have none yet."""
        known = "posteriors.count" in state
        missing = len(state.classes) - (len(state["posteriors.count"]) if known else 0)
        zeros = torch.zeros(missing, width, dtype=torch.float64)
        if not known:
            square = torch.zeros(width, width, dtype=torch.float64)
            return cls(zeros, zeros.sum(1), square, torch.zeros(1, dtype=torch.float64))
        mean = torch.cat([state["posteriors.mean"], zeros])
        count = torch.cat([state["posteriors.count"], zeros.sum(1)])
        return cls(mean, count, state["posteriors.scatter"], state["posteriors.weight"])

    def tensors(self) -> dict[str, Tensor]:
        """As they stand in a state."""
        return {f"posteriors.{name}": value for name, value in vars(self).items()}

    def transport(self, drift: Tensor) -> "ClassPosteriors":
        """Carried along by the map W (d+1, d)."""
        carried = self.mean @ drift[:-1] + drift[-1]
        mean = torch.where(self.count[:, None] > 0, carried, self.mean)
        return replace(self, mean=mean, scatter=drift[:-1].T @ self.scatter @ drift[:-1])

    def merge(self, new: "SufficientStatistics", decay: float, memory: float) -> "ClassPosteriors":
        """With a round's statistics: the parallel-variance formula, the old side tempered.

        n = decay n_old + n_new,   m = (decay n_old m_old + s_new) / n
        S = memory S_old + S_new + sum_c (decay n_old n_new / n) (m_old - m_new)(m_old - m_new)^T
        """
        met = new.count > 0
        old = torch.where(met, decay * self.count, self.count)
        count = old + new.count
        some = count.clamp_min(1e-300)
        fresh = new.sum / new.count.clamp_min(1e-300)[:, None]
        joined = (old[:, None] * self.mean + new.sum) / some[:, None]
        gap = (self.mean - fresh) * (old * new.count / some).sqrt()[:, None]
        within = new.moment - new.sum.T @ fresh
        more = (new.count.sum() - met.sum()).clamp_min(0) + ((old > 0) & met).sum()
        mean = torch.where(met[:, None], joined, self.mean)
        scatter = memory * self.scatter + within + gap.T @ gap
        return ClassPosteriors(mean, count, scatter, memory * self.weight + more)


@dataclass
class SufficientStatistics:
    """The statistics of a round, summed over clients in any order and splitting."""

    count: Tensor
    sum: Tensor
    moment: Tensor
    before: Tensor
    cross: Tensor

    def drift_map(self, ridge: float) -> Tensor:
        """(A + r I) W = B + r [I; 0], r = ridge * mean diagonal of A; identity without data."""
        identity = torch.eye(len(self.before), dtype=torch.float64)
        strength = ridge * self.before.diagonal().mean()
        if not strength:
            return identity[:, :-1]
        target = self.cross + strength * identity[:, :-1]
        solved: Tensor = torch.linalg.solve(self.before + strength * identity, target)
        return solved


def without_posteriors(state: State) -> State:
    """The state as clients are sent it: they never need the class posteriors."""
    kept = (name for name in state.tensors if not name.startswith(SERVER_ONLY))
    return state.only(*kept)


def measure(
    backbone: nn.Module,
    layout: Layout,
    state: State,
    images: ImageSet,
    device: torch.device = CPU,
) -> Tensors:
    """A client's statistics: features under the old and the new backbone, no augmentation."""
    classes = tuple(images.counts())
    labels = images.among(classes).labels
    layout.write(backbone, state["backbone.before"], state["buffers.before"])
    old = features(backbone, images, device).double()
    old = torch.cat([old, torch.ones(len(old), 1, dtype=old.dtype)], 1)
    layout.write(backbone, state["backbone"], state["buffers"])
    new = features(backbone, images, device).double()
    found = {
        "sum": torch.zeros(len(classes), new.shape[1], dtype=new.dtype).index_add_(0, labels, new),
        "moment": triangle(new.T @ new),
        "before": triangle(old.T @ old),
        "cross": old.T @ new,
    }
    return {f"posteriors.{name}": value.float() for name, value in found.items()}


def features(backbone: nn.Module, images: ImageSet, device: torch.device = CPU) -> Tensor:
    """Features of images without augmentation, in eval mode; the backbone is left as it was."""
    training = backbone.training
    backbone.eval()
    with visiting(backbone, device), torch.inference_mode():
        seen = [backbone(one.to(device)) for one, _ in images.loader(BATCH, shuffle=False)]
        found = torch.cat(seen).cpu()
    backbone.train(training)
    return found


@dataclass(frozen=True)
class StatisticsAggregator:
    """The last exchange of a round: statistics under the new backbone and the one it began with."""

    head: GaussianHead
    before: State
    exchange: str = EXCHANGE

    @property
    def width(self) -> int:
        """Features d."""
        return self.before["prototypes"].shape[1] - 1

    def broadcast(self, state: State) -> State:
        """Both backbones; prototypes and scales stay at home."""
        old = {f"{name}.before": self.before[name] for name in ("backbone", "buffers")}
        return state.only("backbone", "buffers").having(old)

    def expected(self, state: State, counts: Mapping[str, int]) -> Spec:
        """Names, shapes and types of the statistics of so many images by class."""
        found = shapes(len(counts), self.width).items()
        return {f"posteriors.{name}": (shape, torch.float32) for name, shape in found}

    def defect(self, state: State, update: Update) -> str | None:
        """What statistics of any images cannot contradict (`fedbnn.heads.checks`)."""
        found = {name: update.tensors[f"posteriors.{name}"].double() for name in SENT}
        found["moment"] = square(found["moment"], self.width)
        found["before"] = square(found["before"], self.width + 1)
        return checks.defect_of_moments(class_counts(update), *found.values())

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """The variance of every feature within classes: all clients have it in common."""
        sums, counts = update.tensors["posteriors.sum"].double(), class_counts(update)
        between = (sums.square() / counts.clamp_min(1)[:, None]).sum(0)
        within = diagonal(update.tensors["posteriors.moment"].double(), self.width) - between
        yield (within.clamp_min(0) / max(1, update.samples - len(counts))).float()

    def known(self, state: State, update: Update) -> dict[str, list[float]]:
        """Statistics have no rows to measure."""
        return {}

    def apart(self, state: State, updates: Sequence[Update]) -> checks.Apart:
        """How far class means are from the others', and how much larger the drift is."""
        means = checks.apart_in_means({update.client: self._means(update) for update in updates})
        drifts = checks.apart_in_drift({update.client: self._drift(update) for update in updates})
        return checks.farthest(means, drifts)

    def _drift(self, update: Update) -> float:
        """max(|A - M|, |B - M|) / |M| without ones: how the second moment changed in the round."""
        moment = square(update.tensors["posteriors.moment"].double(), self.width)
        before = square(update.tensors["posteriors.before"].double(), self.width + 1)[:-1, :-1]
        cross = update.tensors["posteriors.cross"].double()[:-1]
        change = torch.stack([before - moment, cross - moment]).norm(dim=(1, 2)).max()
        return float(change / moment.norm().clamp_min(checks.TINY))

    def _means(self, update: Update) -> checks.ClassMeans:
        squares = diagonal(update.tensors["posteriors.moment"].double(), self.width)
        sums = update.tensors["posteriors.sum"].double()
        return checks.ClassMeans.of(update.classes, class_counts(update), sums, squares)

    def fold(self, state: State) -> "StatisticsFold":
        """Sums, then the transport, then the merge."""
        return StatisticsFold(self.head, state, self.width)


class StatisticsFold:
    """Adds the statistics of clients and ends in a state whose class posteriors moved and grew."""

    def __init__(self, head: GaussianHead, state: State, width: int) -> None:
        self.head, self.state, self.width = head, state, width
        count = len(state.classes)
        found = {"count": (count,), **shapes(count, width)}.items()
        self.sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in found}

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Add a client's sums, tempered by `trust`."""
        index = self.state.index(update.classes)
        self.sums["count"][index] += trust * class_counts(update)
        self.sums["sum"][index] += trust * update.tensors["posteriors.sum"].double()
        for name in ("moment", "before", "cross"):
            self.sums[name].add_(update.tensors[f"posteriors.{name}"], alpha=trust)

    def close(self) -> State:
        """Carry the old posteriors along, then merge the new statistics."""
        moment = square(self.sums["moment"], self.width)
        before = square(self.sums["before"], self.width + 1)
        found = SufficientStatistics(**{**self.sums, "moment": moment, "before": before})
        posteriors = ClassPosteriors.of(self.state, self.width)
        if self.head.drift:
            posteriors = posteriors.transport(found.drift_map(self.head.ridge))
        merged = posteriors.merge(found, self.head.decay, self.head.memory)
        return self.state.having(merged.tensors())


def shapes(classes: int, width: int) -> dict[str, tuple[int, ...]]:
    """Sums by class, the triangles of two symmetric matrices, and one that is not symmetric."""
    triangles = {"moment": (triangle_length(width),), "before": (triangle_length(width + 1),)}
    return {"sum": (classes, width), **triangles, "cross": (width + 1, width)}


def triangle_length(width: int) -> int:
    """Numbers in the upper triangle of a symmetric matrix with so many rows."""
    return width * (width + 1) // 2


@lru_cache(8)
def _upper(width: int) -> Tensor:
    """Places of the triangle in the flat matrix, row by row."""
    return torch.ones(width, width, dtype=torch.bool).triu().view(-1).nonzero()[:, 0]


def triangle(symmetric: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, which is all that need be sent."""
    return symmetric.reshape(-1)[_upper(len(symmetric))]


def square(numbers: Tensor, width: int) -> Tensor:
    """The symmetric matrix of a triangle."""
    flat = numbers.new_zeros(width * width).index_copy_(0, _upper(width), numbers)
    upper = flat.view(width, width)
    return upper + upper.triu(1).T


def diagonal(numbers: Tensor, width: int) -> Tensor:
    """The diagonal of the matrix of a triangle: row i begins after w + (w - 1) + ... numbers."""
    lengths = torch.arange(width, 0, -1)
    return numbers[lengths.cumsum(0) - lengths]
