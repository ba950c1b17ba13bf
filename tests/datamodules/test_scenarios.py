"""Class groups and schedules: nothing lost, proportions right, nobody moves back."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.scenarios import (
    Schedule,
    class_groups,
    consecutive,
    gradual,
    largest_remainder,
)
from fedbnn.errors import ConfigError

MANY = settings(max_examples=100, deadline=None)
PAPER_TINY = ((0, 30), (20, 55), (45, 80), (70, 100))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any legal schedule of up to five tasks, overlaps of several tasks included."""
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    ends = list(accumulate(lengths))
    if len(ends) == 1 or draw(st.booleans()):
        return consecutive(ends)
    late = draw(st.integers(0, ends[-1] - ends[-2] - 1))
    return consecutive(ends, late)


@MANY
@given(st.integers(1, 200), st.data())
def test_groups_hold_every_class_once_and_sizes_differ_by_at_most_one(
    classes: int, data: st.DataObject
) -> None:
    groups = class_groups(classes, data.draw(st.integers(1, classes)))
    assert [label for group in groups for label in group] == list(range(classes))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_a_remainder_goes_to_the_first_groups() -> None:
    assert [len(group) for group in class_groups(10, 3)] == [4, 3, 3]


@pytest.mark.parametrize("tasks", [0, 11])
def test_impossible_groups_are_refused(tasks: int) -> None:
    with pytest.raises(ConfigError, match="choose 1 to 10 tasks"):
        class_groups(10, tasks)


@MANY
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.integers(0, 1000))
def test_largest_remainder_is_whole_complete_and_less_than_one_off(
    weights: list[float], total: int
) -> None:
    numbers = largest_remainder(weights, total)
    quota = np.array(weights) / sum(weights) * total
    assert sum(numbers) == total
    assert np.all(np.abs(np.array(numbers) - quota) < 1 + 1e-6)


def test_largest_remainder_of_a_known_case() -> None:
    assert largest_remainder([47_000, 16_000, 15_800, 12_000, 6_100, 3_100], 10) == (
        5,
        2,
        1,
        1,
        1,
        0,
    )


@MANY
@given(schedules(), st.integers(1, 40))
def test_every_client_is_on_one_active_task_and_never_moves_back(
    schedule: Schedule, clients: int
) -> None:
    tasks = np.array(
        [
            schedule.task_of(round, np.arange(clients), clients)
            for round in range(1, schedule.rounds + 1)
        ]
    )
    assert np.all(np.diff(tasks, axis=0) >= 0)
    for round, row in enumerate(tasks, 1):
        counts = np.bincount(row, minlength=len(schedule.windows))
        assert tuple(counts) == schedule.clients_on(round, clients)
        outside = [not start < round <= end for start, end in schedule.windows]
        assert not counts[outside].any()


@MANY
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.integers(1, 500))
def test_in_an_overlap_the_proportion_moves_linearly(
    before: int, overlap: int, after: int, clients: int
) -> None:
    schedule = gradual([(0, before + overlap), (before, before + overlap + after)])
    for round in range(1, schedule.rounds + 1):
        ideal = min(max((round - before) / (overlap + 1), 0), 1)
        old, new = schedule.clients_on(round, clients)
        assert old + new == clients
        assert abs(new - ideal * clients) <= 0.5 + 1e-9


def test_the_gradual_schedule_of_the_paper() -> None:
    schedule = gradual(PAPER_TINY)
    assert (schedule.rounds, schedule.task_ends) == (100, (30, 55, 80, 100))
    assert schedule.clients_on(20, 110) == (110, 0, 0, 0)
    assert [schedule.clients_on(round, 110)[1] for round in range(21, 32)] == [
        10,
        20,
        30,
        40,
        50,
        60,
        70,
        80,
        90,
        100,
        110,
    ]
    assert schedule.clients_on(100, 110) == (0, 0, 0, 110)


def test_separate_clients_change_together_after_each_boundary() -> None:
    schedule = consecutive([25, 50])
    assert schedule.clients_on(25, 7) == (7, 0)
    assert schedule.clients_on(26, 7) == (0, 7)


@MANY
@given(st.integers(1, 6), st.integers(1, 60))
def test_a_staggered_client_has_one_offset_at_every_boundary(stagger: int, clients: int) -> None:
    ends = [3, 10, 17, 30]
    schedule = consecutive(ends, stagger)
    tasks = np.array(
        [schedule.task_of(round, np.arange(clients), clients) for round in range(1, 31)]
    )
    changes = [1 + (tasks <= task).sum(0) for task in range(3)]
    offsets = [change - 1 - end for change, end in zip(changes, ends, strict=False)]
    assert all(np.array_equal(first, second) for first, second in pairwise(offsets))
    sizes = np.bincount(offsets[0], minlength=stagger + 1)
    assert len(sizes) == stagger + 1
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize(
    "durations",
    [
        [],
        [(1, 5)],
        [(0, 0)],
        [(0, 5), (6, 9)],
        [(0, 5), (0, 9)],
        [(0, 5), (3, 5)],
        [(0, 9), (3, 5)],
        [(0, 5), (5, 4)],
    ],
)
def test_gaps_and_disorder_are_refused(durations: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match="tasks cannot last"):
        gradual(durations)
