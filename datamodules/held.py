"""Images that their owners hold: a folder for every client, as it is when a round begins.

    data/flowers/0/rose/*.png       what client 0 holds, on its own machine
    data/flowers/1/tulip/*.png      what client 1 holds, on another
    data/flowers/test/rose/*.png    what the server tests the model on; may be absent

Nothing is dealt, and nobody knows what a client holds until it says so. When a round begins it
draws at most samples_per_round / clients_per_round of its images, puts them aside, and announces
how many of each class these are. The draw follows from seed, round and client; it trains on what it
put aside, and whatever comes into its folder meanwhile is for the next round. So a run that is
resumed in mid-round shows the same images again.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules import cache
from datamodules.cache import Located, Original, Split, Table
from datamodules.collection import Collection, Pool
from datamodules.scenarios import Integers, draws, require
from datamodules.sources import (
    FOLDER,
    SOURCES,
    DatasetRegistry,
    in_memory,
    is_path,
    items,
    labelled,
    labels_of,
    numbered,
    short_name,
)
from fedbnn.config.own import imported
from fedbnn.errors import ConfigError, DataError, RunDirectoryError
from fedbnn.images import ImageSet, Preprocess
from fedbnn.protocol.state import Malformed, State
from fedbnn.protocol.stream import Task
from fedbnn.seeds import address, settled
from fedbnn.storage import files

LOOK = Preprocess((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and deviation of ImageNet: all scale pixels alike, and nobody sees the images of all."""
CHANNELS, KEPT, TEST = 3, 8, "test"
NOTHING = Split([], np.empty(0, np.int64))


def check_held(
    sources: tuple[str, ...],
    size: int | None,
    samples: int | None,
    tasks: int,
    incremental: str,
    validation: bool,
) -> None:
    """Refuse what could only be done with all images in one place."""
    plain = (tasks, incremental) == (1, "class") and not validation
    what, fix = "nobody deals images that clients hold into tasks", "one task, without validation"
    require(plain, "partition", what, fix)
    known = [source for source in sources if source in SOURCES]
    what, fix = f"clients do not hold {', '.join(known)}", "use folder:PATH, or an import path"
    require(not known, "sources", what, fix)
    what, fix = "nobody knows how large images are that clients hold", "for example size: 32"
    require(size is not None, "size", what, fix)
    what = "nobody knows how many images clients hold"
    fix = "say how many a round may have, over all its clients"
    require(samples is not None, "samples_per_round", what, fix)


@dataclass(frozen=True)
class Part:
    """Pictures of somebody, not decoded yet, and the classes that their labels count."""

    classes: tuple[str, ...]
    split: Split

    def counts(self, chosen: Integers) -> dict[str, int]:
        """How many of the chosen ones are of each class."""
        found = np.unique(self.split.labels[chosen], return_counts=True)
        return {self.classes[label]: int(count) for label, count in zip(*found, strict=True)}


@dataclass(frozen=True)
class Holdings:
    """Who takes part, with at `most` so many of the images it holds; asked like a `Partitioner`."""

    registry: DatasetRegistry
    sources: tuple[str, ...]
    clients: int
    clients_per_round: int
    most: int
    seed: int = 0

    def participants(self, round: int) -> tuple[int, ...]:
        """A random sample of all clients, in order: who has images is not known yet."""
        random = draws(self.seed, "participants", round)
        chosen = random.choice(self.clients, self.clients_per_round, replace=False)
        return tuple(np.sort(chosen).tolist())

    def more_participants(self, round: int, clients: int) -> tuple[int, ...]:
        """Nobody who was not asked what it holds."""
        what, fix = "only the clients of a round announce what they hold", "leave it out"
        raise ConfigError(what, "head.clients_per_round", fix)

    def task_of(self, round: int, client: int) -> int:
        """There is one task: whatever clients hold."""
        return 0

    def image_shares(self, round: int) -> tuple[float, ...]:
        """All of it."""
        return (1.0,)

    def counts(self, round: int, client: int) -> dict[str, int]:
        """How many images of each class a client would show now; no pixel is read."""
        part = self._part(client)
        return part.counts(self._chosen(part, round, client))

    def announce(self, round: int, client: int) -> dict[str, int]:
        """The same, once these images are put aside."""
        images, path = self.shown_now(round, client), self._aside(round, client)
        kept = State({"pixels": images.pixels, "labels": images.labels}, images.classes)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(path, kept.to_bytes())
            files.keep_newest(path.parent.glob(f"{client}-*"), KEPT)
        except (OSError, RunDirectoryError) as error:
            what, fix = f"images cannot be put aside: {error}", "make room or set stream.cache_dir"
            raise DataError(what, str(path), fix) from error
        return images.counts()

    def shown(self, round: int, client: int) -> ImageSet:
        """The images that a client put aside for a round; without them what it would show now."""
        with suppress(OSError, Malformed):
            kept = State.from_bytes(files.read(self._aside(round, client)))
            return ImageSet(kept["pixels"], kept["labels"], kept.classes, LOOK)
        return self.shown_now(round, client)

    def shown_now(self, round: int, client: int) -> ImageSet:
        """What a client would show now; grey images in three equal channels."""
        part = self._part(client)
        chosen = self._chosen(part, round, client)
        pixels = np.empty((len(chosen), CHANNELS, self._side, self._side), np.uint8)
        with ThreadPoolExecutor() as pool:
            read = partial(part.split.read, size=self._side)
            for place, image in enumerate(pool.map(read, chosen.tolist())):
                pixels[place] = image
        labels = torch.tensor(part.split.labels[chosen].tolist(), dtype=torch.int64)
        return ImageSet(torch.from_numpy(pixels), labels, part.classes, LOOK)

    def tests(self) -> Collection:
        """What the model is tested on here: one task with all classes of the test, if any."""
        tables = [*self._tables()]
        classes = tuple(f"{table.name}/{name}" for table in tables for name in table.classes)
        starts = np.cumsum([0, *(len(table.classes) for table in tables)])
        own = [table.test_labels.numpy() for table in tables]
        labels = np.concatenate([NOTHING.labels, *map(np.add, own, starts)])
        blank = torch.empty(0, CHANNELS, self._side, self._side, dtype=torch.uint8)
        pixels = tuple(table.test_pixels for table in tables) or (blank,)
        train = Pool((blank,), NOTHING.labels, CHANNELS, np.empty(0, bool))
        test = Pool(pixels, labels, CHANNELS, np.ones(len(labels), bool))
        every = Task("all classes", classes)
        return Collection(classes, (every,), (range(len(classes)),), (), train, test, LOOK)

    def _tables(self) -> Iterator[Table]:
        """The test images of every source that has some, from the cache."""
        for source in self.sources:
            part = self._found(source, None)
            if part and len(part.split.labels):
                located = self._located(source, Original(part.classes, NOTHING, part.split))
                where = self.registry.size, self.registry.decoded
                yield cache.cached(short_name(source), located, *where)

    def _located(self, source: str, tested: Original) -> Located:
        """Test images with their fingerprint."""
        if is_path(source):
            return in_memory(tested)
        return Located(cache.fingerprint([self._folder(source, None)]), lambda: tested)

    @property
    def _side(self) -> int:
        """Height and width of every image."""
        assert self.registry.size is not None
        return self.registry.size

    def _aside(self, round: int, client: int) -> Path:
        """Where the images of a round are put; those of another stream have another folder."""
        stream = address(self.seed, "held", *self.sources, self._side, self.most)
        return self.registry.decoded / f"held-{stream:016x}" / f"{client}-{round}.safetensors"

    def _chosen(self, part: Part, round: int, client: int) -> Integers:
        """Places of the images that a client shows: all, or a sample without replacement."""
        owned = len(part.split.labels)
        if owned <= self.most:
            return np.arange(owned)
        random = draws(self.seed, "draw", round, client)
        return np.sort(random.choice(owned, self.most, replace=False, shuffle=False))

    def _part(self, client: int) -> Part:
        """All that a client holds, of every source, under the global names of its classes."""
        classes, images, labels = list[str](), list[Any](), [NOTHING.labels]
        for source in self.sources:
            if (part := self._found(source, client)) is None:
                what, where = f"client {client} has no folder", self._folder(source, client)
                fix = "put a folder for each class there, or set stream.data_dir of its site"
                raise DataError(what, f"looked for {where}", fix)
            labels.append(part.split.labels + len(classes))
            images += part.split.images
            classes += [f"{short_name(source)}/{name}" for name in part.classes]
        return Part(tuple(classes), Split(images, np.concatenate(labels)))

    def _found(self, source: str, client: int | None) -> Part | None:
        """Pictures of a client, or of the test (None), in a source; None where it has no place."""
        if is_path(source):
            return _given(source, client)
        folder = self._folder(source, client)
        if not folder.is_dir():
            return None
        classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        return Part(tuple(classes), labelled([folder / name for name in classes]))

    def _folder(self, source: str, client: int | None) -> Path:
        """PATH/CLIENT below the data folder, or PATH/test."""
        who = TEST if client is None else str(client)
        return self.registry.data / source.removeprefix(FOLDER) / who


def _given(source: str, client: int | None) -> Part | None:
    """What the user's own function gives for a client, or for the test (None): a torch Dataset."""
    found = imported(source)
    try:
        with settled():
            if (data := found(client)) is None:
                return None
            images, labels = items(data)
        known, names = labels_of(data, labels)
        return Part(names, numbered(images, labels, known))
    except Exception as error:  # the border to the user's own code, which may raise anything
        what = f"{source} gives no images: {error or type(error).__name__}"
        fix = "a function of the client's number (None: the test) that returns a torch Dataset"
        raise DataError(what, "stream.sources", fix) from error
