"""FedAvg (McMahan et al., 2017) and FedProx (Li et al., 2020).

    local    min_theta  CE(theta; D_k) + mu/2 ||theta - theta_0||^2,   theta_0 = where it starts
    server   theta = sum_k n_k theta_k / N,    prototype c = sum_k n_kc prototype_kc / N_c
    state    none;  floats per weight: 1 down, 1 up

FedAvg has no mu. Prototypes of new classes start where their warm-up left them. Main setting: `mu`,
grid 0.001 ... 1.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedbnn.config.schema import NonNegative
from fedbnn.methods.base import Assignment, LocalObjective, Method, Penalty
from fedbnn.networks import Classifier


@dataclass(frozen=True)
class FedAvg(Method):
    """Cross-entropy on every client, the mean of their weights on the server."""

    formula: ClassVar[str] = "theta = sum_k (n_k / N) theta_k"


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg whose clients are held near the weights they were sent.

    Args:
        mu: strength of the pull.
    """

    formula: ClassVar[str] = "min CE + mu/2 |theta - theta_0|^2; theta = sum_k (n_k / N) theta_k"

    mu: NonNegative = 0.1

    def objective(self, assignment: Assignment, network: Classifier) -> LocalObjective:
        """Cross-entropy, and the same pull on every weight."""
        strength = torch.tensor(self.mu)
        start = {name: weight.detach().clone() for name, weight in network.named_parameters()}
        return Penalty({name: (strength, anchor) for name, anchor in start.items()})
