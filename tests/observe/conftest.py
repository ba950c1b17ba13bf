"""A tiny stream and a model whose answers are known, for tests of everything that watches a run."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from fedbnn.images import ImageSet


@dataclass(frozen=True)
class Task:
    name: str
    classes: tuple[str, ...]


@dataclass
class TinyStream:
    """Three tasks of two classes, two rounds each; the second round of a task already has a quarter of the next."""

    rounds: int = 6
    tasks: tuple[Task, ...] = tuple(Task(f"t{n}", (f"toy/{2 * n}", f"toy/{2 * n + 1}")) for n in range(3))
    gradual: bool = False
    images_per_class: int = 20

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(name for task in self.tasks for name in task.classes)

    def shares(self, round: int) -> tuple[float, ...]:
        current = (round - 1) // 2
        shares = [float(task == current) for task in range(3)]
        if self.gradual and round % 2 == 0 and current < 2:
            shares[current], shares[current + 1] = 0.75, 0.25
        return tuple(shares)

    def task_ends(self) -> tuple[int, ...]:
        return (2, 4, 6)

    def _images(self, labels: Tensor) -> ImageSet:
        return ImageSet(labels.to(torch.uint8).view(-1, 1, 1, 1), labels, self.classes)

    def test(self, task: int) -> ImageSet:
        names = self.tasks[task].classes
        labels = torch.tensor([self.classes.index(name) for name in names])
        return self._images(labels.repeat(self.images_per_class))

    def test_now(self, round: int, images: int | None) -> ImageSet:
        per_task = [int(share * 2 * self.images_per_class) for share in self.shares(round)]
        labels = torch.cat([self.test(task).labels[:count] for task, count in enumerate(per_task)])
        return self._images(labels[:images])


@dataclass
class KnownPredictor:
    """Scores by a table: `answer(true class, column class)`; the pixel of an image is its label. Counts images seen."""

    classes: tuple[str, ...]
    answer: Callable[[str, str], float] = lambda truth, column: 5.0 * (truth == column)
    samples: int = 3
    calls: list[int] = field(default_factory=list)

    def scores(self, images: ImageSet) -> Tensor:
        self.calls.append(len(images))
        truths = [images.classes[int(pixel)] for pixel in images.pixels.flatten()]
        table = torch.tensor([[self.answer(truth, column) for column in self.classes] for truth in truths])
        return table.view(len(truths), len(self.classes)).expand(self.samples, -1, -1)


@pytest.fixture
def stream() -> TinyStream:
    return TinyStream()


@pytest.fixture
def gradual_stream() -> TinyStream:
    return TinyStream(gradual=True)


@pytest.fixture
def predictor() -> type[KnownPredictor]:
    return KnownPredictor
