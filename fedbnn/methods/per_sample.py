"""Sums over images of a function of per-image gradients, without a loop over images: vmap(grad), some images at a time."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedbnn.networks import Classifier

Weights = dict[str, Tensor]
Output = Callable[..., Tensor]
FLOATS = 2**22


def summed(
    network: Classifier, output: Output, batch: tuple[Tensor, ...], term: Output, *beside: Tensor
) -> Weights:
    """sum_i term(d output(logits_i, ...) / d theta, beside_i) by the names of the network's parameters.

    `batch` holds the images and what else `output` takes for each of them. At most `FLOATS` gradient values are in
    memory at once.
    """
    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    statistics = {name: value.detach() for name, value in network.named_buffers()}
    chunk = max(1, FLOATS // sum(weight.numel() for weight in weights.values()))

    def of_one(weights: Weights, image: Tensor, *rest: Tensor) -> Tensor:
        return output(functional_call(network, {**weights, **statistics}, (image[None],))[0], *rest)

    gradients = vmap(grad(of_one), in_dims=(None, *[0] * len(batch)))
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for places in torch.arange(len(batch[0])).split(chunk):
        found = gradients(weights, *(column[places] for column in batch))
        for name, gradient in found.items():
            total[name] += term(gradient, *(column[places] for column in beside))
    return total
