"""Scenarios as pure functions of labels: which classes form a task, who is on which task when, who
owns which image, who takes part, and what each shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fedbnn.errors import ConfigError
from fedbnn.seeds import address

Integers = NDArray[np.int64]
Window = tuple[int, int]


def require(condition: bool, key: str, what: str, fix: str) -> None:
    """Refuse a setting of the stream that cannot be meant."""
    if not condition:
        raise ConfigError(what, f"stream.{key}", fix)


def class_groups(classes: int, tasks: int) -> tuple[range, ...]:
    """Consecutive groups, sizes at most one apart: the first take the remainder, none is lost."""
    what, fix = f"{tasks} tasks of {classes} classes", f"choose 1 to {classes} tasks"
    require(1 <= tasks <= classes, "tasks", what, fix)
    groups = np.array_split(np.arange(classes), tasks)
    return tuple(range(int(group[0]), int(group[-1]) + 1) for group in groups)


def largest_remainder(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """Whole n_i with sum `total`: floor(q_i) or floor(q_i) + 1, where q_i = total w_i / sum w."""
    quota = np.asarray(weights, np.float64) / np.sum(weights) * total
    whole = np.floor(quota + 1e-9).astype(np.int64)
    ahead = np.argsort(-(quota - whole), kind="stable")[: total - int(whole.sum())]
    whole[ahead] += 1
    return tuple(whole.tolist())


@dataclass(frozen=True)
class Schedule:
    """Tasks in windows (start, end]: task t has clients in the rounds start_t + 1 .. end_t.

    Consecutive windows touch or overlap. In an overlap the clients change over one
    after the other, in one order for the whole run, so a client that moved on never comes back.
    """

    windows: tuple[Window, ...]

    @property
    def rounds(self) -> int:
        """The last round."""
        return self.windows[-1][1]

    @property
    def task_ends(self) -> tuple[int, ...]:
        """The last round in which each task has clients."""
        return tuple(end for _, end in self.windows)

    def moved(self, round: int, clients: int) -> tuple[int, ...]:
        """For each change of task, how many of the clients have made it (by largest remainder).

        In an overlap of rounds a + 1 .. b it is a share of (r - a) / (b - a + 1).
        """
        overlaps = [(start, end) for (_, end), (start, _) in pairwise(self.windows)]
        far = [min(max((round - a) / (b - a + 1), 0.0), 1.0) for a, b in overlaps]
        return tuple(largest_remainder((1 - share, share), clients)[1] for share in far)

    def clients_on(self, round: int, clients: int) -> tuple[int, ...]:
        """How many clients are on each task."""
        passed = (clients, *self.moved(round, clients), 0)
        return tuple(before - after for before, after in pairwise(passed))

    def task_of(self, round: int, rank: Integers, clients: int) -> Integers:
        """The task of the clients at these places in the order of changing over (0 moves first)."""
        moved = np.asarray(self.moved(round, clients), np.int64)
        return np.searchsorted(-moved, -rank, side="left")


def consecutive(ends: Sequence[int], stagger: int = 0) -> Schedule:
    """`ends` are the last rounds of the tasks; all clients change together, or staggered.

    Then each changes at an offset of its own, evenly spread over 0..stagger rounds.
    """
    late = [end + stagger for end in ends[:-1]] + [*ends[-1:]]
    return _checked([*zip((0, *ends), late, strict=False)], "stagger" if stagger else "boundaries")


def gradual(durations: Sequence[Window]) -> Schedule:
    """Overlapping durations `start-end`; in an overlap the newer task's share grows linearly."""
    return _checked([(int(start), int(end)) for start, end in durations], "durations")


def _checked(windows: list[Window], key: str) -> Schedule:
    """A schedule whose tasks begin and end in order and leave no round empty."""
    text = ", ".join(f"{start}-{end}" for start, end in windows) or "no rounds"
    begins = bool(windows) and windows[0][0] == 0 and all(start < end for start, end in windows)
    fix = "the first begins at 0, and each ends after it begins"
    require(begins, key, f"tasks cannot last {text}", fix)
    ordered = all(a < later <= b < end for (a, b), (later, end) in pairwise(windows))
    fix = "each begins after the one before it and no later than that ends, and ends after it"
    require(ordered, key, f"tasks cannot last {text}", fix)
    return Schedule(tuple(windows))


def timed(
    tasks: int,
    kind: str,
    rounds_per_task: int | None,
    boundaries: Sequence[int] | None,
    durations: Sequence[Window] | None,
    stagger: int | None,
) -> Schedule:
    """The schedule of so many tasks that these settings of a stream describe, if they agree."""
    owners = {"durations": (durations, "gradual"), "stagger": (stagger, "staggered")}
    for key, (value, owner) in owners.items():
        fits, what = (value is not None) == (kind == owner), f"{key} and schedule: {owner}"
        require(fits, key, f"{what} belong together", "give both or neither")
    said = (rounds_per_task is not None) + (boundaries is not None)
    if durations is not None:
        what, fix = "durations say how long tasks last", "drop rounds_per_task and boundaries"
        require(said == 0, "durations", what, fix)
        return gradual(durations)
    what = f"the length of tasks is said {said} times"
    require(said == 1, "rounds_per_task", what, "give it or boundaries")
    ends = boundaries or [(task + 1) * (rounds_per_task or 1) for task in range(tasks)]
    return consecutive(ends, stagger or 0)


def task_count(incremental: str, tasks: int | None, listed: int, entries: int | None) -> int:
    """How many tasks: as asked or scheduled (class), or one for each source or domain `listed`."""
    counted = (tasks or entries) if incremental == "class" else listed
    if counted is None:
        raise ConfigError("how many tasks is not said", "stream.tasks", "for example tasks: 5")
    what = f"{tasks} tasks, but there are {counted}"
    require(tasks in (None, counted), "tasks", what, "leave tasks out")
    what = f"{counted} tasks, but {entries} in the schedule"
    require(entries in (None, counted), "schedule", what, "give one entry per task")
    return counted


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


def shared_out(sizes: Integers, parts: NDArray[np.float64], total: int) -> Integers:
    """How many images participants show, who own so many, if the round has `total` for all.

    n_i = s r_i size_i by largest remainder, where r_i is the part of its images that a client of
    its task shows in the mean, and s makes the sum `total`, if nobody has to show more than it
    owns: s <= 1 / max r. Each shows at least one image.
    """
    rest = (sizes - 1) * parts
    left = min(total - len(sizes), int(rest.sum() / parts.max() + 1e-9))
    return 1 + np.asarray(largest_remainder(rest, left), np.int64) if left > 0 else sizes * 0 + 1


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

    def more_participants(self, round: int, clients: int) -> tuple[int, ...]:
        """A random sample of the others that have images, for so many in all, in order."""
        what = f"only the clients of a round share its {self.samples_per_round} images"
        fix = "leave it out, or head.clients_per_round"
        require(self.samples_per_round is None, "samples_per_round", what, fix)
        chosen = self.participants(round)
        ready = set(range(self.clients)) - set(chosen)
        others = [client for client in sorted(ready) if len(self.owned(round, client))]
        count = min(max(clients - len(chosen), 0), len(others))
        random = draws(self.seed, "more participants", round)
        return tuple(np.sort(random.choice(others, count, replace=False)).tolist())

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

        It is proportional to the clients on the task, times what one of them shows in the mean.
        """
        each = [self._part(task) * len(images) for task, images in enumerate(self.images)]
        weights = np.multiply(self.schedule.clients_on(round, self.clients), each)
        return tuple((weights / weights.sum()).tolist())

    def _part(self, task: int) -> float:
        """The part of its images that a client on this task shows, in the mean.

        All of them, or what makes |t| / clients the client's part of the round's draw.
        """
        most = (self.samples_per_round or np.inf) / self.clients_per_round
        return min(1.0, most * self.clients / max(len(self.images[task]), 1))

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
        """How many images these participants show: all they own, or their parts of it.

        So what a client shows is in proportion to what it owns, also beside clients of other tasks.
        """
        sizes = np.array([len(self.owned(round, client)) for client in chosen], np.int64)
        if self.samples_per_round is None or not chosen:
            return sizes.tolist()
        parts = np.array([self._part(self.task_of(round, client)) for client in chosen])
        return shared_out(sizes, parts, self.samples_per_round).tolist()
