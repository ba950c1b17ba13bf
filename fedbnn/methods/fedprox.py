"""FedProx (Li et al., 2020).

    local    min_theta  CE(theta; D_k) + mu/2 ||theta - theta_0||^2,    theta_0 = the weights the client starts from
    server   FedAvg's mean
    state    none;  floats per weight: 1 down, 1 up

Rows of new classes start where their warm-up left them. Main knob: `mu`, grid 0.001, 0.01, 0.1, 1.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedbnn.bayes.flatten import Layout
from fedbnn.errors import ConfigError
from fedbnn.methods.base import Assignment, LocalObjective, Method
from fedbnn.methods.pull import Pull
from fedbnn.networks import Classifier


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg whose clients are held near the weights they were sent.

    Args:
        mu: strength of the pull.
    """

    formula: ClassVar[str] = "min CE + mu/2 |theta - theta_0|^2; theta = sum_k (n_k / N) theta_k"

    mu: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu < 0:
            raise ConfigError(f"mu must not be below 0, not {self.mu}", "method.mu")

    def objective(
        self, assignment: Assignment, network: Classifier, layout: Layout
    ) -> LocalObjective:
        """Cross-entropy, and the same pull on every weight."""
        anchors = {name: weight.detach().clone() for name, weight in network.named_parameters()}
        return Pull({name: (torch.tensor(self.mu), anchor) for name, anchor in anchors.items()})
