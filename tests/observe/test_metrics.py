"""Numbers about predictions: identities, closed forms, and scikit-learn as the witness."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from torch import Tensor

from fedbnn.evaluation import metrics


def drawn(seed: int, images: int = 200, classes: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probabilities = (2 * torch.randn(images, classes, generator=generator)).softmax(-1)
    return probabilities, torch.randint(classes, (images,), generator=generator)


def test_a_perfect_prediction_has_no_error() -> None:
    labels = torch.arange(4)
    assert metrics.quality(torch.eye(4), labels) == metrics.Quality(
        accuracy=100.0, nll=0.0, brier=0.0, ece=0.0
    )


def test_a_uniform_prediction_has_the_closed_form_values() -> None:
    labels = torch.arange(8)
    found = metrics.quality(torch.full((8, 8), 1 / 8), labels)
    assert found.nll == pytest.approx(math.log(8))
    assert found.brier == pytest.approx(1 - 1 / 8)
    assert found.accuracy == pytest.approx(100 / 8)
    assert found.ece == pytest.approx(0.0, abs=1e-6)


def test_accuracy_and_nll_agree_with_scikit_learn() -> None:
    probabilities, labels = drawn(0)
    found = metrics.quality(probabilities, labels)
    assert found.accuracy == pytest.approx(
        100 * accuracy_score(labels.numpy(), probabilities.argmax(-1).numpy())
    )
    exact = probabilities.double().numpy()
    assert found.nll == pytest.approx(
        log_loss(labels.numpy(), exact / exact.sum(1, keepdims=True)), rel=1e-5
    )


def test_brier_is_the_sum_of_binary_brier_scores() -> None:
    from sklearn.metrics import brier_score_loss

    probabilities, labels = drawn(1)
    parts = [
        brier_score_loss((labels == c).numpy(), probabilities[:, c].double().numpy())
        for c in range(5)
    ]
    assert metrics.brier(probabilities, labels) == pytest.approx(sum(parts), rel=1e-5)


def test_ece_agrees_with_a_plain_loop_over_the_bins() -> None:
    probabilities, labels = drawn(2)
    confidence, right = (
        probabilities.max(-1).values.numpy(),
        (probabilities.argmax(-1) == labels).numpy(),
    )
    total, edges = 0.0, np.linspace(0, 1, 16)
    for low, high in pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert metrics.quality(probabilities, labels).ece == pytest.approx(total, abs=1e-6)


def test_reliability_bins_hold_every_image_and_the_same_ece() -> None:
    probabilities, labels = drawn(3)
    bins = {
        name: np.array(values)
        for name, values in metrics.reliability(probabilities, labels).items()
    }
    assert bins["images"].sum() == 200
    gaps = bins["images"] * np.abs(bins["accuracy"] - bins["confidence"])
    assert gaps.sum() / 200 == pytest.approx(metrics.ece(probabilities, labels), abs=1e-6)


def test_an_image_whose_class_has_no_row_is_never_right() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1]])
    found = metrics.quality(probabilities, torch.tensor([0, -1]))
    assert found.accuracy == 50.0
    assert found.brier == pytest.approx((0.02 + 0.81 + 0.01 + 1) / 2)
    assert found.nll == pytest.approx((-math.log(0.9) - math.log(metrics.SMALLEST)) / 2)
    assert found.ece == pytest.approx(abs(0.5 - 0.9))


def test_a_classifier_without_rows_is_wrong_about_everything() -> None:
    nothing, labels = torch.zeros(3, 0), torch.full((3,), -1)
    assert metrics.quality(nothing, labels) == metrics.BLIND
    assert sum(metrics.reliability(nothing, labels)["accuracy"]) == 0
    assert metrics.chance(labels, 0) == 0


def test_chance_of_balanced_classes_does_not_depend_on_how_many_have_rows() -> None:
    assert metrics.chance(torch.tensor([0, 1, 2, 3]), 4) == 25.0
    assert metrics.chance(torch.tensor([0, 1, -1, -1]), 2) == 25.0


def test_entropy_is_largest_for_the_uniform_distribution() -> None:
    assert metrics.entropy(torch.full((7,), 1 / 7)).item() == pytest.approx(math.log(7))
    assert metrics.entropy(torch.tensor([1.0, 0.0])).item() == 0.0


def test_mutual_information_is_zero_in_agreement_and_log_two_in_full_disagreement() -> None:
    one, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert metrics.mutual_information(torch.stack([one, one])).item() == 0.0
    assert metrics.mutual_information(torch.stack([one, other])).item() == pytest.approx(
        math.log(2)
    )


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_mutual_information_lies_between_zero_and_the_entropy(seed: int) -> None:
    sampled = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    information = metrics.mutual_information(sampled)
    assert (information >= 0).all()
    assert (information <= metrics.entropy(sampled.mean(0)) + 1e-6).all()


@given(
    st.lists(st.floats(0, 5, width=32), min_size=2, max_size=20),
    st.lists(st.floats(0, 5, width=32), min_size=2, max_size=20),
)
@settings(max_examples=40, deadline=None)
def test_auroc_agrees_with_scikit_learn_also_with_ties(
    seen: list[float], unseen: list[float]
) -> None:
    assume(len({*seen, *unseen}) > 1)
    found = metrics.unseen_auroc(torch.tensor(seen), torch.tensor(unseen))
    expected = roc_auc_score([0] * len(seen) + [1] * len(unseen), seen + unseen)
    assert found == pytest.approx(expected, abs=1e-6)


def test_auroc_needs_both_kinds_of_image() -> None:
    assert metrics.unseen_auroc(torch.ones(3), torch.ones(0)) is None
    assert metrics.unseen_auroc(torch.zeros(2), torch.zeros(2)) is None
    assert metrics.unseen_auroc(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])) == 0.5


def test_pooled_numbers_are_those_of_one_set_and_not_the_mean_of_two() -> None:
    (first, one), (second, other) = drawn(4, images=60, classes=3), drawn(5, images=140)
    odds, labels = metrics.pooled([(first, one), (second, other)])
    assert odds.shape == (200, 5)
    both = metrics.quality(odds, labels)
    parts = metrics.quality(first, one), metrics.quality(second, other)
    for name in ("accuracy", "nll", "brier"):
        weighted = 0.3 * getattr(parts[0], name) + 0.7 * getattr(parts[1], name)
        assert getattr(both, name) == pytest.approx(weighted, rel=1e-6)
    bins = {name: np.array(values) for name, values in metrics.reliability(odds, labels).items()}
    gaps = bins["images"] * np.abs(bins["accuracy"] - bins["confidence"])
    assert both.ece == pytest.approx(gaps.sum() / 200, abs=1e-6)


def test_too_sure_here_and_too_modest_there_is_calibrated_together() -> None:
    """Confidence 3/4 everywhere: always right on one task, half of the time on the other."""
    odds = torch.tensor([[0.75, 0.25]]).expand(4, 2)
    modest, sure = (odds, torch.tensor([0, 0, 0, 0])), (odds, torch.tensor([0, 1, 0, 1]))
    assert [metrics.ece(*part) for part in (modest, sure)] == pytest.approx([0.25, 0.25])
    assert metrics.ece(*metrics.pooled([modest, sure])) == pytest.approx(0.0, abs=1e-6)
