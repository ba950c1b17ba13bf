"""Federated continual learning with variational Bayes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedbnn import machine as _machine  # noqa: F401  (first, before torchvision)

if TYPE_CHECKING:
    from fedbnn.api import Comparison, Run, compare, run
    from fedbnn.bayes.gaussian import Gaussian
    from fedbnn.errors import FedBNNError
    from fedbnn.export import Model, load

__version__ = "0.1.0"
__all__ = ["Comparison", "FedBNNError", "Gaussian", "Model", "Run", "compare", "load", "run"]
_HOMES = {"Gaussian": "bayes.gaussian", "Model": "export", "load": "export"}
_HOMES |= {"FedBNNError": "errors"}


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for: torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module 'fedbnn' has no attribute {name!r}")
    return getattr(import_module(f"fedbnn.{_HOMES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    """What completion in a shell or notebook offers, before anything is imported."""
    return sorted([*__all__, "__version__"])
