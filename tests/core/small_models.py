"""A small Bayesian model, its guide and a batch for them."""

import torch
from torch import Tensor

from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.model import BayesianModel, MeanFieldGuide, Weights
from fedbnn.networks import MLP

SHAPE = (1, 4, 4)
BATCH = (torch.linspace(-1, 1, 6 * 16).view(6, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2]))


def small(rows: int = 3, scale: float = 0.1) -> tuple[BayesianModel, MeanFieldGuide]:
    """A model over a small MLP with a random prior, and a guide that starts there."""
    backbone = MLP(SHAPE, (5,))
    model = BayesianModel(backbone, layout_of(backbone))
    guide = MeanFieldGuide(model)
    size = model.layout.size + rows * 6
    start = torch.randn(size), torch.full((size,), scale)
    model.swap(*start)
    guide.swap(*start)
    return model, guide


def kl_by_weight(posterior: Weights, prior: Weights) -> Tensor:
    """KL(q || p) of each weight; exactly 0 where q = p, also in float32.

    1/2 (exp(2r) - 1 - 2r) + 1/2 ((m - m_0) / s_0)^2  with  r = log s - log s_0
    """
    twice = 2 * (posterior.log_scale - prior.log_scale)
    distance = (posterior.loc - prior.loc) / prior.scale
    return 0.5 * (torch.expm1(twice) - twice + distance.square())
