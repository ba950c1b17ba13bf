"""Who owns which image, who takes part, and what each shows: labels only, never pixels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from datamodules.scenarios import Integers, Schedule, largest_remainder
from fedbnn.seeds import address


def draws(seed: int, *path: int | str) -> np.random.Generator:
    """A numpy generator of its own for the address `path`."""
    return np.random.default_rng(address(seed, *path))


def by_owner(images: Integers, owners: Integers, clients: int) -> list[Integers]:
    """The images of each client, when every image has one owner."""
    ends = np.cumsum(np.bincount(owners, minlength=clients))
    return np.split(images[np.argsort(owners, kind="stable")], ends[:-1])


def preference(seed: int, label: int, clients: int, alpha: float) -> NDArray[np.float64]:
    """ln g_k of every client for one class, g_k ~ Gamma(alpha): normalised, Dirichlet(alpha).

    Drawn as Gamma(alpha + 1) U^(1/alpha), which never underflows.
    """
    random = draws(seed, "preference", label)
    gamma = random.gamma(alpha + 1, size=clients)
    return np.asarray(np.log(gamma) + np.log1p(-random.random(clients)) / alpha)


def dirichlet(labels: Integers, clients: int, alpha: float, seed: int) -> Integers:
    """The owner of each image: a class is cut over the clients in proportions ~ Dirichlet(alpha).

    Of the n images of a class, in random order, image j goes where (j + 1/2) / n falls.
    """
    owners = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        images = draws(seed, "order", int(label)).permutation(np.flatnonzero(labels == label))
        taste = preference(seed, int(label), clients, alpha)
        ladder = np.cumsum(np.exp(taste - taste.max()))
        place = (np.arange(len(images)) + 0.5) / len(images) * ladder[-1]
        owners[images] = np.searchsorted(ladder, place, side="right")
    return owners


def iid(labels: Integers, clients: int, seed: int) -> Integers:
    """The owner of each image, dealt like cards in random order: sizes are at most one apart."""
    random = draws(seed, "deal")
    dealt = random.permutation(clients)[np.arange(len(labels)) % clients]
    owners = np.empty(len(labels), np.int64)
    owners[random.permutation(len(labels))] = dealt
    return owners


def systematic(sizes: Sequence[int], total: int, start: float) -> Integers:
    """Whole n_i with sum `total`, next to and in the mean q_i = total size_i / sum size.

    n_i = floor(Q_i + start) - floor(Q_(i-1) + start), Q the running sums of q, start ~ U[0, 1).
    """
    marks = np.floor(np.cumsum([0, *sizes]) * total / max(sum(sizes), 1) + start)
    return np.diff(marks).astype(np.int64)


def shared_out(sizes: Integers, tasks: Integers, weights: Sequence[float], total: int) -> Integers:
    """How many images participants show, who own so many, if the round has `total` for all.

    By largest remainder: to each task by its weight, and of that to each of its participants by
    what it owns. Each shows at least one image, and none more than it owns.
    """
    shown, present = np.ones(len(sizes), np.int64), np.unique(tasks)
    parts = largest_remainder([weights[task] for task in present], total - len(sizes))
    for task, part in zip(present, parts, strict=True):
        on = np.flatnonzero((tasks == task) & (sizes > 1))
        shown[on] += largest_remainder(sizes[on] - 1, part) if len(on) else 0
    return np.minimum(sizes, shown)


@dataclass(frozen=True)
class Partitioner:
    """Deals every task once over all clients; a client shows its own part of the task it is on.

    So a share s of the clients shows, in the mean, a share s of the images of a task, and a client
    keeps its images whoever else arrives or leaves. `labels[i]` is the class of image i and
    `images[t]` are those of task t. With an `alpha` classes are skewed (Dirichlet), without one the
    deal is IID. Clients change over in one random order, fixed for the run.
    """

    labels: Integers
    images: Sequence[Integers]
    schedule: Schedule
    clients: int
    clients_per_round: int
    alpha: float | None = None
    samples_per_round: int | None = None
    seed: int = 0
    _shows: dict[int, dict[int, int]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def _rank(self) -> Integers:
        return np.argsort(draws(self.seed, "order of changing over").permutation(self.clients))

    @cached_property
    def parts(self) -> list[list[Integers]]:
        """The images of each task, divided among all clients once and for all."""
        deal = iid if self.alpha is None else partial(dirichlet, alpha=self.alpha)
        owners = (deal(self.labels[images], self.clients, seed=self.seed) for images in self.images)
        return [by_owner(*task, self.clients) for task in zip(self.images, owners, strict=True)]

    def task_of(self, round: int, client: int) -> int:
        """The task that a client is on."""
        return int(self.schedule.task_of(round, self._rank[[client]], self.clients)[0])

    def owned(self, round: int, client: int) -> Integers:
        """The client's part of the task that it is on."""
        return self.parts[self.task_of(round, client)][client]

    def participants(self, round: int) -> tuple[int, ...]:
        """A random sample of the clients that have images of the task they are on, in order."""
        return tuple(self._showing(round))

    def shown(self, round: int, client: int) -> Integers:
        """The images that a client trains on: what it owns, or its part of the round's draw."""
        owned = self.owned(round, client)
        count = self._showing(round).get(client, 0) if self.samples_per_round else len(owned)
        if count == len(owned):
            return owned
        random = draws(self.seed, "draw", round, client)
        return np.sort(random.choice(owned, count, replace=False, shuffle=False))

    def image_shares(self, round: int) -> tuple[float, ...]:
        """The share of each task in the images of a round, in expectation.

        It is proportional to the clients on the task, times what one of them shows: its part of the
        task, |t| / clients, but no more than its part of the round's draw.
        """
        most = (self.samples_per_round or np.inf) / self.clients_per_round
        each = [min(len(images) / self.clients, most) for images in self.images]
        weights = np.multiply(self.schedule.clients_on(round, self.clients), each)
        return tuple((weights / weights.sum()).tolist())

    def _showing(self, round: int) -> Mapping[int, int]:
        """The participants of a round, and how many images each shows."""
        if round not in self._shows:
            chosen = self._choose(round)
            self._shows[round] = dict(zip(chosen, self._counts(round, chosen), strict=True))
        return self._shows[round]

    def _choose(self, round: int) -> list[int]:
        """Every client that has images is as likely as any other, so tasks have their share."""
        on = self.schedule.task_of(round, self._rank, self.clients)
        active = np.unique(on).tolist()
        owns = {task: np.array([len(part) for part in self.parts[task]]) for task in active}
        ready = [np.flatnonzero((on == task) & (owns[task] > 0)) for task in active]
        sizes = [len(these) for these in ready]
        count = min(self.clients_per_round, sum(sizes))
        start = draws(self.seed, "tasks of participants", round).random()
        random, numbers = draws(self.seed, "participants", round), systematic(sizes, count, start)
        some = partial(random.choice, replace=False, shuffle=False)
        chosen = [some(*task) for task in zip(ready, numbers, strict=True)]
        return np.sort(np.concatenate(chosen)).tolist()

    def _counts(self, round: int, chosen: Sequence[int]) -> list[int]:
        """How many images these participants show: all they own, or a part of the round's draw.

        Tasks share the draw by their clients; by participants where one may have none of these.
        """
        sizes = np.array([len(self.owned(round, client)) for client in chosen], np.int64)
        if self.samples_per_round is None:
            return sizes.tolist()
        tasks = np.array([self.task_of(round, client) for client in chosen], np.int64)
        clients = self.schedule.clients_on(round, self.clients)
        sure = self.clients_per_round * min(filter(None, clients)) >= self.clients
        weights = clients if sure else np.bincount(tasks)
        return shared_out(sizes, tasks, weights, self.samples_per_round).tolist()
