"""FedBNN (Yao et al., 2024), with our rulings where the paper is silent.

    local    min_q  CE(q; D_k) + tau KL(q || q_0) / N       history-aware inference, q_0 = posterior
             + lambda |f + V f + b - f_0|^2 / E |f_0|^2     with `feature_distillation`
             L_k = L_0 + (N / tau) F_k                      with `precision: curvature`, in the end
    factor   l_k = q_k / q_0                                likelihood extraction
    server   q = q_0 * prod_k l_k                           knowledge integration: the next prior
    state    none;  floats per weight: 2 down, 2 up

The first `r_init` rounds are FedAvg on the same network (SNN initialisation); then means are the
weights and scales the initial ones. `fold_by` says how answers are aggregated (folded, in short),
with L_k, e_k the natural parameters of client k, w_k = n_k / N (n_kc / N_c for the prototype of
class c), and p = `server_lr`:

    scaled    L = sum w_k L_k,  m = m_0 + p (sum w_k e_k / L - m_0)  likelihoods scaled to the round
    product   L = L_0 + p sum (L_k - L_0),  e likewise               the paper's equation for p = 1
    moments   m = sum w_k m_k,  s^2 = sum w_k (s_k^2 + m_k^2) - m^2
              with precisions from the curvature  s^2 = sum w_k s_k^2

With `retention` gamma < 1 the round ends with L <- L_init + gamma (L - L_init): what repeats is not
counted for ever.

How strong is the prior? Its pull on a mean, beside the mean cross-entropy of a round, is tau L / N,
with precisions from the curvature:

    tau L_init / N  +  sum_r gamma^r (N_r / N) F_r      F_r the curvature of the data r rounds ago

So after R rounds it counts as gamma + ... + gamma^R rounds of data, whatever tau is, and tau weighs
the initial scales alone: with `scaled` and `moments`, whose clients speak for the round (`kl_per:
round`), and p times as many with `product`, whose clients speak for their own images (`kl_per:
client`; if they spoke for the round, p times as many for every client). Nothing else makes it grow:
where the likelihood has no curvature, precisions stay what they were, with every fold and every p.

Scales that are `learned`, as published, do not know this measure: an optimiser moves log scales
whatever the signal is. Where noise is all there is, the mean of precisions grows (Jensen), and no
other mean would help: that of log scales leaves a typical one where it was, but each walks about.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedbnn.bayes.flatten import Layout
from fedbnn.bayes.gaussian import Gaussian
from fedbnn.config.schema import NonNegative, NonNegativeCount, Positive, Share
from fedbnn.errors import ConfigError
from fedbnn.heads import prototypes
from fedbnn.heads.checks import LONG, Apart, farthest, lower_median, voted
from fedbnn.methods.aggregation import (
    ROUNDING,
    Aggregator,
    Fold,
    ServerStep,
    Spec,
    apart_in_buffers,
    apart_in_rows,
    defect_of_buffers,
    influence_of_factor,
)
from fedbnn.methods.base import Method
from fedbnn.methods.posterior_fold import (
    FOLDS,
    Moments,
    PosteriorFold,
    Product,
    Scaled,
    factor_of,
)
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State

LONGEST = 20.0
SPEAK_FOR = {"scaled": "round", "moments": "round", "product": "client"}
"""Whose images a factor must stand for, so that the fold counts each image once."""


@dataclass(frozen=True)
class FedBNN(Method):
    """Variational Bayes on every client, the product of their likelihoods on the server.

    Args:
        fold_by: how factors become the next posterior.
        server_lr: p. With `scaled` the mean goes p times as far as the fold, and so do the first
            `r_init` rounds and statistics of batch norm; with `product` factors are raised to the
            power p, and below 1 it damps.
        server_optimizer: a posterior has no momentum.
        temperature: tau, the weight of the KL; 1 is full Bayes.
        kl_per: the KL is divided by the images of the `round`, of the `client`, or by the number
            of `weights`.
        precision: how certain a client becomes. `learned`: gradient descent on log scales, as
            published, which grows certain of noise, too. `curvature`: scales are held while means
            are trained, then L_k = L_0 + F_k / c in closed form (fedbnn/bayes/inference.py).
        retention: gamma in (0, 1]; 1 never forgets.
        scale_gain: initial scale: gain / sqrt(fan-in), or the gain itself with `scale_constant`.
        prototype_gain: the same of prototypes: how far from 0 those of a new class may lie. Clients
            that train draw them no wider than with `scale_gain`.
        scale_constant: one initial scale for all weights.
        scale_lr: learning rate of the log scales, as a multiple of that of the means.
        r_init: rounds of FedAvg before the conversion (the paper has 3); nothing holds clients near
            each other in them.
    """

    formula: ClassVar[str] = "q = q_0 * prod_k (q_k / q_0)"

    fold_by: Literal["scaled", "product", "moments"] = "scaled"
    server_optimizer: Literal["sgd"] = "sgd"
    temperature: NonNegative = 2e-3
    kl_per: Literal["round", "client", "weights"] = "round"
    precision: Literal["curvature", "learned"] = "curvature"
    retention: Share = 1.0
    scale_gain: Positive = 0.05
    prototype_gain: Positive = 1.0
    scale_constant: bool = False
    scale_lr: Positive = 20.0
    r_init: NonNegativeCount = 0

    def __post_init__(self) -> None:
        if self.server_lr != 1 and self.fold_by == "moments":
            what, fix = "moments has no factors to raise to a power", "1, or fold_by scaled"
            raise ConfigError(what, "method.server_lr", fix)
        if self.temperature == 0 and self.precision == "curvature":
            what, fix = "without a prior to weigh it, curvature is infinite", "precision: learned"
            raise ConfigError(what, "method.temperature", f"above 0, or {fix}")

    def facts(self) -> dict[str, Any]:
        """How strong the prior becomes, in rounds of data, if clients speak for what is folded."""
        if self.precision != "curvature" or self.kl_per != SPEAK_FOR[self.fold_by]:
            return super().facts()
        each, kept = self.server_lr if self.fold_by == "product" else 1.0, self.retention
        strength = f"{each:g} a round" if kept == 1 else f"at most {each * kept / (1 - kept):.3g}"
        return {**super().facts(), "prior_in_rounds_of_data": strength}

    @property
    def server_step(self) -> ServerStep:
        """Of points and statistics: p, where p is a step from the mean (a product is a sum)."""
        return ServerStep(self.server_lr if self.fold_by == "scaled" else 1.0)

    def prototype_scale(self, state: State) -> float | None:
        """Initial scale of a prototype, once there is a posterior."""
        width = state["prototypes"].shape[1]
        return self.row_scale(self.prototype_gain, width) if state.bayesian else None

    def row_scale(self, gain: float, width: int) -> float:
        """gain / sqrt(features + 1), or the gain itself."""
        return gain if self.scale_constant else float(gain * width**-0.5)

    def initial(self, state: State, layout: Layout) -> dict[str, Tensor]:
        """The scales of a posterior that has seen nothing."""
        scales = {"backbone.scale": layout.initial_scale(self.scale_gain, self.scale_constant)}
        if "prototypes" in state:
            scale = self.row_scale(self.prototype_gain, state["prototypes"].shape[1])
            scales["prototypes.scale"] = torch.full_like(state["prototypes"], scale)
        return scales

    def prepare(self, state: State, round: int, classes: Sequence[str], layout: Layout) -> State:
        """Points become a posterior after the first `r_init` rounds; new classes get prototypes."""
        if round > self.r_init and not state.bayesian:
            state = state.having(self.initial(state, layout))
        if not self.shares_prototypes:
            return state
        return prototypes.grow(state, classes, self.prototype_scale(state))

    @property
    def rule(self) -> Scaled:
        """How factors become the next posterior."""
        if self.fold_by == "moments":
            return Moments(spread=self.precision == "learned")
        return FOLDS[self.fold_by](self.server_lr)

    def aggregator(self, state: State) -> Aggregator:
        """FedAvg's exchange in the first rounds, then factors."""
        if not state.bayesian:
            return super().aggregator(state)
        shared = self.shares_prototypes
        return FactorAggregator(shares_prototypes=shared, step=self.server_step, rule=self.rule)

    def end_round(self, before: State, state: State, layout: Layout) -> State:
        """L <- L_init + gamma (L - L_init), the mean kept; of prototypes those trained."""
        if not state.bayesian or self.retention == 1:
            return state
        kept = {}
        for name, scale in self.initial(state, layout).items():
            first, now = scale.double().pow(-2), state[name].double().pow(-2)
            kept[name] = (first + self.retention * (now - first)).rsqrt().float()
        if "prototypes.scale" in kept:
            new = state["prototypes.samples"].clone()
            new[: len(before.classes)] -= before["prototypes.samples"]
            kept["prototypes.scale"][new == 0] = state["prototypes.scale"][new == 0]
        return state.having(kept)


@dataclass(frozen=True)
class FactorAggregator(Aggregator):
    """Posteriors down, likelihood factors up, their product."""

    rule: Scaled = field(kw_only=True)

    def expected(self, state: State, counts: Mapping[str, int]) -> Spec:
        """Natural parameters of a factor for every weight; running statistics beside them."""
        of = {"backbone.precision": "backbone", "backbone.info": "backbone", "buffers": "buffers"}
        spec = {name: (tuple(state[one].shape), torch.float32) for name, one in of.items()}
        return spec | self.rows(state, len(counts), "prototypes.precision", "prototypes.info")

    def defect(self, state: State, update: Update) -> str | None:
        """A factor must leave its posterior a positive precision, and rows a usual length."""
        if (reason := defect_of_buffers(state, update)) is not None:
            return reason
        scale = state["backbone.scale"]
        change = (update.tensors["backbone.precision"] * scale).mul_(scale)
        if change.numel() and change.amin() <= ROUNDING - 1:
            return "the precision of backbone is not positive"
        shared = "prototypes" in state and update.counts
        return _defect_of_prototypes(state, update) if shared else None

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """The pull of the factor on the mean and on the precision, in units of the prior."""
        factor = (update.tensors["backbone.precision"], update.tensors["backbone.info"])
        return influence_of_factor(state["backbone"], state["backbone.scale"], *factor)

    def calm(self, state: State) -> float:
        """Factors are in units of the prior, which knows how far is far."""
        return 0.0

    def weights(self, samples: Tensor) -> Tensor:
        """Those of the rule; of factors that are multiplied each counts once."""
        own = self.rule.weight(samples)
        return own if isinstance(self.rule, Product) else super().weights(own)

    def apart(self, state: State, updates: Sequence[Update]) -> Apart:
        """Statistics of batch norm, and the longest mean of a prototype by a usual one."""
        return farthest(apart_in_buffers(state, updates), _apart_in_rows(state, updates))

    def known(self, state: State, update: Update) -> dict[str, list[float]]:
        """L_c = |1 / s_c^2|: the length of the precision that each prototype has already."""
        if not update.counts:
            return {}
        scales = state["prototypes.scale"][state.index(update.classes)]
        return {"prototypes.precision": scales.square().reciprocal_().norm(dim=1).tolist()}

    def centred(self, state: State, update: Update, sign: int) -> Update:
        """Information about the prior mean, de - dL m_0 (-1), and back (+1); in float64."""
        tensors, index = dict(update.tensors), state.index(update.classes)
        priors = {"backbone": state["backbone"]}
        if "prototypes.info" in tensors:
            priors["prototypes"] = state["prototypes"][index]
        for site, loc in priors.items():
            factor = factor_of(update, site)
            info = factor.info.double() + sign * factor.precision.double() * loc
            tensors[f"{site}.info"] = info
        return replace(update, tensors=tensors)

    def fold(self, state: State) -> Fold:
        """The rule chosen."""
        return PosteriorFold(state, self.rule, self.step.lr)


def _defect_of_prototypes(state: State, update: Update) -> str | None:
    """A precision not positive, up to what float32 rounds away, or a mean longer than usual."""
    prior, client = _rows(state, update)
    if (client.precision / prior.precision).amin() <= ROUNDING:
        return "the precision of prototypes is not positive"
    usual = _usual(state)
    longest = float(client.loc.norm(dim=1).max())
    if longest > LONGEST * usual > 0:
        return f"a prototype is {longest / usual:.3g} times as long as those of the server"
    return None


def _rows(state: State, update: Update) -> tuple[Gaussian, Gaussian]:
    """Prior and posterior of the prototypes that an update carries."""
    index = state.index(update.classes)
    prior = Gaussian.from_moments(state["prototypes"][index], state["prototypes.scale"][index])
    return prior, prior * factor_of(update, "prototypes")


def _usual(state: State) -> float:
    """The length of a typical prototype on the server, of those that were ever trained."""
    trained = state["prototypes"].norm(dim=1)[state["prototypes.samples"] > 0]
    return float(trained.median()) if len(trained) else 0.0


def _apart_in_rows(state: State, updates: Sequence[Update]) -> Apart:
    """max_c |m_kc| / max(median_j median_c |m_jc|, that of the server), in units of the limit 5.

    And how far each m_kc is from those of the others.
    """
    carry = [update for update in updates if update.counts and "prototypes" in state]
    means = {update.client: _rows(state, update)[1].loc for update in carry}
    lengths = {client: loc.norm(dim=1).tolist() for client, loc in means.items()}
    known, found = _usual(state) if carry else 0.0, Apart()
    for client, own in lengths.items():
        others = [lower_median(rows) for other, rows in lengths.items() if other != client]
        if usual := max(known, voted(others)):
            found[client] = max(own) / usual / LONG, "prototypes"
    return farthest(found, apart_in_rows(carry, means))
