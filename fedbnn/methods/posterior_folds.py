"""Four ways to make one posterior of many, all as running sums in float64 (formulas in `fedbnn.methods.fedbnn`)."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedbnn.bayes.gaussian import Gaussian
from fedbnn.messages import Update, class_counts
from fedbnn.methods import folds
from fedbnn.state import State

LOG = logging.getLogger(__name__)
Moments = tuple[Tensor, Tensor]
STRETCH = 2**16


class Rule(Protocol):
    """A fold of Gaussians as two running sums: what to add for one client, and what the sums mean at the end."""

    def summands(self, prior: Gaussian, factor: Gaussian) -> Moments:
        """The two tensors of which the weighted sum is kept."""
        ...

    def weight(self, share: Tensor) -> Tensor:
        """The weight of a client with this many images."""
        ...

    def posterior(self, prior: Gaussian, first: Tensor, second: Tensor, total: Tensor) -> Moments:
        """Location and scale, from the two sums and the sum of weights."""
        ...


def lifted(prior: Gaussian, factor: Gaussian, floor: float) -> Moments:
    """Prior times factor; precisions that would fall below `floor` times the prior's are lifted there, and counted in the log."""
    posterior = prior.moved(factor, floor)
    low = int((prior.precision + factor.precision < floor * prior.precision).sum())
    if low:
        LOG.info("%d of %d precisions lifted to the floor", low, prior.precision.numel())
    return posterior.loc, posterior.scale


@dataclass(frozen=True)
class Scaled:
    """L = L_0 + p (sum w_k L_k - L_0), e likewise; p above 1 goes further than the clients did; half of every precision stays."""

    server_lr: float = 1.0
    floor: float = 0.5

    def summands(self, prior: Gaussian, factor: Gaussian) -> Moments:
        """The factor itself: sum w_k L_k = L_0 + sum w_k dL_k."""
        return factor.precision, factor.info

    def weight(self, share: Tensor) -> Tensor:
        """n_k."""
        return share

    def posterior(self, prior: Gaussian, first: Tensor, second: Tensor, total: Tensor) -> Moments:
        """q_0 times a server_lr of the weighted geometric mean of the factors; up to 1 it is a density by itself."""
        factor = Gaussian(first / total, second / total) ** self.server_lr
        if self.server_lr > 1:
            return lifted(prior, factor, self.floor)
        folded = prior * factor
        return folded.loc, folded.scale


@dataclass(frozen=True)
class Product:
    """L = L_0 + p sum dL_k, e likewise; a tenth of every precision stays."""

    server_lr: float = 1.0
    floor: float = 0.1

    def summands(self, prior: Gaussian, factor: Gaussian) -> Moments:
        """The factor to the server_lr p."""
        powered = factor**self.server_lr
        return powered.precision, powered.info

    def weight(self, share: Tensor) -> Tensor:
        """Every client with images counts once: its factor already knows how many it saw."""
        return (share > 0).to(share.dtype)

    def posterior(self, prior: Gaussian, first: Tensor, second: Tensor, total: Tensor) -> Moments:
        """q_0 times the product of the factors."""
        return lifted(prior, Gaussian(first, second), self.floor)


@dataclass(frozen=True)
class MatchMoments:
    """m = sum w_k m_k, s^2 = sum w_k (s_k^2 + m_k^2) - m^2: the moments of the mixture."""

    def summands(self, prior: Gaussian, factor: Gaussian) -> Moments:
        """First and second moment about the prior mean, where the subtraction loses nothing."""
        client = prior * factor
        shift = client.loc - prior.loc
        return shift, client.precision.reciprocal() + shift.square()

    def weight(self, share: Tensor) -> Tensor:
        """n_k."""
        return share

    def posterior(self, prior: Gaussian, first: Tensor, second: Tensor, total: Tensor) -> Moments:
        """Location and scale of the mixture."""
        shift = first / total
        return prior.loc + shift, (second / total - shift.square()).sqrt()


@dataclass(frozen=True)
class MeanOfParameters:
    """m = sum w_k m_k, log s = sum w_k log s_k."""

    def summands(self, prior: Gaussian, factor: Gaussian) -> Moments:
        """Mean and logarithm of the scale."""
        client = prior * factor
        return client.loc, client.scale.log()

    def weight(self, share: Tensor) -> Tensor:
        """n_k."""
        return share

    def posterior(self, prior: Gaussian, first: Tensor, second: Tensor, total: Tensor) -> Moments:
        """The means of both."""
        return first / total, (second / total).exp()


FOLDS: Mapping[str, Callable[[float], Rule]] = {
    "scaled": Scaled,
    "product": Product,
    "moments": lambda _: MatchMoments(),
    "mean": lambda _: MeanOfParameters(),
}


class GaussianSums:
    """The running sums of rows of weights, each row with its own weight; a backbone is one long row.

    All is done a stretch of columns at a time: what float64 needs in between stays in the cache.
    """

    def __init__(self, loc: Tensor, scale: Tensor, rule: Rule) -> None:
        self.loc, self.scale, self.rule = loc, scale, rule
        self.prior = Gaussian.from_moments(loc, scale)
        self.first = torch.zeros_like(self.prior.precision)
        self.second = torch.zeros_like(self.first)
        self.total = torch.zeros(len(loc), 1, dtype=torch.float64)

    def add(self, factor: Gaussian, shares: Tensor, rows: Tensor | None = None) -> None:
        """Add one client's factors of these rows (of the one there is) with these shares."""
        weight = self.rule.weight(shares).view(-1, 1)
        for part in self._stretches():
            here = (slice(None) if rows is None else rows, part)
            own = Gaussian(factor.precision[:, part].double(), factor.info[:, part].double())
            first, second = self.rule.summands(self.prior[here], own)
            for total, value in ((self.first, first), (self.second, second)):
                if rows is None:
                    total[here].addcmul_(value, weight)
                else:
                    total[:, part].index_add_(0, rows, weight * value)
        self.total.index_add_(0, torch.arange(1) if rows is None else rows, weight)

    def _stretches(self) -> Iterator[slice]:
        """All columns, some at a time."""
        starts = range(0, self.loc.shape[1], STRETCH)
        return (slice(start, start + STRETCH) for start in starts)

    def value(self) -> Moments:
        """The folded location and scale; rows nobody added to stay as they were, bit for bit."""
        met = self.total[:, 0] > 0
        loc, scale = self.loc.clone(), self.scale.clone()
        for part in self._stretches() if bool(met.any()) else ():
            here = (slice(None) if bool(met.all()) else met, part)
            sums = self.first[here], self.second[here], self.total[here[0]]
            new_loc, new_scale = self.rule.posterior(self.prior[here], *sums)
            loc[here], scale[here] = new_loc.to(loc.dtype), new_scale.to(scale.dtype)
        return loc, scale


class PosteriorFold:
    """Folds factors into the next posterior: the backbone by n_k, each row by n_kc, points and buffers by n_k."""

    def __init__(self, state: State, rule: Rule) -> None:
        self.state = state
        self.latent = len(state["backbone.scale"])
        self.backbone = GaussianSums(
            state["backbone"][None, : self.latent], state["backbone.scale"][None], rule
        )
        self.points = folds.WeightedMean(state["backbone"][self.latent :])
        self.buffers = folds.WeightedMean(state["buffers"])
        self.rows = (
            GaussianSums(state["rows"], state["rows.scale"], rule)
            if "rows.scale" in state
            else None
        )
        self.samples = torch.zeros(len(state.classes), dtype=torch.float64)

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Fold one update in, its factors raised to the server_lr `trust`, its points tempered; without data it is neutral."""
        if not update.samples:
            return
        whole = torch.tensor([update.samples], dtype=torch.float64)
        self.backbone.add(factor_of(update, "backbone", trust)[None], whole)
        for mean, name in ((self.points, "points"), (self.buffers, "buffers")):
            mean.add(folds.tempered(update.tensors[name], mean.start, trust), update.samples)
        if self.rows is not None and update.counts:
            index, counts = self.state.index(update.classes), class_counts(update)
            self.rows.add(factor_of(update, "rows", trust), counts, index)
            self.samples[index] += counts

    def close(self) -> State:
        """The next posterior."""
        loc, scale = self.backbone.value()
        folded = {
            "backbone": torch.cat([loc[0], self.points.value()]),
            "backbone.scale": scale[0],
            "buffers": self.buffers.value(),
        }
        if self.rows is not None:
            rows, row_scale = self.rows.value()
            folded |= {
                "rows": rows,
                "rows.scale": row_scale,
                "rows.samples": self.state["rows.samples"] + self.samples,
            }
        return self.state.having(folded)


def factor_of(update: Update, site: str, trust: float) -> Gaussian:
    """The likelihood factor of one site as it was sent, raised to the server_lr `trust`."""
    factor = Gaussian(update.tensors[f"{site}.precision"], update.tensors[f"{site}.info"])
    return factor if trust == 1.0 else Gaussian(factor.precision.double(), factor.info.double()) ** trust
