"""What statistics of images cannot contradict, and how far those of one client stand from others'.

Features x of images by class n_c, under one backbone or two, have R^T R = sum x^T x and s_c = sum x
of a class. Whatever is sent as R, R^T R is a second moment; and whoever measured has no negative
eigenvalue in the scatter within classes

    R^T R - sum_c s_c s_c^T / n_c              so s_cj^2 <= n_c (R^T R)_jj

up to what float32 rounds away. Features that were invented as a whole satisfy all of it. But class
means m_kc of clients k scatter as their images do: with S the variance of all features within
classes, and the mean r_c of n_rc images that the server or another client knows of,

    D_kc^2 = |m_kc - r_c|^2 / (S (1 / n_kc + 1 / n_rc))                   about 1
    trust_k = 1 for max_c D_kc <= 4, falling to 0 at twice that

by the server's mean or by the lower median over the other clients, whichever is nearer: so nobody
moves a class more than four times as far as the images it announced do by chance, and one liar does
not make an honest client look far from the others. Few images may lie anywhere within that; but the
classes of nobody differ the other way round than everybody's (`apart_in_contrasts`). Where the
images of all classes drift, nobody is near the server's means. What the others have moved from
there more than by chance is taken off,

    g^2 = median_j median_c max(0, |m_jc - r_c|^2 - S (1 / n_jc + 1 / n_rc))
    D_kc^2 = max(0, |m_kc - r_c| - g)^2 / (S (1 / n_kc + 1 / n_rc))       by the server's mean r_c

Who answers alone is compared with nobody: nothing tells its lies from a drift of all images.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING, TINY, LONGEST = 1e-4, 1e-30, 1024
APART, LONG, LARGE, CALM, PULL, WAY = 4.0, 5.0, 50.0, 0.2, 2.5, 3.0
TURNED, MOST = 0.1, 16
Apart = dict[int, tuple[float, str]]
Counts = Mapping[int, Mapping[str, int]]
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
    """Means (C, spaces, d) and images of named classes, and the variance S (spaces) within them."""

    classes: tuple[str, ...]
    mean: Tensor
    count: Tensor
    variance: Tensor

    @classmethod
    def of(
        cls, classes: Sequence[str], counts: Tensor, sums: Tensor, squares: Tensor
    ) -> "ClassMeans":
        """From n_c, s_c and the diagonal of M: S = (tr M - sum_c |s_c|^2 / n_c) / (n - C).

        No less than what float32 rounds away: where a network sees the same in all images, that is
        all there is.
        """
        sums, squares = sums.view(len(sums), -1, sums.shape[-1]), squares.view(-1, sums.shape[-1])
        mean, whole = sums / counts.clamp_min(1)[:, None, None], squares.sum(1)
        scatter = torch.maximum(whole - (mean * sums).sum((0, 2)), ROUNDING * whole)
        freedom = float(counts.sum()) - len(classes)
        return cls(tuple(classes), mean, counts, scatter / freedom if freedom > 0 else 0 * scatter)

    def under(self, space: int) -> "ClassMeans":
        """The same in one space alone."""
        one = slice(space, space + 1)
        return ClassMeans(self.classes, self.mean[:, one], self.count, self.variance[one])

    def only(self, name: str) -> tuple[Tensor, float]:
        """Mean and images of one class."""
        place = self.classes.index(name)
        return self.mean[place], float(self.count[place])


def apart_in_means(clients: Mapping[int, ClassMeans], known: ClassMeans | None = None) -> Apart:
    """max_c D_kc / 4 of every client, by whatever is nearer: the server's mean or the others'.

    Or how far its means tell classes apart the other way round in a space, where that is farther.
    S is the median over all clients, which one liar of three does not move.
    """
    found: Apart = {}
    if len(clients) < 2:
        return found
    by_space = zip(*(one.variance.tolist() for one in clients.values()), strict=True)
    variance = torch.tensor([lower_median([v for v in each if v > 0]) for each in by_space])
    for client, own in clients.items():
        others = [one for other, one in clients.items() if other != client]
        drift = _drift(others, known, variance) if known else torch.zeros_like(variance)
        far = [_distance(own, name, others, known, drift) for name in own.classes]
        longest = torch.stack(far).amax(0) if far else torch.zeros_like(variance)
        ratios = torch.where(variance > 0, longest / variance.clamp_min(TINY).sqrt(), 0.0)
        found[client] = max(ratios.tolist(), default=0.0) / APART, "class means"
    turned = [_turned(clients, space, one) for space, one in enumerate(variance.tolist())]
    return farthest(found, *turned)


def _turned(clients: Mapping[int, ClassMeans], space: int, variance: float) -> Apart:
    """Whose means tell classes apart the other way round in a space, as swapped ones do."""
    rows, counts = {}, {}
    for client, own in clients.items():
        rows[client] = dict(zip(own.classes, own.mean[:, space], strict=True))
        counts[client] = dict(zip(own.classes, own.count.tolist(), strict=True))
    return apart_in_contrasts(rows, counts, "class means", variance)


def _drift(others: Sequence[ClassMeans], known: ClassMeans, variance: Tensor) -> Tensor:
    """g in every space: how far clients stand from the server's means, more than by chance."""
    found = []
    for one in others:
        shared = [name for name in one.classes if name in known.classes and one.only(name)[1]]
        excess = [_squared_gap(one, known, name, variance) for name in shared]
        if excess:
            found.append(_lower_median(excess))
    return _lower_median(found).sqrt() if found else torch.zeros_like(variance)


def _squared_gap(one: ClassMeans, other: ClassMeans, name: str, variance: Tensor) -> Tensor:
    """max(0, |m - r|^2 - S (1 / n + 1 / n_r)) of a class, in every space."""
    (mean, images), (there, count) = one.only(name), other.only(name)
    apart: Tensor = (mean - there).square().sum(1)
    return (apart - variance * (1 / images + 1 / max(count, 1.0))).clamp_min(0)


def _lower_median(rows: Sequence[Tensor]) -> Tensor:
    """Element by element, the lower one of two in the middle."""
    return torch.stack([*rows]).sort(0).values[(len(rows) - 1) // 2]


def _distance(
    own: ClassMeans,
    name: str,
    others: Sequence[ClassMeans],
    known: ClassMeans | None,
    drift: Tensor,
) -> Tensor:
    """D_kc sqrt(S) in every space; 0 where neither the server nor two others know the class."""
    mean, images = own.only(name)

    def gap(one: ClassMeans, moved: Tensor | float = 0.0) -> Tensor:
        there, count = one.only(name)
        apart: Tensor = (mean - there).norm(dim=1) - moved
        return apart.clamp_min(0) / math.sqrt(1 / images + 1 / max(count, 1.0))

    server = [known] if known is not None and name in known.classes else []
    holders = [one for one in others if name in one.classes]
    if not images or len(holders) + 2 * len(server) < 2:
        return mean.new_zeros(len(mean))
    by_server = [gap(one, drift) for one in server]
    near = _lower_median([gap(one) for one in holders] or by_server)
    return torch.stack([near, *by_server]).amin(0)


def apart_in_points(points: Mapping[int, Tensor], name: str) -> Apart:
    """How far every client stands from a typical other, by how far others do: limit 5.

    s_k = median_j |x_k - x_j| over median_j s_j, and the largest |x_ki| over the median of others;
    a fifth stands in for a median of 0, of others that agree exactly or did not move.
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
        ratios = [a / (b or CALM) for a, b in zip((far[k], largest[k]), usual, strict=True)]
        found[client] = max(ratios, default=0.0) / LONG, name
    return found


def apart_in_rows(rows: Mapping[int, Mapping[str, Tensor]], counts: Counts, name: str) -> Apart:
    """How far a row of a client stands from those that others have for the class: limit 2.5.

    Of a class with K >= 3 holders, as with whole updates: s_k = median_j |w_k - w_j|, and

        u_k = s_k / max(median_j s_j, median_j |w_j| / 8) (2 / K)^(1/2) min(n_k / n, n / n_k)^(1/2)

    for rows that hardly move any more are alike; n_k are the images of the class. Rows of honest
    clients scatter more widely than all their weights do, whose limit is 1.7.
    """
    found: Apart = {}
    for one in {held for own in rows.values() for held in own}:
        holders = [client for client, own in rows.items() if one in own and counts[client][one]]
        if len(holders) < 3:
            continue
        stacked = torch.stack([rows[client][one].double() for client in holders])
        apart = torch.cdist(stacked, stacked, compute_mode="donot_use_mm_for_euclid_dist")
        long, every = stacked.norm(dim=1).tolist(), range(len(holders))
        images = [counts[client][one] for client in holders]
        far = [lower_median([float(apart[k, j]) for j in every if j != k]) for k in every]
        for k, client in enumerate(holders):
            others = ([of[j] for j in every if j != k] for of in (far, long, images))
            usual, length, many = map(lower_median, others)
            alike = 2 / len(holders) * min(images[k] / many, many / images[k])
            if most := PULL * max(usual, length / 8):
                ratio = far[k] / most * math.sqrt(alike), name
                found[client] = max(found.get(client, ratio), ratio)
    return found


def apart_in_contrasts(
    rows: Mapping[int, Mapping[str, Tensor]],
    counts: Counts,
    name: str = "how prototypes tell classes apart",
    variance: float | None = None,
) -> Apart:
    """Whose rows tell classes apart the other way round than everybody's: limit a cosine of -0.1.

    Rows of a new class point wherever the images of a client lead them; what is common to all rows
    of a client tells no classes apart. What is left does, for the classes C that k and j both hold:

        x_kj = w_k - mean_C w_k,  a_kj = cos(x_kj, x_jk),      u_k = -10 max_j a_kj e_kj

    over the sixteen others that share most with k. Swapped rows have -a_kj. Two of those others are
    needed. Few images may lead anywhere, and weigh as little: of means of images with this
    `variance` S, contrasts count in full where they are four times as far apart as by chance, and
    of rows that are learnt, those of clients with about as many images as the others n_j,

        e_kj = min(1, |x_kj - x_jk|^2 / (16 S (|C| - 1) / |C| sum_C (1 / n_kc + 1 / n_jc)))
        e_kj = min(1, n_k / median_j n_j)

    Where one has much of a class and the other little, first steps lead rows that are learnt apart:
    then the two must lean to the same classes, for their images
    sum_C (n_kc - mean_C n_k) (n_jc - mean_C n_j) >= 0.
    """
    found: Apart = {}
    for k in rows:
        others = _sharing(counts, rows, k)
        close = [j for j in others if variance is not None or _lean_alike(counts, k, j, others[j])]
        if len(close) > 1:
            weight = _weight_of_images(counts, k, [*others])
            alike = []
            for j, shared in others.items():
                own, other = _contrast(rows[k], shared), _contrast(rows[j], shared)
                if variance is not None:
                    chance = variance * _chance(counts, k, j, shared)
                    weight = float((own - other).square().sum()) / max(APART**2 * chance, TINY)
                alike.append(min(1.0, weight) * _cosine(own, other))
            found[k] = max(0.0, -max(alike) / TURNED), name
    return found


def _sharing(
    counts: Counts, rows: Mapping[int, Mapping[str, Tensor]], k: int
) -> dict[int, list[str]]:
    """Those who share most classes with client k, two at least, and which."""
    held = {j: {one for one in own if counts[j][one]} for j, own in rows.items()}
    shared = {j: sorted(held[k] & held[j]) for j in rows if j != k}
    most = sorted(shared, key=lambda j: -len(shared[j]))[:MOST]
    return {j: shared[j] for j in most if len(shared[j]) > 1}


def _lean_alike(counts: Counts, k: int, j: int, shared: Sequence[str]) -> bool:
    """Whether two clients have more than their share of the same ones of some classes."""

    def excess(one: Mapping[str, int]) -> list[int]:
        whole = sum(one[name] for name in shared)
        return [len(shared) * one[name] - whole for name in shared]

    return sum(p * q for p, q in zip(excess(counts[k]), excess(counts[j]), strict=True)) >= 0


def _weight_of_images(counts: Counts, k: int, others: Sequence[int]) -> float:
    """n_k / median_j n_j."""
    usual = lower_median([sum(counts[j].values()) for j in others])
    return sum(counts[k].values()) / usual


def _chance(counts: Counts, k: int, j: int, shared: Sequence[str]) -> float:
    """(|C| - 1) / |C| sum_C (1 / n_kc + 1 / n_jc)."""
    scatter = sum(1 / counts[k][one] + 1 / counts[j][one] for one in shared)
    return (len(shared) - 1) / len(shared) * scatter


def _contrast(rows: Mapping[str, Tensor], shared: Sequence[str]) -> Tensor:
    """w - mean_C w of some classes, in one vector."""
    stacked = torch.stack([rows[one] for one in shared]).double()
    return (stacked - stacked.mean(0)).flatten()


def _cosine(first: Tensor, second: Tensor) -> float:
    """The cosine between two vectors; 0 where one of them has no length."""
    length = float(first.norm() * second.norm())
    return float(first @ second) / length if length else 0.0


def apart_in_ways(clients: Mapping[int, ClassMeans], here: int, there: int) -> Apart:
    """How far a client's classes go between two spaces, by how far those of others do: limit 3.

        w_k = max_c |m_kc(there) - m_kc(here)|,   u_k = w_k / max(median_j w_j, S^(1/2) / 5)

    All go from one backbone to another, whatever their classes; S is that of apart_in_means. Honest
    clients were at 2.5 where they stood farthest out.
    """
    ways = {
        client: float((own.mean[:, there] - own.mean[:, here]).norm(dim=1).max())
        for client, own in clients.items()
        if own.classes
    }
    found: Apart = {}
    spread = [float(one.variance[there]) for one in clients.values() if one.variance[there] > 0]
    least = max(CALM * math.sqrt(lower_median(spread)), TINY)
    for client, own in ways.items():
        others = [way for other, way in ways.items() if other != client]
        if len(others) > 1:
            found[client] = own / max(lower_median(others), least) / WAY, "ways of classes"
    return found


def apart_in_size(sizes: Mapping[int, float], name: str, idle: float = 0.0) -> Apart:
    """How large something is by the largest of the others, where honest ones differ by orders.

    The limit is 50 of these, or what is `idle`; two others are needed.
    """
    found: Apart = {}
    for client, own in sizes.items():
        others = [size for other, size in sizes.items() if other != client]
        if len(others) > 1:
            found[client] = own / max(LARGE * max(others), idle, TINY), name
    return found


def lower_median(values: Sequence[float]) -> float:
    """With two values the smaller one, so that one liar of three is outvoted; 0 of none."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def voted(values: Sequence[float]) -> float:
    """The lower median of two values or more; 0 where one alone would decide."""
    return lower_median(values) if len(values) > 1 else 0.0


def peers(counts: Sequence[Mapping[str, float]]) -> list[set[int]]:
    """For each client those others that hold classes of at least half of its images."""

    def share(own: Mapping[str, float], other: Mapping[str, float]) -> float:
        return sum(images for one, images in own.items() if other.get(one))

    def of(k: int) -> set[int]:
        half = sum(counts[k].values()) / 2
        others = (j for j in range(len(counts)) if j != k)
        return {j for j in others if half and share(counts[k], counts[j]) >= half}

    return [of(k) for k in range(len(counts))]


def farthest(*found: Apart) -> Apart:
    """By client the largest of several ratios."""
    clients = {client for one in found for client in one}
    return {client: max(one[client] for one in found if client in one) for client in clients}
