"""Scenarios as pure functions: which classes form a task, and who is on which task when."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbnn.errors import ConfigError

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
    size, more = divmod(classes, tasks)
    starts = [task * size + min(task, more) for task in range(tasks + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))


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

    Consecutive windows touch (`separate`) or overlap. In an overlap the clients change over one
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
        overlaps = [(start, end) for (_, end), (start, _) in itertools.pairwise(self.windows)]
        far = [min(max((round - a) / (b - a + 1), 0.0), 1.0) for a, b in overlaps]
        return tuple(largest_remainder((1 - share, share), clients)[1] for share in far)

    def clients_on(self, round: int, clients: int) -> tuple[int, ...]:
        """How many clients are on each task."""
        passed = (clients, *self.moved(round, clients), 0)
        return tuple(before - after for before, after in itertools.pairwise(passed))

    def task_of(self, round: int, rank: Integers, clients: int) -> Integers:
        """The task of the clients at these places in the order of changing over (0 moves first)."""
        moved = np.asarray(self.moved(round, clients), np.int64)
        return np.searchsorted(-moved, -rank, side="left")

    def phases(self, clients: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """Runs of rounds with the same active tasks: first round, last round, the tasks."""
        found: dict[tuple[int, ...], list[int]] = {}
        for round in range(1, self.rounds + 1):
            counts = enumerate(self.clients_on(round, clients))
            found.setdefault(tuple(task for task, count in counts if count), []).append(round)
        return tuple((rounds[0], rounds[-1], tasks) for tasks, rounds in found.items())


def separate(ends: Sequence[int]) -> Schedule:
    """All clients change together; `ends` are the last rounds of the tasks."""
    return _checked(list(zip((0, *ends), ends, strict=False)), "boundaries")


def staggered(ends: Sequence[int], stagger: int) -> Schedule:
    """Each client changes at an offset of its own, evenly spread over 0..stagger rounds."""
    late = [end + stagger for end in ends[:-1]] + [ends[-1]]
    return _checked(list(zip((0, *ends), late, strict=False)), "stagger")


def gradual(durations: Sequence[Window]) -> Schedule:
    """Overlapping durations `start-end`; in an overlap the newer task's share grows linearly."""
    return _checked([(int(start), int(end)) for start, end in durations], "durations")


def _checked(windows: list[Window], key: str) -> Schedule:
    """A schedule whose tasks begin and end in order and leave no round empty."""
    text = ", ".join(f"{start}-{end}" for start, end in windows) or "no rounds"
    begins = bool(windows) and windows[0][0] == 0 and all(start < end for start, end in windows)
    fix = "the first begins at 0, and each ends after it begins"
    require(begins, key, f"tasks cannot last {text}", fix)
    ordered = all(a < later <= b < end for (a, b), (later, end) in itertools.pairwise(windows))
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
    return separate(ends) if stagger is None else staggered(ends, stagger)


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
