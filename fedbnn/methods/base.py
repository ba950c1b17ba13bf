"""What a method is: a local objective and a fold. One file a method; this is the contract they share.

Data flow of a round:  state -> broadcast -> (client) local objective -> update -> gate -> fold -> state.
A method sees rounds, never tasks: only a `BoundaryMethod` (`boundary`) is ever told that a task has ended.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.errors import ConfigError
from fedbnn.federation.stream import Stream
from fedbnn.heads import library
from fedbnn.heads.discriminant import ClassPrior
from fedbnn.images import ImageSet
from fedbnn.messages import FitInstruction, Update
from fedbnn.methods import folds
from fedbnn.methods.aggregation import influence_of_point
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

    def loss(self, network: Classifier, images: Tensor, labels: Tensor) -> Tensor:
        """CE(softmax(f(x)), y) over the rows the client has assembled; `labels` number those rows."""
        return nn.functional.cross_entropy(network(images), labels)

    def correct(self, network: Classifier, lr: float) -> None:
        """Change the gradients in place before a step of this length."""

    def sends(self, weights: dict[str, Tensor], steps: int, lr: float) -> dict[str, Tensor]:
        """The tensors to send, given the weights after so many steps of this length."""
        return weights

    def keeps(self) -> State | None:
        """What the client remembers for the next time it is asked, if anything."""
        return None


@dataclass(frozen=True)
class Assignment:
    """One client's part of an order: what it was sent, the classes it holds, its images, what it remembers.

    The last `replayed` of the images are not of this round.
    """

    instruction: FitInstruction
    client: int
    classes: tuple[str, ...]
    images: ImageSet
    private: State | None
    replayed: int = 0


@dataclass(frozen=True)
class Method:
    """A federated continual method; its fields are its hyperparameters.

    `replay` says that clients store images of the past, `needs_rows` that the server must have the library, and
    `optimizer` names the one optimiser the method is right with (then without momentum).

    Args:
        lr: learning rate of this method's clients; null takes `client.lr`.
        scope: classes of the training softmax: those of the client's round (`local`) or all seen so far (`seen`).
        share: `global` folds the library too; `backbone_only` leaves the rows on the clients (privacy mode).
        head: what predicts: the `linear` rows, or `gaussian` class posteriors in feature space.
        head_decay: part of its old count that a class posterior keeps when the class is seen again.
        head_memory: part of its old weight that the scatter within classes keeps in a round.
        head_ridge: how strongly the map that carries class posteriors along prefers to stay.
        head_drift: whether class posteriors are carried along when the backbone moves.
        head_temperature: scores of the class posteriors are divided by it.
        head_rows: how much the linear rows say beside `gaussian` class posteriors: this much of their scores is added.
        head_prior: class posteriors take all classes for alike (`uniform`), or as likely as they were met of late (`frequency`).
    """

    formula: ClassVar[str] = ""
    replay: ClassVar[bool] = False
    needs_rows: ClassVar[bool] = False
    optimizer: ClassVar[str | None] = None

    lr: float | None = None
    scope: Literal["local", "seen"] = "local"
    share: Literal["global", "backbone_only"] = "global"
    head: Literal["linear", "gaussian"] = "linear"
    head_decay: float = 0.9
    head_memory: float = 0.7
    head_ridge: float = 1e-2
    head_drift: bool = True
    head_temperature: float = 3.0
    head_rows: float = 0.0
    head_prior: ClassPrior = "uniform"

    @property
    def latent_norm(self) -> bool:
        """Whether scale and shift of norm layers are weights like any other."""
        return True

    def __post_init__(self) -> None:
        if self.head == "gaussian" and self.share == "backbone_only":
            raise ConfigError(
                "class posteriors are shared, so they cannot stay on the clients",
                "method.head",
                "use head: linear",
            )
        if not (
            0 <= self.head_decay <= 1
            and 0 <= self.head_memory <= 1
            and self.head_ridge > 0
            and self.head_temperature > 0
        ):
            raise ConfigError(
                "head_decay and head_memory must be in [0, 1], head_ridge and head_temperature above 0",
                "method",
            )
        if not 0 <= self.head_rows < inf:
            raise ConfigError(
                f"head_rows must be finite and not below 0, and is {self.head_rows}",
                "method.head_rows",
            )
        if self.lr is not None and self.lr <= 0:
            raise ConfigError(f"lr must be above 0, not {self.lr}", "method.lr")
        if self.needs_rows and self.share != "global":
            raise ConfigError(
                "this method needs the library on the server", "method.share", "use share: global"
            )

    def stream(self, stream: Stream) -> Stream:
        """Who takes part with which images: the clients of the stream, unless a bound changes that."""
        return stream

    def start(self, state: State, layout: Layout, clients: int) -> State:
        """The state before round 1, given freshly initialised weights and the number of registered clients."""
        return state

    def prepare(self, state: State, round: int, classes: Sequence[str], layout: Layout) -> State:
        """The state a round begins with: rows for every class its participants hold."""
        return library.grow(state, classes, None) if self.share == "global" else state

    def holds(self, counts: Mapping[str, int], private: State | None) -> dict[str, int]:
        """Images by class that a client trains on: those of its round, and those a method replays."""
        return dict(counts)

    def images(self, images: ImageSet, private: State | None) -> ImageSet:
        """The images behind `holds`, those replayed at the end."""
        return images

    def begins(self, sent: State, private: State | None) -> State:
        """The state a client starts from: what it was sent."""
        return sent

    def softmax(self, library_of: State, held: tuple[str, ...]) -> tuple[str, ...]:
        """Classes of a client's training softmax: those it holds, and with `scope: seen` all other trained ones behind them."""
        others = (
            tuple(name for name in library.trained(library_of) if name not in held)
            if self.scope == "seen"
            else ()
        )
        return held + others

    def exchanges(self, round: int) -> tuple[str, ...]:
        """The exchanges of this round, in order; each sends the newest state down and folds what comes back."""
        return ("train",)

    def broadcast(self, state: State, exchange: str) -> State:
        """What the participants are sent."""
        return state

    def expected(self, state: State, exchange: str, classes: Sequence[str]) -> Spec:
        """Names, shapes and types of the tensors of an honest update that carries rows of `classes`."""
        spec = {name: (tuple(state[name].shape), torch.float32) for name in ("backbone", "buffers")}
        return spec | self._rows(state, len(classes), "rows")

    def _rows(self, state: State, count: int, *names: str) -> Spec:
        """Row tensors of an update, absent when the rows stay on the clients."""
        shared = self.share == "global"
        return (
            dict.fromkeys(names, ((count, state["rows"].shape[1]), torch.float32)) if shared else {}
        )

    def fold(self, state: State, exchange: str) -> Fold:
        """The accumulator of one exchange."""
        return folds.PointFold(state)

    def end_round(self, before: State, state: State, layout: Layout) -> State:
        """The state a round ends with, after all its folds, given the one it began with."""
        return state

    def defect(self, state: State, update: Update) -> str | None:
        """Why a well-formed update cannot be folded, if it cannot."""
        return None

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """Where an update stands among the others, piece by piece, to measure their distances."""
        return influence_of_point(state["backbone"], update.tensors["backbone"])

    def known(self, state: State, update: Update) -> dict[str, list[float]]:
        """How long the rows of an update are in the library already, by tensor, where they grow; nothing for points."""
        return {}

    def objective(
        self, assignment: Assignment, network: Classifier, layout: Layout
    ) -> LocalObjective:
        """The local objective of one client that starts at `network`."""
        return LocalObjective()

    def measure(
        self, assignment: Assignment, network: Classifier, layout: Layout
    ) -> dict[str, Tensor]:
        """What a client answers in an exchange after training, with the newest weights in `network` (eval mode)."""
        raise LookupError(
            f"{type(self).__name__} has no exchange {assignment.instruction.exchange!r}"
        )

    def stored(self, private: State) -> int:
        """Images of the past in what one client remembers."""
        return 0

    def facts(self) -> dict[str, Any]:
        """What a results file should say about how this method was run."""
        return {}
