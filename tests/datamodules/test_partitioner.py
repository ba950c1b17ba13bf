"""Who has which images when: complete, disjoint, bounded, shown once, and the same in any order of asking."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.budgets import SampleBudget, shared_out
from datamodules.partitioner import Partitioner
from datamodules.partitions import Partition
from datamodules.scenarios import gradual, separate, staggered

MANY = settings(max_examples=40, deadline=None)
LABELS = np.tile(np.arange(6), 20)
IMAGES = [np.flatnonzero(task == LABELS // 2) for task in range(3)]
SCHEDULES = st.sampled_from(
    [separate([2, 4, 6]), staggered([2, 4, 7], 2), gradual([(0, 4), (2, 6), (5, 8)])]
)
PARTITIONS = st.builds(
    Partition,
    st.sampled_from(["dirichlet", "iid", "shards"]),
    st.sampled_from([0.1, 1.0]),
    st.just(2),
)
CLIENTS = st.integers(1, 15)
SEEDS = st.integers(0, 50)


def partitioner(schedule=None, partition=None, draw=None, clients=10, seed=0) -> Partitioner:
    schedule = schedule or separate([2, 4, 6])
    return Partitioner(
        LABELS,
        IMAGES,
        schedule,
        partition or Partition("dirichlet", 1.0, 2),
        draw or SampleBudget(),
        clients,
        seed,
    )


@MANY
@given(SCHEDULES, PARTITIONS, CLIENTS, SEEDS)
def test_active_tasks_are_dealt_completely_and_once(schedule, partition, clients, seed) -> None:
    deals = partitioner(schedule, partition, clients=clients, seed=seed)
    for round in range(1, schedule.rounds + 1):
        hands = [deals.shown(round, client, ()).tolist() for client in range(clients)]
        active = [task for task, count in enumerate(schedule.clients_on(round, clients)) if count]
        assert sorted(image for hand in hands for image in hand) == sorted(
            image for task in active for image in IMAGES[task]
        )
        for client, hand in enumerate(hands):
            assert set(LABELS[hand] // 2) <= {deals.task_of(round, client)}


@MANY
@given(SCHEDULES, PARTITIONS, CLIENTS, SEEDS)
def test_true_streaming_shows_every_image_in_one_round_only(
    schedule, partition, clients, seed
) -> None:
    deals = partitioner(schedule, partition, SampleBudget(show_once=True), clients, seed)
    shown = [
        deals.shown(round, client, ())
        for round in range(1, schedule.rounds + 1)
        for client in range(clients)
    ]
    on_time = [
        task
        for task in range(3)
        if any(schedule.clients_on(r, clients)[task] for r in range(1, schedule.rounds + 1))
    ]
    assert sorted(np.concatenate(shown).tolist()) == sorted(
        image for task in on_time for image in IMAGES[task]
    )


@MANY
@given(
    SCHEDULES,
    PARTITIONS,
    st.sampled_from(
        [
            SampleBudget(),
            SampleBudget(samples_per_client=3),
            SampleBudget(9),
            SampleBudget(show_once=True),
        ]
    ),
    st.randoms(),
)
def test_the_order_of_asking_changes_nothing(schedule, partition, draw, random) -> None:
    questions = [(round, client) for round in range(1, schedule.rounds + 1) for client in range(10)]
    forward = partitioner(schedule, partition, draw)
    first = {
        place: forward.shown(*place, forward.participants(place[0], 4)).tolist()
        for place in questions
    }
    random.shuffle(questions)
    backward = partitioner(schedule, partition, draw)
    assert all(
        backward.shown(*place, backward.participants(place[0], 4)).tolist() == first[place]
        for place in questions
    )


def test_another_seed_is_another_stream() -> None:
    assert any(
        partitioner(seed=0).participants(1, 4) != partitioner(seed=seed).participants(1, 4)
        for seed in (1, 2, 3)
    )
    assert not np.array_equal(
        partitioner(seed=0).assignment(0, 1).owners, partitioner(seed=1).assignment(0, 1).owners
    )


def test_another_round_has_other_participants_of_the_same_persistent_clients() -> None:
    deals = partitioner(separate([20, 21, 22]))
    assert len({deals.participants(round, 4) for round in range(1, 21)}) > 5
    assert all(
        np.array_equal(deals.owned(1, client), deals.owned(20, client)) for client in range(10)
    )


@MANY
@given(SCHEDULES, PARTITIONS, CLIENTS, SEEDS, st.integers(1, 20))
def test_participants_are_distinct_clients_with_images(
    schedule, partition, clients, seed, count
) -> None:
    deals = partitioner(schedule, partition, clients=clients, seed=seed)
    for round in (1, schedule.rounds):
        chosen = deals.participants(round, count)
        ready = [client for client in range(clients) if len(deals.owned(round, client))]
        assert list(chosen) == sorted(set(chosen) & set(ready))
        assert len(chosen) == min(count, len(ready))


@MANY
@given(st.integers(4, 60), st.booleans(), SEEDS)
def test_a_draw_over_the_round_is_exact_and_within_what_clients_own(
    total: int, replacement: bool, seed: int
) -> None:
    deals = partitioner(
        draw=SampleBudget(samples_per_round=total, replacement=replacement), seed=seed
    )
    chosen = deals.participants(3, 4)
    hands = [deals.shown(3, client, chosen) for client in chosen]
    owned = [deals.owned(3, client) for client in chosen]
    assert sum(map(len, hands)) == (total if replacement else min(total, sum(map(len, owned))))
    assert all(
        len(hand) >= 1 and set(hand) <= set(own) for hand, own in zip(hands, owned, strict=True)
    )
    assert replacement or all(len(set(hand)) == len(hand) for hand in hands)


def test_a_draw_over_the_round_leaves_nothing_for_those_who_stay_home() -> None:
    deals = partitioner(draw=SampleBudget(samples_per_round=20))
    chosen = deals.participants(1, 3)
    home = [client for client in range(10) if client not in chosen]
    assert all(len(deals.shown(1, client, chosen)) == 0 for client in home)


def test_a_draw_by_each_client_changes_with_the_round() -> None:
    deals = partitioner(separate([20, 21, 22]), draw=SampleBudget(samples_per_client=2))
    client = max(range(10), key=lambda number: len(deals.owned(1, number)))
    hands = [tuple(deals.shown(round, client, ())) for round in range(1, 21)]
    assert {len(hand) for hand in hands} == {2}
    assert len(set(hands)) > 3


def test_shares_of_a_draw_follow_what_participants_own() -> None:
    assert shared_out([100, 300, 600], 103) == (11, 31, 61)
    assert shared_out([1, 1, 1], 9) == (3, 3, 3)


@pytest.mark.parametrize(
    "schedule", [separate([10, 20, 30]), gradual([(0, 20), (10, 30), (29, 40)])]
)
def test_a_hundred_thousand_clients_cost_little(schedule) -> None:
    labels = np.repeat(np.arange(6), 5000)
    images = [np.flatnonzero(labels // 2 == task) for task in range(3)]
    started = time.process_time()
    deals = Partitioner(
        labels, images, schedule, Partition("dirichlet", 1.0, 2), SampleBudget(), 100_000, 0
    )
    for round in range(11, 16):
        chosen = deals.participants(round, 100)
        assert len(chosen) == 100
        assert all(len(deals.shown(round, client, chosen)) for client in chosen)
    assert time.process_time() - started < 5
