"""From the scores of a model to predictions in both regimes: one forward pass, a few images at a time.

`task_aware` normalises over the classifier rows of the tested task only, `class_agnostic` over all rows there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedbnn.evaluation import metrics
from fedbnn.images import ImageSet

REGIMES = ("task_aware", "class_agnostic")


class TaskLike(Protocol):
    """A task: its name and the global names of its classes."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Global names of its classes."""
        ...


class Predictor(Protocol):
    """What evaluation asks of a model: log-scores (S, n, C) of S weight samples that stay the same between calls."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that have a trained row, in the order of the columns."""
        ...

    def scores(self, images: ImageSet) -> Tensor:
        """Softmax over any subset of the columns gives the probabilities of each weight sample."""
        ...


@dataclass(frozen=True)
class Predictions:
    """Predictions for n images: mean probabilities in both regimes with the labels as columns of each, and uncertainty."""

    task_aware: Tensor
    task_labels: Tensor
    class_agnostic: Tensor
    labels: Tensor
    entropy: Tensor
    mutual_information: Tensor

    def regime(self, name: str) -> tuple[Tensor, Tensor]:
        """Probabilities and labels of one regime."""
        return (
            (self.task_aware, self.task_labels)
            if name == "task_aware"
            else (self.class_agnostic, self.labels)
        )


def judge(predictor: Predictor, images: ImageSet, task: TaskLike, batch_size: int) -> Predictions:
    """Predict the images of one task; the scores of `batch_size` images are in memory at a time."""
    chunks = torch.split(torch.arange(len(images)), batch_size)
    parts = [_judge_chunk(predictor, images.subset(chunk), task) for chunk in chunks]
    return Predictions(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _judge_chunk(predictor: Predictor, images: ImageSet, task: TaskLike) -> tuple[Tensor, ...]:
    """The columns of `Predictions` for a few images: probabilities are averaged over the samples, never scores."""
    columns = [place for place, name in enumerate(predictor.classes) if name in task.classes]
    scores = predictor.scores(images).float().cpu()
    sampled = scores.softmax(-1)
    aware, mean = scores[..., columns].softmax(-1).mean(0), sampled.mean(0)
    labels = _as_columns(images, predictor.classes)
    task_labels = _as_columns(images, tuple(predictor.classes[place] for place in columns))
    return (
        aware,
        task_labels,
        mean,
        labels,
        metrics.entropy(mean),
        metrics.mutual_information(sampled),
    )


def _as_columns(images: ImageSet, columns: Sequence[str]) -> Tensor:
    """The column of each image's class, -1 for classes without one."""
    place = {name: column for column, name in enumerate(columns)}
    return torch.tensor([place.get(name, -1) for name in images.classes])[images.labels.cpu()]
