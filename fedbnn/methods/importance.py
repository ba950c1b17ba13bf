"""What EWC and MAS share: weights that mattered for the past are held where they were, by how much they mattered.

    local          min_theta  CE(theta; D_k) + 1/2 sum_j s_j (theta_j - theta*_j)^2,   s = strength(lambda, Omega)
    server         FedAvg's mean;  at a consolidation  Omega <- gamma Omega + sum_k n_k Omega_k / N,  theta* <- theta
    state          Omega, theta* (once there is an Omega)
    communication  floats per weight: 1 down, 1 up; 3 down after the first consolidation; 1 down and 1 up more in it

Omega_k is measured in a second exchange of the round, under the new global weights, by the clients of that round. A row
of a class nobody measured has importance 0. s is capped at 1 / lr (see `Pull`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbnn.bayes.flatten import Layout
from fedbnn.errors import ConfigError
from fedbnn.messages import Update
from fedbnn.methods import folds
from fedbnn.methods.aggregation import pieces
from fedbnn.methods.base import Assignment, Fold, LocalObjective, Spec
from fedbnn.methods.boundary import BoundaryMethod
from fedbnn.methods.pull import Pull
from fedbnn.methods.rows import by_parameter, gathered, padded
from fedbnn.networks import Classifier
from fedbnn.state import State

EXCHANGE = "importance"
SITES = ("backbone", "rows")
WEIGHTS = ("backbone", "buffers", "rows", "rows.samples")


@dataclass(frozen=True)
class ImportanceMethod(BoundaryMethod, ABC):
    """A method that anchors weights by their importance.

    Args:
        strength: lambda, the weight of the penalty.
        decay: gamma in [0, 1], what is left of older importances at a consolidation.
    """

    consolidation: ClassVar[tuple[str, ...]] = (EXCHANGE,)
    needs_rows: ClassVar[bool] = True

    strength: float = 1.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength < 0 or not 0 <= self.decay <= 1:
            raise ConfigError("strength must not be below 0 and decay must be in [0, 1]", "method")

    @abstractmethod
    def stiffness(self, importance: Tensor) -> Tensor:
        """s, from lambda and Omega."""

    @abstractmethod
    def measured(
        self, assignment: Assignment, network: Classifier
    ) -> tuple[tuple[str, ...], dict[str, Tensor]]:
        """Classes of the rows measured, and the mean importance over the client's images by parameter."""

    def prepare(self, state: State, round: int, classes: Sequence[str], layout: Layout) -> State:
        """Importance 0 for new rows."""
        grown = super().prepare(state, round, classes, layout)
        names = [name for name in ("importance.rows", "anchor.rows") if name in state]
        return grown.having({name: padded(state[name], len(grown.classes)) for name in names})

    def broadcast(self, state: State, exchange: str) -> State:
        """Weights to measure under; with the anchors to train under, once there are any."""
        return state.only(*WEIGHTS) if exchange == EXCHANGE else state

    def expected(self, state: State, exchange: str, classes: Sequence[str]) -> Spec:
        """In the exchange of importances, one for every weight of backbone and library."""
        if exchange != EXCHANGE:
            return super().expected(state, exchange, classes)
        return {site: (tuple(state[site].shape), torch.float32) for site in SITES}

    def fold(self, state: State, exchange: str) -> Fold:
        """FedAvg's fold, or the sum of importances."""
        return (
            ImportanceFold(state, self.decay)
            if exchange == EXCHANGE
            else super().fold(state, exchange)
        )

    def defect(self, state: State, update: Update) -> str | None:
        """Importances are not negative."""
        negative = update.exchange == EXCHANGE and any(
            bool((update.tensors[site] < 0).any()) for site in SITES
        )
        return "an importance is negative" if negative else None

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """The weights; or the roots of the importances, which are as large as gradients."""
        return (
            map(torch.sqrt, pieces(update.tensors["backbone"]))
            if update.exchange == EXCHANGE
            else super().influence(state, update)
        )

    def consolidate(self, state: State) -> State:
        """theta* <- theta."""
        return state.having({f"anchor.{site}": state[site].clone() for site in SITES})

    def objective(
        self, assignment: Assignment, network: Classifier, layout: Layout
    ) -> LocalObjective:
        """Cross-entropy and the pull towards theta*; cross-entropy alone before the first consolidation."""
        state = assignment.instruction.state
        if "anchor.backbone" not in state:
            return LocalObjective()
        columns = self.softmax(state, assignment.classes)
        sites = {
            name: _by_parameter(state, name, columns, layout) for name in ("importance", "anchor")
        }
        return Pull(
            {
                name: (self.stiffness(value), sites["anchor"][name])
                for name, value in sites["importance"].items()
            }
        )

    def measure(
        self, assignment: Assignment, network: Classifier, layout: Layout
    ) -> dict[str, Tensor]:
        """Importance of every weight of backbone and library for this client's images."""
        state = assignment.instruction.state
        classes, found = self.measured(assignment, network)
        rows = torch.cat([found["head.weight"], found["head.bias"][:, None]], 1)
        backbone = layout.flatten(
            {slot.name: found[f"backbone.{slot.name}"] for slot in layout.slots}
        )
        return {
            "backbone": backbone,
            "rows": gathered(State({"rows": rows}, classes), "rows", state.classes),
        }

    def facts(self) -> dict[str, Any]:
        """Boundary, and the cap of the penalty."""
        return super().facts() | {"penalty_cap": "stiffness of a weight at most 1 / lr"}


def _by_parameter(
    state: State, name: str, columns: tuple[str, ...], layout: Layout
) -> dict[str, Tensor]:
    """Importance or anchor of the weights a client trains."""
    return by_parameter(layout, state[f"{name}.backbone"], gathered(state, f"{name}.rows", columns))


class ImportanceFold:
    """Omega <- gamma Omega + sum_k n_k Omega_k / N, for backbone and library."""

    def __init__(self, state: State, decay: float) -> None:
        self.state, self.decay = state, decay
        self.means = {site: folds.WeightedMean(torch.zeros_like(state[site])) for site in SITES}

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Add the importances of one client, as far as it is trusted."""
        for site, mean in self.means.items():
            mean.add(trust * update.tensors[site], update.samples)

    def close(self) -> State:
        """The state with the new importances; weights are as they were."""
        found = {f"importance.{site}": mean.value() for site, mean in self.means.items()}
        return self.state.having(
            {name: new + self.decay * self._old(name, new) for name, new in found.items()}
        )

    def _old(self, name: str, like: Tensor) -> Tensor:
        return self.state[name] if name in self.state else torch.zeros_like(like)
