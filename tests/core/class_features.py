"""Features of three classes, the statistics that clients send of them, and their fold."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbnn.heads import GaussianHead
from fedbnn.heads.gaussian import FACTOR, SUM, StatisticsAggregator
from fedbnn.heads.statistics import factor
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State

NAMES = ("a", "b", "c")


def statistics(
    new: Tensor, old: Tensor, labels: Tensor, client: int = 0, before: Tensor | None = None
) -> Update:
    """What a client with these features sends, in float64, from the formulas alone.

    `old` are those under the anchor, which the round began with unless `before` says otherwise.
    """
    present = labels.unique().tolist()
    wide = torch.cat([old, old if before is None else before, new], 1)
    tensors = {SUM: torch.stack([wide[labels == c].sum(0) for c in present]), FACTOR: factor(wide)}
    counts = {NAMES[c]: int((labels == c).sum()) for c in present}
    return Update("run", 1, "statistics", client, "", len(labels), counts, tensors)


def exchange(width: int, **settings: float) -> StatisticsAggregator:
    """The exchange of statistics of so many features; the anchor stays unless asked."""
    head = GaussianHead(**{"anchor_rounds": 1000, **settings})  # type: ignore[arg-type]
    return StatisticsAggregator(head, backbones(width))


def backbones(width: int, number: float = 0.0, classes: Sequence[str] = ()) -> State:
    """A state with a backbone of one weight, and no prototypes of so many features."""
    one = {"backbone": torch.tensor([number]), "buffers": torch.zeros(0)}
    return State({"prototypes": torch.zeros(len(classes), width + 1), **one}, tuple(classes))


def folded(
    state: State, updates: Sequence[Update], settings: StatisticsAggregator, trust: float = 1.0
) -> State:
    if "backbone" not in state:
        state = state.having(settings.before.only("backbone", "buffers").tensors)
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
