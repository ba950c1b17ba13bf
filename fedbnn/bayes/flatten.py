"""Where each weight of a backbone lives in one flat vector, and how wide its initial uncertainty is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_NORMS = (nn.BatchNorm2d, nn.GroupNorm)


@dataclass(frozen=True)
class Slot:
    """One parameter: its name, its shape, its place in the vector, and the fan-in of its layer."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    fan_in: int


@dataclass(frozen=True)
class Layout:
    """The order of a backbone's parameters in the flat vector: first the `latent` ones, then those that stay points."""

    slots: tuple[Slot, ...]
    latent: int
    buffers: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.slots[-1].stop

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Parameters by name, as views into the vector (or into its latent beginning).

        One split, not a slice per slot: the gradient of a slice is a zero vector of full size.
        """
        fitting = [slot for slot in self.slots if slot.stop <= len(vector)]
        parts = vector.split([slot.stop - slot.start for slot in fitting])
        return {slot.name: part.view(slot.shape) for slot, part in zip(fitting, parts, strict=True)}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The flat vector of these tensors by name."""
        return torch.cat([tensors[slot.name].detach().reshape(-1) for slot in self.slots])

    def read(self, backbone: nn.Module) -> tuple[Tensor, Tensor]:
        """Weights and buffers of a backbone as two flat vectors (copies)."""
        named = dict(backbone.named_buffers())
        statistics = [named[name].detach().float().reshape(-1) for name in self.buffers]
        return self.flatten(dict(backbone.named_parameters())), torch.cat(
            statistics
        ) if statistics else torch.zeros(0)

    def write(self, backbone: nn.Module, weights: Tensor, buffers: Tensor) -> None:
        """Set weights and buffers of a backbone from two flat vectors."""
        parameters, named = dict(backbone.named_parameters()), dict(backbone.named_buffers())
        with torch.no_grad():
            for name, value in self.views(weights).items():
                parameters[name].copy_(value)
            start = 0
            for name in self.buffers:
                stop = start + named[name].numel()
                named[name].copy_(buffers[start:stop].view(named[name].shape))
                start = stop

    def initial_scale(self, gain: float, constant: bool = False) -> Tensor:
        """Initial posterior scale of each latent weight: gain / sqrt(fan_in) of its layer, or `gain` everywhere."""
        widths = [
            torch.full((slot.stop - slot.start,), 1.0 if constant else slot.fan_in**-0.5)
            for slot in self.slots
        ]
        return gain * torch.cat(widths)[: self.latent]


def layout_of(backbone: nn.Module, bayes_norm: bool = True) -> Layout:
    """The layout of a backbone; with `bayes_norm` false, scale and shift of norm layers stay points, at the end."""
    entries = [entry for module in backbone.named_modules() for entry in _entries(*module)]
    entries.sort(key=lambda entry: entry[3] and not bayes_norm)
    slots, start = [], 0
    for name, parameter, fan_in, _ in entries:
        slots.append(Slot(name, parameter.shape, start, start + parameter.numel(), fan_in))
        start += parameter.numel()
    latent = sum(entry[1].numel() for entry in entries if bayes_norm or not entry[3])
    buffers = tuple(name for name, value in backbone.named_buffers() if value.is_floating_point())
    return Layout(tuple(slots), latent, buffers)


def _entries(prefix: str, module: nn.Module) -> list[tuple[str, nn.Parameter, int, bool]]:
    """(name, parameter, fan-in, is it of a norm layer) of the parameters a module holds itself."""
    own = list(module.named_parameters(recurse=False))
    fan_in = max(
        (math.prod(p.shape[1:]) for _, p in own if p.dim() > 1),
        default=max((p.numel() for _, p in own), default=1),
    )
    return [
        (f"{prefix}.{name}" if prefix else name, p, fan_in, isinstance(module, _NORMS))
        for name, p in own
    ]
