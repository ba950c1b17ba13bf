"""A client whose weights are points: cross-entropy plus whatever its method adds."""

import torch
from torch import Tensor

from fedbnn.federation.local import LocalTraining
from fedbnn.methods.base import LocalObjective, Method
from fedbnn.networks import Classifier
from lightning_modules.client import ClientModule, optimizer


class PointClient(ClientModule):
    """Trains backbone and rows of one client with the objective of its method."""

    def __init__(
        self, network: Classifier, objective: LocalObjective, method: Method, local: LocalTraining
    ) -> None:
        super().__init__(local)
        self.network, self.terms, self.lr = network, objective, method.lr or local.lr
        self.kind, self.momentum = (
            (method.optimizer, 0.0) if method.optimizer else (local.optimizer, local.momentum)
        )

    def objective(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy and the method's own terms."""
        return self.terms.loss(self.network, images, labels)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the method change the gradients (control variates)."""
        self.terms.correct(self.network, self.lr)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One fresh optimiser: nothing of it lives longer than the round."""
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        return optimizer(self.kind, trained, self.lr, self.momentum)


class WarmUp(ClientModule):
    """Fits the rows of classes nobody has met before, with everything else frozen."""

    def __init__(self, network: Classifier, fresh: Tensor, local: LocalTraining) -> None:
        super().__init__(local)
        self.network, self.lr = network, local.warmup_lr
        self.register_buffer("frozen", ~fresh, persistent=False)

    def objective(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over features that no gradient reaches."""
        with torch.no_grad():
            features = self.network.backbone(images)
        return torch.nn.functional.cross_entropy(self.network.head(features), labels)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Rows that are not new do not move."""
        for parameter in self.network.head.parameters():
            parameter.grad[self.frozen] = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam on the rows alone."""
        return optimizer("adam", self.network.head.parameters(), self.lr, 0.0)
