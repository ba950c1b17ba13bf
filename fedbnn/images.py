"""A set of images as one uint8 tensor: batches are gathered, augmented and normalised as tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Look:
    """How raw pixels become network input: channel mean and deviation, and the augmentation of training batches."""

    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    flip: bool = False
    shift: int = 0

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 in 0..255 -> (x / 255 - mean) / deviation."""
        deviation = torch.tensor(self.deviation, device=pixels.device).view(1, -1, 1, 1)
        offset = torch.tensor(self.mean, device=pixels.device).view(1, -1, 1, 1) / deviation
        return pixels.float().mul_(1 / (255 * deviation)).sub_(offset)

    def augment(self, pixels: Tensor) -> Tensor:
        """Flip each image with probability 1/2 and shift it by up to `shift` pixels (zero padding)."""
        if self.flip:
            mirrored = torch.rand(len(pixels)) < 0.5
            pixels = torch.where(mirrored.view(-1, 1, 1, 1), pixels.flip(-1), pixels)
        return _shifted(pixels, self.shift) if self.shift else pixels


def _shifted(pixels: Tensor, most: int) -> Tensor:
    """Each image moved by its own random offset in [-most, most]^2."""
    count, _, height, width = pixels.shape
    padded = torch.nn.functional.pad(pixels, (most, most, most, most))
    top, left = torch.randint(0, 2 * most + 1, (2, count))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(count), :, top, left]


@dataclass(frozen=True)
class ImageSet(Dataset[Batch]):
    """Images (n, channels, height, width) in uint8, and the class name of each as an index into `classes`."""

    pixels: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    look: Look = Look()
    training: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen = torch.as_tensor(indices, dtype=torch.long)
        pixels = self.pixels[chosen]
        pixels = self.look.augment(pixels) if self.training else pixels
        return self.look.normalise(pixels), self.labels[chosen]

    def loader(self, batch_size: int, shuffle: bool) -> DataLoader[Batch]:
        """A DataLoader that fetches whole batches at once.

        A last batch of a single image is left out (each epoch another one, when shuffled): batch norm cannot
        train on it. A set of one image is given as it is.
        """
        lonely = len(self) > batch_size > 1 and len(self) % batch_size == 1
        return DataLoader(self, batch_size=batch_size, shuffle=shuffle, drop_last=lonely, collate_fn=_as_is)

    def batches(self, size: int) -> Iterator[Batch]:
        """The images in order, normalised, never augmented."""
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            yield self.look.normalise(self.pixels[start:stop]), self.labels[start:stop]

    def subset(self, indices: Tensor) -> "ImageSet":
        """Some of the images, by position."""
        return replace(self, pixels=self.pixels[indices], labels=self.labels[indices])

    def among(self, classes: tuple[str, ...]) -> "ImageSet":
        """The same images, with labels that number `classes` (which must hold every class that occurs here)."""
        place = {name: row for row, name in enumerate(classes)}
        lookup = torch.tensor([place.get(name, -1) for name in self.classes], dtype=torch.long)
        return replace(self, labels=lookup[self.labels], classes=classes)

    def counts(self) -> dict[str, int]:
        """How many images of each class that occurs here."""
        numbers, counts = self.labels.unique(return_counts=True)
        return {self.classes[number]: int(count) for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)}


def _as_is(batch: Any) -> Any:
    """The batch is whole already; there is nothing to collate."""
    return batch
