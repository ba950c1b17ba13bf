"""MAS+FL: memory-aware synapses (Aljundi et al., 2018), federated.

    local    min_theta  CE(theta; D_k) + lambda sum_j Omega_j (theta_j - theta*_j)^2
    Omega_k  mean over images of  | d ||f(x)||^2 / d theta |,   f = logits of all classes seen so far
    server, state, communication as in `importance`

It needs no labels: what counts is how much the output moves. Main knob: `strength` (lambda), grid 0.01, 0.1, 1, 10.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedbnn.heads import library
from fedbnn.methods.base import Assignment
from fedbnn.methods.importance import ImportanceMethod
from fedbnn.methods.per_sample import summed
from fedbnn.networks import Classifier

BATCH = 256


@dataclass(frozen=True)
class MAS(ImportanceMethod):
    """FedAvg with weights held by the sensitivity of the output to them."""

    formula: ClassVar[str] = (
        "min CE + lambda sum Omega (theta - theta*)^2; Omega = E |d |f(x)|^2 / d theta|"
    )

    strength: float = 0.01

    def stiffness(self, importance: Tensor) -> Tensor:
        """2 lambda Omega, for the penalty has no 1/2."""
        return 2 * self.strength * importance

    def measured(
        self, assignment: Assignment, network: Classifier
    ) -> tuple[tuple[str, ...], dict[str, Tensor]]:
        """Sensitivity of the logits of all seen classes, over the client's images."""
        state, images = assignment.instruction.state, assignment.images
        seen = library.trained(state)
        whole = Classifier(network.backbone, len(seen)).eval()
        rows = state["rows"][state.index(seen)]
        with torch.no_grad():
            whole.head.weight.copy_(rows[:, :-1])
            whole.head.bias.copy_(rows[:, -1])
        parts = [sensitivity_sum(whole, batch) for batch, _ in images.loader(BATCH, shuffle=False)]
        return seen, {
            name: torch.stack([part[name] for part in parts]).sum(0) / len(images)
            for name in parts[0]
        }


def sensitivity_sum(network: Classifier, images: Tensor) -> dict[str, Tensor]:
    """sum_x | d ||f(x)||^2 / d theta | by parameter."""
    return summed(
        network,
        lambda logits: logits.square().sum(),
        (images,),
        lambda gradient: gradient.abs().sum(0),
    )
