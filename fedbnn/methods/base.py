"""What a method is: a local objective and a fold. One file a method; this is the contract they share.

Data flow of a round:  state -> broadcast -> (client) local objective -> update -> gate -> fold -> state.
A method sees rounds, never tasks: only a `BoundaryMethod` is ever told that a task has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from fedbnn import folds, library
from fedbnn.errors import ConfigError
from fedbnn.influence import influence_of_point
from fedbnn.images import ImageSet
from fedbnn.layout import Layout
from fedbnn.messages import Order, Update
from fedbnn.networks import Classifier
from fedbnn.state import State

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Fold(Protocol):
    """Takes updates one by one and ends in the next state."""

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Fold one update in."""
        ...

    def close(self) -> State:
        """The folded state."""
        ...


class LocalObjective:
    """What one client minimises on its weights, as points: cross-entropy, and what a method adds to it.

    Made anew for every client and round, so it may hold anchors, teachers and control variates.
    """

    def data(self, images: ImageSet) -> ImageSet:
        """The images to train on: those of the round, unless a method replays others beside them."""
        return images

    def loss(self, network: Classifier, images: Tensor, labels: Tensor) -> Tensor:
        """CE(softmax(f(x)), y) over the rows the client has assembled; `labels` number those rows."""
        return nn.functional.cross_entropy(network(images), labels)

    def correct(self, network: Classifier) -> None:
        """Change the gradients in place before a step."""

    def sends(self, network: Classifier, steps: int, lr: float) -> dict[str, Tensor]:
        """Tensors to send beside the weights."""
        return {}

    def keeps(self) -> State | None:
        """What the client remembers for the next time it is asked, if anything."""
        return None


@dataclass(frozen=True)
class Assignment:
    """One client's part of an order: what it was sent, the rows it assembled, its images, what it remembers."""

    order: Order
    client: int
    classes: tuple[str, ...]
    images: ImageSet
    private: State | None


@dataclass(frozen=True)
class Method:
    """A federated continual method; its fields are its hyperparameters.

    Args:
        lr: learning rate of this method's clients; null takes `client.lr`.
        scope: classes of the training softmax: those of the client's round (`local`) or all seen so far (`seen`).
        share: `global` folds the library too; `trunk_only` leaves the rows on the clients (privacy mode).
    """

    formula: ClassVar[str] = ""
    replay: ClassVar[bool] = False
    optimizer: ClassVar[str | None] = None

    lr: float | None = None
    scope: Literal["local", "seen"] = "local"
    share: Literal["global", "trunk_only"] = "global"

    def __post_init__(self) -> None:
        if self.lr is not None and self.lr <= 0:
            raise ConfigError(f"lr must be above 0, not {self.lr}", "method.lr")

    def start(self, state: State, layout: Layout) -> State:
        """The state before round 1, given freshly initialised weights."""
        return state

    def prepare(self, state: State, round: int, classes: Sequence[str], layout: Layout) -> State:
        """The state a round begins with: rows for every class its participants hold."""
        return library.grow(state, classes, None) if self.share == "global" else state

    def exchanges(self, round: int) -> tuple[str, ...]:
        """The exchanges of this round, in order; each sends the newest state down and folds what comes back."""
        return ("train",)

    def broadcast(self, state: State, exchange: str) -> State:
        """What the participants are sent."""
        return state

    def expected(self, state: State, exchange: str, classes: Sequence[str]) -> Spec:
        """Names, shapes and types of the tensors of an honest update that carries rows of `classes`."""
        spec = {name: (tuple(state[name].shape), torch.float32) for name in ("trunk", "buffers")}
        return spec | self._rows(state, len(classes), "rows")

    def _rows(self, state: State, count: int, *names: str) -> Spec:
        """Row tensors of an update, absent when the rows stay on the clients."""
        shared = self.share == "global"
        return {name: ((count, state["rows"].shape[1]), torch.float32) for name in names} if shared else {}

    def fold(self, state: State, exchange: str) -> Fold:
        """The accumulator of one exchange."""
        return folds.PointFold(state)

    def settle(self, state: State, layout: Layout) -> State:
        """The state a round ends with, after all its folds."""
        return state

    def defect(self, state: State, update: Update) -> str | None:
        """Why a well-formed update cannot be folded, if it cannot."""
        return None

    def influence(self, state: State, update: Update) -> Tensor:
        """Where an update stands among the others, for the cap against the median of their distances."""
        return influence_of_point(state["trunk"], update.tensors["trunk"])

    def objective(self, assignment: Assignment, network: Classifier, layout: Layout) -> LocalObjective:
        """The local objective of one client that starts at `network`."""
        return LocalObjective()

    def measure(self, assignment: Assignment, network: Classifier, layout: Layout) -> dict[str, Tensor]:
        """What a client answers in an exchange after training, with the newest weights in `network` (eval mode)."""
        raise LookupError(f"{type(self).__name__} has no exchange {assignment.order.exchange!r}")

    def facts(self) -> dict[str, Any]:
        """What a results file should say about how this method was run."""
        return {}


class BoundaryMethod(Method):
    """A method that must be told when a task ends; nothing else ever receives a boundary."""

    def exchanges_at(self, round: int, task_ended: bool) -> tuple[str, ...]:
        """The exchanges of this round, knowing whether it is the last of a task."""
        raise NotImplementedError
