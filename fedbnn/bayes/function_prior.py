"""A prior on the function: what the last posterior saw in an image must stay readable from what the new one sees.

With f_0 the features under the prior mean and f those under a draw of the weights, every image adds the factor

    log p(f_0 | f) = -lambda |f + V f + b - f_0|^2 / E |f_0|^2

V and b begin at 0 on every client and are fitted with the weights: features may turn and grow, which the server
follows (`fedbnn.heads.places`), but nothing that earlier classes need is lost from them. The teacher is in eval mode: with
batch norm its features differ a little from those of an unmoved backbone in training, and V and b have to bridge that too.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout

SMALLEST = 1e-6


class FunctionPrior(nn.Module):
    """A frozen copy of the backbone under the prior mean, and the linear map that reads its features from the new ones."""

    def __init__(self, backbone: nn.Module, layout: Layout, weight: float) -> None:
        super().__init__()
        self.layout, self.weight = layout, weight
        self.outside = (
            deepcopy(backbone).requires_grad_(False).eval(),
        )  # in a tuple it is no submodule: nobody can train it
        self.reader = nn.Linear(int(backbone.width), int(backbone.width))  # type: ignore[arg-type]
        self.swap(*layout.read(backbone))

    @property
    def teacher(self) -> nn.Module:
        """The backbone under the prior mean."""
        return self.outside[0]

    def swap(self, weights: Tensor, buffers: Tensor) -> None:
        """The prior mean of the next client, with a map that changes nothing yet."""
        self.layout.write(self.teacher, weights, buffers)
        for parameter in self.reader.parameters():
            parameter.data.zero_()
            parameter.grad = None

    def log_density(self, images: Tensor, features: Tensor) -> Tensor:
        """The sum of the factors of a batch."""
        with torch.no_grad():
            wanted = self.teacher.to(images.device, images.dtype)(images)
        misread = (features + self.reader(features) - wanted).square().sum()
        unit = wanted.square().sum(1).mean().clamp_min(SMALLEST)
        density: Tensor = -self.weight * misread / unit
        return density
