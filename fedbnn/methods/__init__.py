"""The methods by name. A preset is a method with its own defaults and its own head."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedbnn.config.own import spoken
from fedbnn.errors import ConfigError
from fedbnn.methods.base import Method
from fedbnn.methods.bounds import Exact, Joint, Local
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


PRINTED = {"precision": "learned", "temperature": 1.0, "scale_lr": 1.0, "r_init": 3}
PRINTED |= {"scale_constant": True, "prototype_gain": 0.05}
"""What the paper prints or its released code has, where ours differs."""
PRODUCT = {"fold_by": "product", "kl_per": "client"}
DAMPED = {**PRODUCT, "server_lr": 0.1}
RELEASED = {"fold_by": "moments", "kl_per": "weights"}
TOOLS = {"server_lr": 2.0, "feature_distillation": 1.5}
"""What the configurations of FedBNN on CIFAR-100 turn on and every method has."""

METHODS: Mapping[str, Preset] = {
    "fedbnn": Preset(FedBNN, head="gaussian"),
    "fedbnn_paper": Preset(FedBNN, {**PRINTED, **PRODUCT}),
    "fedbnn_paper_damped": Preset(FedBNN, {**PRINTED, **DAMPED}),
    "fedbnn_authors": Preset(FedBNN, {**PRINTED, **RELEASED}),
    "exact": Preset(Exact, head="exact"),
    "fedavg": Preset(FedAvg),
    "fedavg_plus": Preset(FedAvg, TOOLS, head="gaussian"),
    "fedprox": Preset(FedProx),
    "fedprox_plus": Preset(FedProx, TOOLS, head="gaussian"),
    "scaffold": Preset(Scaffold),
    "ewc": Preset(EWC),
    "mas": Preset(MAS),
    "lwf": Preset(LwF),
    "fcil": Preset(FCIL),
    "joint": Preset(Joint),
    "local": Preset(Local),
}


def own(found: Any) -> type[Method]:
    """A method of the user's own: a dataclass that is a Method."""
    if isinstance(found, type) and issubclass(found, Method):
        return found
    what, fix = f"{spoken(found)} is no method", "derive it from fedbnn.methods.Method"
    raise ConfigError(what, "method", fix)


__all__ = ["METHODS", "FedAvg", "FedBNN", "Method", "Preset"]
