"""A set of images as one uint8 tensor: batches are gathered, augmented and normalised as tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Preprocess:
    """How raw pixels become network input: channel mean and deviation, and the augmentation of training batches."""

    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    flip: bool = False
    shift: int = 0

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 in 0..255 -> (x / 255 - mean) / deviation."""
        factor, offset = (one.to(pixels.device) for one in self._line)
        return pixels.float().mul_(factor).sub_(offset)

    @cached_property
    def _line(self) -> tuple[Tensor, Tensor]:
        """Factor and offset of each channel."""
        deviation, mean = (
            torch.tensor(values).view(1, -1, 1, 1) for values in (self.deviation, self.mean)
        )
        return 1 / (255 * deviation), mean / deviation

    def views(self, pixels: Tensor) -> Tensor:
        """Every way an image may be seen: (mirrored, n, channels, top, left, height, width), as views of padded pixels."""
        height, width = pixels.shape[2:]
        padded = torch.nn.functional.pad(pixels, (self.shift,) * 4)
        both = torch.stack([padded, padded.flip(-1)]) if self.flip else padded[None]
        return both.unfold(3, height, 1).unfold(4, width, 1)

    def draw(self, views: Tensor, chosen: Tensor) -> Tensor:
        """The chosen images, each mirrored with probability 1/2 and moved by up to `shift` pixels, in one gather.

        NumPy gathers: it copies whole lines of pixels where torch copies one pixel at a time, which takes six times as long.
        """
        mirrored, top, left = (
            torch.randint(0, views.shape[place], (len(chosen),)).numpy() for place in (0, 3, 4)
        )
        return torch.from_numpy(views.numpy()[mirrored, chosen.numpy(), :, top, left])


@dataclass(frozen=True)
class ImageSet(Dataset[Batch]):
    """Images (n, channels, height, width) in uint8, and the class name of each as an index into `classes`."""

    pixels: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    preprocess: Preprocess = Preprocess()
    training: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Batch:
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return self.preprocess.normalise(self.raw(chosen)), self.labels[chosen]

    def raw(self, chosen: Tensor) -> Tensor:
        """Pixels of some images; augmented when they are for training."""
        return (
            self.preprocess.draw(self._views, chosen)
            if self.training
            else self.pixels.index_select(0, chosen)
        )

    @cached_property
    def _views(self) -> Tensor:
        return self.preprocess.views(self.pixels)

    def loader(self, batch_size: int, shuffle: bool) -> DataLoader[Batch]:
        """A DataLoader that fetches whole batches at once.

        A last batch of a single image is left out (each epoch another one, when shuffled): batch norm cannot
        train on it. A set of one image is given as it is.
        """
        lonely = len(self) > batch_size > 1 and len(self) % batch_size == 1
        return DataLoader(
            self, batch_size=batch_size, shuffle=shuffle, drop_last=lonely, collate_fn=_as_is
        )

    def batches(self, size: int) -> Iterator[Batch]:
        """The images in order, normalised, never augmented."""
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            yield self.preprocess.normalise(self.pixels[start:stop]), self.labels[start:stop]

    def subset(self, indices: Tensor) -> "ImageSet":
        """Some of the images, by position."""
        return replace(
            self,
            pixels=self.pixels.index_select(0, indices),
            labels=self.labels.index_select(0, indices),
        )

    def among(self, classes: tuple[str, ...]) -> "ImageSet":
        """The same images, with labels that number `classes` (which must hold every class that occurs here)."""
        place = {name: row for row, name in enumerate(classes)}
        lookup = torch.tensor([place.get(name, -1) for name in self.classes], dtype=torch.long)
        return replace(self, labels=lookup[self.labels], classes=classes)

    def counts(self) -> dict[str, int]:
        """How many images of each class that occurs here."""
        numbers, counts = self.labels.unique(return_counts=True)
        return {
            self.classes[number]: int(count)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
        }


class EpochBatches(IterableDataset[list[Batch]]):
    """Shuffled passes over a set, for training: lists of up to `AT_ONCE` batches that were gathered together.

    What surrounds a step is paid once a list. No batch crosses from one pass into the next, and a last batch of a
    single image is left out (each pass another image). Several devices share the images, each taking every n-th.
    """

    AT_ONCE = 8

    def __init__(self, images: ImageSet, batch_size: int, passes: int) -> None:
        self.images, self.batch_size, self.passes = images, batch_size, passes

    def loader(self) -> DataLoader[list[Batch]]:
        """What a Trainer takes."""
        return DataLoader(self, batch_size=None)

    def __iter__(self) -> Iterator[list[Batch]]:
        parts = (part for _ in range(self.passes) for part in self._pass())
        while group := list(islice(parts, self.AT_ONCE)):
            pixels = self.images.raw(torch.cat(group)).split([len(part) for part in group])
            yield [
                (self.images.preprocess.normalise(some), self.images.labels[part])
                for some, part in zip(pixels, group, strict=True)
            ]

    def _pass(self) -> list[Tensor]:
        """The places of the images of each batch of one pass."""
        mine = _share(len(self.images))
        parts = list(mine[torch.randperm(len(mine))].split(self.batch_size))
        lonely = len(parts) > 1 and len(parts[-1]) == 1 < self.batch_size
        return parts[:-1] if lonely else parts


def _share(images: int) -> Tensor:
    """The places of this device's images: all of them, or as many as on every other device."""
    if not (dist.is_available() and dist.is_initialized()):
        return torch.arange(images)
    devices = dist.get_world_size()
    return torch.arange(dist.get_rank(), devices * ceil(images / devices), devices) % images


def _as_is(batch: Any) -> Any:
    """The batch is whole already; there is nothing to collate."""
    return batch
