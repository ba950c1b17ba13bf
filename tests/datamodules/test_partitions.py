"""Partitions: disjoint, complete, and distributed as they say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.scenarios import by_owner, dirichlet, iid, preference, shared_out, systematic

MANY = settings(max_examples=60, deadline=None)


@MANY
@given(
    st.none() | st.floats(1e-3, 1e3),
    st.lists(st.integers(0, 5), max_size=120),
    st.integers(1, 30),
    st.integers(0, 99),
)
def test_every_image_has_one_owner_among_the_clients(
    alpha: float | None, labels: list[int], clients: int, seed: int
) -> None:
    images, classes = np.arange(1000, 1000 + len(labels)), np.array(labels, np.int64)
    owners = (
        iid(classes, clients, seed) if alpha is None else dirichlet(classes, clients, alpha, seed)
    )
    assert set(owners.tolist()) <= set(range(clients))
    parts = by_owner(images, owners, clients)
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == images.tolist()
    assert all(np.all(owners[part - 1000] == client) for client, part in enumerate(parts))


def test_iid_parts_differ_by_at_most_one_image() -> None:
    sizes = np.bincount(iid(np.repeat([0, 1], 51), 10, seed=3), minlength=10)
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("members", [slice(None), slice(0, 4)])
def test_preferences_are_dirichlet_in_any_subset(members: slice) -> None:
    """Mean 1/K and variance (1/K)(1 - 1/K)/(K alpha + 1) of each of K proportions."""
    alpha = 0.7
    logs = np.array([preference(0, label, 12, alpha)[members] for label in range(4000)])
    share = np.exp(logs - logs.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    count = share.shape[1]
    assert np.allclose(share.mean(0), 1 / count, atol=0.012)
    assert np.allclose(share.var(0), (1 / count) * (1 - 1 / count) / (count * alpha + 1), rtol=0.12)


def test_a_tiny_alpha_gives_each_class_to_one_client() -> None:
    labels = np.repeat(np.arange(20), 30)
    owners = dirichlet(labels, 50, alpha=1e-4, seed=0)
    assert all(len(np.unique(owners[labels == label])) == 1 for label in range(20))


def test_a_huge_alpha_deals_evenly() -> None:
    owners = dirichlet(np.zeros(1000, np.int64), 10, alpha=1e6, seed=0)
    assert set(np.bincount(owners)) <= {99, 100, 101}


@MANY
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 30))
def test_systematic_numbers_are_whole_complete_and_right_in_the_mean(
    sizes: list[int], total: int
) -> None:
    total = min(total, sum(sizes))
    starts = (np.arange(1000) + 0.5) / 1000
    found = np.array([systematic(sizes, total, start) for start in starts])
    quota = np.array(sizes) * total / max(sum(sizes), 1)
    assert np.all(found.sum(1) == total)
    assert np.all(np.abs(found - quota) < 1)
    assert np.all(found <= sizes)
    assert np.allclose(found.mean(0), quota, atol=2e-3)


def out(sizes: list[int], parts: list[float], total: int) -> list[int]:
    return shared_out(np.array(sizes), np.array(parts), total).tolist()


def test_a_draw_is_shared_by_what_participants_own() -> None:
    assert out([100, 300, 600], [0.1, 0.1, 0.1], 103) == [10 + 1, 31, 61]
    assert out([1, 2, 3], [1.0, 1.0, 1.0], 9) == [1, 2, 3]
    assert out([1, 1, 1], [0.5, 0.5, 0.5], 3) == [1, 1, 1]


def test_a_client_shows_the_same_part_of_its_images_as_all_on_its_task() -> None:
    assert out([101, 201, 1001], [1.0, 1.0, 0.1], 1000) == [101, 201, 101]
    assert out([101, 201, 1001], [0.5, 0.5, 0.05], 203) == [51, 101, 51]
    assert out([101, 201, 1001], [0.5, 0.5, 0.05], 403) == [101, 201, 101]


@MANY
@given(st.data(), st.integers(1, 8))
def test_everyone_shows_something_nobody_more_than_it_owns(data: st.DataObject, many: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=many, max_size=many))
    parts = data.draw(st.lists(st.sampled_from([0.1, 0.25, 1.0]), min_size=many, max_size=many))
    total = data.draw(st.integers(many, 200))
    shown = out(sizes, parts, total)
    assert all(1 <= count <= size for count, size in zip(shown, sizes, strict=True))
    assert sum(shown) <= total
    if len(set(parts)) == 1:
        assert sum(shown) == min(total, sum(sizes))
