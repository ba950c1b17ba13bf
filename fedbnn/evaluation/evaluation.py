"""How good the global model is after a round: both regimes, always both, from one forward pass per image set.

`task_aware` normalises over the classifier rows of the tested task only, `class_agnostic` over all rows there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fedbnn.errors import ConfigError
from fedbnn.evaluation import diagnostics, metrics
from fedbnn.evaluation.predictions import REGIMES, Predictions, Predictor, TaskLike, judge
from fedbnn.images import ImageSet
from fedbnn.seeds import generator


class Stream(Protocol):
    """What evaluation asks of a stream."""

    @property
    def rounds(self) -> int:
        """Number of rounds R."""
        ...

    @property
    def tasks(self) -> Sequence[TaskLike]:
        """All tasks of the run."""
        ...

    def shares(self, round: int) -> tuple[float, ...]:
        """Share of the clients on each task in this round."""
        ...

    def task_ends(self) -> tuple[int, ...]:
        """Last round of each task."""
        ...

    def test(self, task: int) -> ImageSet:
        """The full test set of a task."""
        ...

    def test_now(self, round: int, images: int | None) -> ImageSet:
        """A test set drawn from the current mixture of tasks."""
        ...


@dataclass(frozen=True)
class Evaluation:
    """How often, and on how many images, the global model is evaluated (full test sets at task ends, always).

    Args:
        every: rounds between two Focus-on-Now evaluations; 0 means only at task ends and at the last round.
        images: most images of one Focus-on-Now test set; null means all.
        tasks_every: rounds between two evaluations on the full test sets, besides task ends; null means none.
        novelty_images: most images of each task not begun yet, to see whether the model finds them strange.
        batch_size: images whose scores are held in memory at once.
        samples: weight samples S of a Bayesian model.
        both_heads: with `head: gaussian`, also judge the linear rows: what the head gives, from one training.
    """

    every: int = 1
    images: int | None = 1000
    tasks_every: int | None = None
    novelty_images: int = 500
    batch_size: int = 500
    samples: int = 8
    both_heads: bool = False

    def __post_init__(self) -> None:
        least = {
            "every": 0,
            "images": 1,
            "tasks_every": 1,
            "novelty_images": 0,
            "batch_size": 1,
            "samples": 1,
        }
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"evaluate.{name} is {value}", fix=f"give at least {bound}")

    def full(self, round: int, stream: Stream) -> bool:
        """Whether this round is evaluated on the full test sets."""
        extra = self.tasks_every is not None and round % self.tasks_every == 0
        return extra or round == stream.rounds or round in stream.task_ends()

    def now(self, round: int, stream: Stream) -> bool:
        """Whether this round has a Focus-on-Now value."""
        often = self.every > 0 and round % self.every == 0
        return often or round == stream.rounds or round in stream.task_ends()


def evaluate_round(
    predictor: Predictor, stream: Stream, round: int, settings: Evaluation
) -> dict[str, object]:
    """The evaluated part of this round's metrics line: `fon`, `tasks`, `novelty`, `seen_classes`, `diagnostics`."""
    with torch.inference_mode():
        fon = (
            _focus_on_now(predictor, stream, round, settings)
            if settings.now(round, stream)
            else None
        )
        full = (
            _full(predictor, stream, round, settings)
            if settings.full(round, stream)
            else _not_evaluated(stream)
        )
    return {"fon": fon, **full, "seen_classes": len(predictor.classes)}


def _focus_on_now(
    predictor: Predictor, stream: Stream, round: int, settings: Evaluation
) -> dict[str, float]:
    """Accuracy in both regimes on the current mixture; an image is judged in the first current task that has its class."""
    images, right = stream.test_now(round, settings.images), dict.fromkeys(REGIMES, 0.0)
    left = torch.ones(len(images), dtype=torch.bool)
    for task in (
        task for task, share in zip(stream.tasks, stream.shares(round), strict=True) if share > 0
    ):
        mine = left & torch.tensor([name in task.classes for name in images.classes])[images.labels]
        left = left & ~mine
        if mine.any():
            judged = judge(
                predictor, images.subset(mine.nonzero().flatten()), task, settings.batch_size
            )
            for name in REGIMES:
                right[name] += metrics.quality(*judged.regime(name)).accuracy * len(judged.labels)
    return {name: total / len(images) for name, total in right.items()}


def begun(stream: Stream, round: int) -> list[bool]:
    """For each task, whether any round up to this one had a share of it."""
    shares = [stream.shares(earlier) for earlier in range(1, round + 1)]
    return [any(share > 0 for share in column) for column in zip(*shares, strict=True)]


def _full(
    predictor: Predictor, stream: Stream, round: int, settings: Evaluation
) -> dict[str, object]:
    """Every task begun, on its full test set; and whether images of classes never seen look strange."""
    judged = [
        _judged(predictor, stream, number, stream.test(number), settings) if started else None
        for number, started in enumerate(begun(stream, round))
    ]
    known = [one for one in judged if one is not None]
    strange = [
        _strangers(predictor, stream, number, settings)
        for number, one in enumerate(judged)
        if one is None
    ]
    everything = known + [one for one in strange if one is not None]
    return {
        "tasks": [None if one is None else _task_line(one) for one in judged],
        "novelty": diagnostics.novelty(everything),
        "diagnostics": {
            "reliability": diagnostics.reliability(known),
            "uncertainty": diagnostics.uncertainty(everything),
        },
    }


def _not_evaluated(stream: Stream) -> dict[str, object]:
    return {"tasks": [None] * len(stream.tasks), "novelty": None, "diagnostics": None}


def _strangers(
    predictor: Predictor, stream: Stream, task: int, settings: Evaluation
) -> Predictions | None:
    """Some images of a task not begun yet, the same ones in every round and run."""
    images = stream.test(task)
    chosen = torch.randperm(len(images), generator=generator(0, "novelty", task))[
        : settings.novelty_images
    ]
    return _judged(predictor, stream, task, images.subset(chosen), settings)


def _judged(
    predictor: Predictor, stream: Stream, task: int, images: ImageSet, settings: Evaluation
) -> Predictions | None:
    """Predictions for images of one task, if there are any."""
    return (
        judge(predictor, images, stream.tasks[task], settings.batch_size) if len(images) else None
    )


def _task_line(judged: Predictions) -> dict[str, object]:
    """One entry of `tasks` in the metrics line."""
    regimes = {name: judged.regime(name) for name in REGIMES}
    chance = {
        name: metrics.chance(labels, probabilities.shape[1])
        for name, (probabilities, labels) in regimes.items()
    }
    qualities = {name: metrics.quality(*regime).as_dict() for name, regime in regimes.items()}
    return {"images": len(judged.labels), **qualities, "chance": chance}
