"""What a method is: a local objective and an aggregation. This is what all of them share.

Data flow of a round:  state -> broadcast -> (client) local objective -> update -> gate -> fold ->
state. A method sees rounds, never tasks: only its `consolidation`, if it has one, is ever told that
a task has ended.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.config.ranges import Positive
from fedbnn.errors import ConfigError
from fedbnn.heads import prototypes
from fedbnn.images import ImageSet
from fedbnn.messages import FitInstruction
from fedbnn.methods.aggregation import Aggregator
from fedbnn.networks import Classifier
from fedbnn.state import State
from fedbnn.stream import Stream

Anchors = Mapping[str, tuple[Tensor, Tensor]]
MODEL = ("backbone", "buffers", "prototypes")


@dataclass(frozen=True)
class Assignment:
    """One client's part of an instruction; the last `replayed` images are not of this round."""

    instruction: FitInstruction
    layout: Layout
    client: int
    classes: tuple[str, ...]
    images: ImageSet
    private: State | None
    replayed: int = 0


class LocalObjective:
    """Cross-entropy, and what a method adds to it.

    Made anew for every client and round, so it may hold anchors, teachers and control variates.
    """

    def loss(self, network: Classifier, images: Tensor, labels: Tensor) -> Tensor:
        """CE(softmax(f(x)), y) over the rows the client has assembled; `labels` number them."""
        return nn.functional.cross_entropy(network(images), labels)

    def correct(self, network: Classifier, lr: float) -> None:
        """Change the gradients in place before a step of this length."""

    def sends(self, weights: dict[str, Tensor], steps: int, lr: float) -> dict[str, Tensor]:
        """The tensors to send, given the weights after so many steps of this length."""
        return weights

    def keeps(self) -> State | None:
        """What the client remembers for the next time it is asked, if anything."""
        return None


class Penalty(LocalObjective):
    """CE + 1/2 sum_j s_j (theta_j - a_j)^2, with strength s and anchor a for each parameter named.

    Its gradient s (theta - a) is added in closed form. A step of length lr cannot be pulled beyond
    the anchor: s is capped at 1 / lr, where plain gradient descent lands on the anchor; above 2 /
    lr it would diverge.
    """

    def __init__(self, anchors: Anchors) -> None:
        self.anchors = anchors

    def penalty(self, network: Classifier) -> Tensor:
        """1/2 sum_j s_j (theta_j - a_j)^2, without the cap."""
        weights = dict(network.named_parameters())
        pulls = [(s * (weights[name] - a).square()).sum() for name, (s, a) in self.anchors.items()]
        return 0.5 * torch.stack(pulls).sum() if pulls else torch.zeros(())

    def correct(self, network: Classifier, lr: float) -> None:
        """g += min(s, 1 / lr) (theta - a)."""
        weights = dict(network.named_parameters())
        for name, (strength, anchor) in self.anchors.items():
            weight = weights[name]
            assert weight.grad is not None
            weight.grad.addcmul_(strength.clamp(max=1 / lr), weight.detach() - anchor)


class Replay:
    """A part of methods whose clients store images of every class they have met.

    As private state: `pixels` (m, channels, height, width) in uint8 and `labels` (m,), which number
    the state's classes.
    """

    def counts(self, shown: Mapping[str, int], private: State | None) -> dict[str, int]:
        """Images by class that a client trains on: of its round, and in memory of other classes."""
        if private is None:
            return dict(shown)
        stored = torch.bincount(private["labels"], minlength=len(private.classes)).tolist()
        old = dict(zip(private.classes, stored, strict=True))
        return {**shown, **{n: count for n, count in old.items() if count and n not in shown}}

    def images(self, shown: ImageSet, private: State | None) -> ImageSet:
        """The images behind `counts`, those replayed at the end."""
        held = shown.counts()
        old = self.counts(held, private).keys() - held.keys()
        if private is None or not old:
            return shown
        number = [shown.classes.index(name) if name in old else -1 for name in private.classes]
        labels = torch.tensor(number)[private["labels"]]
        pixels = torch.cat([shown.pixels, private["pixels"][labels >= 0]])
        return replace(shown, pixels=pixels, labels=torch.cat([shown.labels, labels[labels >= 0]]))

    def stored(self, private: State) -> int:
        """How many images one client stores."""
        return len(private["labels"])


@dataclass(frozen=True)
class Consolidation:
    """A part of methods that secure what was learnt: at the end of a task, or every few rounds."""

    every: int | None = None

    def due(self, round: int, task_ended: bool) -> bool:
        """Whether what was learnt so far is consolidated in this round."""
        return task_ended if self.every is None else round % self.every == 0

    @property
    def aggregator(self) -> Aggregator | None:
        """An exchange of its own, after training, if it needs one."""
        return None

    def measure(self, assignment: Assignment, network: Classifier) -> dict[str, Tensor]:
        """What a client answers in that exchange, with the newest weights in `network`."""
        return {}

    def apply(self, state: State) -> State:
        """The state a consolidation leaves behind, after all folds of its round."""
        return state

    def facts(self) -> dict[str, str]:
        """When it consolidates."""
        return {"consolidation": f"every {self.every} rounds" if self.every else "at task ends"}


@dataclass(frozen=True)
class Method:
    """A federated continual method; its fields are its hyperparameters.

    `needs_prototypes` says that the server must have them, and `optimizer` names the one optimiser
    the method is right with (then without momentum). `replay` and `consolidation` are parts that
    few methods have.

    Args:
        lr: learning rate of this method's clients; null takes `client.lr`.
        scope: classes of the training softmax: of the client's round (`local`), or all `seen`.
        share: `global` folds the prototypes too; `backbone_only` leaves them on the clients.
    """

    formula: ClassVar[str] = ""
    needs_prototypes: ClassVar[bool] = False
    optimizer: ClassVar[str | None] = None
    replay: ClassVar[Replay | None] = None

    lr: Positive | None = None
    scope: Literal["local", "seen"] = "local"
    share: Literal["global", "backbone_only"] = "global"

    def __post_init__(self) -> None:
        if self.needs_prototypes and not self.shares_prototypes:
            what = "this method needs the prototypes on the server"
            raise ConfigError(what, "method.share", "use share: global")

    @property
    def shares_prototypes(self) -> bool:
        """Whether the server has the prototypes."""
        return self.share == "global"

    @property
    def consolidation(self) -> Consolidation | None:
        """How what was learnt is secured, if it is."""
        return None

    def stream(self, stream: Stream) -> Stream:
        """Who takes part with which images: as in the stream, unless a bound changes that."""
        return stream

    def start(self, state: State, layout: Layout, clients: int) -> State:
        """The state before round 1, given fresh weights and the number of registered clients."""
        return state

    def prepare(self, state: State, round: int, classes: Sequence[str], layout: Layout) -> State:
        """The state a round begins with: prototypes for every class its participants hold."""
        return prototypes.grow(state, classes, None) if self.shares_prototypes else state

    def begins(self, sent: State, private: State | None) -> State:
        """The state a client starts from: what it was sent."""
        return sent

    def softmax(self, state: State, held: tuple[str, ...]) -> tuple[str, ...]:
        """Classes of a client's softmax: those it holds, then with scope `seen` all trained."""
        if self.scope == "local":
            return held
        return held + tuple(name for name in prototypes.trained(state) if name not in held)

    def prototype_scale(self, state: State) -> float | None:
        """Initial scale of a new prototype, where weights have a posterior; else None."""
        return None

    def aggregator(self, state: State) -> Aggregator:
        """The exchange of training: what goes down, what comes up, and how it is folded."""
        return Aggregator(shares_prototypes=self.shares_prototypes)

    def objective(self, assignment: Assignment, network: Classifier) -> LocalObjective:
        """The local objective of one client that starts at `network`."""
        return LocalObjective()

    def end_round(self, before: State, state: State, layout: Layout) -> State:
        """The state a round ends with, after all its folds, given the one it began with."""
        return state

    def facts(self) -> dict[str, Any]:
        """What a results file should say about how this method was run."""
        return self.consolidation.facts() if self.consolidation else {}


WITHOUT_BOUNDARIES = 10
"""Rounds between two consolidations where tasks overlap, so that no round is the end of one."""


def without_boundaries(method: Method) -> Method:
    """The method for a stream whose tasks overlap: it consolidates at a fixed pace, if at all."""
    if method.consolidation is None or method.consolidation.every is not None:
        return method
    changed: dict[str, Any] = {"every": WITHOUT_BOUNDARIES}
    return replace(method, **changed)


def remember(state: State, prefix: str, model: State) -> State:
    """The state with the weights of `model`, and its trained prototypes, kept under `prefix`."""
    classes = prototypes.trained(model)
    kept = {f"{prefix}.{name}": model[name].clone() for name in MODEL}
    kept[f"{prefix}.prototypes"] = model["prototypes"][model.index(classes)]
    return state.having(kept, **{prefix: list(classes)})


def rename(state: State, old: str, new: str) -> State:
    """The state with the model under `old` kept under `new` instead."""
    rest = {name: t for name, t in state.tensors.items() if not name.startswith(f"{old}.")}
    moved = {f"{new}.{name}": state[f"{old}.{name}"] for name in MODEL}
    notes = {key: value for key, value in state.notes.items() if key not in (old, new)}
    return State({**rest, **moved}, state.classes, {**notes, new: state.notes[old]})


def linear(features: Tensor, rows: Tensor) -> Tensor:
    """One score per row: weights and bias side by side."""
    return nn.functional.linear(features, rows[:, :-1], rows[:, -1])


class Teacher:
    """The frozen model under `prefix` in eval mode, and a student's scores beside it.

    Its columns are its classes, those the student trains first. There the student's own score
    counts; rows of old classes it does not hold are the global ones and do not move, but their
    gradient reaches the backbone.
    """

    def __init__(
        self, state: State, prefix: str, columns: Sequence[str], backbone: nn.Module, layout: Layout
    ) -> None:
        self.backbone = deepcopy(backbone).requires_grad_(False).eval()
        layout.write(self.backbone, state[f"{prefix}.backbone"], state[f"{prefix}.buffers"])
        known = tuple(cast(Any, state.notes[prefix]))
        inside = tuple(name for name in columns if name in known)
        outside = tuple(name for name in known if name not in columns)
        order = [known.index(name) for name in inside + outside]
        self.classes, self.prototypes = inside + outside, state[f"{prefix}.prototypes"][order]
        self.inside = torch.tensor([columns.index(name) for name in inside], dtype=torch.long)
        self.outside = state["prototypes"][state.index(outside)]

    def logits(self, images: Tensor) -> Tensor:
        """Its scores, without gradient."""
        with torch.no_grad():
            return linear(self.backbone(images), self.prototypes)

    def student(self, features: Tensor, logits: Tensor) -> Tensor:
        """The student's scores in the teacher's order: rows it trains, then those outside."""
        return torch.cat([logits[:, self.inside], linear(features, self.outside)], 1)
