"""What a client minimises on weights that are points, and the terms that methods add to it."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.heads import prototypes
from fedbnn.networks import Classifier
from fedbnn.state import State

Anchors = Mapping[str, tuple[Tensor, Tensor]]
MODEL = ("backbone", "buffers", "prototypes")


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
