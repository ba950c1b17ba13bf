"""Exact Bayes over features that nobody trains: the baseline of everything that is trained.

    local    n_c, s_c = sum f, and the R factor of F:  forward passes alone
    server   sums over clients, rounds and tasks:  the product of all likelihoods, in any order
    state    none;  floats down: none (a frozen backbone: 1 per weight); up: see fedbnn.heads.exact

The same classes in another order, by other clients or in other rounds give the same posterior: it
forgets nothing. Features are random convolutions, or those of a network that is never trained; with
`weights` it is one of yours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedbnn.bayes.flatten import Layout
from fedbnn.errors import ConfigError
from fedbnn.methods.base import Method
from fedbnn.state import State

UNREADABLE = (OSError, SafetensorError, UnpicklingError, RuntimeError, EOFError, KeyError)


@dataclass(frozen=True)
class Exact(Method):
    """Nothing is trained: class posteriors over fixed features.

    Args:
        weights: file with weights of the network by name, as safetensors or from torch.save, for
            `head.features: backbone`; null is the network as its seed makes it.
    """

    formula: ClassVar[str] = "p(c | x) from sums of n_c, s_c and f f^T over everybody"
    trains: ClassVar[bool] = False

    weights: str | None = None

    def start(self, state: State, layout: Layout, clients: int) -> State:
        """With the weights of the file, if there is one."""
        if self.weights is None:
            return state
        path = Path(self.weights)
        try:
            tensors = read_weights(path)
            named = {slot.name: tensors[slot.name].float() for slot in layout.slots}
            shaped = {slot.name: named[slot.name].view(slot.shape) for slot in layout.slots}
            numbers = [tensors[name].float().reshape(-1) for name in layout.buffers]
            buffers = torch.cat([torch.zeros(0), *numbers]).view(state["buffers"].shape)
        except UNREADABLE as error:
            what = f"no weights for this network: {str(error).splitlines()[0]}"
            fix = "a .safetensors file or a state_dict that torch.save wrote, of the same network"
            raise ConfigError(what, str(path), fix) from error
        return state.having({"backbone": layout.flatten(shaped), "buffers": buffers})


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Tensors by name; loading runs nothing."""
    if path.suffix == ".safetensors":
        return load_file(path)
    found = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(found, dict) and all(isinstance(one, Tensor) for one in found.values()):
        return found
    raise RuntimeError("it is no table of tensors")
