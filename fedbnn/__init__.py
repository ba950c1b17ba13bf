"""Federated continual learning with variational Bayes."""

from fedbnn import torchvision_ops as _torchvision_ops  # noqa: F401  (first, before torchvision)
from fedbnn.bayes.gaussian import Gaussian
from fedbnn.export import load

__version__ = "0.1.0"
__all__ = ["Gaussian", "load"]
