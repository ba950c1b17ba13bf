"""Partitions: disjoint, complete, and distributed as they say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.partitions import Assignment, dirichlet, iid, preference

MANY = settings(max_examples=60, deadline=None)
KINDS = st.sampled_from(["dirichlet", "iid"])


@MANY
@given(
    KINDS,
    st.lists(st.integers(0, 5), max_size=120),
    st.integers(1, 30),
    st.floats(1e-3, 1e3),
    st.integers(0, 99),
    st.data(),
)
def test_every_image_has_one_owner_among_the_members(
    kind: str, labels: list[int], clients: int, alpha: float, seed: int, data: st.DataObject
) -> None:
    members = np.array(sorted(data.draw(st.sets(st.integers(0, clients - 1), min_size=1))))
    images = np.arange(1000, 1000 + len(labels))
    classes = np.array(labels, np.int64)
    owners = (
        iid(classes, members, seed)
        if kind == "iid"
        else dirichlet(classes, members, clients, alpha, seed)
    )
    assert set(owners.tolist()) <= set(members.tolist())
    assignment = Assignment.of(images, owners)
    parts = [assignment.images_of(client) for client in range(clients)]
    assert sorted(np.concatenate(parts).tolist()) == images.tolist()
    assert all(np.all(owners[part - 1000] == client) for client, part in enumerate(parts))


def test_iid_parts_differ_by_at_most_one_image() -> None:
    sizes = np.bincount(iid(np.repeat([0, 1], 51), np.arange(10), seed=3), minlength=10)
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("members", [slice(None), slice(0, 4)])
def test_preferences_are_dirichlet_in_any_subset(members: slice) -> None:
    """Mean 1/K and variance (1/K)(1 - 1/K)/(K alpha + 1) of each of K proportions, also when others are left out."""
    alpha = 0.7
    logs = np.array([preference(0, label, 12, alpha)[members] for label in range(4000)])
    share = np.exp(logs - logs.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    count = share.shape[1]
    assert np.allclose(share.mean(0), 1 / count, atol=0.012)
    assert np.allclose(share.var(0), (1 / count) * (1 - 1 / count) / (count * alpha + 1), rtol=0.12)


def test_a_tiny_alpha_gives_each_class_to_one_client() -> None:
    labels = np.repeat(np.arange(20), 30)
    owners = dirichlet(labels, np.arange(50), 50, alpha=1e-4, seed=0)
    assert all(len(np.unique(owners[labels == label])) == 1 for label in range(20))


def test_a_huge_alpha_deals_evenly() -> None:
    owners = dirichlet(np.zeros(1000, np.int64), np.arange(10), 10, alpha=1e6, seed=0)
    assert set(np.bincount(owners)) <= {99, 100, 101}


def test_a_client_keeps_its_taste_when_others_leave() -> None:
    labels = np.zeros(6000, np.int64)
    everyone = np.bincount(dirichlet(labels, np.arange(6), 6, 1.0, seed=2), minlength=6)
    fewer = np.bincount(dirichlet(labels, np.array([1, 4]), 6, 1.0, seed=2), minlength=6)
    assert fewer[1] / fewer[4] == pytest.approx(everyone[1] / everyone[4], rel=0.02)
