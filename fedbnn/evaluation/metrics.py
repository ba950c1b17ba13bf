"""Numbers about predictions and posteriors: pure functions of probabilities, labels and scales.

A label of -1 says that the image's class has no row in the classifier: such an image can never be
right. Accuracies are percentages, calibration errors are fractions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad
from torchmetrics.functional import classification

from fedbnn.protocol.state import State

BINS, HISTOGRAM_BINS, MOST_SCALES = 15, 30, 1_000_000
SMALLEST = torch.finfo(torch.float32).eps
"""Probabilities are raised to this before the logarithm: a mistake costs at most 15.9."""


@dataclass(frozen=True)
class Quality:
    """How good the predictions for one set of images are."""

    accuracy: float
    nll: float
    brier: float
    ece: float


BLIND = Quality(accuracy=0.0, nll=-math.log(SMALLEST), brier=1.0, ece=0.0)
"""The quality of a classifier without any row: it gives every class the probability 0."""


def quality(probabilities: Tensor, labels: Tensor) -> Quality:
    """All four numbers of predictions (n, C) with labels (n,) in -1..C-1.

    Images whose class has no row get a class of their own, column C, of probability 0.
    """
    classes = probabilities.shape[1]
    if classes == 0:
        return BLIND
    known, target = pad(probabilities, (0, 1)), torch.where(labels < 0, classes, labels)
    return Quality(*(measure(known, target) for measure in (accuracy, nll, brier, ece)))


def accuracy(probabilities: Tensor, labels: Tensor) -> float:
    """100/n sum_i [argmax_c p_ic = y_i]; torchmetrics counts, its ratio has single precision."""
    classes = probabilities.shape[1]
    counts = classification.multiclass_stat_scores(probabilities, labels, classes, average="micro")
    return 100 * (int(counts[0]) / len(labels))


def nll(probabilities: Tensor, labels: Tensor) -> float:
    """-1/n sum_i log p_i(y_i)."""
    chosen = probabilities.gather(1, labels[:, None]).double()
    return -chosen.clamp(min=SMALLEST).log().mean().item()


def brier(probabilities: Tensor, labels: Tensor) -> float:
    """1/n sum_i sum_c (p_ic - [y_i = c])^2."""
    truth = one_hot(labels, probabilities.shape[1])
    return (probabilities.double() - truth).square().sum(-1).mean().item()


def ece(probabilities: Tensor, labels: Tensor) -> float:
    """sum_b n_b/n |accuracy_b - confidence_b| over equal bins of the highest probability."""
    shape = probabilities.shape[1], BINS
    return float(classification.multiclass_calibration_error(probabilities, labels, *shape))


def chance(labels: Tensor, columns: int) -> float:
    """Percent right of a blind guess: 100/n sum_i [class i has a row] / columns."""
    return 100 * (labels >= 0).double().mean().item() / max(columns, 1)


def entropy(probabilities: Tensor) -> Tensor:
    """-sum_c p_c log p_c along the last axis, in nats."""
    total: Tensor = torch.special.entr(probabilities).sum(-1)
    return total


def mutual_information(sampled: Tensor) -> Tensor:
    """H[mean_s p_s] - mean_s H[p_s] of probabilities (S, n, C): where weights disagree."""
    return (entropy(sampled.mean(0)) - entropy(sampled).mean(0)).clamp(min=0)


def unseen_auroc(seen: Tensor, unseen: Tensor) -> float | None:
    """P(an unseen class is found more uncertain than a seen one).

    None without images of both, or where all are alike: weights that are points never disagree.
    """
    values = torch.cat([seen, unseen]).double()
    if not len(seen) or not len(unseen) or values.min() == values.max():
        return None
    target = torch.cat([torch.zeros(len(seen)), torch.ones(len(unseen))]).long()
    shares = (values - values.min()) / (values.max() - values.min())
    return float(classification.binary_auroc(shares, target))


def pooled(predicted: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Probabilities and labels of several sets of images as one; a column that a set lacks is 0."""
    widest = max(probabilities.shape[1] for probabilities, _ in predicted)
    wide = [pad(odds, (0, widest - odds.shape[1])) for odds, _ in predicted]
    return torch.cat(wide), torch.cat([labels for _, labels in predicted])


def reliability(probabilities: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """Images, mean confidence and fraction right in equal bins of the highest probability.

    0 where a bin is empty.
    """
    confidence, guess = pad(probabilities, (0, 1)).double().max(-1)
    place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    count = torch.bincount(place, minlength=BINS)
    sums = {"confidence": confidence, "accuracy": (guess == labels).double()}
    totals = {name: torch.bincount(place, value, BINS) for name, value in sums.items()}
    means = {name: (total / count.clamp(min=1)).tolist() for name, total in totals.items()}
    return {"images": count.tolist(), **means}


def histograms(seen: Tensor, unseen: Tensor) -> dict[str, list[float]]:
    """How many of both lie between 31 equal edges from the smallest value, at most 0, on."""
    every, both = torch.cat([seen, unseen]), {"seen": seen, "unseen": unseen}
    ends = min(float(every.min()), 0.0), max(float(every.max()), SMALLEST)
    counts = {name: torch.histc(one, HISTOGRAM_BINS, *ends) for name, one in both.items()}
    found = {"edges": torch.linspace(*ends, HISTOGRAM_BINS + 1), **counts}
    return {name: values.tolist() for name, values in found.items()}


def scale_quantiles(state: State) -> dict[str, dict[str, list[float]]] | None:
    """5 %, 50 % and 95 % quantiles of the posterior's scales, of backbone and prototypes.

    At most a million scales of each are looked at, evenly spread. None while weights are points.
    """
    if not state.bayesian:
        return None
    marks, sites = torch.tensor([0.05, 0.5, 0.95]), ("backbone", "prototypes")
    scales = {one: state[f"{one}.scale"].flatten() for one in sites if f"{one}.scale" in state}
    some = {site: one[:: -(-len(one) // MOST_SCALES)] for site, one in scales.items() if len(one)}
    return {"scale": {site: torch.quantile(part, marks).tolist() for site, part in some.items()}}

