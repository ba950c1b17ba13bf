"""A small Bayesian model, its guide and a batch for them."""

import torch

from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.model import BayesianModel, MeanFieldGuide, guide_for
from fedbnn.networks import MLP

SHAPE = (1, 4, 4)
BATCH = (torch.linspace(-1, 1, 6 * 16).view(6, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2]))


def small(rows: int = 3, scale: float = 0.1) -> tuple[BayesianModel, MeanFieldGuide]:
    """A model over a small MLP with a random prior, and a guide that starts there."""
    backbone = MLP(SHAPE, (5,))
    model = BayesianModel(backbone, layout_of(backbone))
    guide = guide_for(model, SHAPE)
    size = model.layout.size + rows * 6
    start = torch.randn(size), torch.full((size,), scale)
    model.swap(*start)
    guide.swap(*start)
    return model, guide
