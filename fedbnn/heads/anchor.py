"""The map from an anchor to now: how class posteriors follow a backbone that moves.

Features a of an image under the anchor, an older backbone that is held for many rounds, never
change; features f under the backbone of now do. Of images that have both, the sums

    A = sum [a 1]^T [a 1],      B = sum [a 1]^T f,      C = sum f^T f

give one map from there to here, a ridge regression that prefers to stay, and what it leaves over:

    (A + r I) W = B + r [I; 0],      E = sum (f - [a 1] W)^T (f - [a 1] W) / n

Older rounds know directions that this round's few images do not. Their f are of an older backbone,
so they are moved by the step map V, the same regression from features b under the backbone that the
round began with, and then remembered with a part m of their weight:

    A <- m A + A',      B <- m [B A_1] V + B',      C <- m (moved C + n E_V) + C'

where A_1 is the column of ones and E_V is left over by V. Remembered as they were, they would pull
back to where the features no longer are. When an anchor is replaced by the backbone of now, f takes
the place of a and W is the identity.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedbnn.heads.posteriors import SMALLEST, ClassPosteriors
from fedbnn.heads.prototypes import padded
from fedbnn.heads.statistics import square, triangle
from fedbnn.protocol.state import State


@dataclass(frozen=True)
class Moments:
    """A (d+1, d+1), B (d+1, d) and C (d, d) of images with features here and there."""

    inner: Tensor
    cross: Tensor
    outer: Tensor

    @classmethod
    def none(cls, width: int) -> "Moments":
        """Of no images."""
        shapes = (width + 1, width + 1), (width + 1, width), (width, width)
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    @property
    def images(self) -> Tensor:
        """n, where older images count less."""
        return self.inner[-1, -1]

    def map(self, ridge: float) -> Tensor:
        """(A + r I) W = B + r [I; 0], r = ridge * mean diagonal of A; identity without images."""
        identity = torch.eye(len(self.inner), dtype=torch.float64)
        strength = ridge * self.inner.diagonal().mean()
        if not strength:
            return identity[:, :-1]
        target = self.cross + strength * identity[:, :-1]
        solved: Tensor = torch.linalg.solve(self.inner + strength * identity, target)
        return solved

    def residual(self, drift: Tensor) -> Tensor:
        """E, the covariance of what a map leaves over."""
        return self.carried(drift)

    def carried(
        self, drift: Tensor, scatter: Tensor | float = 0.0, weight: Tensor | float = 1.0
    ) -> Tensor:
        """W_d^T S W_d + v E in two products, for n E is the symmetric part of C + W^T (A W - 2 B).

        W_d is a map without its last row.
        """
        share = weight / self.images if self.images else 0.0
        inner = share * self.inner
        inner[:-1, :-1] += scatter
        found = share * self.outer + drift.T @ (inner @ drift - 2 * share * self.cross)
        return (found + found.T) / 2

    def moved(self, step: Tensor, left_over: Tensor) -> "Moments":
        """The same images with [f 1] V in the place of f, whose covariance E_V is put back."""
        whole = torch.cat([self.cross, self.inner[:, -1:]], 1)
        now = bordered(self.outer, self.cross[-1], self.images)
        carried = step.T @ now @ step + self.images * left_over
        return Moments(self.inner, whole @ step, carried)

    def joined(self, new: "Moments", memory: float) -> "Moments":
        """With those of other images, which count in full."""
        pairs = zip(vars(self).values(), vars(new).values(), strict=True)
        return Moments(*(memory * old + other for old, other in pairs))

    def anchored(self) -> "Moments":
        """The same images with f in the place of a."""
        inner = bordered(self.outer, self.cross[-1], self.images)
        return Moments(inner, inner[:, :-1], self.outer)


def bordered(matrix: Tensor, total: Tensor, images: Tensor) -> Tensor:
    """sum [x 1]^T [x 1] from sum x^T x, sum x and n."""
    right = torch.cat([total, images.view(1)])[:, None]
    return torch.cat([torch.cat([matrix, total[None]]), right], 1)


def affine(points: Tensor, drift: Tensor) -> Tensor:
    """[x 1] W of points x."""
    return points @ drift[:-1] + drift[-1]


Pair = tuple[int, int]
ANCHOR, BEFORE, NOW = range(3)
PAIRS: tuple[Pair, ...] = tuple((one, two) for one in range(3) for two in {one, NOW})


@dataclass(frozen=True)
class RoundSums:
    """Of a round's images, in any order and splitting of clients: n_c, the sums of a, b and f by
    class (3, C, d), and those of x^T y for the `PAIRS` of them (d, d)."""

    count: Tensor
    sums: Tensor
    grams: Mapping[Pair, Tensor]

    def moments(self, place: int) -> Moments:
        """A, B and C from there to now."""
        total = self.sums.sum(1)
        inner = bordered(self.grams[place, place], total[place], self.count.sum())
        cross = torch.cat([self.grams[place, NOW], total[NOW][None]])
        return Moments(inner, cross, self.grams[NOW, NOW])


@dataclass(frozen=True)
class Anchored:
    """Class posteriors under the anchor, exact sums that never go stale, and their way to now.

    A map knows nothing of what the anchor does not show. So beside `drift`, W, every class has the
    mean r_c of what W left over of its images, `residual`, of `recent` images in which older ones
    count less, moved by the step map like all that is remembered:

        m_c(now) = [m_c 1] W + r_c,      S(now) = W_d^T S W_d + v E        with v the weight of S
    """

    known: ClassPosteriors
    moments: Moments
    drift: Tensor
    residual: Tensor
    recent: Tensor
    age: Tensor

    @classmethod
    def of(cls, state: State, width: int) -> "Anchored":
        """The one in a state; the identity where none is."""
        known, classes = ClassPosteriors.of(state, width, "anchor"), len(state.classes)
        if "anchor.drift" not in state:
            none, rows = Moments.none(width), torch.zeros_like(known.mean)
            age = torch.zeros(1, dtype=torch.float64)
            return cls(known, none, none.map(1.0), rows, rows.sum(1), age)
        inner = square(state["anchor.inner"], width + 1)
        moments = Moments(inner, state["anchor.cross"], square(state["anchor.outer"], width))
        residual, recent = (padded(state[f"anchor.{n}"], classes) for n in ("residual", "recent"))
        return cls(known, moments, state["anchor.drift"], residual, recent, state["anchor.age"])

    def tensors(self) -> dict[str, Tensor]:
        """As it stands in a state."""
        found = {name: getattr(self, name) for name in ("drift", "residual", "recent", "age")}
        found |= {name: triangle(getattr(self.moments, name)) for name in ("inner", "outer")}
        found["cross"] = self.moments.cross
        return {f"anchor.{name}": one for name, one in found.items()} | self.known.tensors("anchor")

    def after(self, found: "RoundSums", memory: float, ridge: float) -> "Anchored":
        """A round later."""
        count, here, there = found.count, found.sums[ANCHOR], found.sums[NOW]
        if not count.any():
            return self
        last = found.moments(BEFORE)
        step = last.map(ridge)
        new = found.moments(ANCHOR)
        moments = self.moments.moved(step, last.residual(step)).joined(new, memory)
        drift = moments.map(ridge)
        left_over = there - here @ drift[:-1] - count[:, None] * drift[-1]
        kept, carried = memory * self.recent, self.residual @ step[:-1]
        joined = (kept[:, None] * carried + left_over) / (kept + count).clamp_min(SMALLEST)[:, None]
        residual = torch.where(count[:, None] > 0, joined, carried)
        known = self.known.merge(count, here, found.grams[ANCHOR, ANCHOR])
        return Anchored(known, moments, drift, residual, kept + count, self.age + 1)

    def now(self) -> ClassPosteriors:
        """Where the classes lie under the backbone of now."""
        known, drift = self.known, self.drift
        mean = torch.where(known.count[:, None] > 0, affine(known.mean, drift) + self.residual, 0.0)
        scatter = self.moments.carried(drift, known.scatter, known.weight)
        return replace(known, mean=mean, scatter=scatter)

    def renewed(self) -> "Anchored":
        """Everything carried once to the backbone of now, which is the anchor from here on."""
        moments, none = self.moments.anchored(), torch.zeros_like(self.residual)
        identity = Moments.none(len(self.drift) - 1).map(1.0)
        return Anchored(self.now(), moments, identity, none, none.sum(1), 0 * self.age)
