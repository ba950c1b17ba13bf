"""What labels say about each weight: the curvature of the likelihood, its diagonal Fisher matrix.

    F = 1/n sum_i E_y (d log p(y | x_i, w) / dw)^2,      y ~ p(y | x_i, w)

Labels are drawn from the model, so each gradient has mean 0 and those of different images are
independent. Hence the square of their sum over a group of images is, in the mean, the sum of their
squares, and one backward pass a group does:

    backbone     F ~ 1/n sum_groups (sum_{i in group} d log p(y_i | x_i, w) / dw)^2
    prototypes   F = 1/n sum_i p_c (1 - p_c) (f, 1)^2      no draw: logits are linear in their rows

without bias, never negative, exactly 0 where the likelihood does not depend on a weight, and for
about the price of an epoch. A Gaussian prior with precision L_0 then becomes a posterior with, in
closed form (a natural-gradient step of length 1 on the ELBO),

    L = L_0 + F / c,      c the weight of the KL beside the mean cross-entropy (1 / n is full Bayes)
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from fedbnn.bayes.gaussian import Gaussian
from fedbnn.bayes.model import BayesianModel

GROUPS = 8


def fisher(model: BayesianModel, loc: Tensor, images: Tensor) -> Tensor:
    """F of every weight at the means, under a network that measures (batch norm in eval mode)."""
    flat = loc.detach().clone().requires_grad_()
    total, rows = torch.zeros_like(loc), loc.new_zeros(())
    for group in images.chunk(GROUPS):
        features, logits = model.outputs(flat, group)
        shares = logits.detach().softmax(1)
        misfit = cross_entropy(logits, shares.multinomial(1)[:, 0], reduction="sum")
        (gradient,) = torch.autograd.grad(misfit, flat)
        total.addcmul_(gradient, gradient)
        rows = rows + (shares * (1 - shares)).T @ pad(features.detach(), (0, 1), value=1.0).square()
    total[model.layout.size :] = rows.reshape(-1)
    return total / len(images)


def informed(prior: Gaussian, loc: Tensor, fisher: Tensor, kl_weight: Tensor) -> Gaussian:
    """The posterior at these means: L = L_0 + F / c, e = L m."""
    precision = prior.precision + fisher.double() / kl_weight.double()
    return Gaussian(precision, precision * loc.double())
