"""A client whose weights are points: from the state it was sent to the tensors it answers with."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedbnn.bayes.model import FeatureDistillation
from fedbnn.heads.prototypes import Assembly
from fedbnn.images import Batch
from fedbnn.methods import Method
from fedbnn.methods.base import Assignment, LocalObjective
from fedbnn.networks import Classifier
from fedbnn.protocol.state import State
from fedbnn.seeds import forked
from lightning_modules.client_trainer import ClientTrainer, LocalTraining

TERMS = ("loss", "kl")
LARGEST = 1e8
"""A loss beyond this many nats per image is as lost as one that is no number."""
UNTRAINED = 3
"""After so many rounds the features of points are worth keeping: before, they are near random."""


class Meter:
    """What a fit cost, seconds of forward, backward and optimiser alone and optimiser steps; and
    in `train` the means over the images of its last pass: `loss`, and for a posterior its `kl`.

    An object beside the module: to set an attribute of a module takes torch a hundred times as long
    as to set one here, and these change in every step.
    """

    def __init__(self) -> None:
        self.seconds = self.began = 0.0
        self.steps = 0
        self.batches: list[tuple[int, Tensor]] = []
        self.train: dict[str, float] = {}

    def start(self) -> None:
        """Start the clock."""
        self.began = perf_counter()

    def stop(self) -> None:
        """Count what has passed since the start."""
        self.seconds += perf_counter() - self.began

    def end_pass(self) -> float:
        """Take the means over the images of a pass; the largest loss of its batches."""
        if not self.batches:
            return 0.0
        images, terms = zip(*self.batches, strict=True)
        table = torch.stack(terms).cpu().double()
        share = torch.tensor(images, dtype=table.dtype) / sum(images)
        worst, *means = torch.cat([table[:, :1].abs().amax(0), share @ table]).tolist()
        self.batches, self.train = [], dict(zip(TERMS, means, strict=False))
        return worst


class ClientModule(pl.LightningModule, ABC):
    """A LightningModule that minimises `objective(images, labels)` and knows how long it took."""

    def __init__(self) -> None:
        super().__init__()
        self.meter, self.lone = Meter(), False

    @abstractmethod
    def objective(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss; it is logged where somebody listens, a logger or a callback."""
        meter = self.meter
        meter.start()
        loss = self.objective(*batch)
        meter.stop()
        meter.batches.append((len(batch[1]), torch.stack([loss.detach(), *self.parts()])))
        if self.trainer.loggers or self.trainer.callbacks:
            self.log("train/loss", loss.detach(), batch_size=len(batch[1]))
        return loss

    def parts(self) -> tuple[Tensor, ...]:
        """What of the last loss is worth telling apart, for a posterior the KL."""
        return ()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass, timed."""
        self.meter.start()
        loss.backward(*args, **kwargs)
        self.meter.stop()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Gradients are there: let the method change them, then start the clock of the step."""
        self.correct()
        self.meter.start()

    def correct(self) -> None:
        """Change the gradients in place, if the method does."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The step of the optimiser, timed from when the gradients were there."""
        super().optimizer_step(*args, **kwargs)
        self.meter.stop()
        self.meter.steps += 1

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """A lone image has no batch statistics: batch norm then keeps those it has."""
        lone = len(batch[1]) == 1
        if lone == self.lone:
            return
        self.lone = lone
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                module.train(not lone)

    def on_train_epoch_end(self) -> None:
        """The loss must have been a number, and one that a fit can have."""
        worst = self.meter.end_pass()
        if not worst < LARGEST:
            epoch = self.current_epoch + 1
            raise FloatingPointError(f"diverged: the loss is {worst} in epoch {epoch}")

    def get_extra_state(self) -> Tensor:
        """The meter travels with the weights: they come back from other ranks' processes."""
        meter = self.meter
        numbers = [meter.seconds, meter.steps, *meter.train.values()]
        return torch.tensor(numbers, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """The meter of the process that trained."""
        self.meter.seconds, steps, *train = state.tolist()
        self.meter.steps, self.meter.train = int(steps), dict(zip(TERMS, train, strict=False))


def optimizer(kind: str, groups: Iterable[Any], lr: float, momentum: float = 0.0) -> Optimizer:
    """Adam or SGD, fused."""
    if kind == "adam":
        return torch.optim.Adam(groups, lr, fused=True)
    return torch.optim.SGD(groups, lr, momentum=momentum, fused=True)


class PointClient(ClientModule):
    """Trains backbone and prototypes of one client with the objective of its method."""

    def __init__(
        self,
        network: Classifier,
        terms: LocalObjective,
        method: Method,
        local: LocalTraining,
        distillation: FeatureDistillation | None = None,
    ) -> None:
        super().__init__()
        self.network, self.terms, self.lr = network, terms, method.lr or local.lr
        self.distillation = distillation
        self.kind = method.optimizer or local.optimizer
        self.momentum = 0.0 if method.optimizer else local.momentum

    def on_train_start(self) -> None:
        """What the method holds follows the weights to their device."""
        self.terms.to(self.device)

    def objective(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy and the method's own terms, and what distillation adds."""
        features, logits = self.network.outputs(images)
        loss = self.terms.loss(images, features, logits, labels)
        return loss if self.distillation is None else loss + self.distillation(images, features)

    def correct(self) -> None:
        """Let the method change the gradients (penalties, control variates)."""
        self.terms.correct(self.network, self.lr)

    def configure_optimizers(self) -> Optimizer:
        """One fresh optimiser: nothing of it lives longer than the round."""
        return optimizer(self.kind, self.parameters(), self.lr, self.momentum)


class WarmUp(ClientModule):
    """Fits the prototypes of classes nobody has met before, with everything else frozen."""

    def __init__(self, network: Classifier, fresh: Tensor, lr: float) -> None:
        super().__init__()
        self.network, self.lr = network, lr
        self.register_buffer("frozen", ~fresh, persistent=False)

    def objective(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over features that no gradient reaches."""
        with torch.no_grad():
            features = self.network.backbone(images)
        return nn.functional.cross_entropy(self.network.logits(images, features), labels)

    def correct(self) -> None:
        """Prototypes that are not new do not move."""
        for parameter in self.network.head.parameters():
            assert parameter.grad is not None
            parameter.grad[self.frozen] = 0

    def configure_optimizers(self) -> Optimizer:
        """Adam on the prototypes alone."""
        return optimizer("adam", self.network.head.parameters(), self.lr)


@dataclass(frozen=True)
class Answer:
    """What one client found: tensors to send, the state it keeps, its seconds of computation, and
    how training went.
    """

    tensors: dict[str, Tensor]
    kept: State | None = None
    seconds: float = 0.0
    train: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Fit:
    """One client ready to train: its classifier on the backbone it was sent, and its data.

    The labels of `data` number the classes of the `assembly`.
    """

    assignment: Assignment
    assembly: Assembly
    network: Classifier
    data: pl.LightningDataModule
    method: Method
    local: LocalTraining
    trainer: ClientTrainer

    def warm_up(self) -> float:
        """Fit fresh prototypes with all else frozen, batch statistics too; the seconds it took."""
        fresh, epochs = self.assembly.fresh, self.local.warmup_epochs
        if not epochs or not bool(fresh.any()):
            return 0.0
        backbone = self.network.backbone
        statistics = {name: value.clone() for name, value in backbone.named_buffers()}
        self.network.requires_grad_(False).head.requires_grad_(True)
        module = WarmUp(self.network, fresh, self.local.warmup_lr)
        self.trainer.fit(module, self.data, epochs)
        with torch.no_grad():
            for name, value in backbone.named_buffers():
                value.copy_(statistics[name])
        return module.meter.seconds

    def distillation(self) -> FeatureDistillation | None:
        """From the backbone as it was sent, if the method distils and it has been trained."""
        weight = self.method.feature_distillation
        if not weight or self.assignment.instruction.round <= UNTRAINED:
            return None
        with forked(0):  # what a map of zeros would have drawn is no draw of this client
            return FeatureDistillation(self.network.backbone, self.assignment.layout, weight)

    def keep(self, rows: dict[str, Tensor]) -> State:
        """The client's own prototypes, where they stay at home."""
        return self.assembly.kept(rows, self.assignment.images.counts().values())


def fit_points(fit: Fit) -> Answer:
    """Warm new prototypes up, train everything, and read out what is sent and what is kept."""
    warm, layout = fit.warm_up(), fit.assignment.layout
    network = fit.network.requires_grad_(True)
    terms = fit.method.objective(fit.assignment, network)
    client = PointClient(network, terms, fit.method, fit.local, fit.distillation())
    fit.trainer.fit(client, fit.data, fit.local.epochs)
    weights = layout.from_parameters(dict(network.named_parameters()))
    weights["buffers"] = layout.statistics(network.backbone)
    rows = weights.pop("prototypes")
    if fit.method.shares_prototypes:
        weights["prototypes"] = rows[: fit.assembly.held]
    sent, kept = terms.answer(weights, client.meter.steps, client.lr)
    if not fit.method.shares_prototypes:
        kept = fit.keep({"prototypes": rows}).having(kept.tensors if kept else {})
    return Answer(sent, kept, warm + client.meter.seconds, client.meter.train)
