"""Three ways to make one posterior of many, as running sums (formulas: `fedbnn.methods.fedbnn`)."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbnn.bayes.gaussian import Gaussian
from fedbnn.messages import Update, class_counts
from fedbnn.methods.aggregation import WeightedMean, tempered
from fedbnn.state import State

LOG = logging.getLogger(__name__)
Pair = tuple[Tensor, Tensor]
STRETCH = 2**16


@dataclass(frozen=True)
class Rule(ABC):
    """A fold of Gaussians as two running sums: what to add for one client, and what they mean."""

    server_lr: float = 1.0

    def weight(self, samples: Tensor) -> Tensor:
        """Clients count by their images, n_k."""
        return samples

    def summands(self, prior: Gaussian, factor: Gaussian) -> Pair:
        """The two tensors of which the weighted sum is kept: the factor itself."""
        return factor.precision, factor.info

    @abstractmethod
    def posterior(self, prior: Gaussian, first: Tensor, second: Tensor, total: Tensor) -> Pair:
        """Location and scale, from the two sums and the sum of weights."""


class Scaled(Rule):
    """L = L_0 + p (sum w_k L_k - L_0), e likewise; half of every precision stays.

    q_0 times a power of the weighted geometric mean of the factors: a density up to p = 1.
    """

    def posterior(self, prior: Gaussian, first: Tensor, second: Tensor, total: Tensor) -> Pair:
        """sum w_k L_k = L_0 + sum w_k dL_k."""
        factor = Gaussian(first / total, second / total) ** self.server_lr
        if self.server_lr > 1:
            return lifted(prior, factor, floor=0.5)
        folded = prior * factor
        return folded.loc, folded.scale


class Product(Rule):
    """L = L_0 + p sum dL_k, e likewise; a tenth of every precision stays."""

    def weight(self, samples: Tensor) -> Tensor:
        """Every client with images counts once: its factor already knows how many it saw."""
        return (samples > 0).to(samples.dtype)

    def posterior(self, prior: Gaussian, first: Tensor, second: Tensor, total: Tensor) -> Pair:
        """q_0 times the product of the factors to the power p."""
        return lifted(prior, Gaussian(first, second) ** self.server_lr, floor=0.1)


class Moments(Rule):
    """m = sum w_k m_k, s^2 = sum w_k (s_k^2 + m_k^2) - m^2: the moments of the mixture."""

    def summands(self, prior: Gaussian, factor: Gaussian) -> Pair:
        """First and second moment about the prior mean, where the subtraction loses nothing."""
        client = prior * factor
        shift = client.loc - prior.loc
        return shift, client.precision.reciprocal() + shift.square()

    def posterior(self, prior: Gaussian, first: Tensor, second: Tensor, total: Tensor) -> Pair:
        """Location and scale of the mixture."""
        shift = first / total
        return prior.loc + shift, (second / total - shift.square()).sqrt()


FOLDS: Mapping[str, type[Rule]] = {"scaled": Scaled, "product": Product, "moments": Moments}


def lifted(prior: Gaussian, factor: Gaussian, floor: float) -> Pair:
    """Prior times factor; precisions below `floor` of the prior's are lifted there, and counted."""
    posterior = prior.moved(factor, floor)
    low = int((prior.precision + factor.precision < floor * prior.precision).sum())
    if low:
        LOG.info("%d of %d precisions lifted to the floor", low, prior.precision.numel())
    return posterior.loc, posterior.scale


class GaussianSums:
    """The running sums of rows of weights, each row with its own weight; a backbone is one row.

    All is done a stretch of columns at a time: what float64 needs in between stays in the cache.
    """

    def __init__(self, loc: Tensor, scale: Tensor, rule: Rule) -> None:
        self.loc, self.scale, self.rule = loc, scale, rule
        self.prior = Gaussian.from_moments(loc, scale)
        self.first = torch.zeros_like(self.prior.precision)
        self.second = torch.zeros_like(self.first)
        self.total = torch.zeros(len(loc), 1, dtype=torch.float64)

    def add(self, factor: Gaussian, samples: Tensor, rows: Tensor | None = None) -> None:
        """Add one client's factors of these rows (None: the one there is) with so many images."""
        weight = self.rule.weight(samples).view(-1, 1)
        index = torch.arange(1) if rows is None else rows
        for part in self._stretches():
            here = (slice(None) if rows is None else rows, part)
            own = Gaussian(factor.precision[:, part].double(), factor.info[:, part].double())
            first, second = self.rule.summands(self.prior[here], own)
            for total, value in ((self.first, first), (self.second, second)):
                total[:, part].index_add_(0, index, weight * value)
        self.total.index_add_(0, index, weight)

    def _stretches(self) -> Iterator[slice]:
        """All columns, some at a time."""
        starts = range(0, self.loc.shape[1], STRETCH)
        return (slice(start, start + STRETCH) for start in starts)

    def value(self) -> Pair:
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
    """Folds factors into the next posterior: the backbone by n_k, each prototype by n_kc."""

    def __init__(self, state: State, rule: Rule) -> None:
        self.state = state
        self.backbone = GaussianSums(state["backbone"][None], state["backbone.scale"][None], rule)
        self.buffers = WeightedMean(state["buffers"])
        self.rows = None
        if "prototypes.scale" in state:
            self.rows = GaussianSums(state["prototypes"], state["prototypes.scale"], rule)
        self.samples = torch.zeros(len(state.classes), dtype=torch.float64)

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Fold one update in, its factors to the power `trust`; without data it is neutral."""
        if not update.samples:
            return
        whole = torch.tensor([update.samples], dtype=torch.float64)
        self.backbone.add(factor_of(update, "backbone", trust)[None], whole)
        buffers = tempered(update.tensors["buffers"], self.buffers.start, trust)
        self.buffers.add(buffers, update.samples)
        if self.rows is not None and update.counts:
            index, counts = self.state.index(update.classes), class_counts(update)
            self.rows.add(factor_of(update, "prototypes", trust), counts, index)
            self.samples[index] += counts

    def close(self) -> State:
        """The next posterior."""
        loc, scale = self.backbone.value()
        folded = {"backbone": loc[0], "backbone.scale": scale[0], "buffers": self.buffers.value()}
        if self.rows is not None:
            folded["prototypes"], folded["prototypes.scale"] = self.rows.value()
            folded["prototypes.samples"] = self.state["prototypes.samples"] + self.samples
        return self.state.having(folded)


def factor_of(update: Update, site: str, trust: float) -> Gaussian:
    """The likelihood factor of one site as it was sent, raised to the power `trust`."""
    precision, info = (update.tensors[f"{site}.{name}"] for name in ("precision", "info"))
    factor = Gaussian(precision, info)
    return factor if trust == 1.0 else factor**trust
