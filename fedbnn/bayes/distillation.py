"""Feature distillation: what the last global model saw in an image stays readable.

With f_0 the features under the weights a client was sent and f those under the weights it trains,
every image adds to the loss, for points and for posteriors alike,

    lambda |f + V f + b - f_0|^2 / E |f_0|^2

V and b begin at 0 on every client and are fitted with the weights: features may turn and grow,
which the server follows (`fedbnn.heads.gaussian`), but nothing that earlier classes need is lost
from them. To a posterior it is a prior on the function: a factor p(f_0 | f) beside the likelihood.
"""

from copy import deepcopy
from typing import cast

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout

SMALLEST = 1e-6


class FeatureDistillation(nn.Module):
    """A frozen copy of the backbone as it was sent, and the map that reads its features."""

    def __init__(self, backbone: nn.Module, layout: Layout, weight: float) -> None:
        super().__init__()
        self.layout, self.weight = layout, weight
        frozen = deepcopy(backbone).requires_grad_(False).eval()
        self.outside = (frozen,)  # in a tuple it is no submodule: nobody can train it
        self.reader = nn.Linear(int(backbone.width), int(backbone.width))  # type: ignore[arg-type]
        self.swap(*layout.read(backbone))

    @property
    def teacher(self) -> nn.Module:
        """The backbone as it was sent, in eval mode."""
        return self.outside[0]

    def swap(self, weights: Tensor, buffers: Tensor) -> None:
        """The backbone sent to the next client, with a map that changes nothing yet."""
        self.layout.write(self.teacher, weights, buffers)
        for parameter in self.reader.parameters():
            parameter.data.zero_()
            parameter.grad = None

    def forward(self, images: Tensor, features: Tensor) -> Tensor:
        """The mean over a batch of what its images add to the loss."""
        with torch.no_grad():
            wanted = self.teacher.to(images.device, images.dtype)(images)
        misread = (features + self.reader(features) - wanted).square().sum(1).mean()
        unit = wanted.square().sum(1).mean().clamp_min(SMALLEST)
        return cast(Tensor, self.weight * misread / unit)
