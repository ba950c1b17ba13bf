"""FedAvg (McMahan et al., 2017).

local    min_theta  CE(theta; D_k)
server   theta = sum_k n_k theta_k / N,    prototype c = sum_k n_kc prototype_kc / N_c
state    none;  floats per weight: 1 down, 1 up
"""

from dataclasses import dataclass
from typing import ClassVar

from fedbnn.methods.base import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """Cross-entropy on every client, the mean of their weights on the server."""

    formula: ClassVar[str] = "theta = sum_k (n_k / N) theta_k"
