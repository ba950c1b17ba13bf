"""Evaluation when the rows stay on the clients: each client is tested on the classes it knows, then the mean is taken."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedbnn.evaluation.evaluation import Evaluation, Stream, evaluate_round
from fedbnn.evaluation.predictions import Predictor, TaskLike
from fedbnn.images import ImageSet
from fedbnn.state import State


def joined(state: State, own: State) -> State:
    """The global backbone with one client's own library."""
    return State({**state.tensors, **own.tensors}, own.classes)


@dataclass(frozen=True)
class Known:
    """A stream whose test sets hold only the classes that one client knows."""

    stream: Stream
    classes: frozenset[str]

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return self.stream.rounds

    @property
    def tasks(self) -> Sequence[TaskLike]:
        """All tasks of the run."""
        return self.stream.tasks

    def shares(self, round: int) -> tuple[float, ...]:
        """Share of the clients on each task."""
        return self.stream.shares(round)

    def task_ends(self) -> tuple[int, ...]:
        """Last round of each task."""
        return self.stream.task_ends()

    def test(self, task: int) -> ImageSet:
        """Test images of a task whose class the client knows."""
        return self._known(self.stream.test(task))

    def test_now(self, round: int, images: int | None) -> ImageSet:
        """The current mixture, of classes the client knows."""
        return self._known(self.stream.test_now(round, images))

    def _known(self, images: ImageSet) -> ImageSet:
        known = torch.tensor([name in self.classes for name in images.classes])
        return images.subset(known[images.labels].nonzero().flatten())


def evaluate(
    predictors: Sequence[Predictor], stream: Stream, round: int, settings: Evaluation
) -> dict[str, Any]:
    """The mean over clients of every number that they have."""
    found = [
        evaluate_round(one, Known(stream, frozenset(one.classes)), round, settings)
        for one in predictors
    ]
    merged: dict[str, Any] = _mean(found)
    return merged


def _mean(values: Sequence[Any]) -> Any:
    """Numbers become their mean, tables and lists are taken apart; what nobody has stays None."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    first = present[0]
    if isinstance(first, Mapping):
        return {key: _mean([value[key] for value in present]) for key in first}
    if isinstance(first, list):
        return [_mean(list(parts)) for parts in zip(*present, strict=True)]
    return sum(present) / len(present)
