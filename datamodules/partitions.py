"""Who owns which image, who takes part, and what each shows: labels only, never pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from datamodules.scenarios import Integers, Schedule, largest_remainder
from fedbnn.seeds import address

_ASSIGNMENTS_KEPT = 8


def draws(seed: int, *path: int | str) -> np.random.Generator:
    """A numpy generator of its own for the address `path`."""
    return np.random.default_rng(address(seed, *path))


@dataclass(frozen=True)
class Assignment:
    """Images sorted by owner: the images of a client are one slice, however many clients."""

    images: Integers
    owners: Integers

    @classmethod
    def of(cls, images: Integers, owners: Integers) -> "Assignment":
        """From images and the owner of each, in any order."""
        order = np.argsort(owners, kind="stable")
        return cls(images[order], owners[order])

    def images_of(self, client: int) -> Integers:
        """The images of one client."""
        first, last = np.searchsorted(self.owners, (client, client + 1))
        return self.images[first:last]


def preference(seed: int, label: int, clients: int, alpha: float) -> NDArray[np.float64]:
    """ln g_k of every client for one class, g_k ~ Gamma(alpha): normalised, Dirichlet(alpha).

    Drawn as Gamma(alpha + 1) U^(1/alpha), which never underflows.
    """
    random = draws(seed, "preference", label)
    return np.asarray(
        np.log(random.gamma(alpha + 1, size=clients)) + np.log1p(-random.random(clients)) / alpha
    )


def dirichlet(
    labels: Integers, members: Integers, clients: int, alpha: float, seed: int
) -> Integers:
    """The owner of each image: a class is cut over the members in proportions ~ Dirichlet(alpha).

    Of the n images of a class, in random order, image j goes where (j + 1/2) / n falls.
    """
    owners = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        images = draws(seed, "order", int(label)).permutation(np.flatnonzero(labels == label))
        taste = preference(seed, int(label), clients, alpha)[members]
        ladder = np.cumsum(np.exp(taste - taste.max()))
        place = (np.arange(len(images)) + 0.5) / len(images) * ladder[-1]
        owners[images] = members[np.searchsorted(ladder, place, side="right")]
    return owners


def iid(labels: Integers, members: Integers, seed: int) -> Integers:
    """The owner of each image, dealt like cards in random order: sizes are at most one apart."""
    random = draws(seed, "deal")
    owners = np.empty(len(labels), np.int64)
    owners[random.permutation(len(labels))] = random.permutation(members)[
        np.arange(len(labels)) % len(members)
    ]
    return owners


def shared_out(sizes: Sequence[int], total: int | None) -> tuple[int, ...]:
    """How many images participants draw that own this many: at most `total` together.

    In proportion to what they own, by largest remainder, each at least one.
    """
    if total is None or sum(sizes) <= total:
        return tuple(sizes)
    more = largest_remainder([size - 1 for size in sizes], total - len(sizes))
    return tuple(1 + extra for extra in more)


@dataclass(frozen=True)
class Partitioner:
    """Deals the images of each task to the clients that are on it.

    `labels[i]` is the class of image i and `images[t]` are the images of task t. With an `alpha`
    classes are skewed (Dirichlet), without one the deal is IID. Clients change over in one random
    order, fixed for the run, so those on a task are always a slice of that order.
    """

    labels: Integers
    images: Sequence[Integers]
    schedule: Schedule
    clients: int
    clients_per_round: int
    alpha: float | None = None
    samples_per_round: int | None = None
    seed: int = 0

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
        return self._assigned(task, passed[task + 1], passed[task])

    @cached_property
    def _assigned(self):
        return lru_cache(_ASSIGNMENTS_KEPT)(self._assign)

    def _assign(self, task: int, first: int, last: int) -> Assignment:
        """Divide among the clients at the places first .. last - 1 of the order."""
        images, members = self.images[task], np.sort(self._order[first:last])
        labels = self.labels[images]
        owners = (
            iid(labels, members, self.seed)
            if self.alpha is None
            else dirichlet(labels, members, self.clients, self.alpha, self.seed)
        )
        return Assignment.of(images, owners)

    def owned(self, round: int, client: int) -> Integers:
        """All images that a client could show this round."""
        return self.assignment(self.task_of(round, client), round).images_of(client)

    def participants(self, round: int) -> tuple[int, ...]:
        """A random sample of the clients that have images this round, in order."""
        return self._chosen(round)

    @cached_property
    def _chosen(self):
        return lru_cache(_ASSIGNMENTS_KEPT)(self._choose)

    def _choose(self, round: int) -> tuple[int, ...]:
        active = self.schedule.active(round, self.clients)
        ready = np.unique(np.concatenate([self.assignment(task, round).owners for task in active]))
        count = min(self.clients_per_round, len(ready))
        random = draws(self.seed, "participants", round)
        chosen = random.choice(ready, count, replace=False, shuffle=False)
        return tuple(np.sort(chosen).tolist())

    def shown(self, round: int, client: int) -> Integers:
        """The images that a client trains on: what it owns, or its part of the round's draw."""
        owned = self.owned(round, client)
        count = self._count(round, client, len(owned))
        if count == len(owned):
            return owned
        random = draws(self.seed, "draw", round, client)
        return np.sort(random.choice(owned, count, replace=False, shuffle=False))

    def _count(self, round: int, client: int, size: int) -> int:
        """How many images; those who stay at home have no part in a draw over the round."""
        chosen = self.participants(round)
        if self.samples_per_round is None or client not in chosen:
            return size if self.samples_per_round is None else 0
        sizes = [len(self.owned(round, other)) for other in chosen]
        return shared_out(sizes, self.samples_per_round)[chosen.index(client)]
