"""Data as drifting streams: sources become tasks, tasks meet clients, round after round."""

import fedbnn as _fedbnn  # noqa: F401  (first, before torchvision)
from datamodules.collection import Task
from datamodules.stream import FederatedStream

__all__ = ["FederatedStream", "Task"]
