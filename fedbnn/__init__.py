"""Federated continual learning with variational Bayes."""

from fedbnn import torchvision_ops as _torchvision_ops  # noqa: F401  (first: before anything imports torchvision)
from fedbnn.deploy import load
from fedbnn.gaussian import Gaussian

__version__ = "0.1.0"
__all__ = ["Gaussian", "load"]
