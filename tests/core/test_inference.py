"""SVI against numerical integration: logistic regression, where a logit is one normal variable."""

import math
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from datamodules.stream import ClientData
from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.model import BayesianModel, MeanFieldGuide
from fedbnn.images import ImageSet, Preprocess
from fedbnn.methods import FedBNN
from fedbnn.protocol.messages import FitInstruction
from fedbnn.protocol.state import State
from lightning_modules.client_trainer import ClientTrainer, LocalTraining
from lightning_modules.svi_client import Start, SVIClient, kl_weights

LOCAL = LocalTraining(epochs=2, batch_size=8, warmup_epochs=2)


def expected_loss(
    loc: Tensor, log_scale: Tensor, inputs: Tensor, labels: Tensor, weight: float
) -> Tensor:
    """The exact negative ELBO per image of two rows (w, b) on one feature, prior N(0, 1),
    by Gauss-Hermite quadrature.
    """
    import numpy as np

    nodes, masses = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(60))
    rows, variances = loc.view(2, 2), (2 * log_scale).exp().view(2, 2)
    difference, variance = rows[1] - rows[0], variances.sum(0)
    mean = inputs * difference[0] + difference[1]
    deviation = (inputs**2 * variance[0] + variance[1]).sqrt()
    logits = mean[:, None] + deviation[:, None] * nodes
    signed = torch.where(labels[:, None] == 1, -logits, logits)
    misfit = (nn.functional.softplus(signed) @ masses).mean() / math.sqrt(2 * math.pi)
    kl = 0.5 * (torch.expm1(2 * log_scale) - 2 * log_scale + loc**2).sum()
    return misfit + weight * kl


def best(inputs: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """The minimum of the exact negative ELBO."""
    loc, log_scale = (
        torch.zeros(4).double().requires_grad_(),
        torch.zeros(4).double().requires_grad_(),
    )
    optimizer = torch.optim.LBFGS(
        [loc, log_scale], max_iter=300, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = expected_loss(loc, log_scale, inputs, labels, weight)
        loss.backward()
        return loss

    optimizer.step(closure)
    return loc.detach(), log_scale.detach().exp()


class Pixel(nn.Module):
    """The one pixel of an image is its feature; there is nothing to learn."""

    width = 1

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)


def one_pixel(
    method: FedBNN, local: LocalTraining, pixels: Tensor, labels: Tensor
) -> tuple[SVIClient, ClientData]:
    backbone = Pixel()
    model = BayesianModel(backbone, layout_of(backbone))
    start = Start(torch.zeros(4), torch.ones(4), torch.zeros(4), torch.ones(4))
    counts = {"a": 10, "b": 10}
    sent = FitInstruction("run", 1, "train", State({}), 20, counts)
    weights = kl_weights(method, 0, 2, counts, sent)
    images = ImageSet(pixels.view(-1, 1, 1, 1), labels, ("a", "b"), Preprocess((0.5,), (0.25,)))
    client = SVIClient(model, MeanFieldGuide(model), start, weights, method, local)
    return client, ClientData(images, local.batch_size)


DARK = [20, 60, 90, 100, 120, 130, 140, 150, 170, 110]
BRIGHT = [80, 115, 135, 160, 180, 190, 210, 220, 240, 255]
PIXELS = torch.tensor(DARK + BRIGHT, dtype=torch.uint8)
LABELS = torch.tensor([0] * 10 + [1] * 10)


def test_the_loss_is_the_exact_negative_elbo_in_the_mean() -> None:
    client, data = one_pixel(FedBNN(temperature=1.0), LOCAL, PIXELS, LABELS)
    inputs = data.images.preprocess.normalise(data.images.pixels)
    loc, log_scale = torch.tensor([-0.5, 0.2, 0.8, -0.1]), torch.tensor([-0.7, -0.3, -0.5, -1.0])
    client.elbo.guide.swap(loc, log_scale.exp())
    with torch.no_grad():
        found = torch.stack([client.objective(inputs, LABELS) for _ in range(480)])
    exact = expected_loss(
        loc.double(), log_scale.double(), inputs.flatten().double(), LABELS, 1 / 20
    )
    assert abs(found.mean().item() - exact.item()) < 4 * found.std().item() / math.sqrt(480)


class Trail(pl.Callback):
    """Where the guide was after every step."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        guide = module.elbo.guide
        self.steps.append(torch.stack([guide.loc, guide.log_scale]).detach())


def test_svi_converges_to_the_best_gaussian_found_by_integration() -> None:
    """One draw a step is noisy: the mean over the last half of the steps is compared."""
    method, local = FedBNN(temperature=1.0, scale_lr=1.0, lr=0.01), LocalTraining(batch_size=20)
    client, data = one_pixel(method, local, PIXELS, LABELS)
    trail = Trail()
    ClientTrainer({"callbacks": [trail]}).fit(client, data, 1500)
    inputs = data.images.preprocess.normalise(data.images.pixels).flatten().double()
    loc, scale = best(inputs, LABELS, 1 / 20)
    found_loc, found_log_scale = torch.stack(trail.steps[750:]).mean(0).double()
    torch.testing.assert_close(found_loc, loc, rtol=0, atol=0.1)
    torch.testing.assert_close(found_log_scale.exp(), scale, rtol=0.1, atol=0)
    assert loc.abs().max() > 0.5
    assert scale.min() < 0.9
