"""Flipout: one weight perturbation, decorrelated over the images of a batch by random signs.

With W = M + D, where M are the means and D = scale * noise, image i sees W_i = M + D * (r_i s_i^T):

    y_i = f(x_i; M) + r_i * f(s_i * x_i; D),     r_i, s_i in {-1, +1}

Each W_i has the distribution of W, so the loss keeps its expectation; the gradients of a batch no longer share
one noise (Wen et al., 2018). Costs a second pass through every linear map.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

CENTRE = "centre"


def _signs(count: int, channels: int, like: Tensor) -> Tensor:
    """Random signs, one per image and channel, broadcastable over space."""
    signs = (
        torch.randint(0, 2, (count, channels), device=like.device, dtype=like.dtype).mul_(2).sub_(1)
    )
    return signs.view(count, channels, *(1,) * (like.dim() - 2))


class FlipoutConv2d(nn.Conv2d):
    """A convolution that perturbs each image's view of its weights when it is given their `centre`."""

    centre: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Mean path plus sign-flipped perturbation path."""
        if not self.centre.numel():
            return super().forward(input)
        mean: Tensor = self._conv_forward(input, self.centre, self.bias)
        flipped = input * _signs(len(input), input.shape[1], input)
        noise: Tensor = self._conv_forward(flipped, self.weight - self.centre, None)
        return mean + noise * _signs(len(input), noise.shape[1], noise)


class FlipoutLinear(nn.Linear):
    """A linear map that perturbs each image's view of its weights when it is given their `centre`."""

    centre: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Mean path plus sign-flipped perturbation path."""
        if not self.centre.numel():
            return super().forward(input)
        mean = nn.functional.linear(input, self.centre, self.bias)
        flipped = input * _signs(len(input), input.shape[1], input)
        noise = nn.functional.linear(flipped, self.weight - self.centre)
        return mean + noise * _signs(len(input), noise.shape[1], noise)


_FLIPPED: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: FlipoutConv2d,
    nn.Linear: FlipoutLinear,
}


def prepare(network: nn.Module) -> None:
    """Give every convolution and linear map of a network the flipout forward; without centres it acts as before."""
    for module in network.modules():
        if type(module) in _FLIPPED:
            module.__class__ = _FLIPPED[type(module)]
            module.register_buffer(CENTRE, torch.zeros(0), persistent=False)


def centres(means: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """The means of all flipped weights, under the buffer names that `functional_call` replaces."""
    flipped = {
        name
        for name, module in network.named_modules()
        if isinstance(module, (FlipoutConv2d, FlipoutLinear))
    }
    return {
        f"{name}.{CENTRE}": means[f"{name}.weight"] for name in flipped if f"{name}.weight" in means
    }
