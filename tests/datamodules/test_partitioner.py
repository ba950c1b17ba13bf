"""Who has which images when: complete, disjoint, bounded, and the same in any order of asking."""

import time
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.scenarios import Partitioner, Schedule, consecutive, gradual
from fedbnn.errors import ConfigError

MANY = settings(max_examples=40, deadline=None)
LABELS = np.tile(np.arange(6), 20)
IMAGES = [np.flatnonzero(task == LABELS // 2) for task in range(3)]
SCHEDULES = st.sampled_from(
    [consecutive([2, 4, 6]), consecutive([2, 4, 7], 2), gradual([(0, 4), (2, 6), (5, 8)])]
)
ALPHAS = st.sampled_from([None, 0.1, 1.0])
CLIENTS = st.integers(1, 15)
SEEDS = st.integers(0, 50)


def partitioner(
    schedule=None, alpha=1.0, samples=None, clients=10, seed=0, at_once=4
) -> Partitioner:
    schedule = schedule or consecutive([2, 4, 6])
    return Partitioner(LABELS, IMAGES, schedule, clients, at_once, alpha, samples, seed)


@MANY
@given(SCHEDULES, ALPHAS, CLIENTS, SEEDS)
def test_a_client_shows_its_own_part_of_the_task_it_is_on(schedule, alpha, clients, seed) -> None:
    """Parts are disjoint and together the task; those on it show theirs."""
    deals = partitioner(schedule, alpha, clients=clients, seed=seed)
    for task, part in enumerate(deals.parts):
        assert sorted(np.concatenate(part).tolist()) == sorted(IMAGES[task].tolist())
    for round in range(1, schedule.rounds + 1):
        for client in range(clients):
            own = deals.parts[deals.task_of(round, client)][client]
            assert np.array_equal(deals.shown(round, client), own)


@MANY
@given(ALPHAS, CLIENTS, SEEDS)
def test_separate_tasks_are_dealt_completely_and_once(alpha, clients, seed) -> None:
    deals = partitioner(consecutive([2, 4, 6]), alpha, clients=clients, seed=seed)
    for round in range(1, 7):
        hands = [deals.shown(round, client).tolist() for client in range(clients)]
        assert sorted(chain.from_iterable(hands)) == sorted(IMAGES[(round - 1) // 2].tolist())


@st.composite
def drifting(draw: st.DrawFn) -> Schedule:
    """A gradual or staggered schedule of two to four tasks."""
    lengths = draw(st.lists(st.integers(3, 8), min_size=2, max_size=4))
    ends = [sum(lengths[: place + 1]) for place in range(len(lengths))]
    overlap = draw(st.integers(1, min(lengths) - 1))
    if draw(st.booleans()):
        return consecutive(ends, overlap)
    starts = [0, *(end - overlap for end in ends[:-1])]
    return gradual(list(zip(starts, ends, strict=True)))


def crowd(schedule: Schedule, alpha, samples=None, clients=100, seed=0, at_once=10) -> Partitioner:
    """Tasks of different sizes: 10 classes of 100, 200, 300, ... images."""
    tasks = len(schedule.windows)
    labels = np.concatenate(
        [np.repeat(np.arange(10) + 10 * t, 100 * (t + 1)) for t in range(tasks)]
    )
    images = [np.flatnonzero(labels // 10 == task) for task in range(tasks)]
    return Partitioner(labels, images, schedule, clients, at_once, alpha, samples, seed)


@settings(max_examples=25, deadline=None)
@given(drifting(), st.sampled_from([None, 0.5, 1.0, 10.0]), st.integers(2, 120), SEEDS)
def test_the_images_of_a_task_follow_its_share_of_the_clients(
    schedule, alpha, clients, seed
) -> None:
    """share x |task| images belong to the clients on it, up to the spread of what clients own.

    A class is cut ~ Dirichlet(alpha): a share s of the clients has s of it in the mean, with
    variance s (1 - s) / (clients alpha + 1), and the ten classes are independent.
    """
    deals = crowd(schedule, alpha, clients=clients, seed=seed)
    for round in range(1, schedule.rounds + 1):
        held = np.zeros(len(schedule.windows))
        for client in range(clients):
            held[deals.task_of(round, client)] += len(deals.shown(round, client))
        share = np.array(schedule.clients_on(round, clients)) / clients
        sizes = np.array([len(images) for images in deals.images])
        spread = np.sqrt(share * (1 - share) / (clients * (alpha or 1e9) + 1) / 10)
        assert np.all(np.abs(held / sizes - share) <= 5 * spread + 5 * np.sqrt(clients) / sizes)


@settings(max_examples=15, deadline=None)
@given(drifting(), st.sampled_from([None, 1.0]), st.sampled_from([None, 200]), st.data())
def test_a_round_shows_the_mixture_in_the_mean(schedule, alpha, samples, data) -> None:
    """Over many seeds the images of participants are in their `image_shares`."""
    round = data.draw(st.integers(1, schedule.rounds))
    tasks = len(schedule.windows)
    shown = np.zeros((60, tasks))
    for seed in range(60):
        deals = crowd(schedule, alpha, samples, clients=40, seed=seed, at_once=8)
        for client in deals.participants(round):
            shown[seed, deals.task_of(round, client)] += len(deals.shown(round, client))
    mixture = shown.sum(0) / shown.sum()
    error = 5 * (shown / shown.sum(1, keepdims=True)).std(0) / np.sqrt(60) + 0.01
    assert np.all(np.abs(mixture - deals.image_shares(round)) <= error)
    assert samples is None or np.all(shown.sum(1) <= samples)


@settings(max_examples=25, deadline=None)
@given(drifting(), SEEDS)
def test_a_draw_over_the_round_has_the_shares_of_the_schedule(schedule, seed) -> None:
    """To a participant and an image a task: as many take part, or one more, as are its share."""
    deals = crowd(schedule, None, samples=50, seed=seed)
    for round in range(1, schedule.rounds + 1):
        shown = np.zeros(len(schedule.windows))
        for client in deals.participants(round):
            shown[deals.task_of(round, client)] += len(deals.shown(round, client))
        share = np.array(schedule.clients_on(round, 100)) / 100
        assert shown.sum() == 50
        assert deals.image_shares(round) == pytest.approx(tuple(share))
        assert np.all(np.abs(shown / 50 - share) < 0.1 + 0.04)


@pytest.mark.parametrize("owned", [60, 150, 400])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_clients_that_own_less_than_their_part_take_no_share_from_their_task(owned, alpha) -> None:
    """Tasks of as many images: one client of ten on the second, a tenth of the images, of which a
    client may own far less than its part of the draw, or more.
    """
    labels = np.repeat(np.arange(20), 10 * owned)
    images = [np.flatnonzero(labels // 10 == task) for task in range(2)]
    schedule, shown = gradual([(0, 10), (1, 11)]), np.zeros((200, 2))
    for seed in range(200):
        deals = Partitioner(labels, images, schedule, 100, 10, alpha, 1500, seed)
        for client in deals.participants(2):
            shown[seed, deals.task_of(2, client)] += len(deals.shown(2, client))
    assert deals.image_shares(2) == pytest.approx((0.9, 0.1))
    error = 3 * (shown[:, 1] / shown.sum(1)).std() / np.sqrt(200)
    assert abs(shown[:, 1].sum() / shown.sum() - 0.1) <= error
    assert np.all(shown.sum(1) <= 1500)
    assert shown.sum(1).mean() >= 0.93 * min(1500, 10 * owned)


@MANY
@given(drifting(), ALPHAS, st.integers(2, 30), SEEDS)
def test_a_client_keeps_its_images_while_others_come_and_go(schedule, alpha, clients, seed) -> None:
    deals = crowd(schedule, alpha, clients=clients, seed=seed)
    for client in range(clients):
        seen: dict[int, list[int]] = {}
        for round in range(1, schedule.rounds + 1):
            own = deals.owned(round, client).tolist()
            assert seen.setdefault(deals.task_of(round, client), own) == own


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
    first, second = (partitioner(seed=seed).parts[0] for seed in (0, 1))
    assert not all(np.array_equal(*both) for both in zip(first, second, strict=True))


def test_another_round_has_other_participants_of_the_same_persistent_clients() -> None:
    deals = partitioner(consecutive([20, 21, 22]))
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
@given(SCHEDULES, ALPHAS, SEEDS, st.integers(1, 20))
def test_more_participants_are_others_with_images(schedule, alpha, seed, count) -> None:
    deals, again = (partitioner(schedule, alpha, seed=seed, at_once=3) for _ in range(2))
    for round in range(1, schedule.rounds + 1):
        chosen, more = deals.participants(round), deals.more_participants(round, count)
        ready = {client for client in range(10) if len(deals.owned(round, client))}
        assert list(more) == sorted(set(more) & ready - set(chosen))
        assert len(chosen) + len(more) == max(len(chosen), min(count, len(ready)))
        assert all(len(deals.shown(round, client)) for client in more)
    assert again.more_participants(schedule.rounds, count) == more


def test_a_draw_over_the_round_has_no_images_for_more_participants() -> None:
    with pytest.raises(ConfigError, match="share its 20 images"):
        partitioner(samples=20).more_participants(1, 8)


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
    deals = partitioner(consecutive([20, 21, 22]), samples=10, at_once=10)
    client = max(range(10), key=lambda number: len(deals.owned(1, number)))
    assert len({tuple(deals.shown(round, client)) for round in range(1, 21)}) > 3


@pytest.mark.parametrize(
    "schedule", [consecutive([10, 20, 30]), gradual([(0, 20), (10, 30), (29, 40)])]
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
