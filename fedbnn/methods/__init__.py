"""The methods by name. A preset is a method with its own defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedbnn.methods.base import BoundaryMethod, Method
from fedbnn.methods.fedavg import FedAvg
from fedbnn.methods.fedbnn import FedBNN


@dataclass(frozen=True)
class Preset:
    """A method class, and the defaults that differ from its own."""

    method: type[Method]
    defaults: Mapping[str, Any] = field(default_factory=dict)


METHODS: Mapping[str, Preset] = {
    "fedbnn": Preset(FedBNN),
    "fedbnn_paper": Preset(FedBNN, {"fold_by": "product", "damping": 0.1, "kl_per": "client", "scale_gain": 0.05, "scale_constant": True}),
    "fedbnn_authors": Preset(FedBNN, {"fold_by": "moments", "kl_per": "weights", "temperature": 1.0, "scale_gain": 0.05, "scale_constant": True}),
    "fedavg": Preset(FedAvg),
}

__all__ = ["METHODS", "BoundaryMethod", "FedAvg", "FedBNN", "Method", "Preset"]
