"""A quadratic pull towards anchors: the penalty of FedProx, EWC and MAS, given to the weights that are being trained."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedbnn.methods.base import LocalObjective
from fedbnn.networks import Classifier

Anchors = Mapping[str, tuple[Tensor, Tensor]]


class Pull(LocalObjective):
    """CE + 1/2 sum_j s_j (theta_j - a_j)^2, with strength s and anchor a for each parameter named.

    Its gradient s (theta - a) is added in closed form. A step of length lr cannot be pulled beyond the anchor:
    s is capped at 1 / lr, where plain gradient descent lands on the anchor; above 2 / lr it would diverge.
    """

    def __init__(self, anchors: Anchors) -> None:
        self.anchors = anchors

    def penalty(self, network: Classifier) -> Tensor:
        """1/2 sum_j s_j (theta_j - a_j)^2, without the cap."""
        weights = dict(network.named_parameters())
        terms = [
            (strength * (weights[name] - anchor).square()).sum()
            for name, (strength, anchor) in self.anchors.items()
        ]
        return 0.5 * torch.stack(terms).sum() if terms else torch.zeros(())

    def correct(self, network: Classifier, lr: float) -> None:
        """g += min(s, 1 / lr) (theta - a)."""
        weights = dict(network.named_parameters())
        for name, (strength, anchor) in self.anchors.items():
            weight = weights[name]
            assert weight.grad is not None
            weight.grad.addcmul_(strength.clamp(max=1 / lr), weight.detach() - anchor)
