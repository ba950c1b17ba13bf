"""A federated stream of images: which client sees what in which round, and what the model is tested on."""

from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader

from datamodules import settings
from datamodules.budgets import SampleBudget
from datamodules.client_data import ClientData
from datamodules.collection import Collection, Task, collect, joined
from datamodules.partitioner import Partitioner
from datamodules.partitions import Partition, draws
from datamodules.registry import DatasetRegistry
from datamodules.scenarios import Integers, largest_remainder
from fedbnn.images import Batch, ImageSet, Preprocess

_TEST_BATCH = 256


class FederatedStream(LightningDataModule):
    """The `stream:` section of a configuration. Making one opens no file; data are opened when first asked for.

    Rounds are 1..rounds and clients 0..num_clients - 1. Every draw is addressed by (seed, purpose, round, client), so
    the order of calls does not matter.
    """

    def __init__(
        self,
        incremental: Literal["class", "task", "domain"] = "class",
        sources: list[str] | str = "digits",
        tasks: int | None = None,
        domains: list[str] | None = None,
        class_order: int | None = None,
        schedule: Literal["separate", "staggered", "gradual"] = "separate",
        rounds_per_task: int | None = None,
        boundaries: list[int] | None = None,
        durations: list[tuple[int, int]] | None = None,
        stagger: int | None = None,
        clients: int = 100,
        clients_per_round: int = 10,
        partition: Literal["dirichlet", "iid", "shards"] = "dirichlet",
        alpha: float = 1.0,
        shards_per_client: int = 2,
        samples_per_round: int | None = None,
        samples_per_client: int | None = None,
        replacement: bool = False,
        show_once: bool = False,
        validation: bool = False,
        validation_share: float = 0.1,
        data_dir: str = "data",
        cache_dir: str | None = None,
        size: int | None = None,
        download: bool = False,
        flip: bool = False,
        shift: int = 0,
        seed: int = 0,
    ) -> None:
        """Describe the stream.

        Args:
            incremental: What changes over time: `class` groups of the sources, `task` (one source after the other), `domain`.
            sources: Names of data sets, or `folder:PATH` for images of your own (PATH/train/CLASS/*.png, PATH/test/CLASS/*.png).
            tasks: Number of class groups. With `task` and `domain` it follows from the list.
            domains: `clean`, `rotation:DEGREES`, `noise:DEVIATION`, `blur:SIGMA`, `contrast:FACTOR` or `brightness:FACTOR` each.
            class_order: Seed of a shuffle of the classes before they are grouped; null keeps the order of the source.
            schedule: `separate` (clients change together), `staggered` (each at its own offset), `gradual` (durations overlap).
            rounds_per_task: Length of every task, for `separate` and `staggered`.
            boundaries: Or the last round of each task.
            durations: For `gradual`: [start, end] of each task; it has clients in rounds start + 1 .. end.
            stagger: For `staggered`: the last client changes this many rounds after the first.
            clients: Number of clients.
            clients_per_round: How many of them take part in a round.
            partition: `dirichlet`, `iid` or `shards`: how the images of a task are divided among the clients on it.
            alpha: Dirichlet concentration per class; small is more skewed.
            shards_per_client: For `shards`.
            samples_per_round: Images drawn in a round over all participants; null is all they own.
            samples_per_client: Or images drawn by each participant.
            replacement: Whether a draw may take the same image twice.
            show_once: True streaming: every image belongs to one round only.
            validation: Test on a part of the train split that is then never trained on; for tuning.
            validation_share: That part.
            data_dir: Where data sets are.
            cache_dir: Where decoded images go; null is DATA_DIR/.cache.
            size: Resize images to size x size.
            download: Fetch data sets that are missing.
            flip: Mirror training images at random.
            shift: Move training images by up to this many pixels.
            seed: Seed of every draw.
        """
        self.arguments = {
            name: value for name, value in locals().items() if name not in ("self", "__class__")
        }
        super().__init__()
        self.incremental = settings.choose("incremental", incremental, settings.INCREMENTS)
        self.sources = settings.source_names(sources)
        self.domains = settings.domain_names(incremental, domains, self.sources)
        timing = settings.Timing(schedule, rounds_per_task, boundaries, durations, stagger)
        self._task_count = settings.task_count(
            incremental, tasks, len(self.domains or self.sources), timing.entries()
        )
        self.schedule = timing.build(self._task_count)
        settings.check_numbers(self.arguments)
        self.num_clients, self.clients_per_round, self.seed = clients, clients_per_round, seed
        self._partition = Partition(
            settings.choose("partition", partition, settings.PARTITIONS), alpha, shards_per_client
        )
        self._budget = SampleBudget(samples_per_round, samples_per_client, replacement, show_once)
        self._budget.check(clients_per_round)
        self._class_order, self._held_out = class_order, validation_share if validation else 0.0
        self._flip, self._shift = flip, shift
        self._registry = DatasetRegistry(*settings.folders(data_dir, cache_dir), size, download)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy for another process is made from the settings; it maps the cached images instead of carrying them."""
        return _from_arguments, (self.arguments,)

    @property
    def rounds(self) -> int:
        """The number of the last round."""
        return self.schedule.rounds

    def shares(self, round: int) -> tuple[float, ...]:
        """The share of the clients on each task."""
        return tuple(
            count / self.num_clients
            for count in self.schedule.clients_on(self._known(round), self.num_clients)
        )

    @property
    def separate(self) -> bool:
        """Whether all clients change over together, so that a task has an end."""
        return self.arguments["schedule"] == "separate"

    def task_ends(self) -> tuple[int, ...]:
        """The last round in which each task has clients."""
        return self.schedule.task_ends

    @cached_property
    def _collection(self) -> Collection:
        tables = [self._registry.open(source) for source in self.sources]
        return collect(
            tables,
            self.incremental,
            self._task_count,
            self.domains,
            self._class_order,
            self._held_out,
            self.seed,
        )

    @cached_property
    def _partitioner(self) -> Partitioner:
        data = self._collection
        images = [data.images(data.train, task) for task in range(len(data.tasks))]
        return Partitioner(
            data.train.labels,
            images,
            self.schedule,
            self._partition,
            self._budget,
            self.num_clients,
            self.seed,
        )

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
        return self._partitioner.participants(self._known(round), self.clients_per_round)

    def task_of(self, round: int, client: int) -> int:
        """The task that a client is on."""
        return self._partitioner.task_of(self._known(round), self._client(client))

    def counts(self, round: int, client: int) -> dict[str, int]:
        """How many images of each class a client shows; no pixel is read."""
        labels, counts = np.unique(
            self._collection.train.labels[self._shown(round, client)], return_counts=True
        )
        return {
            self.classes[label]: int(count) for label, count in zip(labels, counts, strict=True)
        }

    def train(self, round: int, client: int) -> ImageSet:
        """The images that a client trains on in a round; empty if it has none."""
        data = self._collection
        look = replace(data.preprocess, flip=self._flip, shift=self._shift)
        images = data.image_set(data.train, self._shown(round, client), self.task_of(round, client))
        return replace(images, preprocess=look, training=True)

    def _shown(self, round: int, client: int) -> Integers:
        return self._partitioner.shown(
            self._known(round), self._client(client), self.participants(round)
        )

    def test(self, task: int) -> ImageSet:
        """The full test set of a task."""
        data = self._collection
        return data.image_set(data.test, data.images(data.test, task), task)

    def test_now(self, round: int, images: int | None = None) -> ImageSet:
        """Test images of the tasks in their shares of this round, at most `images`; a task always gives the same ones first."""
        data, shares = self._collection, self.shares(round)
        active = [task for task, share in enumerate(shares) if share]
        mixed = {
            task: draws(self.seed, "test now", task).permutation(data.images(data.test, task))
            for task in active
        }
        most = min(int(len(mixed[task]) / shares[task] + 1e-9) for task in active)
        counts = largest_remainder(
            [shares[task] for task in active], most if images is None else min(images, most)
        )
        chosen = [
            (task, np.sort(mixed[task][:count])) for task, count in zip(active, counts, strict=True)
        ]
        return joined([data.image_set(data.test, positions, task) for task, positions in chosen])

    def at(self, round: int, client: int, batch_size: int = 64) -> ClientData:
        """What one client has in one round, for `Trainer.fit(module, datamodule=stream.at(round, client))`."""
        return ClientData(self.train(round, client), batch_size)

    def test_dataloader(self) -> list[DataLoader[Batch]]:
        """One loader a task, so `Trainer.test(module, datamodule=stream)` tests all of them."""
        return [
            self.test(task).loader(_TEST_BATCH, shuffle=False) for task in range(len(self.tasks))
        ]

    def prepare_data(self) -> None:
        """Fetch what is missing and decode what is not cached; Lightning calls it once per machine."""
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Open the sources."""
        self._partitioner

    def _known(self, round: int) -> int:
        if not 1 <= round <= self.rounds:
            raise IndexError(f"round {round} is not one of 1..{self.rounds}")
        return round

    def _client(self, client: int) -> int:
        if not 0 <= client < self.num_clients:
            raise IndexError(f"client {client} is not one of 0..{self.num_clients - 1}")
        return client


def _from_arguments(arguments: dict[str, Any]) -> FederatedStream:
    return FederatedStream(**arguments)
