"""LwF+FL: learning without forgetting (Li and Hoiem, 2016), federated.

    local    min_theta  CE(theta; D_k) + lambda T^2 KL(teacher(x) || student(x)),
             softmax over the old classes at temperature T
    server   FedAvg's mean;  at a consolidation  teacher <- global model
    state    the teacher;  floats per weight: 1 down, 1 up; 2 down after the first consolidation

The teacher is frozen, in eval mode, and sees the same augmented images. The KL is over all classes
of the teacher, never over the columns of the current task; prototypes of old classes a client does
not hold stay as they are, so they change only where their class is held. Main setting: `strength`
(lambda), grid 0.3, 1, 3, 10.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.config.schema import Count, NonNegative, Positive
from fedbnn.heads import prototypes
from fedbnn.methods.base import Assignment, Consolidation, LocalObjective, Method
from fedbnn.networks import Classifier
from fedbnn.protocol.state import State

TEACHER, MODEL = "teacher", ("backbone", "buffers", "prototypes")


class NewTeacher(Consolidation):
    """The global model becomes the teacher."""

    def apply(self, state: State) -> State:
        """Keep a copy of the model in the state."""
        return remember(state, TEACHER, state)


@dataclass(frozen=True)
class LwF(Method):
    """FedAvg whose clients also imitate the global model of the last consolidation on old classes.

    Args:
        strength: lambda, the weight of the distillation.
        temperature: T, how soft the teacher's answers are made.
        every: consolidate every so many rounds; null at the true end of each task, and every 10
            rounds where tasks overlap.
    """

    formula: ClassVar[str] = "min CE + lambda T^2 KL(teacher || student) on old classes"

    share: Literal["global"] = "global"
    strength: NonNegative = 1.0
    temperature: Positive = 2.0
    every: Count | None = None

    @property
    def consolidation(self) -> Consolidation:
        """A new teacher."""
        return NewTeacher(self.every)

    def objective(self, assignment: Assignment, network: Classifier) -> LocalObjective:
        """Cross-entropy and distillation, once there is a teacher."""
        state = assignment.instruction.state
        if TEACHER not in state.notes:
            return LocalObjective()
        columns = self.softmax(state, assignment.classes)
        teacher = Teacher(state, TEACHER, columns, network, assignment.layout)
        return Distilled(teacher, self.strength, self.temperature)


class Teacher:
    """The frozen model under `prefix` in eval mode, and a student's scores beside it.

    Its columns are its classes, those the student trains first. There the student's own score
    counts, and where it learns beside a prior mean the teacher stands on the same one; rows of old
    classes it does not hold are the global ones and do not move, but their gradient reaches the
    backbone.
    """

    def __init__(
        self,
        state: State,
        prefix: str,
        columns: Sequence[str],
        student: Classifier,
        layout: Layout,
    ) -> None:
        self.backbone = deepcopy(student.backbone).requires_grad_(False).eval()
        self.prior_mean = student.prior_mean
        layout.write(self.backbone, state[f"{prefix}.backbone"], state[f"{prefix}.buffers"])
        known = tuple(cast(Any, state.notes[prefix]))
        inside = tuple(name for name in columns if name in known)
        outside = tuple(name for name in known if name not in columns)
        self.classes, rows = inside + outside, state[f"{prefix}.prototypes"]
        self.prototypes = rows[[known.index(name) for name in self.classes]]
        self.inside = torch.tensor([columns.index(name) for name in inside], dtype=torch.long)
        self.outside = state["prototypes"][state.index(outside)]

    def to(self, device: torch.device) -> None:
        """The frozen model, and what is taken from it."""
        self.backbone.to(device)
        self.prototypes, self.outside = self.prototypes.to(device), self.outside.to(device)
        self.inside = self.inside.to(device)

    def logits(self, images: Tensor) -> Tensor:
        """Its scores, without gradient."""
        with torch.no_grad():
            features = self.backbone(images)
            scores = linear(features, self.prototypes)
            if self.prior_mean is not None:
                mine = self.prior_mean(images, features)[:, self.inside]
                scores[:, : len(self.inside)] += mine
            return scores

    def student(self, features: Tensor, logits: Tensor) -> Tensor:
        """The student's scores in the teacher's order: rows it trains, then those outside."""
        return torch.cat([logits[:, self.inside], linear(features, self.outside)], 1)


@dataclass
class Distilled(LocalObjective):
    """CE + lambda T^2 KL(teacher || student)."""

    teacher: Teacher
    strength: float
    temperature: float

    def to(self, device: torch.device) -> None:
        """The teacher."""
        self.teacher.to(device)

    def loss(self, images: Tensor, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over the client's rows, and distillation over the old ones."""
        fit = super().loss(images, features, logits, labels)
        return fit + self.strength * self.distillation(images, features, logits)

    def distillation(self, images: Tensor, features: Tensor, logits: Tensor) -> Tensor:
        """T^2 KL(softmax(teacher / T) || softmax(student / T)), the mean over images."""
        scores = self.teacher.logits(images), self.teacher.student(features, logits)
        target, answer = ((one / self.temperature).log_softmax(1) for one in scores)
        divergence = nn.functional.kl_div(answer, target, reduction="batchmean", log_target=True)
        return self.temperature**2 * divergence


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
