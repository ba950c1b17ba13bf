"""A client whose weights are a posterior: stochastic variational inference from the prior it was sent."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbnn.bayes.model import BayesianModel, ClosedFormELBO, MeanFieldGuide
from fedbnn.federation.local import LocalTraining
from fedbnn.methods.fedbnn import FedBNN
from lightning_modules.client import ClientModule, optimizer


@dataclass(frozen=True)
class Start:
    """Where local inference begins: the prior over the flat vector, and the means the guide starts from.

    They differ only in rows that were warmed up: their prior is the row before warm-up, else data count twice.
    """

    loc: Tensor
    scale: Tensor
    guide_loc: Tensor


class SVIClient(ClientModule):
    """Minimises CE + sum_j c_j KL_j over the guide's means and log scales."""

    def __init__(
        self,
        model: BayesianModel,
        guide: MeanFieldGuide,
        start: Start,
        kl_weight: Tensor,
        method: FedBNN,
        local: LocalTraining,
    ) -> None:
        super().__init__(local)
        model.swap(start.loc, start.scale)
        guide.swap(start.guide_loc, start.scale)
        model.centre = guide.loc if method.flipout else None
        self.elbo = ClosedFormELBO(kl_weight, method.mc_samples)(model, guide)
        self.method = method

    def objective(self, images: Tensor, labels: Tensor) -> Tensor:
        """The negative ELBO per image."""
        loss: Tensor = self.elbo(images, labels)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Means (and what stays a point) at the learning rate, log scales at a multiple of it."""
        lr = self.method.lr or self.local.lr
        guide, points = self.elbo.guide, self.elbo.model.points()
        groups = [
            {"params": [guide.loc, *points]},
            {"params": [guide.log_scale], "lr": lr * self.method.scale_lr},
        ]
        return optimizer(self.local.optimizer, groups, lr, self.local.momentum)


def kl_weights(
    method: FedBNN,
    latent: int,
    features: int,
    counts: dict[str, int],
    totals: tuple[int, dict[str, int]],
) -> Tensor:
    """The weight of each KL term beside the mean cross-entropy.

    round    backbone tau / N,   row c  tau n_kc / (n_k N_c):  the client scales its likelihood to the round
    client   tau / n_k
    weights  tau / (number of weights)
    """
    images, (everyone, by_class) = sum(counts.values()), totals
    size = latent + len(counts) * (features + 1)
    if method.kl_per != "round":
        return torch.full(
            (size,), method.temperature / (images if method.kl_per == "client" else size)
        )
    rows = [
        count / (images * by_class.get(name, count)) if count else 1 / everyone
        for name, count in counts.items()
    ]
    rows_weight = torch.tensor(rows).repeat_interleave(features + 1)
    return method.temperature * torch.cat([torch.full((latent,), 1 / everyone), rows_weight])
