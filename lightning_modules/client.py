"""What the client modules share: the optimiser, the guard against a loss that is no number, and a stopwatch."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor

from fedbnn.federation.local import LocalTraining
from fedbnn.images import Batch

LARGEST = 1e8
"""A loss beyond this many nats per image is as lost as one that is no number."""


@dataclass(frozen=True)
class Clip:
    """How gradients are clipped: `gradient_clip_val` and `gradient_clip_algorithm` of the `trainer:` section."""

    value: float | None = None
    algorithm: str | None = None


class ClientModule(pl.LightningModule, ABC):
    """A LightningModule that minimises `objective(images, labels)` and knows how long it computed.

    It optimises by hand.
    `inner` is the time in forward, backward and optimiser alone; `steps` counts optimiser steps.
    """

    def __init__(self, local: LocalTraining) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.local, self.clip = local, Clip()
        self.inner, self.steps, self.last_loss = 0.0, 0, float("nan")

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning notes which hook is running some sixty times a step; that is no module, parameter or buffer."""
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def get_extra_state(self) -> Tensor:
        """Counters travel with the weights, so that they come back from other ranks' processes too."""
        return torch.tensor([self.steps, self.inner], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """The counters of the process that trained."""
        self.steps, self.inner = int(state[0]), float(state[1])

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """A lone image has no batch statistics: batch norm then keeps those it has."""
        if len(batch[1]) == 1:
            for module in self.modules():
                if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                    module.eval()

    @abstractmethod
    def objective(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """A step."""
        if self.steps != self.trainer.max_steps:
            self._step(*batch)

    def _step(self, images: Tensor, labels: Tensor) -> None:
        """Forward, backward, update. The loss must be a number, and one that a fit can have."""
        optimizer = cast(LightningOptimizer, self.optimizers())
        start = perf_counter()
        loss = self.objective(images, labels)
        self.last_loss = loss.item()
        if not abs(self.last_loss) < LARGEST:
            raise FloatingPointError(
                f"diverged: the loss is {self.last_loss} at step {self.steps + 1}"
            )
        optimizer.zero_grad()
        self.inner += perf_counter() - start
        self.manual_backward(loss)
        start = perf_counter()
        self.clip_gradients(optimizer.optimizer, self.clip.value, self.clip.algorithm)
        optimizer.step()
        self.inner += perf_counter() - start
        self.steps += 1

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass, timed."""
        start = perf_counter()
        loss.backward(*args, **kwargs)
        self.inner += perf_counter() - start


def optimizer(
    kind: str, groups: Iterable[Any], lr: float, momentum: float
) -> torch.optim.Optimizer:
    """Adam or SGD, fused."""
    if kind == "adam":
        return torch.optim.Adam(groups, lr, fused=True)
    return torch.optim.SGD(groups, lr, momentum=momentum, fused=True)
