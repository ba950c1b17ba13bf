"""The opened sources as one: global class names, one image shape, and the images of each task.

In a domain-incremental stream a task shifts all images; in a domain an image always looks the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode, functional

from datamodules.cache import Table
from datamodules.scenarios import Integers, class_groups, draws, require
from fedbnn.errors import ConfigError, did_you_mean
from fedbnn.images import ImageSet, Preprocess
from fedbnn.protocol.stream import Task
from fedbnn.seeds import generator

DOMAINS = ("clean", "rotation", "noise", "blur")
_NOISES = 251
LONGEST = 32
"""Letters of class names that make the name of a task."""


@dataclass(frozen=True)
class Pool:
    """One split of all sources; an image is known by its position. Only `open` ones are shown."""

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
    shuffle: bool,
    validation: bool,
    seed: int,
) -> Collection:
    """Put sources side by side, perhaps `shuffle` all classes, and cut them into tasks.

    With `validation` a part of train is the test.
    """
    sizes = {table.name: "{}x{}".format(*table.train_pixels.shape[-2:]) for table in tables}
    found = ", ".join(f"{name} {size}" for name, size in sizes.items())
    what = f"images of one stream need one size, not {found}"
    require(len(set(sizes.values())) == 1, "size", what, "set it, for example size: 32")
    names = [f"{table.name}/{name}" for table in tables for name in table.classes]
    order = np.arange(len(names))
    if shuffle:
        order = draws(seed, "class order").permutation(len(names))
    train, test = (_pool(tables, split, np.argsort(order)) for split in ("train", "test"))
    if validation:
        held = held_out(train.labels, seed)
        train, test = replace(train, open=~held), replace(train, open=held)
    classes = tuple(names[place] for place in order)
    labels = task_labels(incremental, tables, tasks, domains)
    groups = {name: classes[group.start : group.stop] for name, group in labels.items()}
    if incremental == "class":
        groups = spoken(groups)
    named = tuple(Task(name, own) for name, own in groups.items())
    look = common_preprocess(tables)
    return Collection(classes, named, (*labels.values(),), domains, train, test, look)


def spoken(groups: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Groups of classes by what people call them, if it is short and tells them apart: `cat, dog`.

    Classes that are only counted, 0, 1, 2, ..., keep the name of their places.
    """
    plain = [[_plain(name) for name in own] for own in groups.values()]
    every = sorted(chain.from_iterable(plain))
    counted = every == sorted(map(str, range(len(every))))
    said = [", ".join(own) for own in plain]
    once = len(set(said)) == len(said)
    short = [len(words) <= LONGEST and once and not counted for words in said]
    named = zip(groups.items(), said, short, strict=True)
    return {words if take else place: own for (place, own), words, take in named}


def _plain(name: str) -> str:
    """`pets/guinea_pig` -> `guinea pig`."""
    return name.partition("/")[2].replace("_", " ")


def task_labels(
    incremental: str, tables: Sequence[Table], tasks: int, domains: Sequence[str]
) -> dict[str, range]:
    """Name and labels of each task: a group of classes, those of a source, or in a domain all."""
    ends = np.cumsum([0, *(len(table.classes) for table in tables)]).tolist()
    if incremental == "class":
        groups = class_groups(ends[-1], tasks)
        return {_counted(group): group for group in groups}
    if incremental == "domain":
        return dict.fromkeys(domains, range(ends[-1]))
    return {one.name: range(*span) for one, span in zip(tables, pairwise(ends), strict=True)}


def _counted(group: range) -> str:
    """`classes 2-4`, or `class 2` of one alone."""
    return f"classes {group[0]}-{group[-1]}" if len(group) > 1 else f"class {group[0]}"


def _pool(tables: Sequence[Table], split: str, place: Integers) -> Pool:
    """One split of every source; labels count the classes of all sources by their `place`."""
    starts = np.cumsum([0, *(len(table.classes) for table in tables)])
    own = [getattr(table, f"{split}_labels").numpy() for table in tables]
    labels = place[np.concatenate([*map(np.add, own, starts)])]
    pixels = tuple(getattr(table, f"{split}_pixels") for table in tables)
    channels = max(len(table.mean) for table in tables)
    return Pool(pixels, labels, channels, np.ones(len(labels), bool))


def common_preprocess(tables: Sequence[Table]) -> Preprocess:
    """One normalisation for the stream: one per source would tell the network which task it sees.

    mean = E[mean_s], variance = E[variance_s] + Var[mean_s], every source s with the same weight.
    """
    channels = max(len(table.mean) for table in tables)
    means = np.array([np.broadcast_to(table.mean, channels) for table in tables])
    variances = np.array([np.broadcast_to(table.deviation, channels) for table in tables]) ** 2
    deviation = np.sqrt(variances.mean(0) + means.var(0))
    return Preprocess(tuple(means.mean(0).tolist()), tuple(deviation.tolist()))


def held_out(labels: Integers, seed: int) -> NDArray[np.bool_]:
    """Which images are for validation: a tenth of each class, at least one of two or more."""
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        images = draws(seed, "validation", int(label)).permutation(np.flatnonzero(labels == label))
        chosen[images[: min(max(1, round(0.1 * len(images))), len(images) - 1)]] = True
    return chosen


def domain_names(incremental: str, domains: Sequence[str] | None, sources: int) -> tuple[str, ...]:
    """The domains of a stream, each a known shift of its one source."""
    names = tuple(domains or ())
    paired, once = bool(names) == (incremental == "domain"), len(set(names)) == len(names)
    what = "domains belong to incremental: domain"
    require(paired, "domains", what, "give both or neither")
    require(not names or sources == 1, "sources", "domains shift one source", "keep one source")
    require(once, "domains", "a domain is named twice", "name each domain once")
    for name in names:
        parse(name)
    return names


def parse(domain: str) -> tuple[str, float]:
    """`rotation:45` -> ("rotation", 45.0); `clean` needs no strength."""
    name, _, strength = domain.partition(":")
    fix = did_you_mean(name, DOMAINS)
    require(name in DOMAINS, "domains", f"unknown domain {domain!r}", fix)
    try:
        value = 0.0 if name == "clean" and not strength else float(strength)
    except ValueError:
        what = f"domain {domain!r} has no strength"
        raise ConfigError(what, "stream.domains", f"write {name}:NUMBER") from None
    possible = math.isfinite(value) and (value >= 0 or name == "rotation")
    what = f"domain {domain!r} has no possible strength"
    require(possible, "domains", what, "use a number of at least 0")
    return name, value


def shifted(domain: str, pixels: Tensor, positions: Integers) -> Tensor:
    """The uint8 images as they look in `domain`; `positions` name them.

    clean       as they are
    rotation:D  turned by D degrees counter-clockwise about the centre, black where nothing was
    noise:S     x + 255 S e, e ~ N(0, 1); image i always meets noise number i mod 251
    blur:S      convolved with a Gaussian of S pixels that reaches 3 S, mirrored at the border
    """
    (name, strength), changed = parse(domain), pixels.float()
    if name == "rotation":
        changed = functional.rotate(changed, strength, InterpolationMode.BILINEAR)
    elif name == "noise":
        bank = torch.randn(_NOISES, *pixels.shape[1:], generator=generator(0, "noise"))
        changed += 255 * strength * bank[torch.from_numpy(positions % _NOISES)]
    elif name == "blur" and strength:
        reach = min(max(1, math.ceil(3 * strength)), min(pixels.shape[-2:]) - 1)
        changed = functional.gaussian_blur(changed, [2 * reach + 1] * 2, [strength] * 2)
    return changed.round().clamp(0, 255).to(torch.uint8)
