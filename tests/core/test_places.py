"""Class posteriors: statistics that add, a map that carries them along, and a discriminant that is LDA."""

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.covariance import OAS
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor, nn

from fedbnn import triangles
from fedbnn.discriminant import Discriminant, shrinkage
from fedbnn.images import ImageSet, Look
from fedbnn.layout import layout_of
from fedbnn.messages import Update
from fedbnn.places import Places, PlacesExchange, measure
from fedbnn.state import State

NAMES = ("a", "b", "c")
seeds = st.integers(0, 2**32)


def statistics(new: Tensor, old: Tensor, labels: Tensor, client: int = 0) -> Update:
    """What a client with these features sends, in float64, from the formulas alone."""
    present = labels.unique().tolist()
    before = torch.cat([old, torch.ones(len(old), 1).double()], 1)
    tensors = {
        "places.sum": torch.stack([new[labels == c].sum(0) for c in present]),
        "places.moment": triangles.folded(new.T @ new),
        "places.before": triangles.folded(before.T @ before),
        "places.cross": before.T @ new,
    }
    counts = {NAMES[c]: int((labels == c).sum()) for c in present}
    return Update("run", 1, "statistics", client, "", len(labels), counts, tensors)


@given(seeds, st.integers(1, 7))
def test_a_triangle_is_the_whole_of_a_symmetric_matrix(seed: int, width: int) -> None:
    half = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
    square = half + half.T
    triangle = triangles.folded(square)
    assert len(triangle) == triangles.length(width)
    assert torch.equal(triangles.unfolded(triangle, width), square)
    assert torch.equal(triangles.diagonal(triangle, width), square.diagonal())


def exchange(width: int, **settings: float) -> PlacesExchange:
    return PlacesExchange(State({}), width, **{"decay": 1.0, "memory": 1.0, **settings})  # type: ignore[arg-type]


def folded(state: State, updates: Sequence[Update], settings: PlacesExchange, trust: float = 1.0) -> State:
    fold = settings.fold(state, "statistics")
    for update in updates:
        fold.add(update, trust)
    return fold.close()


def world(seed: int, count: int = 60, width: int = 4) -> tuple[Tensor, Tensor]:
    """Features of three classes with a common covariance, and the labels."""
    source = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    centres, mix = (torch.randn(shape, generator=source, dtype=torch.float64) for shape in ((3, width), (width, width)))
    return centres[labels] * 3 + torch.randn(count, width, generator=source, dtype=torch.float64) @ mix, labels


def pooled(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Class means and scatter within classes, from all data at once."""
    means = torch.stack([features[labels == c].mean(0) for c in range(3)])
    centred = features - means[labels]
    return means, centred.T @ centred


def assert_pooled(state: State, features: Tensor, labels: Tensor) -> None:
    means, scatter = pooled(features, labels)
    torch.testing.assert_close(state["places.mean"], means, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state["places.scatter"], scatter, rtol=1e-8, atol=1e-8)
    assert state["places.count"].tolist() == torch.bincount(labels, minlength=3).tolist()
    assert state["places.weight"].item() == len(labels) - 3


@given(seeds, st.integers(1, 6), st.randoms(use_true_random=False))
def test_statistics_of_clients_are_those_of_the_pooled_data(seed: int, clients: int, shuffle: object) -> None:
    features, labels = world(seed)
    owner = torch.randint(0, clients, (60,), generator=torch.Generator().manual_seed(seed))
    parts = [owner == k for k in range(clients) if bool((owner == k).any())]
    updates = [statistics(features[part], features[part], labels[part], k) for k, part in enumerate(parts)]
    shuffle.shuffle(updates)  # type: ignore[attr-defined]
    assert_pooled(folded(State({}, NAMES), updates, exchange(4)), features, labels)


@given(seeds, st.integers(1, 59))
def test_rounds_with_a_resting_trunk_end_in_the_exact_pooled_posteriors(seed: int, cut: int) -> None:
    features, labels = world(seed)
    state = State({}, NAMES)
    for part in (slice(0, cut), slice(cut, 60)):
        state = folded(state, [statistics(features[part], features[part], labels[part])], exchange(4))
    assert_pooled(state, features, labels)


@given(seeds)
def test_a_trunk_that_rests_gives_the_identity(seed: int) -> None:
    features, labels = world(seed)
    fold = exchange(4).fold(State({}, NAMES), "statistics")
    fold.add(statistics(features, features, labels))
    torch.testing.assert_close(fold.sums.step(1e-3), torch.cat([torch.eye(4), torch.zeros(1, 4)]).double(), rtol=0, atol=1e-9)


def test_without_data_nothing_moves() -> None:
    features, labels = world(1)
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4))
    again = folded(state, [], exchange(4))
    assert all(torch.equal(state[name], again[name]) for name in state.tensors)


@given(seeds)
def test_a_known_affine_move_carries_absent_classes_exactly(seed: int) -> None:
    features, labels = world(seed)
    source = torch.Generator().manual_seed(seed + 1)
    turn, offset = torch.randn(4, 4, generator=source).double(), torch.randn(4, generator=source).double()
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4))
    here = labels == 0
    moved = features @ turn + offset
    after = folded(state, [statistics(moved[here], features[here], labels[here])], exchange(4, ridge=1e-13))
    means, _ = pooled(moved, labels)
    torch.testing.assert_close(after["places.mean"][1:], means[1:], rtol=1e-4, atol=1e-4)
    without = folded(state, [statistics(moved[here], features[here], labels[here])], exchange(4, drift=False))
    assert not torch.allclose(without["places.mean"][1:], means[1:], rtol=1e-2)


def test_a_known_affine_move_carries_the_scatter() -> None:
    features, labels = world(2)
    turn = torch.randn(4, 4).double()
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4))
    places = Places.of(state, 4).moved(torch.cat([turn, torch.ones(1, 4).double()]))
    means, scatter = pooled(features @ turn + 1, labels)
    torch.testing.assert_close(places.mean, means)
    torch.testing.assert_close(places.scatter, scatter)


def test_the_default_ridge_carries_means_most_of_the_way() -> None:
    features, labels = world(3, count=300)
    moved = features @ torch.randn(4, 4).double() + 1
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4))
    here = labels < 2
    after = folded(state, [statistics(moved[here], features[here], labels[here])], exchange(4, ridge=1e-3))
    means, _ = pooled(moved, labels)
    old = pooled(features, labels)[0]
    assert (after["places.mean"][2] - means[2]).norm() < 0.05 * (old[2] - means[2]).norm()


def test_absent_classes_keep_count_and_place_when_the_trunk_rests() -> None:
    features, labels = world(4)
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4))
    here = labels == 1
    again = folded(state, [statistics(features[here], features[here], labels[here])], exchange(4, decay=0.5, memory=0.7))
    assert again["places.count"].tolist() == [20, 0.5 * 20 + 20, 20]
    torch.testing.assert_close(again["places.mean"], state["places.mean"], rtol=1e-9, atol=1e-9)


def test_decay_weighs_old_places_by_what_they_keep() -> None:
    old, new = torch.zeros(4, 2).double(), torch.ones(4, 2).double()
    labels = torch.zeros(4, dtype=torch.long)
    state = folded(State({}, NAMES), [statistics(old, old, labels)], exchange(2))
    after = folded(state, [statistics(new, new, labels)], exchange(2, decay=0.5, drift=False))
    torch.testing.assert_close(after["places.mean"][0], torch.full((2,), 4 / 6).double())
    assert after["places.count"][0].item() == 6


def test_trust_tempers_counts_and_sums_alike() -> None:
    """A class with a single image, trusted by a third, lies where that image lies."""
    features, labels = torch.tensor([[3.0, 6.0]]).double(), torch.tensor([1])
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(2), trust=1 / 3)
    torch.testing.assert_close(state["places.mean"][1], features[0])
    torch.testing.assert_close(state["places.scatter"], torch.zeros(2, 2).double(), atol=1e-12, rtol=0)


def test_new_classes_find_empty_places() -> None:
    features, labels = world(5)
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4))
    grown = Places.of(State(state.tensors, (*NAMES, "d")), 4)
    assert grown.count.tolist() == [20, 20, 20, 0]
    assert grown.mean.shape == (4, 4)


def trunk_of(width: int, side: int = 4) -> nn.Module:
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(side * side, width))
    trunk.width = width
    return trunk


def pictures(count: int, side: int = 4) -> ImageSet:
    pixels = torch.randint(0, 256, (count, 1, side, side), dtype=torch.uint8)
    return ImageSet(pixels, torch.arange(count) % 3, NAMES, Look(flip=True, shift=2), training=True)


def test_a_client_measures_both_trunks_without_augmentation() -> None:
    trunk, images = trunk_of(5), pictures(40)
    layout = layout_of(trunk)
    new, buffers = layout.read(trunk)
    old = new + 0.1 * torch.randn(len(new))
    sent = State({"trunk": new, "buffers": buffers, "trunk.before": old, "buffers.before": buffers}, NAMES)
    found = measure(trunk, layout, sent, images)
    plain = images.look.normalise(images.pixels).flatten(1)
    weights = [layout.views(vector) for vector in (new, old)]
    now, before = ((plain @ w["1.weight"].T + w["1.bias"]).double() for w in weights)
    for name, value in statistics(now, before, images.labels).tensors.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-4, atol=1e-3)
        assert found[name].dtype == torch.float32


def test_an_honest_update_is_what_is_expected_and_has_no_defect() -> None:
    features, labels = world(6)
    update = statistics(features, features, labels)
    spec = exchange(4).expected(State({}, NAMES), "statistics", update.classes)
    assert {name: shape for name, (shape, _) in spec.items()} == {
        name: tuple(value.shape) for name, value in update.tensors.items()
    }
    assert exchange(4).defect(State({}, NAMES), update) is None
    update.tensors["places.moment"][-1] = -1
    assert exchange(4).defect(State({}, NAMES), update) is not None


# Shrinkage and discriminant.


@pytest.mark.parametrize(("count", "width"), [(20, 50), (200, 50), (60, 10), (5, 300)])
def test_shrinkage_is_the_limit_of_the_oracle_iteration(count: int, width: int) -> None:
    """Chen et al. (2010), equations 20 and 21, iterated: the closed form is their fixed point."""
    data = torch.randn(count, width).double() * torch.linspace(0.5, 2, width).double()
    covariance = data.T @ data / count
    trace, share = covariance.trace(), torch.zeros(()).double()
    for _ in range(2_000):
        target = trace / width * torch.eye(width).double()
        mixed = float(((1 - share) * covariance + share * target).mul(covariance).sum())
        above = (1 - 2 / width) * mixed + trace**2
        share = above / ((count + 1 - 2 / width) * mixed + (1 - count / width) * trace**2)
        if abs(float(share) - shrinkage(covariance, count)) < 1e-9:
            break
    assert shrinkage(covariance, count) == pytest.approx(min(1.0, float(share)), abs=1e-6)


@pytest.mark.parametrize(("count", "width"), [(30, 200), (300, 200), (500, 64)])
def test_shrinkage_is_that_of_scikit_learn_up_to_its_dropped_terms(count: int, width: int) -> None:
    """scikit-learn leaves the terms 2/d out, which is a relative difference of that order."""
    data = np.random.default_rng(count).normal(size=(count, width)) * np.linspace(0.5, 2, width)
    data -= data.mean(0)
    ours = shrinkage(torch.from_numpy(data.T @ data / count), count)
    assert ours == pytest.approx(OAS(assume_centered=True).fit(data).shrinkage_, rel=4 / width)


def test_shrinkage_of_the_identity_and_of_nothing_is_complete() -> None:
    assert shrinkage(torch.eye(5).double(), 100) == 1.0
    assert shrinkage(torch.zeros(5, 5).double(), 0) == 1.0


@pytest.mark.parametrize("solver", ["lsqr", "eigen"])
@pytest.mark.parametrize(("count", "width"), [(90, 6), (60, 100)])
def test_predictions_are_those_of_lda_on_the_pooled_features(solver: str, count: int, width: int) -> None:
    features, labels = world(7, count + 300, width)
    train, test = (features[:count], labels[:count]), features[count:]
    updates = [statistics(train[0][k::3], train[0][k::3], train[1][k::3], k) for k in range(3)]
    places = Places.of(folded(State({}, NAMES), updates, exchange(width)), width)
    covariance = places.scatter / places.weight
    share = shrinkage(covariance, float(places.weight))
    reference = LinearDiscriminantAnalysis(solver=solver, shrinkage=share, priors=[1 / 3] * 3).fit(
        *(part.numpy() for part in train)
    )
    scores = Discriminant.of(places, torch.arange(3)).scores(test)
    assert scores.argmax(1).tolist() == reference.predict(test.numpy()).tolist()


def test_many_degrees_of_freedom_give_the_gaussian_scores() -> None:
    features, labels = world(8, 3000)
    places = Places.of(folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4)), 4)
    ours = Discriminant.of(places, torch.arange(3)).scores(features[:50]).softmax(1).double()
    covariance = places.scatter / places.weight
    share = shrinkage(covariance, float(places.weight))
    shrunk = (1 - share) * covariance + share * covariance.trace() / 4 * torch.eye(4).double()
    normals = [torch.distributions.MultivariateNormal(mean, shrunk) for mean in places.mean]
    reference = torch.stack([normal.log_prob(features[:50]) for normal in normals], 1).softmax(1)
    torch.testing.assert_close(ours, reference, rtol=0, atol=0.02)


def test_scores_are_differences_of_student_t_densities() -> None:
    """Against scipy, class by class, for unequal counts: the constant they share is all that may differ."""
    from scipy.stats import multivariate_t

    features, labels = world(9, 30)
    keep = torch.cat([torch.arange(30)[labels == 0][:9], torch.arange(30)[labels == 1][:2], torch.arange(30)[labels == 2][:5]])
    features, labels = features[keep], labels[keep]
    places = Places.of(folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4)), 4)
    covariance, freedom = places.scatter / places.weight, float(places.weight)
    share = shrinkage(covariance, freedom)
    shrunk = (1 - share) * covariance + share * covariance.trace() / 4 * torch.eye(4).double()
    points = features.numpy()
    reference = np.stack([
        multivariate_t(places.mean[c].numpy(), (1 + 1 / places.count[c].item()) * shrunk.numpy(), df=freedom).logpdf(points)
        for c in range(3)
    ], 1)  # fmt: skip
    ours = Discriminant.of(places, torch.arange(3)).scores(features).double().numpy()
    np.testing.assert_allclose(ours - ours[:, :1], reference - reference[:, :1], atol=1e-4)


def test_temperature_divides_the_scores() -> None:
    features, labels = world(10)
    places = Places.of(folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4)), 4)
    one, two = (Discriminant.of(places, torch.arange(3), temperature).scores(features) for temperature in (1.0, 2.0))
    torch.testing.assert_close(one, 2 * two)


def wide(images: int, width: int, offset: float = 0.0, dead: int = 0) -> tuple[Places, Tensor]:
    """Places from features as they are sent: sums in float32 of rectified features, some of them always zero."""
    features = torch.relu(torch.randn(images, width) + offset).double()
    features[:, :dead] = 0
    update = statistics(features, features, torch.arange(images) % 3)
    sent = {name: value.float() for name, value in update.tensors.items()}
    state = folded(State({}, NAMES), [Update("run", 1, "statistics", 0, "", images, update.counts, sent)], exchange(width))
    return Places.of(state, width), features


@pytest.mark.parametrize("images", [3, 6, 40])
def test_a_thousand_features_of_few_images_stay_finite_and_fast(images: int) -> None:
    places, features = wide(images, 1000, dead=200)
    start = perf_counter()
    scores = Discriminant.of(places, torch.arange(3)).scores(features)
    assert bool(scores.isfinite().all())
    assert perf_counter() - start < 5
    assert scores.argmax(1).tolist() == (torch.arange(images) % 3).tolist()


def test_features_far_from_zero_lose_nothing_that_matters_to_float32_sums() -> None:
    places, features = wide(2000, 20, offset=300.0)
    assert bool(Discriminant.of(places, torch.arange(3)).scores(features).isfinite().all())


def test_one_class_with_one_image_can_be_scored() -> None:
    features = torch.tensor([[1.0, 2.0]]).double()
    places = Places.of(folded(State({}, NAMES), [statistics(features, features, torch.tensor([1]))], exchange(2)), 2)
    assert bool(Discriminant.of(places, torch.tensor([1])).scores(features).isfinite().all())
