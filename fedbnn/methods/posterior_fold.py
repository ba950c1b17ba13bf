"""How likelihood factors become the next posterior: three rules, and the sums they are made of.

With L_k, e_k the natural parameters of client k, w_k = n_k / N (n_kc / N_c for the prototype of
class c), and p = `server_lr`:

    scaled    L = sum w_k L_k,  m = m_0 + p (sum w_k e_k / L - m_0)  likelihoods scaled to the round
    product   L = L_0 + p sum (L_k - L_0),  e likewise               the paper's equation for p = 1
    moments   m = sum w_k m_k,  s^2 = sum w_k (s_k^2 + m_k^2) - m^2
              with precisions from the curvature  s^2 = sum w_k s_k^2

With `scaled` a step of the server is one of the mean, as in FedOpt: what the images of a round say
of precisions counts once, however far the server goes. A power of the factors, which would count
it p times, goes p times as far only where they say little, and not at all where they say all.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedbnn.bayes.gaussian import Gaussian, spans
from fedbnn.methods.aggregation import WeightedMean, followed, tempered
from fedbnn.protocol.messages import Update, class_counts
from fedbnn.protocol.state import State

LOG = logging.getLogger(__name__)
Pair = tuple[Tensor, Tensor]
STRETCH = 2**16


@dataclass(frozen=True)
class Scaled:
    """L = sum w_k L_k, m = m_0 + p (sum w_k e_k / L - m_0).

    With p = 1, q_0 times the weighted geometric mean of the factors. Every rule is two running
    sums: what to add for one client, and what the sums mean. Where the sums are `noisy`, half of
    every precision stays.
    """

    server_lr: float = 1.0
    noisy: bool = False

    @property
    def floor(self) -> float:
        """The part of each precision that stays, whatever the factors say."""
        return 0.5 if self.noisy else 0.0

    def weight(self, samples: Tensor) -> Tensor:
        """Clients count by their images, n_k."""
        return samples

    def summands(self, prior: Callable[[], Gaussian], factor: Gaussian) -> Pair:
        """The two tensors of which the weighted sum is kept: the factor itself."""
        return factor.precision, factor.info

    def posterior(self, prior: Gaussian, first: Tensor, second: Tensor, total: Tensor) -> Pair:
        """Location and scale from the sums; sum w_k L_k = L_0 + sum w_k dL_k."""
        folded = self.folded(prior, Gaussian(first / total, second / total))
        if self.server_lr == 1:
            return folded.loc, folded.scale
        return torch.lerp(prior.loc, folded.loc, self.server_lr), folded.scale

    def folded(self, prior: Gaussian, factor: Gaussian) -> Gaussian:
        """q_0 times a factor, no less certain than the floor."""
        folded = prior.moved(factor, self.floor)
        if low := int((prior.precision + factor.precision < folded.precision).sum()):
            LOG.info("%d of %d precisions lifted to the floor", low, folded.precision.numel())
        return folded


class Product(Scaled):
    """L = L_0 + p sum dL_k, e likewise; a tenth of every precision stays."""

    floor = 0.1

    def weight(self, samples: Tensor) -> Tensor:
        """Every client with images counts once: its factor already knows how many it saw."""
        return (samples > 0).to(samples.dtype)

    def posterior(self, prior: Gaussian, first: Tensor, second: Tensor, total: Tensor) -> Pair:
        """The sums are not divided: q_0 times the product of the factors to the power p."""
        folded = self.folded(prior, Gaussian(first, second) ** self.server_lr)
        return folded.loc, folded.scale


@dataclass(frozen=True)
class Moments(Scaled):
    """m = sum w_k m_k, s^2 = sum w_k (s_k^2 + m_k^2) - m^2: the moments of the mixture.

    Without `spread` s^2 = sum w_k s_k^2. The curvature of a client is scaled to the whole round, so
    s_k is how certain all its images together make one; how far apart the clients' means are, each
    from a part of these images and a few steps of an optimiser, is no uncertainty beside that.
    """

    spread: bool = True

    def summands(self, prior: Callable[[], Gaussian], factor: Gaussian) -> Pair:
        """First and second moment about the prior mean, where the subtraction loses nothing."""
        start = prior()
        client = start * factor
        shift = client.loc - start.loc
        variance = client.precision.reciprocal()
        return shift, variance + shift.square() if self.spread else variance

    def posterior(self, prior: Gaussian, first: Tensor, second: Tensor, total: Tensor) -> Pair:
        """Location and scale of the mixture."""
        shift = first / total
        mean_square = second / total
        variance = mean_square - shift.square() if self.spread else mean_square
        return prior.loc + shift, variance.sqrt()


FOLDS: Mapping[str, type[Scaled]] = {"scaled": Scaled, "product": Product, "moments": Moments}


class GaussianSums:
    """The running sums of rows of weights, each row with its own weight; a backbone is one row.

    All is done a stretch of columns at a time, the prior too: what float64 needs in between stays
    in the cache.
    """

    def __init__(self, loc: Tensor, scale: Tensor, rule: Scaled) -> None:
        self.loc, self.scale, self.rule = loc, scale, rule
        self.first = torch.zeros_like(loc, dtype=torch.float64)
        self.second = torch.zeros_like(self.first)
        self.total = torch.zeros(len(loc), 1, dtype=torch.float64)

    def add(self, factor: Gaussian, samples: Tensor, rows: Tensor | None = None) -> None:
        """Add one client's factors of these rows (None: the one there is) with so many images."""
        weight = self.rule.weight(samples).view(-1, 1)
        index = torch.arange(1) if rows is None else rows
        for part in spans(self.loc.shape[1], STRETCH):
            here = (slice(None) if rows is None else rows, part)
            own = Gaussian(factor.precision[:, part].double(), factor.info[:, part].double())
            first, second = self.rule.summands(partial(self._prior, here), own)
            for total, value in ((self.first, first), (self.second, second)):
                total[:, part].index_add_(0, index, weight * value)
        self.total.index_add_(0, index, weight)

    def _prior(self, here: Any) -> Gaussian:
        """q_0 of some rows and columns."""
        return Gaussian.from_moments(self.loc[here], self.scale[here])

    def value(self) -> Pair:
        """The folded location and scale; rows nobody added to stay as they were, bit for bit."""
        met = self.total[:, 0] > 0
        loc, scale = self.loc.clone(), self.scale.clone()
        for part in spans(self.loc.shape[1], STRETCH) if bool(met.any()) else ():
            here = (slice(None) if bool(met.all()) else met, part)
            sums = self.first[here], self.second[here], self.total[here[0]]
            new_loc, new_scale = self.rule.posterior(self._prior(here), *sums)
            loc[here], scale[here] = new_loc.to(loc.dtype), new_scale.to(scale.dtype)
        return loc, scale


class PosteriorFold:
    """Folds factors into the next posterior: the backbone by n_k, each prototype by n_kc."""

    def __init__(self, state: State, rule: Scaled, step: float = 1.0) -> None:
        self.state, self.step = state, step
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
        folded = {"backbone": loc[0], "backbone.scale": scale[0]}
        folded |= followed(self.state, self.buffers.value(), self.step)
        if self.rows is not None:
            folded["prototypes"], folded["prototypes.scale"] = self.rows.value()
            folded["prototypes.samples"] = self.state["prototypes.samples"] + self.samples
        return self.state.having(folded)


def factor_of(update: Update, site: str, trust: float = 1.0) -> Gaussian:
    """The likelihood factor of one site as it was sent, raised to the power `trust`."""
    factor = Gaussian(update.tensors[f"{site}.precision"], update.tensors[f"{site}.info"])
    return factor if trust == 1.0 else factor**trust
