"""Models of the past inside a state: kept under a prefix, and made a frozen teacher again on a client."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.heads import library
from fedbnn.state import State


def remember(state: State, prefix: str, model: State) -> State:
    """The state with the weights of `model`, and its trained rows, kept under `prefix`."""
    classes = library.trained(model)
    kept = {
        "backbone": model["backbone"].clone(),
        "buffers": model["buffers"].clone(),
        "rows": model["rows"][model.index(classes)],
    }
    return state.having(
        {f"{prefix}.{name}": value for name, value in kept.items()}, **{prefix: list(classes)}
    )


def rename(state: State, old: str, new: str) -> State:
    """The state with the model under `old` kept under `new` instead."""
    moved = {
        name: name.replace(f"{old}.", f"{new}.", 1) if name.startswith(f"{old}.") else name
        for name in state.tensors
    }
    notes = {new if key == old else key: value for key, value in state.notes.items() if key != new}
    tensors = {
        target: state[name]
        for name, target in moved.items()
        if not (name.startswith(f"{new}.") and target == name)
    }
    return State(tensors, state.classes, notes)


@dataclass(frozen=True)
class Teacher:
    """A frozen model in eval mode: a column for each of `classes`."""

    backbone: nn.Module
    rows: Tensor
    classes: tuple[str, ...]

    def logits(self, images: Tensor) -> Tensor:
        """Its scores, without gradient."""
        with torch.no_grad():
            return linear(self.backbone(images), self.rows)

    def ordered(self, classes: tuple[str, ...]) -> "Teacher":
        """The same model with its columns in this order."""
        places = [self.classes.index(name) for name in classes]
        return Teacher(self.backbone, self.rows[places], classes)


def recall(state: State, prefix: str, backbone: nn.Module, layout: Layout) -> Teacher | None:
    """The model kept under `prefix` on a copy of this backbone; None if there is none."""
    if prefix not in state.notes:
        return None
    copy = deepcopy(backbone).requires_grad_(False).eval()
    layout.write(copy, state[f"{prefix}.backbone"], state[f"{prefix}.buffers"])
    return Teacher(copy, state[f"{prefix}.rows"], tuple(cast(Any, state.notes[prefix])))


def linear(features: Tensor, rows: Tensor) -> Tensor:
    """One score per row: weights and bias side by side."""
    return nn.functional.linear(features, rows[:, :-1], rows[:, -1])


class OldColumns:
    """A student's scores beside those of its teacher, for all classes of the teacher.

    Where the student trains the row of an old class its own score counts; rows of old classes it does not hold are
    the global ones and do not move, but their gradient reaches the backbone.
    """

    def __init__(self, teacher: Teacher, state: State, columns: tuple[str, ...]) -> None:
        inside = tuple(name for name in columns if name in teacher.classes)
        outside = tuple(name for name in teacher.classes if name not in columns)
        self.teacher = teacher.ordered(inside + outside)
        self.inside = torch.tensor([columns.index(name) for name in inside], dtype=torch.long)
        self.outside = state["rows"][state.index(outside)]

    def student(self, features: Tensor, logits: Tensor) -> Tensor:
        """The student's scores in the teacher's order: `logits` of the rows it trains, then those outside."""
        return torch.cat([logits[:, self.inside], linear(features, self.outside)], 1)
