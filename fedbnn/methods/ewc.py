"""EWC+FL: elastic weight consolidation (Kirkpatrick et al., 2017), online (Schwarz et al., 2018), federated.

    local    min_theta  CE(theta; D_k) + lambda/2 sum_j Omega_j (theta_j - theta*_j)^2
    Omega_k  diagonal Fisher = mean over images of  sum_y p(y|x) (d log p(y|x) / d theta)^2,  y from the model, not the data
    server, state, communication as in `importance`

The Fisher is that of the likelihood the client trains: the softmax over the classes it holds. The sum over y costs a
backward pass per class; `draws` labels drawn from the model estimate it without bias.
Main knob: `strength` (lambda), grid 10, 100, 1e3, 1e4.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedbnn.errors import ConfigError
from fedbnn.methods.base import Assignment
from fedbnn.methods.importance import ImportanceMethod
from fedbnn.methods.per_sample import summed
from fedbnn.networks import Classifier

BATCH = 256


@dataclass(frozen=True)
class EWC(ImportanceMethod):
    """FedAvg with weights held by their Fisher information.

    Args:
        draws: labels drawn from the model per image; null takes the exact expectation over all classes.
    """

    formula: ClassVar[str] = (
        "min CE + lambda/2 sum Omega (theta - theta*)^2; Omega = Fisher of the past"
    )

    strength: float = 100.0
    draws: int | None = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draws is not None and self.draws < 1:
            raise ConfigError(f"draws must be at least 1, not {self.draws}", "method.draws")

    def stiffness(self, importance: Tensor) -> Tensor:
        """lambda Omega."""
        return self.strength * importance

    def measured(
        self, assignment: Assignment, network: Classifier
    ) -> tuple[tuple[str, ...], dict[str, Tensor]]:
        """The diagonal Fisher over the client's images."""
        columns, images = (
            self.softmax(assignment.instruction.state, assignment.classes),
            assignment.images,
        )
        parts = [fisher_sum(network, batch, self.draws) for batch, _ in images.loader(BATCH, shuffle=False)]
        return columns, {
            name: torch.stack([part[name] for part in parts]).sum(0) / len(images)
            for name in parts[0]
        }


def fisher_sum(network: Classifier, images: Tensor, draws: int | None) -> dict[str, Tensor]:
    """sum_x sum_y p(y|x) (d log p(y|x) / d theta)^2 by parameter, as a sum over pairs (image, label)."""
    with torch.no_grad():
        probabilities = network(images).softmax(1)
    count, classes = probabilities.shape
    if draws is None:
        labels, weights = torch.arange(classes).repeat(count), probabilities.reshape(-1)
    else:
        labels = probabilities.multinomial(draws, replacement=True).reshape(-1)
        weights = torch.full((len(labels),), 1 / draws, dtype=probabilities.dtype)
    repeated = images.repeat_interleave(len(labels) // count, 0)
    return summed(network, _log_likelihood, (repeated, labels), _weighted_square, weights)


def _log_likelihood(logits: Tensor, label: Tensor) -> Tensor:
    return logits.log_softmax(0).gather(0, label[None])[0]


def _weighted_square(gradient: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("i,i...->...", weight, gradient.square())
