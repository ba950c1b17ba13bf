"""FedBNN (Yao et al., 2024), with our rulings where the paper is silent.

    local    min_q  CE(q; D_k) + tau KL(q || q_0) / N          history-aware local inference, q_0 = last posterior
             + lambda |f + V f + b - f_0|^2 / E |f_0|^2        with `function_prior`: its features stay readable
    factor   l_k = q_k / q_0                                   likelihood extraction, in natural parameters
    server   q = q_0 * prod_k l_k                              global knowledge integration; q is the next prior
    state    none;  floats per weight: 2 down, 2 up

The first `r_init` rounds are FedAvg on the same network (SNN initialisation); then means are the weights and scales
the initial ones. Four folds, with L_k, e_k the natural parameters of client k and w_k = n_k / N (n_kc / N_c for the
row of class c):

    scaled    L = L_0 + p (sum w_k L_k - L_0),  e likewise        each client scales its likelihood to the round
    product   L = L_0 + p sum (L_k - L_0),      e likewise        the paper's equation, with p = 1
    moments   m = sum w_k m_k,  s^2 = sum w_k (s_k^2 + m_k^2) - m^2
    mean      m = sum w_k m_k,  log s = sum w_k log s_k

With gamma < 1 the round ends with L <- L_init + gamma (L - L_init): what repeats is not counted for ever.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedbnn.bayes.flatten import Layout
from fedbnn.errors import ConfigError
from fedbnn.heads import library
from fedbnn.messages import Update
from fedbnn.methods import folds
from fedbnn.methods.aggregation import ROUNDING, influence_of_factor, known_lengths
from fedbnn.methods.base import Fold, Method, Spec
from fedbnn.methods.posterior_folds import FOLDS, PosteriorFold
from fedbnn.state import State

LONGEST = 20.0


@dataclass(frozen=True)
class FedBNN(Method):
    """Variational Bayes on every client, the product of their likelihoods on the server.

    Args:
        fold_by: how factors become the next posterior.
        server_lr: p, to which factors are raised (`scaled`, `product`): below 1 it damps, above 1 the server goes further than
            its clients. What has no factor (points, statistics of batch norm, the first `r_init` rounds) is averaged.
        temperature: tau, the weight of the KL; 1 is full Bayes.
        kl_per: the KL is divided by the images of the `round`, of the `client`, or by the number of `weights`.
        retention: gamma in (0, 1]; 1 never forgets.
        scale_gain: initial scale: gain / sqrt(fan-in), or the gain itself with `scale_constant`.
        scale_constant: one initial scale for all weights.
        scale_lr: learning rate of the log scales, as a multiple of that of the means.
        mc_samples: draws of the weights per step.
        function_prior: lambda, how strongly features of the last posterior must stay readable from the new ones.
        flipout: decorrelate the draw over the images of a batch.
        r_init: rounds of FedAvg before the conversion.
        bayes_norm: whether scale and shift of norm layers have a posterior too.
    """

    formula: ClassVar[str] = "q = q_0 * prod_k (q_k / q_0)"

    fold_by: Literal["scaled", "product", "moments", "mean"] = "scaled"
    server_lr: float = 1.0
    temperature: float = 3e-4
    kl_per: Literal["round", "client", "weights"] = "round"
    retention: float = 1.0
    scale_gain: float = 0.05
    scale_constant: bool = False
    scale_lr: float = 20.0
    mc_samples: int = 1
    function_prior: float = 0.0
    flipout: bool = False
    r_init: int = 3
    bayes_norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.retention <= 1 or not 0 < self.server_lr < inf:
            raise ConfigError(
                "retention must be in (0, 1], and server_lr above 0 and finite", "method"
            )
        if self.server_lr != 1 and self.fold_by not in ("scaled", "product"):
            raise ConfigError(
                f"{self.fold_by} has no factors to raise to a server_lr",
                "method.server_lr",
                "1, or fold_by scaled",
            )
        weights = (self.temperature, self.function_prior, self.r_init)
        if (
            min(self.scale_gain, self.scale_lr) <= 0
            or not 0 <= min(weights) <= max(weights) < inf
            or self.mc_samples < 1
        ):
            fix = "scale_gain and scale_lr above 0; temperature, function_prior, r_init not below 0; mc_samples at least 1"
            raise ConfigError("a setting is out of range", "method", fix)

    @property
    def latent_norm(self) -> bool:
        """Whether scale and shift of norm layers have a posterior."""
        return self.bayes_norm

    def row_scale(self, features: int) -> float:
        """Initial scale of a library row of `features` weights and a bias."""
        return self.scale_gain if self.scale_constant else self.scale_gain * (features + 1) ** -0.5

    def initial(self, state: State, layout: Layout) -> dict[str, Tensor]:
        """The scales of a posterior that has seen nothing."""
        scales = {"backbone.scale": layout.initial_scale(self.scale_gain, self.scale_constant)}
        if "rows" in state:
            scales["rows.scale"] = torch.full_like(
                state["rows"], self.row_scale(state["rows"].shape[1] - 1)
            )
        return scales

    def prepare(self, state: State, round: int, classes: Sequence[str], layout: Layout) -> State:
        """Turn points into a posterior once the first `r_init` rounds are over; add rows for new classes."""
        if round > self.r_init and not state.bayesian:
            state = state.having(self.initial(state, layout))
        return (
            library.grow(state, classes, self.row_scale(state["rows"].shape[1] - 1))
            if self.share == "global"
            else state
        )

    def expected(self, state: State, exchange: str, classes: Sequence[str]) -> Spec:
        """Natural parameters of a factor for what is Bayesian, plain values for what stays a point."""
        if not state.bayesian:
            return super().expected(state, exchange, classes)
        latent = len(state["backbone.scale"])
        sizes = {
            "backbone.precision": latent,
            "backbone.info": latent,
            "points": len(state["backbone"]) - latent,
        }
        spec: Spec = {name: ((size,), torch.float32) for name, size in sizes.items()}
        spec["buffers"] = (tuple(state["buffers"].shape), torch.float32)
        return spec | self._rows(state, len(classes), "rows.precision", "rows.info")

    def fold(self, state: State, exchange: str) -> Fold:
        """FedAvg's fold in the first rounds, then the one chosen."""
        if not state.bayesian:
            return folds.PointFold(state)
        return PosteriorFold(state, FOLDS[self.fold_by](self.server_lr))

    def end_round(self, before: State, state: State, layout: Layout) -> State:
        """L <- L_init + gamma (L - L_init), with the mean kept; rows that nobody trained this round stay as they are."""
        if not state.bayesian or self.retention == 1:
            return state
        first = {
            name: scale.double().pow(-2) for name, scale in self.initial(state, layout).items()
        }
        now = {name: state[name].double().pow(-2) for name in first}
        kept = {
            name: (first[name] + self.retention * (now[name] - first[name])).rsqrt().float()
            for name in first
        }
        if "rows.scale" in kept:
            earlier = before["rows.samples"].new_zeros(len(state.classes))
            earlier[: len(before.classes)] = before["rows.samples"]
            trained = (state["rows.samples"] > earlier)[:, None]
            kept["rows.scale"] = torch.where(trained, kept["rows.scale"], state["rows.scale"])
        return state.having(kept)

    def defect(self, state: State, update: Update) -> str | None:
        """A factor must leave the client's own posterior a positive precision everywhere, and rows of a usual length."""
        if not state.bayesian:
            return None
        if (
            _share_left(update.tensors["backbone.precision"], state["backbone.scale"]).amin()
            <= ROUNDING
        ):
            return "the precision of backbone is not positive"
        return _defect_of_rows(state, update) if "rows" in state and update.counts else None

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """The pull of the factor on the mean and on the precision, in units of the prior."""
        if not state.bayesian:
            return super().influence(state, update)
        scale, factor = (
            state["backbone.scale"],
            (update.tensors["backbone.precision"], update.tensors["backbone.info"]),
        )
        return influence_of_factor(state["backbone"][: len(scale)], scale, *factor)

    def known(self, state: State, update: Update) -> dict[str, list[float]]:
        """The precision of each row in the library."""
        if not state.bayesian or not update.counts:
            return {}
        return {"rows.precision": known_lengths(state["rows.scale"][state.index(update.classes)])}


def _share_left(d_precision: Tensor, scale: Tensor) -> Tensor:
    """(L_0 + dL) / L_0 = 1 + dL s_0^2, which must be above what float32 rounds away."""
    return (d_precision * scale).mul_(scale).add_(1)


def _defect_of_rows(state: State, update: Update) -> str | None:
    """Precisions that are not positive, or a mean m = m_0 + (de - dL m_0) / (L_0 + dL) far longer than trained rows are."""
    index, precision, info = (
        state.index(update.classes),
        update.tensors["rows.precision"],
        update.tensors["rows.info"],
    )
    loc, scale = state["rows"][index], state["rows.scale"][index]
    left = _share_left(precision, scale)
    if left.amin() <= ROUNDING:
        return "the precision of rows is not positive"
    mean = (
        torch.addcmul(info, precision, loc, value=-1).mul_(scale).mul_(scale).div_(left).add_(loc)
    )
    trained = state["rows"].norm(dim=1)[state["rows.samples"] > 0]
    longest, usual = float(mean.norm(dim=1).max()), float(trained.median()) if len(trained) else 0.0
    return (
        f"a row is {longest / usual:.3g} times as long as those of the library"
        if longest > LONGEST * usual > 0
        else None
    )
