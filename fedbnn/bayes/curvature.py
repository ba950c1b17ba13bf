"""What labels say about each weight: the curvature of the likelihood, its diagonal Fisher matrix.

    F = 1/n sum_i E_y (d log p(y | x_i, w) / dw)^2,      y ~ p(y | x_i, w)

Labels are drawn from the model, so each gradient has mean 0 and those of different images are
independent. Hence the square of their sum over a group of images is, in the mean, the sum of their
squares, and one backward pass a group does:

    F ~ 1/n sum_groups (sum_{i in group} d log p(y_i | x_i, w) / dw)^2

without bias, never negative, exactly 0 where the likelihood does not depend on a weight, and for
less than one epoch of training. The posterior of a Gaussian prior with precision L_0 under n images
then has, in closed form (a natural-gradient step of length 1 on the ELBO),

    L = L_0 + F / c,      c the weight of the KL beside the mean cross-entropy (1 / n is full Bayes)
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedbnn.bayes.gaussian import Gaussian
from fedbnn.bayes.model import BayesianModel

GROUPS = 16


def fisher(model: BayesianModel, loc: Tensor, images: Tensor) -> Tensor:
    """F of every weight at the means, under networks that measure (batch norm in eval mode)."""
    flat = loc.detach().clone().requires_grad_()
    total = torch.zeros_like(loc)
    for group in images.chunk(GROUPS):
        logits = model.outputs(flat, group)[1]
        labels = logits.detach().softmax(1).multinomial(1)[:, 0]
        (gradient,) = torch.autograd.grad(cross_entropy(logits, labels, reduction="sum"), flat)
        total.addcmul_(gradient, gradient)
    return total / len(images)


def informed(prior: Gaussian, loc: Tensor, fisher: Tensor, kl_weight: Tensor) -> Gaussian:
    """The posterior at these means: L = L_0 + F / c, e = L m."""
    precision = prior.precision + fisher.double() / kl_weight.double()
    return Gaussian(precision, precision * loc.double())
