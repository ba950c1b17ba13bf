"""Scenarios as pure functions: which classes form a task, when tasks reign, and who is on which task."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbnn.errors import ConfigError

Integers = NDArray[np.int64]
Window = tuple[int, int]


def class_groups(classes: int, tasks: int) -> tuple[range, ...]:
    """Consecutive groups whose sizes differ by at most one; the first groups take the remainder, none is lost."""
    if not 1 <= tasks <= classes:
        raise ConfigError(
            f"{tasks} tasks of {classes} classes", "stream.tasks", f"choose 1 to {classes} tasks"
        )
    size, more = divmod(classes, tasks)
    starts = [task * size + min(task, more) for task in range(tasks + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))


def largest_remainder(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """Whole numbers n_i with sum `total`: n_i = floor(q_i) or floor(q_i) + 1, where q_i = total w_i / sum w."""
    quota = np.asarray(weights, np.float64) / np.sum(weights) * total
    whole = np.floor(quota + 1e-9).astype(np.int64)
    ahead = np.argsort(-(quota - whole), kind="stable")[: total - int(whole.sum())]
    whole[ahead] += 1
    return tuple(whole.tolist())


@dataclass(frozen=True)
class Schedule:
    """Tasks in windows (start, end]: task t has clients in the rounds start_t + 1 .. end_t.

    Consecutive windows touch (`separate`) or overlap. In an overlap the clients change over one after the other, in
    one order for the whole run, so a client that moved on never comes back.
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

    def proportion(self, task: int, round: int) -> float:
        """How far the change from `task` to the next has come: (r - a) / (b - a + 1) in an overlap of rounds a + 1 .. b."""
        start, end = self.windows[task + 1][0], self.windows[task][1]
        return float(np.clip((round - start) / (end - start + 1), 0, 1))

    def moved(self, round: int, clients: int) -> tuple[int, ...]:
        """For each change of task, how many of the clients have made it by this round (by largest remainder)."""
        share = [self.proportion(task, round) for task in range(len(self.windows) - 1)]
        return tuple(largest_remainder((1 - part, part), clients)[1] for part in share)

    def clients_on(self, round: int, clients: int) -> tuple[int, ...]:
        """How many clients are on each task."""
        passed = (clients, *self.moved(round, clients), 0)
        return tuple(before - after for before, after in itertools.pairwise(passed))

    def task_of(self, round: int, rank: Integers, clients: int) -> Integers:
        """The task of those of the `clients` that have these places in the order of changing over (0 moves first)."""
        moved = np.asarray(self.moved(round, clients), np.int64)
        return np.searchsorted(-moved, -rank, side="left")


def separate(ends: Sequence[int]) -> Schedule:
    """All clients change together; `ends` are the last rounds of the tasks."""
    return _checked(
        [(start, end) for start, end in zip((0, *ends), ends, strict=False)], "stream.boundaries"
    )


def staggered(ends: Sequence[int], stagger: int) -> Schedule:
    """Each client changes at an offset of its own, in 0..stagger rounds after the boundary, the offsets evenly spread."""
    starts = (0, *ends)
    late = [end + stagger for end in ends[:-1]] + [ends[-1]]
    return _checked(list(zip(starts, late, strict=False)), "stream.stagger")


def gradual(durations: Sequence[Window]) -> Schedule:
    """Overlapping durations `start-end`; in an overlap the share of the newer task grows linearly."""
    return _checked([(int(start), int(end)) for start, end in durations], "stream.durations")


def _checked(windows: list[Window], where: str) -> Schedule:
    """A schedule whose tasks begin and end in order and leave no round empty."""
    if not windows or windows[0][0] != 0 or any(start >= end for start, end in windows):
        raise ConfigError(
            f"tasks cannot last {_text(windows)}",
            where,
            "the first begins at 0, and each ends after it begins",
        )
    for (start, end), (later_start, later_end) in itertools.pairwise(windows):
        if not start < later_start <= end < later_end:
            fix = "each task begins after the one before it, no later than that one ends, and ends after it"
            raise ConfigError(f"tasks cannot last {_text(windows)}", where, fix)
    return Schedule(tuple(windows))


def _text(windows: Sequence[Window]) -> str:
    return ", ".join(f"{start}-{end}" for start, end in windows) or "no rounds"
