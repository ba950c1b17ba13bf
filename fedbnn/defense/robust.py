"""How far one update may move the fold: who stands apart from the other clients counts less.

The backbone of every update is a point x_k in a space all clients share (`Method.influence`). With
the lower median over the others of K clients that moved at all, and n_k images,

    s_k = median_j |x_k - x_j|              how far client k stands from a typical other
    r_k = s_k / max(median_j s_j, calm_k)   the same, by how far the others stand from each other
    u_k = r_k sqrt(2 / K) min(n_k / n, n / n_k)^(1/2),  n = median_j n_j
                                            how far it moves the mean of all, by the mean's error
    trust_k = 1 for u_k <= cap,  2 - u_k / cap up to u_k = 2 cap,  0 beyond

For if honest clients scatter by sigma, two of them are sqrt(2) sigma apart, their mean errs by
sigma / sqrt(K), and one client at the distance r sqrt(2) sigma moves it by r sqrt(2) sigma / K.
Fewer images than usual scatter more, as the root of their number, and weigh less; more of them are
more steps, and an honest walk is longer by their root. A model that hardly moves any more would
make every step look long: a distance below `calm`, a small part of the weights' own length, is none
to speak of; nor is one below what clients walked while this one was away, where it has to walk that
after them (`Aggregator.walked`). So with a cap of u one client makes the error about sqrt(1 + u^2)
times as large, however many there are, and a gross forgery has no pull at all (Hampel's
redescending weight). A norm would not do: a flipped sign has the norm of an honest update, and
zeros have less. As long as fewer than half of the clients lie, every median is an honest distance.
Three clients that moved are the least that can be judged.

Where tasks drift, the first clients of a new one move far while those of the old one hardly do. So
a client is measured by the larger of the median over all others and the one over its peers, who
hold classes of at least half of its images; two peers are needed. Who holds what is the roll call's
to say, not the client's.

Rows of classes cannot be compared so: somebody may be the only one who knows a class, and a new
class moves far. But rows are about equally long, and their precisions too. For each of these
tensors, with l_kc the length of row c,

    v_k = max_c l_kc / max(median_j median_c l_jc, median_j l_jc, L_c)
                    * min(1, n_kc / median_j median_c n_jc)       its longest row, by a typical one
    trust_k is at most 1 for v_k <= 6,  2 - v_k / 6 up to v_k = 12,  0 beyond

median_j l_jc is over the other clients that hold class c, two at least: a row may be long because
it is with everybody, for rows of a class that others know alone have met and grown short. That
gives a liar no room, for rows of three holders are compared as points (`checks.apart_in_rows`).
L_c is the length of the precision prototype c has on the server already, 0 for points. For where
tasks drift, the last clients of an old task know their rows well, and add as much again as there
is, while the first of a new one know little. Of a class with few images a client knows little and
may think much, but it weighs less in the row by as much. Precisions of honest clients differ by
orders, as their images are more or less easily told apart: they are measured by the longest row
of any other client, max_jc l_jc, in place of the typical one.

A row that is alone wins every softmax and learns nothing, so clients with several classes are
measured by each other: by the larger of their median and that of all. Clients with one class are
measured likewise, or by all if fewer than two others have several.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedbnn.heads.checks import lower_median

PRECISION = "prototypes.precision"
ROWS, LONG = ("prototypes", PRECISION), 6.0
LEAST = 1e-6


def squared_distances(points: Sequence[Iterable[Tensor]]) -> Tensor:
    """|x_j - x_k|^2 of all pairs, piece by piece; the last row and column is the origin.

    Differences first, so that points which agree are at a distance of exactly 0; in float32, and in
    float64 where a forger sent something whose square float32 cannot hold.
    """
    count = len(points) + 1
    rows, columns = torch.triu_indices(count, count, 1)
    pairs = torch.zeros(len(rows), dtype=torch.float64)
    for piece in zip(*points, strict=True):
        matrix = torch.stack([*piece, torch.zeros_like(piece[0])])
        distances = torch.pdist(matrix)
        if not math.isfinite(float(distances.sum())):
            distances = torch.pdist(matrix.double())
        pairs += distances.double().square()
    squares = torch.zeros(count, count, dtype=torch.float64)
    squares[rows, columns] = squares[columns, rows] = pairs
    return squares


def peers(counts: Sequence[Mapping[str, int]]) -> list[set[int]]:
    """For each client those others that hold classes of at least half of its images."""

    def share(own: Mapping[str, int], other: Mapping[str, int]) -> int:
        return sum(images for one, images in own.items() if other.get(one))

    def of(k: int) -> set[int]:
        half = sum(counts[k].values()) / 2
        others = (j for j in range(len(counts)) if j != k)
        return {j for j in others if half and share(counts[k], counts[j]) >= half}

    return [of(k) for k in range(len(counts))]


def pulls(
    squares: Tensor,
    samples: Sequence[int],
    calm: Sequence[float] | None = None,
    alike: Sequence[set[int]] | None = None,
) -> list[float]:
    """u_k from squared distances (K+1, K+1), n_k, calm_k and peers; 0 where nobody can compare."""
    distances = squares.sqrt()
    norms, clients = distances[:, -1].tolist(), range(len(samples))
    moved = [k for k in clients if samples[k] and norms[k]]
    far = [lower_median([float(distances[k, j]) for j in moved if j != k]) for k in clients]

    def pull(k: int) -> float:
        """Others that agree exactly are measured by their length; two of them are needed."""
        others = [j for j in moved if j != k]
        if len(others) < 2:
            return 0.0
        by = far, norms, samples
        typical, norm, usual = (lower_median([of[j] for j in others]) for of in by)
        near = [far[j] for j in others if j in alike[k]] if alike else []
        least = calm[k] if calm else 0.0
        typical = max(typical or norm, lower_median(near) if len(near) > 1 else 0.0, least)
        images = min(samples[k] / usual, usual / max(samples[k], 1))
        return far[k] / typical * math.sqrt(2 / (len(others) + 1) * images)

    return [pull(k) for k in clients]


def row_lengths(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """l_c of every row tensor that is judged."""
    present = [name for name in ROWS if name in tensors and len(tensors[name])]
    return {name: tensors[name].norm(dim=1).tolist() for name in present}


def row_ratio(
    lengths: Mapping[int, Mapping[str, Sequence[float]]],
    counts: Mapping[int, Mapping[str, int]],
    moved: Sequence[int],
    client: int,
    known: Mapping[str, Sequence[float]],
) -> tuple[float, str]:
    """The largest v_k over the row tensors of a client, and of which; 0 without two others."""
    found, images = [(0.0, "")], counts.get(client, {})
    others = [other for other in moved if other != client and other in lengths]
    usual = lower_median([lower_median([*counts[other].values()]) for other in others]) or 1.0
    for name, own in lengths.get(client, {}).items():
        theirs = [lengths[other][name] for other in others if name in lengths[other]]
        if typical := _typical_length(theirs, alone=len(own) == 1):
            if name == PRECISION:
                typical = max(map(max, theirs))
            named = [dict(zip(counts[j], lengths[j].get(name, ()), strict=False)) for j in others]
            alike = (_length_elsewhere(named, one) for one in images)
            rows = zip(own, known.get(name, [0.0] * len(own)), alike, images.values(), strict=True)
            ratios = [a / max(typical, b, c) * min(1.0, n / usual) for a, b, c, n in rows]
            found.append((max(ratios), name))
    return max(found)


def _length_elsewhere(others: Sequence[Mapping[str, float]], one: str) -> float:
    """median_j l_jc: how long the row of a class is with its other holders; 0 without two."""
    found = [rows[one] for rows in others if one in rows]
    return lower_median(found) if len(found) > 1 else 0.0


def _typical_length(others: Sequence[Sequence[float]], alone: bool) -> float:
    """The yardstick for a client with one class (`alone`) or several; 0 where there is none."""
    everybody = [lower_median(rows) for rows in others]
    several = [lower_median(rows) for rows in others if len(rows) > 1]
    if len(several) >= 2:
        return max(lower_median(several), lower_median(everybody))
    return lower_median(everybody) if alone and len(everybody) >= 2 else 0.0


def trust(pull: float, cap: float) -> float:
    """1 up to the cap, falling to 0 at twice the cap."""
    return min(1.0, max(0.0, 2.0 - pull / cap))
