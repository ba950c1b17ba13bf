"""Class posteriors: statistics that add, and a map that carries them along."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedbnn.bayes.flatten import layout_of
from fedbnn.heads.gaussian import (
    ClassPosteriors,
    SufficientStatistics,
    diagonal,
    measure,
    square,
    triangle,
    triangle_length,
)
from fedbnn.images import ImageSet, Preprocess
from fedbnn.state import State
from tests.core.class_features import NAMES, exchange, folded, statistics, world

seeds = st.integers(0, 2**32)


@given(seeds, st.integers(1, 7))
def test_a_triangle_is_the_whole_of_a_symmetric_matrix(seed: int, width: int) -> None:
    half = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
    symmetric = half + half.T
    numbers = triangle(symmetric)
    assert len(numbers) == triangle_length(width)
    assert torch.equal(square(numbers, width), symmetric)
    assert torch.equal(diagonal(numbers, width), symmetric.diagonal())


def pooled(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Class means and scatter within classes, from all data at once."""
    means = torch.stack([features[labels == c].mean(0) for c in range(3)])
    centred = features - means[labels]
    return means, centred.T @ centred


def assert_pooled(state: State, features: Tensor, labels: Tensor) -> None:
    means, scatter = pooled(features, labels)
    torch.testing.assert_close(state["posteriors.mean"], means, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state["posteriors.scatter"], scatter, rtol=1e-8, atol=1e-8)
    assert state["posteriors.count"].tolist() == torch.bincount(labels, minlength=3).tolist()
    assert state["posteriors.weight"].item() == len(labels) - 3


@given(seeds, st.integers(1, 6), st.randoms(use_true_random=False))
def test_statistics_of_clients_are_those_of_the_pooled_data(
    seed: int, clients: int, shuffle: object
) -> None:
    features, labels = world(seed)
    owner = torch.randint(0, clients, (60,), generator=torch.Generator().manual_seed(seed))
    parts = [owner == k for k in range(clients) if bool((owner == k).any())]
    updates = [
        statistics(features[part], features[part], labels[part], k) for k, part in enumerate(parts)
    ]
    shuffle.shuffle(updates)  # type: ignore[attr-defined]
    assert_pooled(folded(State({}, NAMES), updates, exchange(4)), features, labels)


@given(seeds, st.integers(1, 59))
def test_rounds_with_a_resting_backbone_end_in_the_exact_pooled_posteriors(
    seed: int, cut: int
) -> None:
    features, labels = world(seed)
    state = State({}, NAMES)
    for part in (slice(0, cut), slice(cut, 60)):
        state = folded(
            state, [statistics(features[part], features[part], labels[part])], exchange(4)
        )
    assert_pooled(state, features, labels)


@given(seeds)
def test_a_backbone_that_rests_gives_the_identity(seed: int) -> None:
    features, labels = world(seed)
    before = torch.cat([features, torch.ones(len(features), 1).double()], 1)
    found = SufficientStatistics(
        count=torch.bincount(labels).double(),
        sum=torch.zeros(3, 4).double(),
        moment=features.T @ features,
        before=before.T @ before,
        cross=before.T @ features,
    )
    torch.testing.assert_close(
        found.drift_map(1e-3),
        torch.cat([torch.eye(4), torch.zeros(1, 4)]).double(),
        rtol=0,
        atol=1e-9,
    )


def test_without_data_nothing_moves() -> None:
    features, labels = world(1)
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4))
    again = folded(state, [], exchange(4))
    assert all(torch.equal(state[name], again[name]) for name in state.tensors)


@given(seeds)
def test_a_known_affine_move_carries_absent_classes_exactly(seed: int) -> None:
    features, labels = world(seed)
    source = torch.Generator().manual_seed(seed + 1)
    turn, offset = (
        torch.randn(4, 4, generator=source).double(),
        torch.randn(4, generator=source).double(),
    )
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4))
    here = labels == 0
    moved = features @ turn + offset
    after = folded(
        state, [statistics(moved[here], features[here], labels[here])], exchange(4, ridge=1e-13)
    )
    means, _ = pooled(moved, labels)
    torch.testing.assert_close(after["posteriors.mean"][1:], means[1:], rtol=1e-4, atol=1e-4)
    without = folded(
        state, [statistics(moved[here], features[here], labels[here])], exchange(4, drift=False)
    )
    assert not torch.allclose(without["posteriors.mean"][1:], means[1:], rtol=1e-2)


def test_a_known_affine_move_carries_the_scatter() -> None:
    features, labels = world(2)
    turn = torch.randn(4, 4).double()
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4))
    posteriors = ClassPosteriors.of(state, 4).transport(
        torch.cat([turn, torch.ones(1, 4).double()])
    )
    means, scatter = pooled(features @ turn + 1, labels)
    torch.testing.assert_close(posteriors.mean, means)
    torch.testing.assert_close(posteriors.scatter, scatter)


def test_the_default_ridge_carries_means_most_of_the_way() -> None:
    features, labels = world(3, count=300)
    moved = features @ torch.randn(4, 4).double() + 1
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4))
    here = labels < 2
    after = folded(
        state, [statistics(moved[here], features[here], labels[here])], exchange(4, ridge=1e-3)
    )
    means, _ = pooled(moved, labels)
    old = pooled(features, labels)[0]
    assert (after["posteriors.mean"][2] - means[2]).norm() < 0.05 * (old[2] - means[2]).norm()


def test_absent_classes_keep_count_and_place_when_the_backbone_rests() -> None:
    features, labels = world(4)
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4))
    here = labels == 1
    again = folded(
        state,
        [statistics(features[here], features[here], labels[here])],
        exchange(4, decay=0.5, memory=0.7),
    )
    assert again["posteriors.count"].tolist() == [20, 0.5 * 20 + 20, 20]
    torch.testing.assert_close(
        again["posteriors.mean"], state["posteriors.mean"], rtol=1e-9, atol=1e-9
    )


def test_decay_weighs_old_posteriors_by_what_they_keep() -> None:
    old, new = torch.zeros(4, 2).double(), torch.ones(4, 2).double()
    labels = torch.zeros(4, dtype=torch.long)
    state = folded(State({}, NAMES), [statistics(old, old, labels)], exchange(2))
    after = folded(state, [statistics(new, new, labels)], exchange(2, decay=0.5, drift=False))
    torch.testing.assert_close(after["posteriors.mean"][0], torch.full((2,), 4 / 6).double())
    assert after["posteriors.count"][0].item() == 6


def test_trust_tempers_counts_and_sums_alike() -> None:
    """A class with a single image, trusted by a third, lies where that image lies."""
    features, labels = torch.tensor([[3.0, 6.0]]).double(), torch.tensor([1])
    state = folded(
        State({}, NAMES), [statistics(features, features, labels)], exchange(2), trust=1 / 3
    )
    torch.testing.assert_close(state["posteriors.mean"][1], features[0])
    torch.testing.assert_close(
        state["posteriors.scatter"], torch.zeros(2, 2).double(), atol=1e-12, rtol=0
    )


def test_new_classes_have_empty_posteriors() -> None:
    features, labels = world(5)
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4))
    grown = ClassPosteriors.of(State(state.tensors, (*NAMES, "d")), 4)
    assert grown.count.tolist() == [20, 20, 20, 0]
    assert grown.mean.shape == (4, 4)


def backbone_of(width: int, side: int = 4) -> nn.Module:
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(side * side, width))
    backbone.width = width
    return backbone


def pictures(count: int, side: int = 4) -> ImageSet:
    pixels = torch.randint(0, 256, (count, 1, side, side), dtype=torch.uint8)
    return ImageSet(pixels, torch.arange(count) % 3, NAMES, Preprocess(flip=True, shift=2))


def test_a_client_measures_both_backbones_without_augmentation() -> None:
    backbone, images = backbone_of(5), pictures(40)
    layout = layout_of(backbone)
    new, buffers = layout.read(backbone)
    old = new + 0.1 * torch.randn(len(new))
    sent = State(
        {"backbone": new, "buffers": buffers, "backbone.before": old, "buffers.before": buffers},
        NAMES,
    )
    found = measure(backbone, layout, sent, images)
    plain = images.preprocess.normalise(images.pixels).flatten(1)
    weights = [layout.views(vector) for vector in (new, old)]
    now, before = ((plain @ w["1.weight"].T + w["1.bias"]).double() for w in weights)
    for name, value in statistics(now, before, images.labels).tensors.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-4, atol=1e-3)
        assert found[name].dtype == torch.float32


def test_an_honest_update_is_what_is_expected_and_has_no_defect() -> None:
    features, labels = world(6)
    update = statistics(features, features, labels)
    spec = exchange(4).expected(State({}, NAMES), update.counts)
    assert {name: shape for name, (shape, _) in spec.items()} == {
        name: tuple(value.shape) for name, value in update.tensors.items()
    }
    assert exchange(4).defect(State({}, NAMES), update) is None
    update.tensors["posteriors.moment"][-1] = -1
    assert exchange(4).defect(State({}, NAMES), update) is not None
