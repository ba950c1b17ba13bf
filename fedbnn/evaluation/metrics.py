"""Numbers about predictions: pure functions from probabilities and labels, and from an accuracy matrix.

A label of -1 says that the image's class has no row in the classifier: such an image can never be right.
Accuracies are percentages, calibration errors are fractions.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad
from torchmetrics.functional.classification import binary_auroc, multiclass_calibration_error

Row = Sequence[float | None]

BINS = 15
SMALLEST = torch.finfo(torch.float32).eps
"""Probabilities are raised to this before the logarithm, so that a certain mistake costs 15.9 and not infinity."""


@dataclass(frozen=True)
class Quality:
    """How good the predictions for one set of images are."""

    accuracy: float
    nll: float
    brier: float
    ece: float

    def as_dict(self) -> dict[str, float]:
        """The four numbers by name."""
        return asdict(self)


BLIND = Quality(accuracy=0.0, nll=-math.log(SMALLEST), brier=1.0, ece=0.0)
"""The quality of a classifier without any row: it gives every class the probability 0."""


def quality(probabilities: Tensor, labels: Tensor) -> Quality:
    """All four numbers of predictions (n, C) with labels (n,) in -1..C-1."""
    if probabilities.shape[1] == 0:
        return BLIND
    known, target = _with_unknown(probabilities, labels)
    return Quality(
        accuracy(probabilities, labels),
        nll(known, target),
        brier(known, target),
        ece(known, target),
    )


def _with_unknown(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """One more column of probability 0, the class of all images whose class has no row."""
    return pad(probabilities, (0, 1)), torch.where(labels < 0, probabilities.shape[1], labels)


def accuracy(probabilities: Tensor, labels: Tensor) -> float:
    """100/n sum_i [argmax_c p_ic = y_i]."""
    return 100 * (probabilities.argmax(-1) == labels).double().mean().item()


def nll(probabilities: Tensor, labels: Tensor) -> float:
    """-1/n sum_i log p_i(y_i)."""
    chosen = probabilities.gather(1, labels[:, None]).double()
    return -chosen.clamp(min=SMALLEST).log().mean().item()


def brier(probabilities: Tensor, labels: Tensor) -> float:
    """1/n sum_i sum_c (p_ic - [y_i = c])^2."""
    truth = one_hot(labels, probabilities.shape[1])
    return (probabilities.double() - truth).square().sum(-1).mean().item()


def ece(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """sum_b n_b/n |accuracy_b - confidence_b| over equal bins of the highest probability."""
    classes = max(probabilities.shape[1], 2)
    return float(
        multiclass_calibration_error(probabilities, labels, classes, n_bins=bins, norm="l1")
    )


def chance(labels: Tensor, columns: int) -> float:
    """Percent right of a blind guess among the columns: 100/n sum_i [class i has a row] / columns."""
    return 100 * (labels >= 0).double().mean().item() / max(columns, 1)


def entropy(probabilities: Tensor) -> Tensor:
    """-sum_c p_c log p_c along the last axis, in nats."""
    total: Tensor = torch.special.entr(probabilities).sum(-1)
    return total


def mutual_information(sampled: Tensor) -> Tensor:
    """H[mean_s p_s] - mean_s H[p_s] of sampled probabilities (S, n, C): what the weights do not agree on."""
    return (entropy(sampled.mean(0)) - entropy(sampled).mean(0)).clamp(min=0)


def unseen_auroc(seen: Tensor, unseen: Tensor) -> float | None:
    """Probability that an image of an unseen class is more uncertain than one of a seen class; None without both."""
    if not len(seen) or not len(unseen):
        return None
    values = torch.cat([seen, unseen]).double()
    target = torch.cat([torch.zeros(len(seen)), torch.ones(len(unseen))]).long()
    return float(binary_auroc(values / values.max().clamp(min=SMALLEST), target))


def reliability(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> dict[str, list[float]]:
    """Per bin of the highest probability: images, mean confidence, fraction right (0 where a bin is empty)."""
    confidence, guess = pad(probabilities, (0, 1)).double().max(-1)
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    count = torch.bincount(place, minlength=bins)
    sums = [
        torch.bincount(place, weights=value, minlength=bins)
        for value in (confidence, (guess == labels).double())
    ]
    mean_confidence, right = (total / count.clamp(min=1) for total in sums)
    return {
        "images": count.tolist(),
        "confidence": mean_confidence.tolist(),
        "accuracy": right.tolist(),
    }


def diagonal(matrix: Sequence[Row]) -> list[float | None]:
    """@TS: the accuracy of each task at its own end (row i of the matrix is the evaluation at the end of task i)."""
    return [row[task] for task, row in enumerate(matrix)]


def average(values: Row) -> float | None:
    """Mean of the values that are there."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def forgetting(matrix: Sequence[Row], final: Row) -> float | None:
    """1/(T-1) sum_{j<T} max_{i<T} a_ij - a_j^final: how far each task fell from its best earlier evaluation."""
    return average(forgetting_by_task(matrix, final)[:-1])


def forgetting_by_task(matrix: Sequence[Row], final: Row) -> list[float | None]:
    """max_{i<T} a_ij - a_j^final for each task j."""
    best = [[row[task] for row in matrix[:-1]] for task in range(len(final))]
    return [_drop(values, last) for values, last in zip(best, final, strict=True)]


def _drop(values: Row, last: float | None) -> float | None:
    present = [value for value in values if value is not None]
    return max(present) - last if present and last is not None else None


def backward_transfer(matrix: Sequence[Row], final: Row) -> float | None:
    """1/(T-1) sum_{j<T} a_j^final - a_jj: what later tasks did to earlier ones."""
    pairs = list(zip(diagonal(matrix), final, strict=True))[:-1]
    return average([None if own is None or last is None else last - own for own, last in pairs])
