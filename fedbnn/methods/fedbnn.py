"""FedBNN (Yao et al., 2024), with our rulings where the paper is silent.

    local    min_q  CE(q; D_k) + tau KL(q || q_0) / N       history-aware inference, q_0 = posterior
             + lambda |f + V f + b - f_0|^2 / E |f_0|^2     with `function_prior`: features readable
    factor   l_k = q_k / q_0                                likelihood extraction
    server   q = q_0 * prod_k l_k                           knowledge integration: the next prior
    state    none;  floats per weight: 2 down, 2 up

The first `r_init` rounds are FedAvg on the same network (SNN initialisation); then means are the
weights and scales the initial ones. Three folds, with L_k, e_k the natural parameters of client k,
w_k = n_k / N (n_kc / N_c for the prototype of class c), and p = `server_lr`:

    scaled    L = L_0 + p (sum w_k L_k - L_0),  e likewise     likelihoods scaled to the round
    product   L = L_0 + p sum (L_k - L_0),      e likewise     the paper's equation, with p = 1
    moments   m = sum w_k m_k,  s^2 = sum w_k (s_k^2 + m_k^2) - m^2

With `retention` gamma < 1 the round ends with L <- L_init + gamma (L - L_init): what repeats is not
counted for ever.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedbnn.bayes.flatten import Layout
from fedbnn.config.ranges import NonNegative, NonNegativeCount, Positive, Share
from fedbnn.errors import ConfigError
from fedbnn.heads import prototypes
from fedbnn.messages import Update
from fedbnn.methods.aggregation import ROUNDING, Aggregator, Fold, Spec, influence_of_factor
from fedbnn.methods.base import Method
from fedbnn.methods.posterior_folds import FOLDS, PosteriorFold, Rule
from fedbnn.state import State

LONGEST = 20.0


@dataclass(frozen=True)
class FedBNN(Method):
    """Variational Bayes on every client, the product of their likelihoods on the server.

    Args:
        fold_by: how factors become the next posterior.
        server_lr: p, to which factors are raised (`scaled`, `product`): below 1 it damps, above 1
            the server goes further than its clients. What has no factor (statistics of batch norm,
            the first `r_init` rounds) is averaged.
        temperature: tau, the weight of the KL; 1 is full Bayes.
        kl_per: the KL is divided by the images of the `round`, of the `client`, or by the number
            of `weights`.
        retention: gamma in (0, 1]; 1 never forgets.
        scale_gain: initial scale: gain / sqrt(fan-in), or the gain itself with `scale_constant`.
        scale_constant: one initial scale for all weights.
        scale_lr: learning rate of the log scales, as a multiple of that of the means.
        function_prior: lambda, how strongly features of the last posterior must stay readable.
        r_init: rounds of FedAvg before the conversion.
    """

    formula: ClassVar[str] = "q = q_0 * prod_k (q_k / q_0)"

    fold_by: Literal["scaled", "product", "moments"] = "scaled"
    server_lr: Positive = 1.0
    temperature: NonNegative = 3e-4
    kl_per: Literal["round", "client", "weights"] = "round"
    retention: Share = 1.0
    scale_gain: Positive = 0.05
    scale_constant: bool = False
    scale_lr: Positive = 20.0
    function_prior: NonNegative = 0.0
    r_init: NonNegativeCount = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server_lr != 1 and self.fold_by not in ("scaled", "product"):
            what, fix = f"{self.fold_by} has no factors to raise to a power", "1, or fold_by scaled"
            raise ConfigError(what, "method.server_lr", fix)

    def prototype_scale(self, state: State) -> float | None:
        """Initial scale of a prototype, gain / sqrt(features + 1), once there is a posterior."""
        return self._row_scale(state) if state.bayesian else None

    def _row_scale(self, state: State) -> float:
        width = 1 if self.scale_constant else state["prototypes"].shape[1]
        return float(self.scale_gain * width**-0.5)

    def initial(self, state: State, layout: Layout) -> dict[str, Tensor]:
        """The scales of a posterior that has seen nothing."""
        scales = {"backbone.scale": layout.initial_scale(self.scale_gain, self.scale_constant)}
        if "prototypes" in state:
            rows = torch.full_like(state["prototypes"], self._row_scale(state))
            scales["prototypes.scale"] = rows
        return scales

    def prepare(self, state: State, round: int, classes: Sequence[str], layout: Layout) -> State:
        """Points become a posterior after the first `r_init` rounds; new classes get prototypes."""
        if round > self.r_init and not state.bayesian:
            state = state.having(self.initial(state, layout))
        if not self.shares_prototypes:
            return state
        return prototypes.grow(state, classes, self.prototype_scale(state))

    def aggregator(self, state: State) -> Aggregator:
        """FedAvg's exchange in the first rounds, then factors."""
        if not state.bayesian:
            return super().aggregator(state)
        rule = FOLDS[self.fold_by](self.server_lr)
        return FactorAggregator(shares_prototypes=self.shares_prototypes, rule=rule)

    def end_round(self, before: State, state: State, layout: Layout) -> State:
        """L <- L_init + gamma (L - L_init), the mean kept; of prototypes those trained."""
        if not state.bayesian or self.retention == 1:
            return state
        kept = {}
        for name, scale in self.initial(state, layout).items():
            first, now = scale.double().pow(-2), state[name].double().pow(-2)
            kept[name] = (first + self.retention * (now - first)).rsqrt().float()
        if "prototypes.scale" in kept:
            met = state["prototypes.samples"].clone()
            met[: len(before.classes)] -= before["prototypes.samples"]
            rows = torch.where(
                met[:, None] > 0, kept["prototypes.scale"], state["prototypes.scale"]
            )
            kept["prototypes.scale"] = rows
        return state.having(kept)


@dataclass(frozen=True)
class FactorAggregator(Aggregator):
    """Posteriors down, likelihood factors up, their product."""

    rule: Rule = field(kw_only=True)

    def expected(self, state: State, classes: Sequence[str]) -> Spec:
        """Natural parameters of a factor for every weight; running statistics beside them."""
        shapes = {
            "backbone.precision": "backbone",
            "backbone.info": "backbone",
            "buffers": "buffers",
        }
        spec = {name: (tuple(state[of].shape), torch.float32) for name, of in shapes.items()}
        return spec | self.rows(state, len(classes), "prototypes.precision", "prototypes.info")

    def defect(self, state: State, update: Update) -> str | None:
        """A factor must leave its posterior a positive precision, and rows a usual length."""
        left = _share_left(update.tensors["backbone.precision"], state["backbone.scale"])
        if left.amin() <= ROUNDING:
            return "the precision of backbone is not positive"
        shared = "prototypes" in state and update.counts
        return _defect_of_prototypes(state, update) if shared else None

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """The pull of the factor on the mean and on the precision, in units of the prior."""
        factor = (update.tensors["backbone.precision"], update.tensors["backbone.info"])
        return influence_of_factor(state["backbone"], state["backbone.scale"], *factor)

    def known(self, state: State, update: Update) -> dict[str, list[float]]:
        """L_c = |1 / s_c^2|: the length of the precision that each prototype has already."""
        if not update.counts:
            return {}
        scales = state["prototypes.scale"][state.index(update.classes)]
        return {"prototypes.precision": scales.square().reciprocal_().norm(dim=1).tolist()}

    def fold(self, state: State) -> Fold:
        """The rule chosen."""
        return PosteriorFold(state, self.rule)


def _share_left(d_precision: Tensor, scale: Tensor) -> Tensor:
    """(L_0 + dL) / L_0 = 1 + dL s_0^2, which must be above what float32 rounds away."""
    return (d_precision * scale).mul_(scale).add_(1)


def _defect_of_prototypes(state: State, update: Update) -> str | None:
    """A precision not positive, or a mean m_0 + (de - dL m_0) / (L_0 + dL) longer than usual."""
    index = state.index(update.classes)
    precision, info = (update.tensors[f"prototypes.{name}"] for name in ("precision", "info"))
    loc, scale = state["prototypes"][index], state["prototypes.scale"][index]
    left = _share_left(precision, scale)
    if left.amin() <= ROUNDING:
        return "the precision of prototypes is not positive"
    pull = torch.addcmul(info, precision, loc, value=-1).mul_(scale).mul_(scale)
    mean = pull.div_(left).add_(loc)
    trained = state["prototypes"].norm(dim=1)[state["prototypes.samples"] > 0]
    longest, usual = float(mean.norm(dim=1).max()), float(trained.median()) if len(trained) else 0.0
    if longest > LONGEST * usual > 0:
        return f"a prototype is {longest / usual:.3g} times as long as those of the server"
    return None
