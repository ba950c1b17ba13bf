"""The opened sources as one collection: global class names, one image shape, one look, and which images a task has."""

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
from datamodules.scenarios import Integers, class_groups
from fedbnn.errors import ConfigError
from fedbnn.images import ImageSet, Preprocess


@dataclass(frozen=True)
class Pool:
    """One split of all sources, one source after the other; an image is known by its position. Only `open` ones are shown."""

    parts: tuple[Tensor, ...]
    labels: Integers
    channels: int
    open: NDArray[np.bool_]

    def gather(self, positions: Integers) -> Tensor:
        """These images, copied whole out of the memory maps; grey ones are repeated where the stream is in colour."""
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
    """All images of a stream: classes in its order, tasks as ranges of them, and what may be shown in train and test."""

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
        pixels = pool.gather(images)
        pixels = (
            shifted(self.domains[task], pixels, images) if self.domains and len(images) else pixels
        )
        return ImageSet(
            pixels, torch.from_numpy(pool.labels[images]), self.classes, self.preprocess
        )


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

    `class_order` is the seed of a shuffle of all classes. With a `validation` share, that part of train is the test.
    """
    _same_size(tables)
    names = [f"{table.name}/{name}" for table in tables for name in table.classes]
    order = (
        np.arange(len(names))
        if class_order is None
        else draws(class_order, "class order").permutation(len(names))
    )
    number = np.argsort(order)
    train = _pool(tables, [(table.train_pixels, table.train_labels) for table in tables], number)
    test = _pool(tables, [(table.test_pixels, table.test_labels) for table in tables], number)
    if validation:
        held = held_out(train.labels, validation, seed)
        train, test = replace(train, open=~held), replace(train, open=held)
    classes = tuple(names[place] for place in order)
    groups = task_labels(incremental, [len(table.classes) for table in tables], tasks)
    titles = task_titles(incremental, [table.name for table in tables], domains, groups)
    named = tuple(
        Task(title, classes[group.start : group.stop])
        for title, group in zip(titles, groups, strict=True)
    )
    return Collection(classes, named, groups, domains, train, test, common_preprocess(tables))


def _same_size(tables: Sequence[Table]) -> None:
    shapes = {table.name: tuple(table.train_pixels.shape[-2:]) for table in tables}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} {height}x{width}" for name, (height, width) in shapes.items())
        raise ConfigError(
            f"images of one stream need one size, not {found}",
            "stream.size",
            "set it, for example size: 32",
        )


def task_labels(incremental: str, sizes: Sequence[int], tasks: int) -> tuple[range, ...]:
    """The labels of each task: groups of classes, the classes of each source, or all of them for every domain."""
    if incremental == "class":
        return class_groups(sum(sizes), tasks)
    if incremental == "domain":
        return (range(sum(sizes)),) * tasks
    starts = np.cumsum([0, *sizes]).tolist()
    return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))


def task_titles(
    incremental: str, sources: Sequence[str], domains: Sequence[str], groups: Sequence[range]
) -> tuple[str, ...]:
    """A short name for each task."""
    titles = {
        "class": [f"classes {group[0]}-{group[-1]}" for group in groups],
        "task": sources,
        "domain": domains,
    }
    return tuple(titles[incremental])


def _pool(
    tables: Sequence[Table], splits: Sequence[tuple[Tensor, Tensor]], number: Integers
) -> Pool:
    """One split of every source; labels of a source become places in the global order of classes."""
    starts = np.cumsum([0, *(len(table.classes) for table in tables)])
    labels = np.concatenate(
        [number[part.numpy() + start] for (_, part), start in zip(splits, starts, strict=False)]
    )
    channels = max(table.train_pixels.shape[1] for table in tables)
    return Pool(tuple(pixels for pixels, _ in splits), labels, channels, np.ones(len(labels), bool))


def common_preprocess(tables: Sequence[Table]) -> Preprocess:
    """One normalisation for the stream, since a normalisation per source would tell the network which task it sees.

    mean = E[mean_s], variance = E[variance_s] + Var[mean_s], every source s with the same weight.
    """
    channels = max(len(table.mean) for table in tables)
    means = np.array([np.broadcast_to(table.mean, channels) for table in tables])
    variances = np.array([np.broadcast_to(table.deviation, channels) for table in tables]) ** 2
    deviation = np.sqrt(variances.mean(0) + means.var(0))
    return Preprocess(tuple(means.mean(0).tolist()), tuple(deviation.tolist()))


def joined(sets: Sequence[ImageSet]) -> ImageSet:
    """Sets of one stream, one after the other."""
    pixels, labels = (
        torch.cat([part.pixels for part in sets]),
        torch.cat([part.labels for part in sets]),
    )
    return replace(sets[0], pixels=pixels, labels=labels)


def held_out(labels: Integers, share: float, seed: int) -> NDArray[np.bool_]:
    """Which images are the validation split: `share` of each class, at least one where a class has two."""
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        images = draws(seed, "validation", int(label)).permutation(np.flatnonzero(labels == label))
        chosen[images[: min(max(1, round(share * len(images))), len(images) - 1)]] = True
    return chosen
