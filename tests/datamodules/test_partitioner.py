"""Who has which images when: complete, disjoint, bounded, and the same in any order of asking."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.partitions import Partitioner, shared_out
from datamodules.scenarios import gradual, separate, staggered

MANY = settings(max_examples=40, deadline=None)
LABELS = np.tile(np.arange(6), 20)
IMAGES = [np.flatnonzero(task == LABELS // 2) for task in range(3)]
SCHEDULES = st.sampled_from(
    [separate([2, 4, 6]), staggered([2, 4, 7], 2), gradual([(0, 4), (2, 6), (5, 8)])]
)
ALPHAS = st.sampled_from([None, 0.1, 1.0])
CLIENTS = st.integers(1, 15)
SEEDS = st.integers(0, 50)


def partitioner(
    schedule=None, alpha=1.0, samples=None, clients=10, seed=0, at_once=4
) -> Partitioner:
    schedule = schedule or separate([2, 4, 6])
    return Partitioner(LABELS, IMAGES, schedule, clients, at_once, alpha, samples, seed)


@MANY
@given(SCHEDULES, ALPHAS, CLIENTS, SEEDS)
def test_active_tasks_are_dealt_completely_and_once(schedule, alpha, clients, seed) -> None:
    deals = partitioner(schedule, alpha, clients=clients, seed=seed)
    for round in range(1, schedule.rounds + 1):
        hands = [deals.shown(round, client).tolist() for client in range(clients)]
        active = [task for task, count in enumerate(schedule.clients_on(round, clients)) if count]
        assert sorted(image for hand in hands for image in hand) == sorted(
            image for task in active for image in IMAGES[task]
        )
        for client, hand in enumerate(hands):
            assert set(LABELS[hand] // 2) <= {deals.task_of(round, client)}


@MANY
@given(SCHEDULES, ALPHAS, st.sampled_from([None, 9]), st.randoms())
def test_the_order_of_asking_changes_nothing(schedule, alpha, samples, random) -> None:
    questions = [(round, client) for round in range(1, schedule.rounds + 1) for client in range(10)]
    forward, backward = (partitioner(schedule, alpha, samples) for _ in range(2))
    first = {place: forward.shown(*place).tolist() for place in questions}
    random.shuffle(questions)
    assert all(backward.shown(*place).tolist() == first[place] for place in questions)


def test_another_seed_is_another_stream() -> None:
    assert any(
        partitioner(seed=0).participants(1) != partitioner(seed=seed).participants(1)
        for seed in (1, 2, 3)
    )
    assert not np.array_equal(
        partitioner(seed=0).assignment(0, 1).owners, partitioner(seed=1).assignment(0, 1).owners
    )


def test_another_round_has_other_participants_of_the_same_persistent_clients() -> None:
    deals = partitioner(separate([20, 21, 22]))
    assert len({deals.participants(round) for round in range(1, 21)}) > 5
    assert all(
        np.array_equal(deals.owned(1, client), deals.owned(20, client)) for client in range(10)
    )


@MANY
@given(SCHEDULES, ALPHAS, CLIENTS, SEEDS, st.integers(1, 20))
def test_participants_are_distinct_clients_with_images(
    schedule, alpha, clients, seed, count
) -> None:
    deals = partitioner(schedule, alpha, clients=clients, seed=seed, at_once=count)
    for round in range(1, schedule.rounds + 1):
        chosen = deals.participants(round)
        ready = [client for client in range(clients) if len(deals.owned(round, client))]
        assert list(chosen) == sorted(set(chosen) & set(ready))
        assert len(chosen) == min(count, len(ready))


@MANY
@given(st.integers(4, 60), SEEDS)
def test_a_draw_over_the_round_is_exact_and_within_what_clients_own(total: int, seed: int) -> None:
    deals = partitioner(samples=total, seed=seed)
    hands = [deals.shown(3, client) for client in deals.participants(3)]
    owned = [deals.owned(3, client) for client in deals.participants(3)]
    assert sum(map(len, hands)) == min(total, sum(map(len, owned)))
    for hand, own in zip(hands, owned, strict=True):
        assert 1 <= len(set(hand)) == len(hand)
        assert set(hand) <= set(own)


def test_a_draw_over_the_round_leaves_nothing_for_those_who_stay_home() -> None:
    deals = partitioner(samples=20)
    home = set(range(10)) - set(deals.participants(1))
    assert all(len(deals.shown(1, client)) == 0 for client in home)


def test_a_draw_changes_with_the_round() -> None:
    deals = partitioner(separate([20, 21, 22]), samples=10, at_once=10)
    client = max(range(10), key=lambda number: len(deals.owned(1, number)))
    assert len({tuple(deals.shown(round, client)) for round in range(1, 21)}) > 3


def test_shares_of_a_draw_follow_what_participants_own() -> None:
    assert shared_out([100, 300, 600], 103) == (11, 31, 61)
    assert shared_out([1, 2, 3], 9) == (1, 2, 3)


@pytest.mark.parametrize(
    "schedule", [separate([10, 20, 30]), gradual([(0, 20), (10, 30), (29, 40)])]
)
def test_a_hundred_thousand_clients_cost_little(schedule) -> None:
    labels = np.repeat(np.arange(6), 5000)
    images = [np.flatnonzero(labels // 2 == task) for task in range(3)]
    started = time.process_time()
    deals = Partitioner(labels, images, schedule, 100_000, 100, 1.0)
    for round in range(11, 16):
        chosen = deals.participants(round)
        assert len(chosen) == 100
        assert all(len(deals.shown(round, client)) for client in chosen)
    assert time.process_time() - started < 5
