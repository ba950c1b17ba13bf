"""What a method is: a local objective and an aggregation. This is what all of them share.

Data flow of a round:  state -> broadcast -> (client) local objective -> update -> gate -> fold ->
state. A method sees rounds, never tasks: only its `consolidation`, if it has one, is ever told that
a task has ended.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.config.schema import NonNegative, Positive
from fedbnn.heads import prototypes
from fedbnn.images import ImageSet, joined
from fedbnn.methods.aggregation import Aggregator, ServerStep, Spec
from fedbnn.networks import Classifier
from fedbnn.protocol.messages import FitInstruction, Refused
from fedbnn.protocol.state import State
from fedbnn.protocol.stream import Stream

Tensors = dict[str, Tensor]
Anchors = Mapping[str, tuple[Tensor, Tensor]]


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

    @property
    def shown(self) -> ImageSet:
        """The images of this round alone."""
        return self.images.subset(torch.arange(len(self.images) - self.replayed))


class LocalObjective:
    """Cross-entropy, and what a method adds to it.

    Made anew for every client and round, so it may hold anchors, teachers and control variates.
    """

    def loss(self, images: Tensor, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """CE(softmax(f(x)), y) over the rows the client has assembled; `labels` number them."""
        return nn.functional.cross_entropy(logits, labels)

    def to(self, device: torch.device) -> None:
        """Take what every step needs to the device on which it is made, once."""

    def correct(self, network: Classifier, lr: float) -> None:
        """Change the gradients in place before a step of this length."""

    def answer(self, weights: Tensors, steps: int, lr: float) -> tuple[Tensors, State | None]:
        """What to send, and to keep for the next time, after so many steps of this length."""
        return weights, None


class Penalty(LocalObjective):
    """CE + 1/2 sum_j s_j (theta_j - a_j)^2, with strength s and anchor a for each parameter named.

    Its gradient s (theta - a) is added in closed form. A step of length lr cannot be pulled beyond
    the anchor: s is capped at 1 / lr, where plain gradient descent lands on the anchor; above 2 /
    lr it would diverge.
    """

    def __init__(self, anchors: Anchors) -> None:
        self.anchors = anchors

    def to(self, device: torch.device) -> None:
        """The anchors with their strengths."""
        here = self.anchors.items()
        self.anchors = {name: (one.to(device), other.to(device)) for name, (one, other) in here}

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
        stored = Counter(private.classes[label] for label in private["labels"].tolist())
        return {**stored, **shown}

    def images(self, shown: ImageSet, private: State | None) -> ImageSet:
        """The images behind `counts`, those replayed at the end."""
        if private is None:
            return shown
        memory = ImageSet(private["pixels"], private["labels"], private.classes)
        old = torch.tensor([name not in shown.counts() for name in private.classes])
        chosen = memory.subset(old[memory.labels].nonzero().flatten())
        return joined([shown, chosen.among(shown.classes)])

    def kept(self, own: State, announced: Mapping[str, int], shape: tuple[int, int, int]) -> Spec:
        """Images of what the client announced, no more of a class than there were."""
        labels = own.tensors.get("labels", torch.zeros(0))
        if labels.is_floating_point() or labels.dim() != 1:
            raise Refused("labels that are no numbers of classes")
        counts = Counter(labels.tolist())
        if not all(0 <= label < len(own.classes) for label in counts):
            raise Refused("a label without a class")
        for label, count in counts.items():
            name = own.classes[label]
            if count > (there := announced.get(name, 0)):
                raise Refused(f"{count} images of {name[:60]!r}, the announcement said {there}")
        size = (len(labels),)
        return {"pixels": ((*size, *shape), torch.uint8), "labels": (size, torch.int64)}

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

    def measure(self, assignment: Assignment, network: Classifier) -> Tensors:
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

    `trains` says whether clients train at all, and `optimizer` names the one optimiser the method
    is right with (then without momentum). `replay` and `consolidation` are parts that few methods
    have; `notes` are for the results file; `exchange` is what training exchanges.

    Args:
        lr: learning rate of this method's clients; null takes `client.lr`.
        scope: classes of the training softmax: of the client's round (`local`), or all `seen`.
        share: `global` aggregates the prototypes too; `backbone_only` leaves them on the clients.
        server_lr: p, how far the server goes in the direction of its clients' mean.
        server_optimizer: that direction itself, with momentum (FedAvgM), or as Adam's (FedAdam).
        feature_distillation: lambda, how strongly features of the last global model must stay
            linearly readable: lambda |f + V f + b - f_0|^2 / E |f_0|^2 an image. Of points from
            round 4 on.
    """

    formula: ClassVar[str] = ""
    trains: ClassVar[bool] = True
    optimizer: ClassVar[str | None] = None
    replay: ClassVar[Replay | None] = None
    notes: ClassVar[Mapping[str, str]] = {}
    exchange: ClassVar[type[Aggregator]] = Aggregator

    lr: Positive | None = None
    scope: Literal["local", "seen"] = "local"
    share: Literal["global", "backbone_only"] = "global"
    server_lr: Positive = 1.0
    server_optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    feature_distillation: NonNegative = 0.0

    @property
    def shares_prototypes(self) -> bool:
        """Whether the server has the prototypes."""
        return self.share == "global"

    @property
    def server_reads(self) -> bool:
        """Whether the server reads what clients keep: images they replay, prototypes of theirs."""
        return self.replay is not None or not self.shares_prototypes

    @property
    def server_step(self) -> ServerStep:
        """What the server makes of the clients' mean."""
        return ServerStep(self.server_lr, self.server_optimizer)

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

    def kept(self, own: State, state: State, layout: Layout) -> Spec:
        """What a client may keep for itself: its prototypes, where they stay with it."""
        if self.shares_prototypes:
            raise Refused("this method keeps nothing on its clients")
        rows = (len(own.classes), layout.width + 1)
        found = dict.fromkeys(own.tensors.keys() & {"prototypes.scale"}, (rows, torch.float32))
        samples = {"prototypes.samples": (rows[:1], torch.float64)}
        return {"prototypes": (rows, torch.float32), **samples, **found}

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
        return self.exchange(shares_prototypes=self.shares_prototypes, step=self.server_step)

    def objective(self, assignment: Assignment, network: Classifier) -> LocalObjective:
        """The local objective of one client that starts at `network`."""
        return LocalObjective()

    def end_round(self, before: State, state: State, layout: Layout) -> State:
        """The state a round ends with, after all its folds, given the one it began with."""
        return state

    def facts(self) -> dict[str, Any]:
        """What a results file should say about how this method was run."""
        return {**self.notes, **(self.consolidation.facts() if self.consolidation else {})}


WITHOUT_BOUNDARIES = 10
"""Rounds between two consolidations where tasks overlap, so that no round is the end of one."""


def without_boundaries(method: Method) -> Method:
    """The method for a stream whose tasks overlap: it consolidates at a fixed pace, if at all."""
    if method.consolidation is None or method.consolidation.every is not None:
        return method
    return replace(method, **dict[str, Any](every=WITHOUT_BOUNDARIES))
