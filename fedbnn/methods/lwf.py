"""LwF+FL: learning without forgetting (Li and Hoiem, 2016), federated.

    local    min_theta  CE(theta; D_k) + lambda T^2 KL(teacher(x) || student(x)),   softmax over the old classes at temperature T
    server   FedAvg's mean;  at a consolidation  teacher <- global model, with its trained rows
    state    the teacher;  floats per weight: 1 down, 1 up; 2 down after the first consolidation

The teacher is frozen, in eval mode, and sees the same augmented images. The KL is over all classes of the teacher,
never over the columns of the current task; rows of old classes a client does not hold stay as they are, so old rows
change only where their class is held. Main knob: `strength` (lambda), grid 0.3, 1, 3, 10.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.errors import ConfigError
from fedbnn.methods.base import Assignment, LocalObjective
from fedbnn.methods.boundary import BoundaryMethod
from fedbnn.methods.snapshots import OldColumns, recall, remember
from fedbnn.networks import Classifier
from fedbnn.state import State

TEACHER = "teacher"


@dataclass(frozen=True)
class LwF(BoundaryMethod):
    """FedAvg whose clients also imitate the global model of the last consolidation on old classes.

    Args:
        strength: lambda, the weight of the distillation.
        temperature: T, how soft the teacher's answers are made.
    """

    formula: ClassVar[str] = "min CE + lambda T^2 KL(teacher || student) on old classes"
    needs_rows: ClassVar[bool] = True

    strength: float = 1.0
    temperature: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength < 0 or self.temperature <= 0:
            raise ConfigError(
                "strength must not be below 0 and temperature must be above 0", "method"
            )

    def consolidate(self, state: State) -> State:
        """The global model becomes the teacher."""
        return remember(state, TEACHER, state)

    def objective(
        self, assignment: Assignment, network: Classifier, layout: Layout
    ) -> LocalObjective:
        """Cross-entropy and distillation; cross-entropy alone before the first consolidation."""
        state = assignment.instruction.state
        teacher = recall(state, TEACHER, network.backbone, layout)
        if teacher is None:
            return LocalObjective()
        return Distilled(
            OldColumns(teacher, state, self.softmax(state, assignment.classes)),
            self.strength,
            self.temperature,
        )


class Distilled(LocalObjective):
    """CE + lambda T^2 KL(teacher || student)."""

    def __init__(self, old: OldColumns, strength: float, temperature: float) -> None:
        self.old, self.strength, self.temperature = old, strength, temperature

    def loss(self, network: Classifier, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over the client's rows, and distillation over the old ones."""
        features = network.backbone(images)
        logits = network.head(features)
        student = self.old.student(features, logits)
        return nn.functional.cross_entropy(logits, labels) + self.strength * self.distillation(
            student, images
        )

    def distillation(self, student: Tensor, images: Tensor) -> Tensor:
        """T^2 KL(softmax(teacher / T) || softmax(student / T)), the mean over images; 0 where both agree."""
        target = (self.old.teacher.logits(images) / self.temperature).log_softmax(1)
        answer = (student / self.temperature).log_softmax(1)
        return self.temperature**2 * nn.functional.kl_div(
            answer, target, reduction="batchmean", log_target=True
        )
