"""The shrinkage is that of the oracle, and the discriminant is LDA with Student-t densities."""

from time import perf_counter

import numpy as np
import pytest
import torch
from sklearn.covariance import OAS
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from fedbnn.heads import GaussianHead
from fedbnn.heads.posteriors import ClassPosteriors, Discriminant, shrinkage
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State
from tests.core.class_features import NAMES, exchange, folded, statistics, world

PLAIN = GaussianHead(temperature=1.0)


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
def test_predictions_are_those_of_lda_on_the_pooled_features(
    solver: str, count: int, width: int
) -> None:
    features, labels = world(7, count + 300, width)
    train, test = (features[:count], labels[:count]), features[count:]
    updates = [statistics(train[0][k::3], train[0][k::3], train[1][k::3], k) for k in range(3)]
    posteriors = ClassPosteriors.of(folded(State({}, NAMES), updates, exchange(width)), width)
    covariance = posteriors.scatter / posteriors.weight
    share = shrinkage(covariance, float(posteriors.weight))
    reference = LinearDiscriminantAnalysis(solver=solver, shrinkage=share, priors=[1 / 3] * 3).fit(
        *(part.numpy() for part in train)
    )
    scores = Discriminant.of(posteriors, torch.arange(3), PLAIN).scores(test)
    assert scores.argmax(1).tolist() == reference.predict(test.numpy()).tolist()


def test_many_degrees_of_freedom_give_the_gaussian_scores() -> None:
    features, labels = world(8, 3000)
    posteriors = ClassPosteriors.of(
        folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4)), 4
    )
    ours = (
        Discriminant.of(posteriors, torch.arange(3), PLAIN)
        .scores(features[:50])
        .softmax(1)
        .double()
    )
    covariance = posteriors.scatter / posteriors.weight
    share = shrinkage(covariance, float(posteriors.weight))
    shrunk = (1 - share) * covariance + share * covariance.trace() / 4 * torch.eye(4).double()
    normals = [torch.distributions.MultivariateNormal(mean, shrunk) for mean in posteriors.mean]
    reference = torch.stack([normal.log_prob(features[:50]) for normal in normals], 1).softmax(1)
    torch.testing.assert_close(ours, reference, rtol=0, atol=0.02)


def test_scores_are_differences_of_student_t_densities() -> None:
    """Against scipy, class by class, for unequal counts: the constant they share is all that may
    differ.
    """
    from scipy.stats import multivariate_t

    features, labels = world(9, 30)
    keep = torch.cat(
        [
            torch.arange(30)[labels == 0][:9],
            torch.arange(30)[labels == 1][:2],
            torch.arange(30)[labels == 2][:5],
        ]
    )
    features, labels = features[keep], labels[keep]
    posteriors = ClassPosteriors.of(
        folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4)), 4
    )
    covariance, freedom = posteriors.scatter / posteriors.weight, float(posteriors.weight)
    share = shrinkage(covariance, freedom)
    shrunk = (1 - share) * covariance + share * covariance.trace() / 4 * torch.eye(4).double()
    points = features.numpy()
    reference = np.stack(
        [
            multivariate_t(
                posteriors.mean[c].numpy(),
                (1 + 1 / posteriors.count[c].item()) * shrunk.numpy(),
                df=freedom,
            ).logpdf(points)
            for c in range(3)
        ],
        1,
    )
    ours = Discriminant.of(posteriors, torch.arange(3), PLAIN).scores(features).double().numpy()
    np.testing.assert_allclose(ours - ours[:, :1], reference - reference[:, :1], atol=1e-4)


def test_temperature_divides_the_scores() -> None:
    features, labels = world(10)
    posteriors = ClassPosteriors.of(
        folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4)), 4
    )
    one, two = (
        Discriminant.of(posteriors, torch.arange(3), GaussianHead(temperature=temperature)).scores(
            features
        )
        for temperature in (1.0, 2.0)
    )
    torch.testing.assert_close(one, 2 * two)


def uneven() -> tuple[Tensor, Tensor, ClassPosteriors]:
    """Classes of 90, 30 and 6 images that overlap, and where they lie."""
    features, labels = world(11, 900)
    keep = torch.cat(
        [(labels == c).nonzero().flatten()[:count] for c, count in enumerate((90, 30, 6))]
    )
    features, labels = features[keep] + 3 * torch.randn(126, 4).double(), labels[keep]
    return (
        features,
        labels,
        ClassPosteriors.of(
            folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4)), 4
        ),
    )


def test_a_prior_of_frequencies_is_the_mean_of_their_dirichlet_posterior() -> None:
    """Added after the temperature: it weighs classes, not features."""
    features, _, posteriors = uneven()
    heads = GaussianHead(temperature=3.0, prior="frequency"), GaussianHead(temperature=3.0)
    often, alike = (
        Discriminant.of(posteriors, torch.tensor([0, 2]), head).scores(features) for head in heads
    )
    expected = torch.log(torch.tensor([91.0, 7.0]) / 98)
    torch.testing.assert_close(
        (often - alike).diff(dim=1), expected.diff().expand(len(features), 1), rtol=0, atol=1e-5
    )


def test_with_frequencies_predictions_are_those_of_lda_with_its_priors() -> None:
    features, labels, posteriors = uneven()
    share = shrinkage(posteriors.scatter / posteriors.weight, float(posteriors.weight))
    priors = [91 / 129, 31 / 129, 7 / 129]
    reference = LinearDiscriminantAnalysis(solver="eigen", shrinkage=share, priors=priors).fit(
        features.numpy(), labels.numpy()
    )
    ours = (
        Discriminant.of(
            posteriors, torch.arange(3), GaussianHead(temperature=1.0, prior="frequency")
        )
        .scores(features)
        .argmax(1)
    )
    alike = Discriminant.of(posteriors, torch.arange(3), PLAIN).scores(features).argmax(1)
    agreement = (ours == torch.tensor(reference.predict(features.numpy()))).double().mean()
    assert agreement > 0.97  # Student-t tails move a few images near a border
    assert (ours == 2).sum() < (alike == 2).sum()


def wide(
    images: int, width: int, offset: float = 0.0, dead: int = 0
) -> tuple[ClassPosteriors, Tensor]:
    """ClassPosteriors from features as they are sent: sums in float32 of rectified features, some
    of them always zero.
    """
    features = torch.relu(torch.randn(images, width) + offset).double()
    features[:, :dead] = 0
    update = statistics(features, features, torch.arange(images) % 3)
    sent = {name: value.float() for name, value in update.tensors.items()}
    state = folded(
        State({}, NAMES),
        [Update("run", 1, "statistics", 0, "", images, update.counts, sent)],
        exchange(width),
    )
    return ClassPosteriors.of(state, width), features


@pytest.mark.parametrize("images", [3, 6, 40])
def test_a_thousand_features_of_few_images_stay_finite_and_fast(images: int) -> None:
    posteriors, features = wide(images, 1000, dead=200)
    start = perf_counter()
    scores = Discriminant.of(posteriors, torch.arange(3), PLAIN).scores(features)
    assert bool(scores.isfinite().all())
    assert perf_counter() - start < 5
    assert scores.argmax(1).tolist() == (torch.arange(images) % 3).tolist()


def test_features_far_from_zero_lose_nothing_that_matters_to_float32_sums() -> None:
    posteriors, features = wide(2000, 20, offset=300.0)
    assert bool(
        Discriminant.of(posteriors, torch.arange(3), PLAIN).scores(features).isfinite().all()
    )


def test_one_class_with_one_image_can_be_scored() -> None:
    features = torch.tensor([[1.0, 2.0]]).double()
    posteriors = ClassPosteriors.of(
        folded(State({}, NAMES), [statistics(features, features, torch.tensor([1]))], exchange(2)),
        2,
    )
    assert bool(
        Discriminant.of(posteriors, torch.tensor([1]), PLAIN).scores(features).isfinite().all()
    )


# A class that nobody has met.


def known(classes: int = 40, width: int = 6, images: float = 50.0) -> ClassPosteriors:
    """Class means around (1, ..., 1), wide in the first direction; within classes S is diagonal."""
    wide = torch.linspace(3, 0.5, width).double()
    mean = 1 + wide * torch.randn(classes, width).double()
    scatter = torch.linspace(1, 2, width).double().diag() * images * classes
    count, weight = torch.full((classes,), images).double(), torch.tensor([images * classes])
    return ClassPosteriors(mean, count, scatter, weight.double())


def test_odds_of_an_unknown_class_are_those_of_the_two_normal_densities() -> None:
    """With fewer features than classes the span is everything: S, S + B and S + S / n in full."""
    posteriors, features = known(), 2 * torch.randn(30, 6).double()
    found = Discriminant.of(posteriors, torch.arange(40), PLAIN)
    within = found.lower @ found.lower.T
    centred = posteriors.mean - posteriors.mean.mean(0)
    between = centred.T @ centred / 39 - within / 50
    normal = torch.distributions.MultivariateNormal
    unknown = normal(posteriors.mean.mean(0), within + between).log_prob(features)
    each = normal(posteriors.mean, within * (1 + 1 / 50)).log_prob(features[:, None])
    wanted = unknown - each.logsumexp(1) + np.log(40)
    torch.testing.assert_close(found.read(features)[1].double(), wanted, rtol=1e-4, atol=1e-4)


def test_odds_do_not_depend_on_the_coordinates_of_features() -> None:
    posteriors, features = known(classes=4), torch.randn(30, 6).double()
    turn = torch.linalg.qr(torch.randn(6, 6).double()).Q
    scatter = turn.T @ posteriors.scatter @ turn
    turned = ClassPosteriors(posteriors.mean @ turn, posteriors.count, scatter, posteriors.weight)
    odds = [
        Discriminant.of(one, torch.arange(4), PLAIN).read(seen)[1]
        for one, seen in ((posteriors, features), (turned, features @ turn))
    ]
    torch.testing.assert_close(*odds, rtol=1e-4, atol=1e-4)


def test_odds_tell_images_of_classes_never_met_from_others() -> None:
    posteriors = known(classes=30, width=20)
    strange = known(classes=30, width=20).mean
    found = Discriminant.of(posteriors, torch.arange(30), PLAIN)
    noise = torch.randn(30, 20).double()
    own, other = (found.read(mean + noise)[1] for mean in (posteriors.mean, strange))
    assert float(own.median()) < 0 < float(other.median())


def test_one_class_alone_tells_nothing_of_others() -> None:
    found = Discriminant.of(known(), torch.tensor([3]), PLAIN)
    assert bool((found.read(torch.randn(5, 6).double())[1] == 0).all())
