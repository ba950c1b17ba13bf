"""Where each weight lives in one flat vector, and how wide its initial uncertainty is.

A network is a backbone and a classifier. The weights of the backbone are one vector (P,), the
classifier is its prototypes (C, d + 1): weights and bias of one class side by side. This file alone
maps both to the parameters of a module and back.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedbnn.networks import Classifier


@dataclass(frozen=True)
class Slot:
    """One parameter of the backbone: its name, its shape, and its layer's fan-in."""

    name: str
    shape: torch.Size
    fan_in: int


@dataclass(frozen=True)
class Layout:
    """The order of a backbone's parameters in the flat vector, and of its running statistics.

    Of batch norm all running means come first, then as many variances. `width` is the number d of
    features.
    """

    slots: tuple[Slot, ...]
    buffers: tuple[str, ...]
    width: int

    @property
    def size(self) -> int:
        """Number of weights."""
        return sum(self._sizes)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Parameters of the backbone by name, as views into the vector.

        One split, not a slice per slot: the gradient of a slice is a zero vector of full size.
        """
        return self._named(vector.split(self._sizes))

    @property
    def _sizes(self) -> list[int]:
        return [slot.shape.numel() for slot in self.slots]

    def _named(self, parts: Iterable[Tensor]) -> dict[str, Tensor]:
        return {s.name: part.view(s.shape) for s, part in zip(self.slots, parts, strict=True)}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The flat vector of these tensors by name."""
        parts = [tensors[slot.name].detach().reshape(-1) for slot in self.slots]
        return torch.cat(parts) if parts else torch.zeros(0)

    def by_parameter(self, backbone: Tensor, prototypes: Tensor) -> dict[str, Tensor]:
        """A flat backbone and prototypes, by the names of a classifier's parameters."""
        return _classifier(self.views(backbone), prototypes)

    def by_parameter_of(self, whole: Tensor) -> dict[str, Tensor]:
        """The same of one vector that ends in the prototypes row by row, with one split."""
        *parts, rows = whole.split([*self._sizes, len(whole) - self.size])
        return _classifier(self._named(parts), rows.view(-1, self.width + 1))

    def from_parameters(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `by_parameter`: `backbone` (P,) and `prototypes` (C, d + 1), as copies."""
        backbone = {slot.name: named[f"backbone.{slot.name}"] for slot in self.slots}
        return {"backbone": self.flatten(backbone), "prototypes": prototypes_of(named)}

    def read(self, backbone: nn.Module) -> tuple[Tensor, Tensor]:
        """Weights and running statistics of a backbone as two flat vectors (copies)."""
        return self.flatten(dict(backbone.named_parameters())), self.statistics(backbone)

    def statistics(self, backbone: nn.Module) -> Tensor:
        """The running statistics of a backbone alone (a copy)."""
        named = dict(backbone.named_buffers())
        found = [named[name].detach().float().reshape(-1) for name in self.buffers]
        return torch.cat(found) if found else torch.zeros(0)

    def write(self, backbone: nn.Module, weights: Tensor, buffers: Tensor) -> None:
        """Set weights and running statistics of a backbone from two flat vectors."""
        old = dict(backbone.named_buffers())
        parts = buffers.split([old[name].numel() for name in self.buffers])
        new = {n: part.view_as(old[n]) for n, part in zip(self.buffers, parts, strict=True)}
        backbone.load_state_dict({**self.views(weights), **new}, strict=False)

    def classifier(self, backbone: nn.Module, prototypes: Tensor) -> Classifier:
        """A classifier with these prototypes on this backbone."""
        network = Classifier(backbone, len(prototypes))
        network.head.load_state_dict({"weight": prototypes[:, :-1], "bias": prototypes[:, -1]})
        return network

    def initial_scale(self, gain: float, constant: bool = False) -> Tensor:
        """Initial posterior scale of each weight: gain / sqrt(fan_in) of its layer, or `gain`."""
        widths = [1.0 if constant else slot.fan_in**-0.5 for slot in self.slots]
        sizes = torch.tensor(self._sizes, dtype=torch.long)
        return gain * torch.tensor(widths).repeat_interleave(sizes)


def prototypes_of(named: Mapping[str, Tensor]) -> Tensor:
    """The prototypes (C, d + 1) among a classifier's parameters by name (a copy)."""
    return torch.cat([named["head.weight"], named["head.bias"][:, None]], 1).detach()


def _classifier(backbone: Mapping[str, Tensor], prototypes: Tensor) -> dict[str, Tensor]:
    """Parameters of a backbone and prototypes, by the names of a classifier's parameters."""
    named = {f"backbone.{name}": value for name, value in backbone.items()}
    return {**named, "head.weight": prototypes[:, :-1], "head.bias": prototypes[:, -1]}


def layout_of(backbone: nn.Module) -> Layout:
    """The layout of a backbone."""
    slots: list[Slot] = []
    for prefix, module in backbone.named_modules():
        own = dict(module.named_parameters(prefix, recurse=False))
        slots += [Slot(name, weight.shape, _fan_in(own.values())) for name, weight in own.items()]
    kept, buffers = backbone.state_dict().keys(), dict(backbone.named_buffers())
    floats = [name for name in buffers if name in kept and buffers[name].is_floating_point()]
    floats.sort(key=lambda name: name.endswith("running_var"))
    return Layout(tuple(slots), tuple(floats), int(getattr(backbone, "width", 0)))


def constants(backbone: nn.Module) -> dict[str, Tensor]:
    """What is neither weight nor statistic, such as weights that were frozen: never sent."""
    kept = backbone.state_dict().keys()
    return {name: value for name, value in backbone.named_buffers() if name not in kept}


def _fan_in(parameters: Collection[nn.Parameter]) -> int:
    """Inputs of one unit of a layer with these parameters; of a norm layer, its width."""
    matrices = [math.prod(p.shape[1:]) for p in parameters if p.dim() > 1]
    return max(matrices or [p.numel() for p in parameters])
