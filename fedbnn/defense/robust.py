"""How far one update may move the fold, and how far each did.

Who stands apart from the other clients counts less.

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

How far each client moved the model in an exchange is told to whoever audits a run afterwards. Of
weights the gate has put the updates as points x_k in units of the prior (`Aggregator.influence`:
for factors |x|^2 = sum_i L_0i (dm_i)^2 and the change of precision likewise, for points the plain
difference) and knows their distances. A fold moves the model by X = sum_k t_k w_k x_k with trust
t_k and weight w_k, so

    part_k = t_k w_k |x_k|,     whole = |X|,     x_j . x_k = (|x_j|^2 + |x_k|^2 - |x_j - x_k|^2) / 2

cost nothing but K^2 numbers. Class statistics. With r_c the mean of class c before the round (the
centre of all classes if it is new), n_c and m_c its images and mean after it,

    part_k = (sum_c |t_k n_kc (m_kc - r_c) / n_c|^2)^(1/2),     whole = (sum_c |m_c - r_c|^2)^(1/2)

over the classes met. What else moved the means, their transport by the drift of the backbone, is in
the whole and in nobody's part. Parts may add up to more than the whole: clients pull apart.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbnn.heads.checks import lower_median, voted
from fedbnn.protocol.messages import Update, class_counts
from fedbnn.protocol.state import State

PRECISION = "prototypes.precision"
ROWS, LONG = ("prototypes", PRECISION), 6.0
LEAST = 1e-6
SUMS = ("posteriors.sum", "exact.sum")


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
        typical = max(typical or norm, voted(near), least)
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
    return voted([rows[one] for rows in others if one in rows])


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


@dataclass(frozen=True)
class Moves:
    """The length of the whole move of an exchange, and of each client's part in it."""

    whole: float = 0.0
    parts: Mapping[int, float] = field(default_factory=dict)


def moves_of_points(clients: Sequence[int], squares: Tensor, weights: Tensor) -> Moves:
    """From squared distances (K+1, K+1) with the origin last, and t_k w_k."""
    lengths = squares[:-1, -1]
    products = (lengths[:, None] + lengths - squares[:-1, :-1]) / 2
    whole = (weights @ products @ weights).clamp_min(0).sqrt()
    parts = (weights * lengths.sqrt()).tolist()
    return Moves(float(whole), dict(zip(clients, parts, strict=True)))


def moves_of_means(before: State, after: State, updates: Sequence[tuple[Update, float]]) -> Moves:
    """From the class means of a state before and after these updates with their trust."""
    old_count, old = _class_means(before, len(after.classes))
    count, mean = _class_means(after, len(after.classes))
    centre = (count @ mean) / count.sum().clamp_min(1)
    start = torch.where(old_count[:, None] > 0, old, centre)
    met, parts = torch.zeros(len(count), dtype=torch.bool), {}
    for update, trust in updates:
        index, images = after.index(update.classes), class_counts(update)[:, None]
        [sums] = (update.tensors[name].double() for name in SUMS if name in update.tensors)
        sums = sums[:, -start.shape[1] :]  # of several backbones the last is that of now
        pull = trust * (sums - images * start[index]) / count[index, None].clamp_min(1e-300)
        parts[update.client] = float(pull.norm())
        met[index] = True
    return Moves(float((mean - start)[met].norm()), parts)


def _class_means(state: State, classes: int) -> tuple[Tensor, Tensor]:
    """Images and means of all classes, zeros for those that have none yet."""
    if "exact.count" in state:
        count = state["exact.count"]
        mean = state["exact.sum"] / count.clamp_min(1e-300)[:, None]
    elif "posteriors.count" in state:
        count, mean = state["posteriors.count"], state["posteriors.mean"]
    else:
        return torch.zeros(classes, dtype=torch.float64), torch.zeros(classes, 1).double()
    missing = classes - len(count)
    return (
        torch.cat([count, count.new_zeros(missing)]),
        torch.cat([mean, mean.new_zeros(missing, mean.shape[1])]),
    )
