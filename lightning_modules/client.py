"""What the client modules share: the optimiser, the guard against a loss that is no number, and a stopwatch."""

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from fedbnn.images import Batch

LARGEST = 1e8
"""A loss beyond this many nats per image is as lost as one that is no number."""


class ClientModule(pl.LightningModule):
    """A LightningModule that minimises `objective(images, labels)` and knows how long it computed.

    `inner` is the time in forward, backward and optimiser alone; `steps` counts optimiser steps.
    """

    def __init__(self) -> None:
        super().__init__()
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

    def objective(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch."""
        raise NotImplementedError

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss, which must be a number, and one that a fit can have."""
        start = perf_counter()
        loss = self.objective(*batch)
        self.last_loss = loss.item()
        if not abs(self.last_loss) < LARGEST:
            raise FloatingPointError(f"diverged: the loss is {self.last_loss} at step {self.steps + 1}")
        self.inner += perf_counter() - start
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass, timed."""
        start = perf_counter()
        loss.backward(*args, **kwargs)
        self.inner += perf_counter() - start

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """One step; its closure (forward and backward) is timed where it happens."""
        closure = _Timed(optimizer_closure)
        start = perf_counter()
        optimizer.step(closure=closure)
        self.inner += perf_counter() - start - closure.seconds
        self.steps += 1


class _Timed:
    """A closure that knows how long it took."""

    def __init__(self, closure: Callable[[], Any] | None) -> None:
        self.closure, self.seconds = closure, 0.0

    def __call__(self) -> Any:
        start = perf_counter()
        result = self.closure() if self.closure else None
        self.seconds += perf_counter() - start
        return result


def optimizer(kind: str, groups: Iterable[Any], lr: float, momentum: float) -> torch.optim.Optimizer:
    """Adam or SGD, fused."""
    if kind == "adam":
        return torch.optim.Adam(groups, lr, fused=True)
    return torch.optim.SGD(groups, lr, momentum=momentum, fused=True)
