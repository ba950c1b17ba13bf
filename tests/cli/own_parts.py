"""What a user might bring along: networks, a method, data, a callback."""

import random
import signal
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from fedbnn.methods import FedAvg


class Tiny(nn.Module):
    """A convolution, a hidden layer and a classifier; the convolution may be frozen."""

    def __init__(
        self, image_shape: tuple[int, int, int], dim: int = 12, freeze: bool = False
    ) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.conv, self.norm = nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4)
        self.hidden = nn.Linear(4 * (height - 2) * (width - 2), dim)
        self.classifier = nn.Linear(dim, 10)
        if freeze:
            self.conv.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        seen = self.norm(self.conv(images)).relu().flatten(1)
        logits: Tensor = self.classifier(self.hidden(seen).relu())
        return logits


class Tied(nn.Module):
    """Two layers, one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.width = nn.Linear(64, 64), nn.Linear(64, 64), 64
        self.second.weight = self.first.weight

    def forward(self, images: Tensor) -> Tensor:
        """Features."""
        features: Tensor = self.second(self.first(images.flatten(1)))
        return features


class TiedFrozen(Tied):
    """The same, and nobody trains them."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Needy(Tiny):
    """Does not say how wide it is."""

    def __init__(self, image_shape: tuple[int, int, int], dim: int) -> None:
        super().__init__(image_shape, dim)


def flat() -> nn.Sequential:
    """A classifier in a function."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def in_words() -> "nn.Module":
    """A classifier, in a function that says so in a text."""
    return flat()


def pictures() -> nn.Module:
    """A network whose features are no vectors."""
    return nn.Conv2d(1, 2, 3)


def unannotated():
    """Nobody knows what this builds before it is called."""
    return flat()


class Normed(nn.Module):
    """Pixels normalised by constants, batch norm, and layers made in another order than used."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(12, 10)
        self.register_buffer("mean", torch.tensor(0.3))
        self.register_buffer("waves", torch.arange(64.0).sin())
        self.norm, self.hidden = nn.BatchNorm1d(64), nn.Linear(64, 12)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        seen = self.norm(images.flatten(1) - self.mean + self.waves)
        logits: Tensor = self.classifier(self.hidden(seen).relu())
        return logits


def scripted() -> nn.Module:
    """The same, compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(Normed())


def spectral() -> nn.Module:
    """A layer that remembers something of its own."""
    return nn.Sequential(nn.Flatten(), nn.utils.spectral_norm(nn.Linear(64, 8)), nn.ReLU())


class Double(nn.Linear):
    """A network of numbers that nothing else has."""

    width = 8

    def __init__(self) -> None:
        super().__init__(64, 8, dtype=torch.float64)

    def forward(self, images: Tensor) -> Tensor:
        """Features."""
        return super().forward(images.flatten(1).double())


class TwoFaced(nn.Flatten):
    """Returns more in training than it does else."""

    def forward(self, images: Tensor) -> Any:
        """Features, or features and logits."""
        features = super().forward(images)
        return (features, features) if self.training else features


class Boasting(nn.Flatten):
    """Says that it returns more than it does."""

    width = 65


READY = flat()
FROZEN = flat().requires_grad_(False)


@dataclass(frozen=True)
class Mine(FedAvg):
    """Averaging, and a number to set."""

    strength: float = 0.5


class Digits(Dataset[Any]):
    """Some digits as floats from 0 to 1."""

    def __init__(self, count: int = 400) -> None:
        data = load_digits()
        self.images, self.labels = data.images[:count] / 16, data.target[:count]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor(self.images[index])[None], int(self.labels[index])


class Named(Digits):
    """The same as pictures of Pillow, and classes with names."""

    classes = np.array([f"digit-{name}" for name in range(10)])

    def __getitem__(self, index: int) -> Any:
        pixels = np.round(self.images[index] * 255).astype(np.uint8)
        return Image.fromarray(pixels), int(self.labels[index])


def pair() -> tuple[Dataset[Any], Dataset[Any]]:
    """Train and test."""
    whole = Named()
    return Subset(whole, range(300)), Subset(whole, range(300, 400))


def joined() -> Dataset[Any]:
    """Parts of what has names."""
    return ConcatDataset(pair())


class Drawn(Digits):
    """Images that are turned and made noisy at random."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = super().__getitem__(index)
        noise = torch.rand(image.shape) + np.random.random()  # noqa: NPY002
        return (image + noise + random.random()).float() / 4, label


class Halved(Digits):
    """Numbers that are no labels."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, label / 2


class Misnamed(Digits):
    """Fewer names than labels."""

    classes = ("zero", "one")


def three() -> tuple[Dataset[Any], ...]:
    """Train, validation and test."""
    return Named(), Named(), Named()


class Module(pl.LightningDataModule):
    """The same as Lightning has it."""

    def setup(self, stage: str) -> None:
        """Nothing before this is there."""
        self.train, self.test = pair()

    def train_dataloader(self) -> DataLoader[Any]:
        """Train."""
        return DataLoader(self.train)

    def test_dataloader(self) -> DataLoader[Any]:
        """Test."""
        return DataLoader(self.test)


def unlabelled() -> Dataset:
    """Images alone."""
    return TensorDataset(torch.zeros(10, 1, 8, 8))


def nonsense() -> int:
    """No data."""
    return 3


class Interrupting(pl.Callback):
    """Ctrl-C in the middle of the second fit of a process."""

    fits = 0

    def on_train_epoch_start(self, *_: Any) -> None:
        """Count, and press."""
        Interrupting.fits += 1
        if Interrupting.fits == 6:
            signal.raise_signal(signal.SIGINT)
