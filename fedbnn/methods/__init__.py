"""The methods by name. A preset is a method with its own defaults and its own head."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedbnn.methods.base import Method
from fedbnn.methods.bounds import Joint, Local
from fedbnn.methods.exact import Exact
from fedbnn.methods.fedavg import FedAvg, FedProx
from fedbnn.methods.fedbnn import FedBNN
from fedbnn.methods.glfc import FCIL
from fedbnn.methods.importance import EWC, MAS
from fedbnn.methods.lwf import LwF
from fedbnn.methods.scaffold import Scaffold


@dataclass(frozen=True)
class Preset:
    """A method class, the defaults that differ from its own, and the head it predicts with."""

    method: type[Method]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    head: str = "linear"


PRINTED = {"temperature": 1.0, "scale_constant": True, "scale_lr": 1.0}
"""What the paper prints or its released code has, where ours differs."""
PRODUCT = {"fold_by": "product", "server_lr": 0.1, "kl_per": "client"}
RELEASED = {"fold_by": "moments", "kl_per": "weights"}

METHODS: Mapping[str, Preset] = {
    "fedbnn": Preset(FedBNN, head="gaussian"),
    "fedbnn_paper": Preset(FedBNN, {**PRINTED, **PRODUCT}),
    "fedbnn_authors": Preset(FedBNN, {**PRINTED, **RELEASED}),
    "exact": Preset(Exact, head="exact"),
    "fedavg": Preset(FedAvg),
    "fedprox": Preset(FedProx),
    "scaffold": Preset(Scaffold),
    "ewc": Preset(EWC),
    "mas": Preset(MAS),
    "lwf": Preset(LwF),
    "fcil": Preset(FCIL),
    "joint": Preset(Joint),
    "local": Preset(Local),
}

__all__ = ["METHODS", "FedAvg", "FedBNN", "Method", "Preset"]
