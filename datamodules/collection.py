"""The opened sources as one: global class names, one image shape, and which images a task has."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datamodules.cache import Table
from datamodules.domains import shifted
from datamodules.partitions import draws
from datamodules.scenarios import Integers, class_groups, require
from fedbnn.images import ImageSet, Preprocess


@dataclass(frozen=True)
class Pool:
    """One split of all sources, one after the other; an image is known by its position.

    Only `open` images are shown.
    """

    parts: tuple[Tensor, ...]
    labels: Integers
    channels: int
    open: NDArray[np.bool_]

    def gather(self, positions: Integers) -> Tensor:
        """These images, copied out of the memory maps; grey becomes colour if others are."""
        starts = np.cumsum([0, *map(len, self.parts)])
        height, width = self.parts[0].shape[-2:]
        found = np.empty((len(positions), self.channels, height, width), np.uint8)
        for start, part in zip(starts, self.parts, strict=False):
            inside = np.flatnonzero((positions >= start) & (positions < start + len(part)))
            found[inside] = part.numpy()[positions[inside] - start]
        return torch.from_numpy(found)


@dataclass(frozen=True)
class Task:
    """A name, and the classes that occur in it."""

    name: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Collection:
    """All images of a stream: classes in its order, and tasks as ranges of them."""

    classes: tuple[str, ...]
    tasks: tuple[Task, ...]
    labels: tuple[range, ...]
    domains: tuple[str, ...]
    train: Pool
    test: Pool
    preprocess: Preprocess

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        height, width = self.train.parts[0].shape[-2:]
        return self.train.channels, height, width

    def images(self, pool: Pool, task: int) -> Integers:
        """The images of a task that may be shown."""
        group = self.labels[task]
        return np.flatnonzero((pool.labels >= group.start) & (pool.labels < group.stop) & pool.open)

    def image_set(self, pool: Pool, images: Integers, task: int) -> ImageSet:
        """These images as they look in the task."""
        pixels, labels = pool.gather(images), torch.from_numpy(pool.labels[images])
        if self.domains and len(images):
            pixels = shifted(self.domains[task], pixels, images)
        return ImageSet(pixels, labels, self.classes, self.preprocess)


def collect(
    tables: Sequence[Table],
    incremental: str,
    tasks: int,
    domains: tuple[str, ...],
    class_order: int | None,
    validation: float,
    seed: int,
) -> Collection:
    """Put sources side by side and cut them into tasks.

    `class_order` is the seed of a shuffle of all classes. With a `validation` share, that part of
    train is the test.
    """
    _same_size(tables)
    names = [f"{table.name}/{name}" for table in tables for name in table.classes]
    order = np.arange(len(names))
    if class_order is not None:
        order = draws(class_order, "class order").permutation(len(names))
    train, test = (_pool(tables, split, np.argsort(order)) for split in ("train", "test"))
    if validation:
        held = held_out(train.labels, validation, seed)
        train, test = replace(train, open=~held), replace(train, open=held)
    classes = tuple(names[place] for place in order)
    groups = task_labels(incremental, [len(table.classes) for table in tables], tasks)
    titles = {
        "class": [f"classes {group[0]}-{group[-1]}" for group in groups],
        "task": [table.name for table in tables],
        "domain": domains,
    }
    named = tuple(
        Task(title, classes[group.start : group.stop])
        for title, group in zip(titles[incremental], groups, strict=True)
    )
    return Collection(classes, named, groups, domains, train, test, common_preprocess(tables))


def _same_size(tables: Sequence[Table]) -> None:
    sizes = {table.name: "{}x{}".format(*table.train_pixels.shape[-2:]) for table in tables}
    found = ", ".join(f"{name} {size}" for name, size in sizes.items())
    what = f"images of one stream need one size, not {found}"
    require(len(set(sizes.values())) == 1, "size", what, "set it, for example size: 32")


def task_labels(incremental: str, sizes: Sequence[int], tasks: int) -> tuple[range, ...]:
    """The labels of each task: a group of classes, the classes of a source, or in a domain all."""
    if incremental == "class":
        return class_groups(sum(sizes), tasks)
    if incremental == "domain":
        return (range(sum(sizes)),) * tasks
    starts = np.cumsum([0, *sizes]).tolist()
    return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))


def _pool(tables: Sequence[Table], split: str, number: Integers) -> Pool:
    """One split of every source; labels become places in the global order of classes."""
    starts = np.cumsum([0, *(len(table.classes) for table in tables)])
    pixels, labels = (
        [getattr(table, f"{split}_{part}") for table in tables] for part in ("pixels", "labels")
    )
    placed = [number[part.numpy() + start] for part, start in zip(labels, starts, strict=False)]
    channels = max(len(table.mean) for table in tables)
    return Pool(
        tuple(pixels), np.concatenate(placed), channels, np.ones(sum(map(len, labels)), bool)
    )


def common_preprocess(tables: Sequence[Table]) -> Preprocess:
    """One normalisation for the stream: one per source would tell the network which task it sees.

    mean = E[mean_s], variance = E[variance_s] + Var[mean_s], every source s with the same weight.
    """
    channels = max(len(table.mean) for table in tables)
    means = np.array([np.broadcast_to(table.mean, channels) for table in tables])
    variances = np.array([np.broadcast_to(table.deviation, channels) for table in tables]) ** 2
    deviation = np.sqrt(variances.mean(0) + means.var(0))
    return Preprocess(tuple(means.mean(0).tolist()), tuple(deviation.tolist()))


def held_out(labels: Integers, share: float, seed: int) -> NDArray[np.bool_]:
    """Which images are for validation: `share` of each class, at least one of two or more."""
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        images = draws(seed, "validation", int(label)).permutation(np.flatnonzero(labels == label))
        chosen[images[: min(max(1, round(share * len(images))), len(images) - 1)]] = True
    return chosen
