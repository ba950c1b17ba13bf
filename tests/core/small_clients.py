"""Small clients of points and of posteriors, with data for them."""

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from datamodules.stream import ClientData
from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.model import BayesianModel, MeanFieldGuide
from fedbnn.images import ImageSet, Preprocess
from fedbnn.methods import FedAvg, FedBNN
from fedbnn.methods.base import LocalObjective
from fedbnn.networks import Classifier
from lightning_modules.client_trainer import LocalTraining
from lightning_modules.point_client import PointClient
from lightning_modules.svi_client import Start, SVIClient

LOCAL = LocalTraining(epochs=2, batch_size=4)


class Tiny(nn.Module):
    """A convolution with batch norm and a linear layer."""

    width = 6

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.Flatten(),
            nn.Linear(16, 6),
            nn.ReLU(),
        )

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images)
        return features


def pictures(count: int = 16, batch_size: int = 4) -> ClientData:
    """So many images of two classes, the same in every call."""
    source = torch.Generator().manual_seed(8)
    pixels = torch.randint(0, 256, (count, 1, 4, 4), dtype=torch.uint8, generator=source)
    look = Preprocess((0.5,), (0.3,))
    return ClientData(ImageSet(pixels, torch.arange(count) % 2, ("a", "b"), look), batch_size)


def point_client(local: LocalTraining = LOCAL, backbone: nn.Module | None = None) -> PointClient:
    """A client of FedAvg with fresh weights."""
    network = Classifier(backbone or Tiny(), 2)
    return PointClient(network, LocalObjective(), FedAvg(), local)


def svi_client(distillation: float = 0.0, local: LocalTraining = LOCAL) -> SVIClient:
    """A client of FedBNN that starts at its prior, N(fresh weights, 0.05^2)."""
    backbone = Tiny()
    layout = layout_of(backbone)
    model = BayesianModel(backbone, layout, distillation)
    guide = MeanFieldGuide(model)
    loc = torch.cat([layout.read(backbone)[0], torch.zeros(14)])
    scale = torch.full_like(loc, 0.05)
    start = Start(loc, scale, loc, scale)
    return SVIClient(model, guide, start, torch.full_like(loc, 1e-3), FedBNN(), local)


def weights(module: pl.LightningModule) -> Tensor:
    """All weights and statistics of a client, in one vector."""
    named = [*module.parameters(), *module.buffers()]
    return torch.cat([value.detach().flatten().double() for value in named])
