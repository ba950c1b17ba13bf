"""LwF+FL: learning without forgetting (Li and Hoiem, 2016), federated.

    local    min_theta  CE(theta; D_k) + lambda T^2 KL(teacher(x) || student(x)),
             softmax over the old classes at temperature T
    server   FedAvg's mean;  at a consolidation  teacher <- global model
    state    the teacher;  floats per weight: 1 down, 1 up; 2 down after the first consolidation

The teacher is frozen, in eval mode, and sees the same augmented images. The KL is over all classes
of the teacher, never over the columns of the current task; prototypes of old classes a client does
not hold stay as they are, so they change only where their class is held. Main knob: `strength`
(lambda), grid 0.3, 1, 3, 10.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedbnn.config.ranges import Count, NonNegative, Positive
from fedbnn.methods.base import Assignment, Consolidation, LocalObjective, Method, Teacher, remember
from fedbnn.networks import Classifier
from fedbnn.state import State

TEACHER = "teacher"


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
    needs_prototypes: ClassVar[bool] = True

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
        teacher = Teacher(state, TEACHER, columns, network.backbone, assignment.layout)
        return Distilled(teacher, self.strength, self.temperature)


class Distilled(LocalObjective):
    """CE + lambda T^2 KL(teacher || student)."""

    def __init__(self, teacher: Teacher, strength: float, temperature: float) -> None:
        self.teacher, self.strength, self.temperature = teacher, strength, temperature

    def loss(self, network: Classifier, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over the client's rows, and distillation over the old ones."""
        features = network.backbone(images)
        logits = network.head(features)
        student = self.teacher.student(features, logits)
        fit = nn.functional.cross_entropy(logits, labels)
        return fit + self.strength * self.distillation(student, images)

    def distillation(self, student: Tensor, images: Tensor) -> Tensor:
        """T^2 KL(softmax(teacher / T) || softmax(student / T)), the mean over images."""
        target = (self.teacher.logits(images) / self.temperature).log_softmax(1)
        answer = (student / self.temperature).log_softmax(1)
        divergence = nn.functional.kl_div(answer, target, reduction="batchmean", log_target=True)
        return self.temperature**2 * divergence
