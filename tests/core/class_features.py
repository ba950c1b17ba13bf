"""Features of three classes, the statistics that clients send of them, and their fold."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbnn.heads import GaussianHead
from fedbnn.heads.gaussian import StatisticsAggregator, triangle
from fedbnn.messages import Update
from fedbnn.state import State

NAMES = ("a", "b", "c")


def statistics(new: Tensor, old: Tensor, labels: Tensor, client: int = 0) -> Update:
    """What a client with these features sends, in float64, from the formulas alone."""
    present = labels.unique().tolist()
    before = torch.cat([old, torch.ones(len(old), 1).double()], 1)
    tensors = {
        "posteriors.sum": torch.stack([new[labels == c].sum(0) for c in present]),
        "posteriors.moment": triangle(new.T @ new),
        "posteriors.before": triangle(before.T @ before),
        "posteriors.cross": before.T @ new,
    }
    counts = {NAMES[c]: int((labels == c).sum()) for c in present}
    return Update("run", 1, "statistics", client, "", len(labels), counts, tensors)


def exchange(width: int, **settings: float) -> StatisticsAggregator:
    """The exchange of statistics of so many features; nothing is forgotten unless asked."""
    head = GaussianHead(**{"decay": 1.0, "memory": 1.0, **settings})  # type: ignore[arg-type]
    return StatisticsAggregator(head, State({"prototypes": torch.zeros(0, width + 1)}))


def folded(
    state: State, updates: Sequence[Update], settings: StatisticsAggregator, trust: float = 1.0
) -> State:
    fold = settings.fold(state)
    for update in updates:
        fold.add(update, trust)
    return fold.close()


def world(seed: int, count: int = 60, width: int = 4) -> tuple[Tensor, Tensor]:
    """Features of three classes with a common covariance, and the labels."""
    source = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    centres, mix = (
        torch.randn(shape, generator=source, dtype=torch.float64)
        for shape in ((3, width), (width, width))
    )
    return centres[labels] * 3 + torch.randn(
        count, width, generator=source, dtype=torch.float64
    ) @ mix, labels
