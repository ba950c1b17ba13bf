"""The library as class posteriors: where each class lies in feature space (`head: gaussian`).

Features of class c are N(m_c, S) with one covariance S for all; with a Normal-inverse-Wishart posterior the sums of
sufficient statistics over clients are the product of their likelihoods, exactly and in any order. Clients send, under
the new backbone and beside the features g under the backbone the round began with,

    n_c, s_c = sum f,     M = sum f f^T,     A = sum [g 1]^T [g 1],     B = sum [g 1]^T f

(of M and A, which are symmetric, the upper triangle).

The backbone moves, so the places of absent classes go stale. The ridge map W from old to new features, which prefers
the identity, carries all of them along: no boundary, no replay, no generator.

    (A + r I) W = B + r [I; 0]          m_c <- [m_c 1] W          S <- W_d^T S W_d

A class that is visited keeps `decay` of its old count, and the scatter keeps `memory` of its old weight.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.heads import triangles
from fedbnn.images import ImageSet
from fedbnn.messages import Update, class_counts
from fedbnn.state import State

EXCHANGE = "statistics"
BATCH = 500


@dataclass(frozen=True)
class Places:
    """What the server knows of C classes in d features: means, counts, and the scatter within classes."""

    mean: Tensor
    count: Tensor
    scatter: Tensor
    weight: Tensor

    @classmethod
    def of(cls, state: State, width: int) -> "Places":
        """The places in a state, with empty ones for classes that have none yet."""
        missing = len(state.classes) - (
            len(state["places.count"]) if "places.count" in state else 0
        )
        zeros = torch.zeros(missing, width, dtype=torch.float64)
        if "places.count" not in state:
            square = torch.zeros(width, width, dtype=torch.float64)
            return cls(
                zeros,
                torch.zeros(missing, dtype=torch.float64),
                square,
                torch.zeros(1, dtype=torch.float64),
            )
        mean, count = (
            torch.cat([state["places.mean"], zeros]),
            torch.cat([state["places.count"], zeros[:, 0]]),
        )
        return cls(mean, count, state["places.scatter"], state["places.weight"])

    def tensors(self) -> dict[str, Tensor]:
        """As they stand in a state."""
        return {
            "places.mean": self.mean,
            "places.count": self.count,
            "places.scatter": self.scatter,
            "places.weight": self.weight,
        }

    def moved(self, step: Tensor) -> "Places":
        """Carried along by the map W (d+1, d)."""
        mean = torch.where(self.count[:, None] > 0, self.mean @ step[:-1] + step[-1], self.mean)
        return Places(mean, self.count, step[:-1].T @ self.scatter @ step[:-1], self.weight)

    def joined(self, new: "Sums", decay: float, memory: float) -> "Places":
        """Old places with a round's statistics: the parallel-variance formula, the old side tempered.

        n = decay n_old + n_new,   m = (decay n_old m_old + s_new) / n
        S = memory S_old + S_new + sum_c (decay n_old n_new / n) (m_old - m_new)(m_old - m_new)^T
        """
        met = new.count > 0
        old = torch.where(met, decay * self.count, self.count)
        count = old + new.count
        fresh = new.sum / new.count.clamp_min(1e-300)[:, None]
        mean = torch.where(
            met[:, None],
            (old[:, None] * self.mean + new.sum) / count.clamp_min(1e-300)[:, None],
            self.mean,
        )
        gap = (self.mean - fresh) * (old * new.count / count.clamp_min(1e-300)).sqrt()[:, None]
        within = new.moment - new.sum.T @ fresh
        weight = (
            memory * self.weight
            + (new.count.sum() - met.sum()).clamp_min(0)
            + ((old > 0) & met).sum()
        )
        return Places(mean, count, memory * self.scatter + within + gap.T @ gap, weight)


@dataclass
class Sums:
    """The statistics of a round, summed over clients: additive, so their order and splitting change nothing."""

    count: Tensor
    sum: Tensor
    moment: Tensor
    before: Tensor
    cross: Tensor

    @classmethod
    def zero(cls, classes: int, width: int) -> "Sums":
        """Of no client."""
        shapes = (
            (classes,),
            (classes, width),
            (width, width),
            (width + 1, width + 1),
            (width + 1, width),
        )
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    def step(self, ridge: float) -> Tensor:
        """The map W: (A + r I) W = B + r [I; 0], with r = ridge * mean diagonal of A; the identity without data."""
        width = len(self.before) - 1
        stay = torch.cat(
            [torch.eye(width, dtype=torch.float64), torch.zeros(1, width, dtype=torch.float64)]
        )
        strength = ridge * self.before.diagonal().mean()
        if not strength:
            return stay
        square = self.before + strength * torch.eye(width + 1, dtype=torch.float64)
        solved: Tensor = torch.linalg.solve(square, self.cross + strength * stay)
        return solved


def without_places(state: State) -> State:
    """The state as clients are sent it: they never need the class posteriors."""
    return state.only(*(name for name in state.tensors if not name.startswith("places.")))


def measure(
    backbone: nn.Module, layout: Layout, state: State, images: ImageSet
) -> dict[str, Tensor]:
    """A client's statistics: features of its images under the old and the new backbone, no augmentation."""
    classes = tuple(images.counts())
    labels = images.among(classes).labels
    new = features(backbone, layout, state["backbone"], state["buffers"], images)
    old = features(backbone, layout, state["backbone.before"], state["buffers.before"], images)
    old = torch.cat([old, torch.ones(len(old), 1, dtype=old.dtype)], 1)
    sums = torch.zeros(len(classes), new.shape[1], dtype=new.dtype).index_add_(0, labels, new)
    squares = {"moment": triangles.folded(new.T @ new), "before": triangles.folded(old.T @ old)}
    found = {"sum": sums, **squares, "cross": old.T @ new}
    return {f"places.{name}": value.float() for name, value in found.items()}


def features(
    backbone: nn.Module, layout: Layout, weights: Tensor, buffers: Tensor, images: ImageSet
) -> Tensor:
    """Features of all images in float64, in eval mode."""
    layout.write(backbone, weights, buffers)
    backbone.eval()
    with torch.inference_mode():
        return torch.cat([backbone(batch) for batch, _ in images.batches(BATCH)]).double()


@dataclass(frozen=True)
class PlacesExchange:
    """The second exchange of a round: statistics under the new backbone, with the backbone the round began with beside it."""

    before: State
    width: int
    decay: float = 0.9
    memory: float = 0.7
    ridge: float = 1e-2
    drift: bool = True

    def broadcast(self, state: State, exchange: str) -> State:
        """Both backbones; rows and scales stay at home."""
        sent = {"backbone": state["backbone"], "buffers": state["buffers"]}
        return State(
            {
                **sent,
                "backbone.before": self.before["backbone"],
                "buffers.before": self.before["buffers"],
            },
            state.classes,
        )

    def expected(
        self, state: State, exchange: str, classes: Sequence[str]
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Sums by class, the triangles of two symmetric matrices, and one that is not symmetric."""
        width = self.width
        shapes: dict[str, tuple[int, ...]] = {
            "sum": (len(classes), width),
            "cross": (width + 1, width),
        }
        shapes |= {"moment": (triangles.length(width),), "before": (triangles.length(width + 1),)}
        return {f"places.{name}": (shape, torch.float32) for name, shape in shapes.items()}

    def defect(self, state: State, update: Update) -> str | None:
        """Second moments have no negative diagonal."""
        for name, width in (("moment", self.width), ("before", self.width + 1)):
            if bool((triangles.diagonal(update.tensors[f"places.{name}"], width) < 0).any()):
                return "a second moment has a negative diagonal"
        return None

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """The second moment per image: what all clients have in common, whatever their classes."""
        yield update.tensors["places.moment"] / max(1, update.samples)

    def fold(self, state: State, exchange: str) -> "PlacesFold":
        """Sums, then the move, then the join."""
        return PlacesFold(self, state)


class PlacesFold:
    """Adds the statistics of clients one by one and ends in a state whose places have moved and grown."""

    def __init__(self, settings: PlacesExchange, state: State) -> None:
        self.settings, self.state = settings, state
        self.sums = Sums.zero(len(state.classes), settings.width)
        self.moment = torch.zeros(triangles.length(settings.width), dtype=torch.float64)
        self.before = torch.zeros(triangles.length(settings.width + 1), dtype=torch.float64)

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Add a client's sums, tempered by `trust`."""
        index = self.state.index(update.classes)
        self.sums.count[index] += trust * class_counts(update)
        self.sums.sum[index] += trust * update.tensors["places.sum"].double()
        for name, total in (
            ("moment", self.moment),
            ("before", self.before),
            ("cross", self.sums.cross),
        ):
            total.add_(update.tensors[f"places.{name}"], alpha=trust)

    def close(self) -> State:
        """Carry the old places along, then join the new statistics."""
        width = self.settings.width
        squares = {
            "moment": triangles.unfolded(self.moment, width),
            "before": triangles.unfolded(self.before, width + 1),
        }
        places, sums = Places.of(self.state, width), replace(self.sums, **squares)
        if self.settings.drift:
            places = places.moved(sums.step(self.settings.ridge))
        return self.state.having(
            places.joined(sums, self.settings.decay, self.settings.memory).tensors()
        )
