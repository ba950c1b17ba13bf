"""Who has which images in which round. It knows labels only, never pixels, and costs no time per idle client."""

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from datamodules.budgets import SampleBudget, shown_once
from datamodules.partitions import Assignment, Partition, draws
from datamodules.scenarios import Integers, Schedule

_ASSIGNMENTS_KEPT = 8


class Partitioner:
    """Deals the images of each task to the clients that are on it.

    `labels[i]` is the class of image i and `images[t]` are the images of task t. Clients change over in one random
    order, fixed for the run, so those on a task are always a slice of that order.
    """

    def __init__(
        self,
        labels: Integers,
        images: Sequence[Integers],
        schedule: Schedule,
        partition: Partition,
        budget: SampleBudget,
        clients: int,
        seed: int,
    ) -> None:
        self.labels, self.images, self.schedule = labels, tuple(images), schedule
        self.partition, self.budget, self.clients, self.seed = partition, budget, clients, seed
        self._assigned = lru_cache(_ASSIGNMENTS_KEPT)(self._assign)
        self._chosen = lru_cache(_ASSIGNMENTS_KEPT)(self._choose)

    @cached_property
    def _order(self) -> Integers:
        return draws(self.seed, "order of changing over").permutation(self.clients)

    @cached_property
    def _rank(self) -> Integers:
        return np.argsort(self._order)

    def task_of(self, round: int, client: int) -> int:
        """The task that a client is on."""
        return int(self.schedule.task_of(round, self._rank[[client]], self.clients)[0])

    def assignment(self, task: int, round: int) -> Assignment:
        """The images of the task, divided among the clients that are on it this round."""
        passed = (self.clients, *self.schedule.moved(round, self.clients), 0)
        return self._assigned(
            task, passed[task + 1], passed[task], round if self.budget.show_once else 0
        )

    def _assign(self, task: int, first: int, last: int, round: int) -> Assignment:
        """Divide among the clients at the places first .. last - 1 of the order; `round` matters when images are shown once."""
        images = self.images[task]
        if self.budget.show_once:
            mixed = draws(self.seed, "show once", task).permutation(images)
            images = shown_once(mixed, task, round, self.schedule, self.clients)
        members = np.sort(self._order[first:last])
        return Assignment.of(
            images, self.partition.owners(self.labels[images], members, self.clients, self.seed)
        )

    def participants(self, round: int, count: int) -> tuple[int, ...]:
        """A random sample of the clients that have images this round, in order."""
        return self._chosen(round, count)

    def _choose(self, round: int, count: int) -> tuple[int, ...]:
        active = [
            task
            for task, clients in enumerate(self.schedule.clients_on(round, self.clients))
            if clients
        ]
        ready = np.unique(np.concatenate([self.assignment(task, round).owners for task in active]))
        random = draws(self.seed, "participants", round)
        return tuple(
            np.sort(
                random.choice(ready, min(count, len(ready)), replace=False, shuffle=False)
            ).tolist()
        )

    def owned(self, round: int, client: int) -> Integers:
        """All images that a client could show this round."""
        return self.assignment(self.task_of(round, client), round).images_of(client)

    def shown(self, round: int, client: int, participants: Sequence[int]) -> Integers:
        """The images that a client trains on this round; a draw over the round is shared among its participants only."""
        owned = self.owned(round, client)
        count = self._count(round, client, participants, len(owned))
        if count == len(owned) and not self.budget.replacement:
            return owned
        random = draws(self.seed, "draw", round, client)
        return np.sort(random.choice(owned, count, replace=self.budget.replacement, shuffle=False))

    def _count(self, round: int, client: int, participants: Sequence[int], size: int) -> int:
        if self.budget.samples_per_round is None or not size:
            return self.budget.allowed([size])[0] if size else 0
        if client not in participants:
            return 0
        return self.budget.allowed([len(self.owned(round, other)) for other in participants])[
            participants.index(client)
        ]
