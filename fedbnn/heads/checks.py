"""What statistics of images cannot contradict, and how far those of one client stand from others'.

Features x of images by class n_c, under one backbone or two, have R^T R = sum x^T x and s_c = sum x
of a class. Whatever is sent as R, R^T R is a second moment; and whoever measured has no negative
eigenvalue in the scatter within classes

    R^T R - sum_c s_c s_c^T / n_c              so s_cj^2 <= n_c (R^T R)_jj

up to what float32 rounds away. Features that were invented as a whole satisfy all of it. But class
means m_kc scatter as images do. In the metric in which the head tells classes apart, with S the
covariance within classes of what the server and every second client have, not k itself, lifted as
far as n images leave directions unknown (by its mean eigenvalue times d / (n + d)), and the mean
r_c of n_rc images that the server knows, or another client,

    y_kc = S^(-1/2) (m_kc - r_c) / (1 / n_kc + 1 / n_rc)^(1/2)      has about the covariance 1
    D_kc = |y_kc| / sqrt(d)                                         about 1: in any direction
    T_kc = max_b |y_kc . u_b|,  u_b the unit vector to class b      |N(0, 1)|: where it matters most

A class of its own may scatter up to three times as widely as all do together, a new one above all
in the directions that tell old ones apart; and n images know a direction up to 1 + d / n. So D may
be 3, and T four such deviations:

    trust_k = 1 for D <= 3 and T <= 12 (1 + d / n)^(1/2), falling to 0 at twice that

by whatever is nearer, the server's mean or, in the median, those of the others: nobody moves a
class much further, in any direction, than the images it announced do by chance.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedbnn.heads.discriminant import lifted_root, whitened
from fedbnn.heads.posteriors import ClassPosteriors
from fedbnn.messages import Update, class_counts

ROUNDING, TINY, LONGEST = 1e-4, 1e-30, 1024
ANYWHERE, TOWARDS = 3.0, 12.0
LONG, LARGE, CALM = 5.0, 20.0, 0.2
Apart = dict[int, tuple[float, str]]
FAR = "a class lies farther out than its images can"


def defect_of_sums(counts: Tensor, sums: Tensor, squares: Tensor) -> str | None:
    """s_cj^2 <= n_c M_jj, and sum_c s_cj^2 / n_c <= M_jj, given the diagonal of M."""
    if bool((squares < 0).any()):
        return "a second moment has a negative diagonal"
    if bool((sums.square() > (1 + ROUNDING) * counts[:, None] * squares + TINY).any()):
        return FAR
    between = (sums.square() / counts.clamp_min(1)[:, None]).sum(0)
    return FAR if bool((between > (1 + ROUNDING) * squares + TINY).any()) else None


def defect_of_factor(counts: Tensor, sums: Tensor, upper: Tensor) -> str | None:
    """Why n_c, s_c and R cannot be those of any images; above 1,024 rows feature by feature."""
    if not counts.any() and bool(sums.any()):
        return "statistics of no images"
    if (reason := defect_of_sums(counts, sums, upper.square().sum(0))) is not None:
        return reason
    whole = len(upper) > LONGEST or within_factor(counts, sums, upper)
    return None if whole else "its sums contradict its second moment"


def within_factor(counts: Tensor, sums: Tensor, upper: Tensor) -> bool:
    """Whether R^T R - sum_c s_c s_c^T / n_c has no negative eigenvalue, in r x r numbers.

    Every feature is measured in the root of its square. With S the rows s_c / sqrt(n_c), M = R^T R
    and e = 1e-4, that is whether none of the eigenvalues is above 1 of
    S (M + e I)^-1 S^T = (S S^T - S R^T (R R^T + e I)^-1 R S^T) / e.
    """
    units = upper.square().sum(0).clamp_min(TINY).rsqrt()
    upper, rows = upper * units, sums * units / counts.clamp_min(1).sqrt()[:, None]
    seen, gram = rows @ upper.T, upper @ upper.T
    gram.diagonal().add_(ROUNDING)
    inside = seen @ torch.cholesky_solve(seen.T, torch.linalg.cholesky(gram))
    largest = torch.linalg.eigvalsh((rows @ rows.T - inside) / ROUNDING)[-1:]
    return bool((largest <= 1 + 100 * ROUNDING).all())


def variances(counts: Tensor, sums: Tensor, upper: Tensor) -> Tensor:
    """The variance of every feature within classes, (M_jj - sum_c s_cj^2 / n_c) / (n - C)."""
    between = (sums.square() / counts.float().clamp_min(1)[:, None]).sum(0)
    within = upper.square().sum(0) - between
    return within.clamp_min(0) / (counts.sum().float() - len(counts)).clamp_min(1)


@dataclass(frozen=True)
class ClassMeans:
    """Means (C, d) of named classes and their images; the scatter within, and its freedom."""

    classes: tuple[str, ...]
    mean: Tensor
    count: Tensor
    scatter: Callable[[], Tensor]
    freedom: float

    @classmethod
    def of(cls, update: Update, sums: Tensor, upper: Tensor) -> "ClassMeans":
        """What a client says of one space: its scatter is R^T R - sum_c s_c s_c^T / n_c."""
        count = class_counts(update)
        mean, freedom = sums / count.clamp_min(1)[:, None], update.samples - len(count)
        return cls(update.classes, mean, count, lambda: upper.T @ upper - mean.T @ sums, freedom)

    @classmethod
    def known(cls, names: Sequence[str], found: ClassPosteriors) -> "ClassMeans | None":
        """What a server has met of these classes, if anything."""
        met, freedom = found.count > 0, float(found.weight)
        classes = tuple(name for name, there in zip(names, met.tolist(), strict=True) if there)
        whole = cls(classes, found.mean[met], found.count[met], lambda: found.scatter, freedom)
        return whole if freedom > 0 else None

    def seen_by(self, lower: Tensor) -> "ClassMeans":
        """The same in coordinates in which the covariance is 1."""
        return replace(self, mean=whitened(self.mean, lower))

    def only(self, name: str) -> tuple[Tensor, float]:
        """Mean and images of one class."""
        place = self.classes.index(name)
        return self.mean[place], max(float(self.count[place]), 1.0)

    def but(self, name: str) -> Tensor:
        """The means of all other classes."""
        return self.mean[[place for place, one in enumerate(self.classes) if one != name]]


def apart_in_means(
    clients: Mapping[int, ClassMeans], known: ClassMeans | None, stay: bool = True
) -> Apart:
    """max_c of D_kc and T_kc of every client, by what they may be.

    Where features do not `stay`, the server's means are not of these, and the others are compared.
    """
    found, everybody = Apart(), [*clients.values()]
    server = [known] if known else []
    for half in (0, 1):
        judges = [one for one in (*server, *everybody[1 - half :: 2]) if one.freedom > 0]
        if not judges:
            continue
        lower, images = _root(judges), sum(one.freedom for one in judges)
        limit = TOWARDS * math.sqrt(1 + len(lower) / images)
        here = {client: one.seen_by(lower) for client, one in clients.items()}
        there = known.seen_by(lower) if known else None
        for client in [*clients][half::2]:
            others = [one for other, one in here.items() if other != client]
            judge = _Judge(here[client], others, there, stay, limit)
            found[client] = max(map(judge.far, judge.own.classes), default=0.0), "class means"
    return found


def _root(found: Sequence[ClassMeans]) -> Tensor:
    """L with L L^T = S + I tr(S) / (n + d), of these together; in float32 where d is large."""
    images, scatter = sum(one.freedom for one in found), found[0].scatter().clone()
    for one in found[1:]:
        scatter += one.scatter()
    width = len(scatter)
    covariance = (scatter + scatter.T) / (2 * images)
    level = float(covariance.diagonal().mean())
    covariance = covariance.float() if width > LONGEST else covariance
    return lifted_root(covariance, level * width / (width + images), level)


@dataclass(frozen=True)
class _Judge:
    """One client before the others and what is known, all with the covariance 1."""

    own: ClassMeans
    others: Sequence[ClassMeans]
    known: ClassMeans | None
    stay: bool
    limit: float

    def far(self, name: str) -> float:
        """max(D / 3, T / limit) of a class; 0 where neither the server nor two others know it."""
        holders = [one for one in self.others if name in one.classes]
        known = self.known if self.stay and self.known and name in self.known.classes else None
        references = [self._from(known, name)] if known else []
        if len(holders) >= 2:
            references.append(lower_median([self._from(one, name) for one in holders]))
        return min(references, default=0.0)

    def _from(self, there: ClassMeans, name: str) -> float:
        """By the mean that one of them has."""
        (mean, images), (centre, count) = self.own.only(name), there.only(name)
        gap = (mean - centre) / math.sqrt(1 / images + 1 / count)
        elsewhere = [one.but(name) for one in ([self.known] if self.known else self.others)]
        ways = nn.functional.normalize(torch.cat(elsewhere) - centre, dim=1) @ gap
        towards = float(ways.abs().max()) if len(ways) else 0.0
        return max(float(gap.norm()) / math.sqrt(len(gap)) / ANYWHERE, towards / self.limit)


def apart_in_points(points: Mapping[int, Tensor], name: str) -> Apart:
    """How far every client stands from a typical other, by how far others do: limit 5.

    s_k = median_j |x_k - x_j| over median_j s_j, and the largest |x_ki| over the median of others.
    """
    stacked = torch.stack([*points.values()]).double() if points else torch.zeros(0, 1)
    if len(stacked) < 3 or not stacked.shape[1]:
        return {}
    distances = torch.cdist(stacked, stacked, compute_mode="donot_use_mm_for_euclid_dist")
    largest, every = stacked.abs().amax(1).tolist(), range(len(stacked))
    found: Apart = {}
    far = [lower_median([float(distances[k, j]) for j in every if j != k]) for k in every]
    for k, client in enumerate(points):
        usual = (lower_median([of[j] for j in every if j != k]) for of in (far, largest))
        ratios = [a / b for a, b in zip((far[k], largest[k]), usual, strict=True) if b]
        found[client] = max(ratios, default=0.0) / LONG, name
    return found


def apart_in_drift(drifts: Mapping[int, float]) -> Apart:
    """A relative change of moments by that of the others, or by a fifth if they are calm: limit 5.

    All measure the same two backbones.
    """
    found: Apart = {}
    for client, own in drifts.items():
        others = [drift for other, drift in drifts.items() if other != client]
        if len(others) > 1:
            found[client] = own / max(lower_median(others), CALM) / LONG, "moments before training"
    return found


def apart_in_size(sizes: Mapping[int, float], name: str, idle: float = 0.0) -> Apart:
    """How large something is by the largest of the others, where honest ones differ by orders.

    The limit is 20 of these, or what is `idle`; two others are needed.
    """
    found: Apart = {}
    for client, own in sizes.items():
        others = [size for other, size in sizes.items() if other != client]
        if len(others) > 1 and (most := max(LARGE * max(others), idle)):
            found[client] = own / most, name
    return found


def lower_median(values: Sequence[float]) -> float:
    """With two values the smaller one, so that one liar of three is outvoted; 0 of none."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def farthest(*found: Apart) -> Apart:
    """By client the largest of several ratios."""
    clients = {client for one in found for client in one}
    return {client: max(one[client] for one in found if client in one) for client in clients}
