"""A federated stream: which client sees what in which round, and what the model is tested on."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader

from datamodules.collection import Collection, collect, domain_names
from datamodules.held import Holdings, check_held
from datamodules.scenarios import Partitioner, draws, largest_remainder, require, task_count, timed
from datamodules.sources import DatasetRegistry, source_names
from fedbnn.config.schema import Count, NonNegativeCount, Positive, Side
from fedbnn.images import Batch, ImageSet, Preprocess, joined
from fedbnn.protocol.stream import Task

_TEST_BATCH = 256


class ClientData(LightningDataModule):
    """The images of one client in one round, as the data module that `Trainer.fit` takes."""

    def __init__(self, images: ImageSet, batch_size: int) -> None:
        super().__init__()
        self.images, self.batch_size = images, batch_size

    def with_images(self, images: ImageSet) -> "ClientData":
        """The same client with other images, such as those it remembers beside its own."""
        return ClientData(images, self.batch_size)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled and augmented; one epoch is one pass."""
        return self.images.loader(self.batch_size, shuffle=True)


class FederatedStream(LightningDataModule):
    """The `stream:` section of a configuration. Data are opened when first asked for.

    Rounds are 1..rounds and clients 0..num_clients - 1. Every draw is addressed by (seed, purpose,
    round, client), so the order of calls does not matter.
    """

    def __init__(
        self,
        incremental: Literal["class", "task", "domain"] = "class",
        sources: list[str] | str = "digits",
        tasks: Count | None = None,
        domains: list[str] | None = None,
        shuffle_classes: bool = False,
        schedule: Literal["separate", "staggered", "gradual"] = "separate",
        rounds_per_task: Count | None = None,
        boundaries: list[int] | None = None,
        durations: list[tuple[int, int]] | None = None,
        stagger: Count | None = None,
        clients: Count = 100,
        clients_per_round: Count = 10,
        partition: Literal["dirichlet", "iid", "held"] = "dirichlet",
        alpha: Positive = 1.0,
        samples_per_round: Count | None = None,
        validation: bool = False,
        data_dir: str = "data",
        cache_dir: str | None = None,
        size: Side | None = None,
        download: bool = False,
        flip: bool = False,
        shift: NonNegativeCount = 0,
        expelled: list[tuple[NonNegativeCount, Count]] | None = None,
        seed: int = 0,
    ) -> None:
        """Describe the stream.

        Args:
            incremental: What changes over time: `class` groups of the sources, `task` (one source
                after the other), or `domain`.
            sources: Names of data sets, or `folder:PATH` for images of your own
                (PATH/train/CLASS/*.png, PATH/test/CLASS/*.png; with `held` PATH/CLIENT/CLASS).
            tasks: Number of class groups. With `task` and `domain` it follows from the list.
            domains: Each `clean`, `rotation:DEGREES`, `noise:DEVIATION` or `blur:SIGMA`.
            shuffle_classes: Group the classes in an order drawn by the seed, not as they are named.
            schedule: `separate` (clients change together), `staggered` (each at its own offset) or
                `gradual` (durations overlap).
            rounds_per_task: Length of every task, for `separate` and `staggered`.
            boundaries: Or the last round of each task.
            durations: For `gradual`: [start, end] of each task; its rounds are start + 1 .. end.
            stagger: For `staggered`: the last client changes this many rounds after the first.
            clients: Number of clients.
            clients_per_round: How many of them take part in a round.
            partition: `dirichlet` or `iid`: how the images of a task are divided among the clients;
                `held`: not at all, each holds a folder of its own (docs/federation.md).
            alpha: Dirichlet concentration per class; small is more skewed.
            samples_per_round: Images drawn in a round over all participants; null is all they own.
                With `held` each shows at most an equal part.
            validation: Test on a tenth of the train split, never trained on then; for tuning.
            data_dir: Where data sets are.
            cache_dir: Where decoded images go; null is DATA_DIR/.cache.
            size: Resize images to size x size.
            download: Fetch data sets that are missing.
            flip: Mirror training images at random.
            shift: Move training images by up to this many pixels.
            expelled: [client, round] of each that is not asked from this round on; nobody takes its
                place.
            seed: Seed of every draw.
        """
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.incremental, self.sources = incremental, source_names(sources)
        self.domains = domain_names(incremental, domains, len(self.sources))
        entries = durations if boundaries is None else boundaries
        listed = len(self.domains or self.sources), None if entries is None else len(entries)
        timing = schedule, rounds_per_task, boundaries, durations, stagger
        held = partition == "held"
        if held:
            check_held(self.sources, size, samples_per_round, tasks or 1, incremental, validation)
        count = task_count(incremental, 1 if held else tasks, *listed)
        self.schedule = timed(count, *timing)
        self.separate = schedule == "separate"
        self.num_clients, self.clients_per_round, self.seed = clients, clients_per_round, seed
        what = f"{clients_per_round} clients a round of {clients}"
        require(clients_per_round <= clients, "clients_per_round", what, "use no more than clients")
        enough, fix = (samples_per_round or math.inf) >= clients_per_round, "give each client one"
        require(enough, "samples_per_round", f"{samples_per_round} images a round", fix)
        self.held = (samples_per_round or 0) // clients_per_round if held else 0
        fits = not shuffle_classes or incremental == "class"
        require(fits, "shuffle_classes", "only class groups have an order", "drop it")
        self.expelled = dict(expelled or {})
        known = all(0 <= client < clients for client in self.expelled)
        require(known, "expelled", f"clients are 0 to {clients - 1}", "name one of them")

    @property
    def rounds(self) -> int:
        """The number of the last round."""
        return self.schedule.rounds

    def shares(self, round: int) -> tuple[float, ...]:
        """The share of the clients on each task."""
        counts = self.schedule.clients_on(self._known(round)[0], self.num_clients)
        return tuple(count / self.num_clients for count in counts)

    def image_shares(self, round: int) -> tuple[float, ...]:
        """The share of each task in the images that are trained on, in expectation."""
        return self._who.image_shares(self._known(round)[0])

    def task_ends(self) -> tuple[int, ...]:
        """The last round in which each task has clients."""
        return self.schedule.task_ends

    def schedule_rows(self) -> list[dict[str, Any]]:
        """The tasks of each run of rounds with the same tasks, at its first and last round."""
        rows = []
        shown = {round: np.sign(self.shares(round)).tolist() for round in range(1, self.rounds + 1)}
        for active, phase in groupby(shown, shown.__getitem__):
            first, last = (rounds := [*phase])[0], rounds[-1]
            clients = np.array([self.shares(first), self.shares(last)])
            images = np.array([self.image_shares(first), self.image_shares(last)])
            for task in np.flatnonzero(active):
                name, classes = self.tasks[task].name, self.tasks[task].classes
                row = {"first": first, "last": last, "task": name}
                row["clients"] = np.rint(clients[:, task] * self.num_clients).astype(int).tolist()
                row["client_shares"] = clients[:, task].round(3).tolist()
                row["image_shares"] = images[:, task].round(3).tolist()
                few = " .. ".join(classes[:1] + classes[-1:])
                row["classes"] = f"{len(classes)}: {few}"
                rows.append(row)
        return rows

    @property
    def _registry(self) -> DatasetRegistry:
        asked = self.hparams
        return DatasetRegistry(asked.data_dir, asked.cache_dir, asked.size, asked.download)

    @cached_property
    def _holdings(self) -> Holdings | None:
        """What clients hold, if they do."""
        who = self.num_clients, self.clients_per_round, self.held, self.seed
        return Holdings(self._registry, self.sources, *who) if self.held else None

    @cached_property
    def _collection(self) -> Collection:
        if self._holdings:
            return self._holdings.tests()
        asked = self.hparams
        tables = [self._registry.open(source) for source in self.sources]
        tasks = self.incremental, len(self.schedule.windows), self.domains, asked.shuffle_classes
        return collect(tables, *tasks, asked.validation, self.seed)

    @property
    def _who(self) -> Partitioner | Holdings:
        """Who knows who takes part."""
        return self._holdings or self._partitioner

    @cached_property
    def _partitioner(self) -> Partitioner:
        data, asked = self._collection, self.hparams
        images = [data.images(data.train, task) for task in range(len(data.tasks))]
        skew = asked.alpha if asked.partition == "dirichlet" else None
        draw = self.num_clients, self.clients_per_round, skew, asked.samples_per_round, self.seed
        return Partitioner(data.train.labels, images, self.schedule, *draw)

    @property
    def classes(self) -> tuple[str, ...]:
        """All classes `<source>/<class name>`, in the order in which labels count them."""
        return self._collection.classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self._collection.image_shape

    @property
    def preprocess(self) -> Preprocess:
        """How pixels become network input, without augmentation."""
        return self._collection.preprocess

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks in their order in time."""
        return self._collection.tasks

    def participants(self, round: int) -> tuple[int, ...]:
        """A seeded sample of the clients that have data this round, in order."""
        return self._welcome(round, self._who.participants(self._known(round)[0]))

    def more_participants(self, round: int, clients: int) -> tuple[int, ...]:
        """A seeded sample of the other clients that have data, for so many in all, in order."""
        return self._welcome(round, self._who.more_participants(self._known(round)[0], clients))

    def _welcome(self, round: int, chosen: Sequence[int]) -> tuple[int, ...]:
        """Those that are not expelled; nobody takes their place."""
        return tuple(one for one in chosen if round < self.expelled.get(one, math.inf))

    def task_of(self, round: int, client: int) -> int:
        """The task that a client is on."""
        return self._who.task_of(*self._known(round, client))

    def counts(self, round: int, client: int) -> dict[str, int]:
        """How many images of each class a client shows; no pixel is read."""
        if self._holdings:
            return self._holdings.counts(*self._known(round, client))
        shown = self._partitioner.shown(*self._known(round, client))
        found = np.unique(self._collection.train.labels[shown], return_counts=True)
        return {self.classes[label]: int(count) for label, count in zip(*found, strict=True)}

    def announce(self, round: int, client: int) -> dict[str, int]:
        """The same, for good: from now on a client that holds its images shows just these."""
        known = self._known(round, client)
        return self._holdings.announce(*known) if self._holdings else self.counts(*known)

    def train(self, round: int, client: int) -> ImageSet:
        """The images that a client trains on in a round; empty if it has none."""
        if self._holdings:
            images = self._holdings.shown(*self._known(round, client))
        else:
            data, shown = self._collection, self._partitioner.shown(*self._known(round, client))
            images = data.image_set(data.train, shown, self.task_of(round, client))
        look = replace(images.preprocess, flip=self.hparams.flip, shift=self.hparams.shift)
        return replace(images, preprocess=look)

    def at(self, round: int, client: int, batch_size: int = 64) -> ClientData:
        """What `trainer.fit(module, datamodule=stream.at(round, client))` trains on."""
        return ClientData(self.train(round, client), batch_size)

    def test(self, task: int) -> ImageSet:
        """The full test set of a task."""
        data = self._collection
        return data.image_set(data.test, data.images(data.test, task), task)

    def test_now(self, round: int, images: int | None = None) -> ImageSet:
        """At most so many test images, mixed as in the round; a task gives the same ones first."""
        data = self._collection
        shares = {task: share for task, share in enumerate(self.image_shares(round)) if share}
        draw = partial(draws, self.seed, "test now")
        mixed = {task: draw(task).permutation(data.images(data.test, task)) for task in shares}
        most = min(int(len(mixed[task]) / share + 1e-9) for task, share in shares.items())
        counts = largest_remainder([*shares.values()], min(images or most, most))
        chosen = [(task, mixed[task][:count]) for task, count in zip(shares, counts, strict=True)]
        return joined([data.image_set(data.test, np.sort(some), task) for task, some in chosen])

    def test_dataloader(self) -> list[DataLoader[Batch]]:
        """One loader a task, so `Trainer.test(module, datamodule=stream)` tests all of them."""
        tests = (self.test(task) for task in range(len(self.tasks)))
        return [images.loader(_TEST_BATCH, shuffle=False) for images in tests]

    def prepare_data(self) -> None:
        """Fetch what is missing and decode what is not cached; called once per machine."""
        _ = self._collection

    def _known(self, round: int, client: int = 0) -> tuple[int, int]:
        """The same round and client, if there are such."""
        if not 1 <= round <= self.rounds:
            raise IndexError(f"round {round} is not one of 1..{self.rounds}")
        if not 0 <= client < self.num_clients:
            raise IndexError(f"client {client} is not one of 0..{self.num_clients - 1}")
        return round, client
