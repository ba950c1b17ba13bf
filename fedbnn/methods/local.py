"""Local training, no federation: the lower bound.

    local    min_theta_k  CE(theta_k; D_k), from the client's own weights of the last time it took part
    server   nothing: the state never changes
    state    a whole model on every client that ever took part;  floats per weight: 1 down (the common start), 0 up

Each client is tested on the classes it knows, then the mean over the clients of the round is taken. A client trains as
often as it would be sampled in the federation, with the same budget.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedbnn.bayes.flatten import Layout
from fedbnn.errors import ConfigError
from fedbnn.messages import Update
from fedbnn.methods.base import Assignment, Fold, LocalObjective, Method, Spec
from fedbnn.networks import Classifier
from fedbnn.state import State

OWN = ("backbone", "buffers")


@dataclass(frozen=True)
class Local(Method):
    """Every client alone with its own model."""

    formula: ClassVar[str] = "theta_k = argmin CE(theta; D_k), never averaged"

    share: Literal["global", "backbone_only"] = "backbone_only"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share != "backbone_only":
            raise ConfigError("local shares nothing", "method.share", "leave it out")

    def begins(self, sent: State, private: State | None) -> State:
        """The client's own weights; the common ones the first time."""
        return sent.having({name: private[name] for name in OWN}) if private else sent

    def objective(
        self, assignment: Assignment, network: Classifier, layout: Layout
    ) -> LocalObjective:
        """Cross-entropy."""
        return Alone()

    def expected(self, state: State, exchange: str, classes: Any) -> Spec:
        """Nothing."""
        return {}

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """None."""
        return iter(())

    def fold(self, state: State, exchange: str) -> Fold:
        """Nothing to fold."""
        return Untouched(state)

    def facts(self) -> dict[str, Any]:
        """That this is no federation, and how it is tested."""
        tested = "each client of the round on the classes it knows, then the mean"
        return {"bound": "lower: every client alone", "tested": tested}


class Alone(LocalObjective):
    """Cross-entropy; the weights stay on the client."""

    def sends(self, weights: dict[str, Tensor], steps: int, lr: float) -> dict[str, Tensor]:
        """Nothing."""
        self.weights = {name: weights[name] for name in OWN}
        return {}

    def keeps(self) -> State:
        """Backbone and statistics, beside the client's own rows."""
        return State(self.weights)


class Untouched:
    """The state as it was."""

    def __init__(self, state: State) -> None:
        self.state = state

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Nothing to add."""

    def close(self) -> State:
        """The same state."""
        return self.state
