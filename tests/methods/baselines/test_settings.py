"""What a method cannot be set to is refused where it is read; what it can be set to is taken."""

from dataclasses import fields
from typing import Any

import pytest
from jsonargparse import ArgumentError, ArgumentParser

from fedbnn.errors import ConfigError
from fedbnn.methods import METHODS
from fedbnn.methods.fedavg import FedProx
from fedbnn.methods.fedbnn import FedBNN

WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "fedavg": {
        "lr": (0, -1),
        "scope": ("all",),
        "share": ("nothing",),
        "server_lr": (0, -1, float("inf")),
        "server_optimizer": ("lion",),
        "feature_distillation": (-1, float("inf")),
    },
    "fedprox": {"mu": (-1,)},
    "scaffold": {"lr": (0, -0.1)},
    "ewc": {"strength": (-1,), "decay": (2, -0.1), "draws": (0, 1.5), "every": (0,)},
    "mas": {"strength": (-1,), "decay": (2, -0.1), "every": (0,)},
    "lwf": {"strength": (-1,), "temperature": (0,), "every": (0,)},
    "fcil": {"memory": (0, 1.5), "distil": (1.5, -0.5), "threshold": (0,)},
    "fedbnn": {
        "fold_by": ("median",),
        "server_optimizer": ("adam",),
        "temperature": (-1,),
        "kl_per": ("image",),
        "precision": ("exact",),
        "retention": (0, 1.5),
        "scale_gain": (0,),
        "prototype_gain": (0, -1),
        "scale_lr": (0,),
        "r_init": (-1, 0.5),
    },
}
RIGHT: dict[str, dict[str, Any]] = {
    "fedavg": {
        "lr": 0.5,
        "scope": "seen",
        "share": "backbone_only",
        "server_lr": 2.5,
        "server_optimizer": "adam",
        "feature_distillation": 30,
    },
    "fedprox": {"mu": 0},
    "scaffold": {"lr": 0.01},
    "ewc": {"strength": 0, "decay": 0, "draws": None, "every": 1},
    "mas": {"strength": 0, "decay": 1, "every": None},
    "lwf": {"strength": 0, "temperature": 0.5, "every": 3},
    "fcil": {"memory": 1, "distil": 1, "threshold": 0.1},
    "fedbnn": {
        "server_lr": 2.5,
        "temperature": 0.5,
        "prototype_gain": 0.1,
        "retention": 1,
        "r_init": 0,
    },
}
KINDS = {FedBNN: "fedbnn", FedProx: "fedprox"}
CASES = [
    (name, key, value)
    for name, keys in WRONG.items()
    for key, values in keys.items()
    for value in values
]


def read(name: str, options: dict[str, Any]) -> Any:
    """The options of a method as a configuration file gives them."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(METHODS[name].method, "method")
    return parser.parse_object({"method": options})


@pytest.mark.parametrize(("name", "key", "value"), CASES)
def test_settings_out_of_range_are_refused(name: str, key: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=key):
        read(name, {key: value})


@pytest.mark.parametrize("name", RIGHT)
def test_settings_in_range_are_taken(name: str) -> None:
    assert {key: read(name, RIGHT[name]).method[key] for key in RIGHT[name]} == RIGHT[name]


def test_every_setting_with_a_range_has_a_case() -> None:
    for name, preset in METHODS.items():
        known = WRONG.get(name) or WRONG.get(KINDS.get(preset.method, ""), {})
        ranged = {one.name for one in fields(preset.method) if one.type is not bool}
        assert ranged == WRONG["fedavg"].keys() | known.keys(), name


@pytest.mark.parametrize("name", ["scaffold", "ewc", "mas", "lwf", "fcil"])
def test_methods_that_need_the_prototypes_cannot_leave_them_on_the_clients(name: str) -> None:
    with pytest.raises(ArgumentError, match="share"):
        read(name, {"share": "backbone_only"})


@pytest.mark.parametrize("name", ["fedbnn", "fedavg", "fedprox", "joint"])
def test_the_others_can(name: str) -> None:
    assert not METHODS[name].method(share="backbone_only").shares_prototypes


def test_local_cannot_share() -> None:
    with pytest.raises(ArgumentError, match="share"):
        read("local", {"share": "global"})


def test_only_factors_can_be_raised_to_a_power() -> None:
    with pytest.raises(ConfigError, match="power"):
        METHODS["fedbnn"].method(fold_by="moments", server_lr=0.5)
