"""How answers of clients become the next state: an exchange, its folds, and where an answer stands.

Folds are running sums in float64, one update at a time, in the order given: sums that become means.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedbnn.heads import checks
from fedbnn.protocol.messages import Update, class_counts
from fedbnn.protocol.state import State

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]
TRAIN, BUFFERS = "train", "buffers"
WHOLE = ("backbone", BUFFERS)
MOMENTS, SMALLEST = (".server_mean", ".server_square"), 1e-12
MEASURED = f"{BUFFERS}{MOMENTS[0]}"
EPSILON = 1e-5
ROUNDING, PIECE = 2.0**-20, 2**15
CALM = 64


class Fold(Protocol):
    """Takes updates one by one and ends in the next state."""

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Fold one update in."""
        ...

    def close(self) -> State:
        """The folded state."""
        ...


@dataclass(frozen=True)
class ServerStep:
    """theta = theta_0 + p d, where the clients' mean is theta_0 + delta.

        sgd         d = delta                                     p = 1: the mean, bit for bit
        momentum    v <- 0.9 v + delta,   d = v                   FedAvgM (Hsu et al., 2019)
        adam        m <- 0.9 m + 0.1 delta,  s <- 0.99 s + 0.01 delta^2
                    d = m / (sqrt(s) + 0.001)                     FedAdam (Reddi et al., 2021)

    v, m and s begin at 0 and stay on the server; prototypes that nobody held do not move, and their
    v, m and s neither. Statistics of batch norm are followed to where the backbone goes
    (`followed`), r times as far as delta: r = <p d, delta> / |delta|^2, which for `sgd` is p.
    """

    lr: float = 1.0
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"

    def __call__(self, before: State, folded: State) -> State:
        """The state after the step from `before`, given the one that holds the clients' means."""
        if self.lr == 1 and self.optimizer == "sgd":
            return folded
        found = self._moved(before, folded, "backbone")
        ratio = self.lr if self.optimizer == "sgd" else self._along(before, folded, found)
        found |= followed(before, folded[BUFFERS], ratio)
        if "prototypes" in folded:
            met = (folded["prototypes.samples"] > before["prototypes.samples"])[:, None]
            for name, new in self._moved(before, folded, "prototypes").items():
                old = before.tensors.get(name, torch.zeros_like(new))
                found[name] = torch.where(met, new, old)
        return folded.having(found)

    def _moved(self, before: State, folded: State, site: str) -> dict[str, Tensor]:
        """The weights of a site after the step, and what the optimiser remembers of them."""
        first, second = (f"{site}{moment}" for moment in MOMENTS)
        start, found = before[site].double(), dict[str, Tensor]()
        move, nothing = folded[site].double() - start, torch.zeros_like(start)
        mean, square = (before.tensors.get(name, nothing) for name in (first, second))
        if self.optimizer == "momentum":
            found[first] = move = 0.9 * mean + move
        elif self.optimizer == "adam":
            found[second] = 0.99 * square + 0.01 * move.square()
            found[first] = 0.9 * mean + 0.1 * move
            move = found[first] / (found[second].sqrt() + 1e-3)
        found[site] = start + self.lr * move
        return {name: value.to(before[site].dtype) for name, value in found.items()}

    @staticmethod
    def _along(before: State, folded: State, found: Mapping[str, Tensor]) -> float:
        """How far the backbone went along what its clients wanted, in units of it."""
        step, wanted = (one["backbone"].double() - before["backbone"] for one in (found, folded))
        return float(step @ wanted / (wanted @ wanted).clamp_min(SMALLEST))


MEAN_ITSELF = ServerStep()


def followed(before: State, measured: Tensor, ratio: float) -> dict[str, Tensor]:
    """Statistics of batch norm where the backbone went r times as far as its clients' mean.

    Clients measure them anew in every round: their mean b is under the mean w of their weights, as
    b' of the round before, which stays on the server, was under w'. While steps go on as they are,
    w is r steps from w', and the new weights (r - 1) steps from w:

        b + (r - 1) / r (b - b')        at most b - b' either way; b itself at r = 1

    for running means, the first half, and the same in logs for variances, so that they stay
    positive. What was measured is all that counts: no step is made on top of an earlier one.
    """
    if ratio == 1 or not measured.numel():
        return {BUFFERS: measured}
    ahead = (ratio - 1) / ratio if ratio > 0.5 else -1.0
    (mean, variance), (old_mean, old) = (
        one.tensor_split(2) for one in (measured, before.tensors.get(MEASURED, measured))
    )
    log, old_log = (one.clamp_min(SMALLEST).log() for one in (variance, old))
    moved = mean + ahead * (mean - old_mean), (log + ahead * (log - old_log)).exp()
    return {BUFFERS: torch.cat(moved), MEASURED: measured}


def defect_of_buffers(state: State, update: Update) -> str | None:
    """Variances, the second half of the statistics of batch norm, are not negative."""
    if BUFFERS not in update.tensors:
        return None
    (_, old), (_, new) = (one[BUFFERS].tensor_split(2) for one in (state, update.tensors))
    return "a variance of batch norm is negative" if bool(((new < 0) & (old >= 0)).any()) else None


def apart_in_buffers(state: State, updates: Sequence[Update]) -> checks.Apart:
    """How far statistics of batch norm are from the others': (m - m_0) / s_0, log(s^2 / s_0^2)."""
    mean, variance = state[BUFFERS].double().tensor_split(2)
    variance = variance.clamp_min(0) + EPSILON
    points = {}
    for update in updates:
        new_mean, new = update.tensors[BUFFERS].double().tensor_split(2)
        move = (new_mean - mean) / variance.sqrt()
        grown = (new.clamp_min(0) + EPSILON).log() - variance.log()
        points[update.client] = torch.cat([move, grown])
    return checks.apart_in_points(points, "statistics of batch norm")


def apart_in_rows(updates: Sequence[Update], rows: Mapping[int, Tensor]) -> checks.Apart:
    """How far the rows of every client are from those that others have for the same classes."""
    named = {u.client: dict(zip(u.classes, rows[u.client], strict=True)) for u in updates}
    counts = {update.client: update.counts for update in updates}
    by_class = checks.apart_in_rows(named, counts, "prototypes of a class")
    return checks.farthest(by_class, checks.apart_in_contrasts(named, counts))


@dataclass(frozen=True)
class Aggregator:
    """One exchange of a round: what goes down, what may come up, and how it is folded.

    As it stands it is the exchange of FedAvg: weights down, weights up, their mean, the step of the
    server. `names` are the tensors that come up whole, the first of them the one by which updates
    are compared.
    """

    exchange: str = TRAIN
    shares_prototypes: bool = True
    names: tuple[str, ...] = WHOLE
    step: ServerStep = MEAN_ITSELF

    def broadcast(self, state: State) -> State:
        """What the participants are sent: all but the memory of the server's optimiser."""
        return state.only(*(name for name in state.tensors if not name.endswith(MOMENTS)))

    def expected(self, state: State, counts: Mapping[str, int]) -> Spec:
        """Names, shapes and types of an honest update of so many images by class."""
        spec = {name: (tuple(state[name].shape), torch.float32) for name in self.names}
        return spec | self.rows(state, len(counts), "prototypes")

    def rows(self, state: State, count: int, *names: str) -> Spec:
        """Tensors with a row a class, absent when the prototypes stay on the clients."""
        if not self.shares_prototypes:
            return {}
        return dict.fromkeys(names, ((count, state["prototypes"].shape[1]), torch.float32))

    def defect(self, state: State, update: Update) -> str | None:
        """Why a well-formed update cannot be folded, if it cannot: a negative variance."""
        return defect_of_buffers(state, update)

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """Where an update stands among the others, piece by piece, to measure their distances."""
        first = self.names[:1]
        return chain(*(influence_of_point(state[name], update.tensors[name]) for name in first))

    def calm(self, state: State) -> float:
        """The distance between updates below which there is nothing to compare: |theta| / 64."""
        return float(state[self.names[0]].norm()) / CALM if self.names else 0.0

    def walked(self, state: State, client: int) -> float:
        """How far a client may have to walk after the others, who went ahead while it was away."""
        return 0.0

    def weights(self, samples: Tensor) -> Tensor:
        """How much each client counts in the fold, given n_k: n_k / N."""
        return samples / samples.sum().clamp_min(1)

    def known(self, state: State, update: Update) -> Mapping[str, Sequence[float]]:
        """How long the update's rows are already, by tensor, where rows grow; none for points."""
        return {}

    def apart(self, state: State, updates: Sequence[Update]) -> checks.Apart:
        """How far from the others what has its own units stands, in units of the limit."""
        carry = [update for update in updates if "prototypes" in update.tensors]
        rows = {update.client: update.tensors["prototypes"] for update in carry}
        buffers = apart_in_buffers(state, updates) if BUFFERS in self.names else {}
        return checks.farthest(buffers, apart_in_rows(carry, rows))

    def centred(self, state: State, update: Update, sign: int) -> Update:
        """An update in numbers of which the middle can be taken (-1), and back (+1)."""
        return update

    def fold(self, state: State) -> Fold:
        """The accumulator of this exchange."""
        return PointFold(state, self.step, self.names)


class WeightedMean:
    """sum_k w_k x_k / sum_k w_k of a vector, or row by row; without weight as it was, every bit."""

    def __init__(self, start: Tensor) -> None:
        self.start = start
        self.total = torch.zeros_like(start, dtype=torch.float64)
        self.weight = torch.zeros(start.shape[:-1], dtype=torch.float64)

    def add(self, value: Tensor, weight: float) -> None:
        """Add w x to the whole."""
        self.total.add_(value, alpha=weight)
        self.weight += weight

    def add_rows(self, rows: Tensor, values: Tensor, weights: Tensor) -> None:
        """Add w_c x_c to these rows."""
        self.total[rows] += weights.view(-1, 1) * values.double()
        self.weight[rows] += weights

    def value(self) -> Tensor:
        """The mean, in the type of the start."""
        weight = self.weight.unsqueeze(-1)
        return torch.where(weight > 0, (self.total / weight).to(self.start.dtype), self.start)


class PointFold:
    """FedAvg: theta = sum_k n_k theta_k / N; each row by its class: h_c = sum_k n_kc h_kc / N_c.

    Then the server takes its step. `trust` below 1 pulls a client that weighs too much towards the
    weights it started from.
    """

    def __init__(
        self, state: State, step: ServerStep = MEAN_ITSELF, names: Sequence[str] = WHOLE
    ) -> None:
        self.state, self.step = state, step
        self.means = {name: WeightedMean(state[name]) for name in names}
        self.rows = WeightedMean(state["prototypes"]) if "prototypes" in state else None
        self.samples = torch.zeros(len(state.classes), dtype=torch.float64)

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Fold one update in; a client without data changes nothing."""
        if not update.samples:
            return
        for name, mean in self.means.items():
            mean.add(tempered(update.tensors[name], self.state[name], trust), update.samples)
        if self.rows is not None and update.counts:
            index, counts = self.state.index(update.classes), class_counts(update)
            start = self.state["prototypes"][index]
            self.rows.add_rows(index, tempered(update.tensors["prototypes"], start, trust), counts)
            self.samples[index] += counts

    def close(self) -> State:
        """The folded state."""
        folded = {name: mean.value() for name, mean in self.means.items()}
        if self.rows is not None:
            samples = self.state["prototypes.samples"] + self.samples
            folded |= {"prototypes": self.rows.value(), "prototypes.samples": samples}
        return self.step(self.state, self.state.having(folded))


def tempered(value: Tensor, start: Tensor, trust: float) -> Tensor:
    """start + trust (value - start), and exactly `value` at full trust."""
    return value if trust == 1.0 else start + trust * (value - start)


def largest(tensor: Tensor) -> float:
    """The largest absolute value, NaN if there is one; in one pass without a temporary."""
    low, high = map(float, tensor.aminmax()) if tensor.numel() else (0.0, 0.0)
    return max(-low, high)


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The values of a tensor, some at a time: what is done to a piece stays in the cache."""
    return iter(tensor.reshape(-1).split(PIECE))


def influence_of_point(prior: Tensor, value: Tensor) -> Iterator[Tensor]:
    """x = value - prior, for weights without a posterior.

    It is 0 where float32 may round as much away: up to 2^-20 max |prior|.
    """
    rounded = ROUNDING * largest(prior)
    for before, after in zip(pieces(prior), pieces(value), strict=True):
        yield torch.hardshrink(after - before, rounded).float()


def influence_of_factor(
    prior_loc: Tensor, prior_scale: Tensor, d_precision: Tensor, d_info: Tensor
) -> Iterator[Tensor]:
    """x = ((d_info - d_precision m_0) s_0,  d_precision s_0^2 / sqrt(2)) on the prior m_0, s_0.

    The natural parameters of a Gaussian factor with the prior mean as origin, in units of the
    prior: for a small step |x|^2 / 2 is the divergence between prior and posterior, and the neutral
    factor is 0. Both halves matter: a forged precision at the prior mean moves no mean by itself,
    it stops all others from moving it. What float32 rounds away counts as 0: a mean that moved by
    less than 2^-20 (1 + max |m_0| / min s_0) of its s_0, a precision that changed by less than
    2^-20.
    """
    least = float(prior_scale.amin()) if prior_scale.numel() else 1.0
    rounded = ROUNDING * (1 + largest(prior_loc) / least)
    parts = map(pieces, (prior_loc, prior_scale, d_precision, d_info))
    for loc, scale, precision, info in zip(*parts, strict=True):
        pull = torch.addcmul(info, precision, loc, value=-1).mul_(scale)
        certainty = (precision * scale).mul_(scale)
        yield torch.hardshrink(pull, rounded)
        yield torch.hardshrink(certainty, ROUNDING).mul_(math.sqrt(0.5))
