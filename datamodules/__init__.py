"""Data as drifting streams: sources become tasks, tasks meet clients, round after round."""

import fedbnn as fedbnn  # before torchvision: it makes that importable beside a CPU-only torch
from datamodules.stream import FederatedStream
from fedbnn.protocol.stream import Task

__all__ = ["FederatedStream", "Task"]
