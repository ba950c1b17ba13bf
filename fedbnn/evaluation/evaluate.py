"""How good the model is after a round: two regimes, always both, from one forward pass an image.

`task_aware` normalises over the classifier rows of the tested task only, `class_agnostic` over all
rows there are. Where the rows stay on the clients, each client is tested on the classes it knows,
then the mean is taken.

Where the forgetting is, an oracle tells: the head of a run against one that forgets nothing, round
by round. It has the class posteriors of all images shown so far, each once, under the backbone of
the round itself. No run could have them: the images are gone. What it loses over the rounds the
backbone has forgotten; what is between it and the run's own head, the head has.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.config.schema import Count, NonNegativeCount
from fedbnn.devices import CPU
from fedbnn.evaluation import metrics
from fedbnn.heads import GaussianHead, Head, LinearHead
from fedbnn.heads.gaussian import features
from fedbnn.heads.posteriors import ClassPosteriors
from fedbnn.heads.predictive import Predictor
from fedbnn.images import ImageSet
from fedbnn.methods.bounds import JointStream
from fedbnn.protocol.state import State
from fedbnn.protocol.stream import Stream, Task
from fedbnn.seeds import generator

REGIMES = ("task_aware", "class_agnostic")
UNCERTAINTIES = ("entropy", "mutual_information", "unknown_class")
LOOKED_AT = 200
"""Images of the next round that tell whether they look strange."""
FULL = ("pooled", "novelty", "diagnostics")
HEADS = ("ours", "oracle")
Row = dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """How often, and on how many images, the global model is evaluated; at task ends always on all.

    Args:
        every: rounds between two Focus-on-Now evaluations; 0: only at task ends and the last round.
        images: most images of one Focus-on-Now test set; null means all.
        novelty_images: most images of each task not begun yet, to see whether they look strange.
        batch_size: images whose scores are held in memory at once.
        samples: weight samples S of a Bayesian model.
        both_heads: with `head: gaussian`, also test the linear prototypes: what the head gives.
    """

    every: NonNegativeCount = 1
    images: Count | None = 1000
    novelty_images: NonNegativeCount = 500
    batch_size: Count = 500
    samples: Count = 8
    both_heads: bool = False

    def full(self, round: int, stream: Stream) -> bool:
        """Whether this round is evaluated on the full test sets."""
        return testable(stream) and (round == stream.rounds or round in stream.task_ends())

    def now(self, round: int, stream: Stream) -> bool:
        """Whether this round has a Focus-on-Now value."""
        due = bool(self.every and round % self.every == 0)
        return (due and testable(stream)) or self.full(round, stream)


def testable(stream: Stream) -> bool:
    """Whether there are images to test on: where clients hold theirs, the server may have none."""
    return any(task.classes for task in stream.tasks)


@dataclass(frozen=True)
class Predictions:
    """Of n images: mean probabilities and labels as their columns in both regimes; uncertainty.

    `unknown_class` are the log-odds of a class nobody has met, 0 where nothing tells them.
    """

    task_aware: Tensor
    task_labels: Tensor
    class_agnostic: Tensor
    labels: Tensor
    entropy: Tensor
    mutual_information: Tensor
    unknown_class: Tensor

    def regime(self, name: str) -> tuple[Tensor, Tensor]:
        """Probabilities and labels of one regime."""
        aware = name == "task_aware"
        return (self.task_aware, self.task_labels) if aware else (self.class_agnostic, self.labels)


def predict(model: Predictor, images: ImageSet, task: Task, batch_size: int) -> Predictions:
    """Predict images of one task; the scores of `batch_size` images are in memory at a time."""
    chunks = torch.split(torch.arange(len(images)), batch_size)
    parts = [_predict_chunk(model, images.subset(chunk), task) for chunk in chunks]
    return Predictions(*map(torch.cat, zip(*parts, strict=True)))


def _predict_chunk(model: Predictor, images: ImageSet, task: Task) -> tuple[Tensor, ...]:
    """The columns of `Predictions`: probabilities are averaged over the samples, never scores."""
    own = [column for column, name in enumerate(model.classes) if name in task.classes]
    scores, odds = model.read(images)
    unknown = torch.zeros(len(images)) if odds is None else odds
    aware, sampled = scores[..., own].softmax(-1).mean(0), scores.softmax(-1)
    known = tuple(model.classes[column] for column in own), model.classes
    labels, every = (images.among(classes).labels for classes in known)
    mean, doubt = sampled.mean(0), metrics.mutual_information(sampled)
    return aware, labels, mean, every, metrics.entropy(mean), doubt, unknown


def evaluate_round(
    model: Predictor, stream: Stream, round: int, settings: Evaluation, known_only: bool = False
) -> dict[str, Any]:
    """The evaluated part of a round's record: fon, surprise, tasks, `FULL`, seen_classes.

    `pooled` are the numbers of all images of the tasks begun, together. With `known_only` the test
    sets hold only the classes that the model has rows for.
    """
    this = _Round(model, stream, round, settings, known_only)
    with torch.inference_mode():
        due = settings.now(round, stream)
        fon, surprise = (this.focus_on_now(), this.surprise()) if due else (None, None)
        full = this.full() if settings.full(round, stream) else {}
    nothing = {"tasks": [None] * len(stream.tasks), **dict.fromkeys(FULL)}
    seen = {"surprise": surprise, "seen_classes": len(model.classes)}
    return {"fon": fon, **nothing, **full, **seen}


@dataclass(frozen=True)
class _Round:
    """One evaluation: which model, on what, and how."""

    model: Predictor
    stream: Stream
    round: int
    settings: Evaluation
    known_only: bool

    def focus_on_now(self) -> dict[str, float] | None:
        """Accuracy on the current mixture; an image is tested in the first task with its class."""
        images = self._tested(self.stream.test_now(self.round, self.settings.images))
        left, right = torch.ones(len(images), dtype=torch.bool), dict.fromkeys(REGIMES, 0.0)
        for task, share in zip(self.stream.tasks, self.stream.shares(self.round), strict=True):
            mine = left & (images.among(task.classes).labels >= 0) & (share > 0)
            left = left & ~mine
            if found := self._predict(images.subset(mine.nonzero().flatten()), task):
                for name in REGIMES:
                    right[name] += metrics.quality(*found.regime(name)).accuracy * int(mine.sum())
        return {name: total / len(images) for name, total in right.items()} if len(images) else None

    def surprise(self) -> float | None:
        """How strange the images of the next round look, before anybody has learnt from them.

        Without labels: their mean predictive entropy, 1 where all classes known are equally likely.
        """
        if self.round == self.stream.rounds or len(self.model.classes) < 2:
            return None
        few = min(self.settings.images or LOOKED_AT, LOOKED_AT)
        images = self._tested(self.stream.test_now(self.round + 1, few))
        found = self._predict(images, self.stream.tasks[0])
        return float(found.entropy.mean()) / math.log(len(self.model.classes)) if found else None

    def full(self) -> dict[str, Any]:
        """Every task begun, on its full test set; and whether classes never seen look strange."""
        started = begun(self.stream, self.round)
        tests = [self._test(number, was) for number, was in enumerate(started)]
        found = list(map(self._predict, tests, self.stream.tasks))
        known = [one if was else None for one, was in zip(found, started, strict=True)]
        seen, everything = ([one for one in part if one] for part in (known, found))
        split = {name: _by_seen(everything, name) for name in UNCERTAINTIES}
        areas = {name: metrics.unseen_auroc(*parts) for name, parts in split.items()}
        pooled = {name: metrics.pooled([one.regime(name) for one in seen]) for name in REGIMES}
        bins = {name: metrics.reliability(*both) for name, both in pooled.items()}
        spread = {name: metrics.histograms(*parts) for name, parts in split.items()}
        return {
            "tasks": [_task_line(one) if one else None for one in known],
            "pooled": {name: asdict(metrics.quality(*both)) for name, both in pooled.items()},
            "novelty": areas if areas["entropy"] is not None else None,
            "diagnostics": {"reliability": bins, "uncertainty": spread},
        }

    def _test(self, task: int, started: bool) -> ImageSet:
        """All test images of a task; of one not begun yet some, the same in every round and run."""
        images = self._tested(self.stream.test(task))
        if started:
            return images
        mixed = torch.randperm(len(images), generator=generator(0, "novelty", task))
        return images.subset(mixed[: self.settings.novelty_images])

    def _tested(self, images: ImageSet) -> ImageSet:
        if not self.known_only:
            return images
        known = images.among(self.model.classes).labels >= 0
        return images.subset(known.nonzero().flatten())

    def _predict(self, images: ImageSet, task: Task) -> Predictions | None:
        """Predictions, if there are any images."""
        return predict(self.model, images, task, self.settings.batch_size) if len(images) else None


def begun(stream: Stream, round: int) -> list[bool]:
    """For each task, whether any round up to this one had a share of it."""
    return list(map(any, zip(*map(stream.shares, range(1, round + 1)), strict=True)))


def _by_seen(predictions: Sequence[Predictions], uncertainty: str) -> tuple[Tensor, Tensor]:
    """One uncertainty of all images: of seen classes, and of classes without a row."""
    values = torch.cat([getattr(one, uncertainty) for one in predictions])
    seen = torch.cat([one.labels for one in predictions]) >= 0
    return values[seen], values[~seen]


def _task_line(predictions: Predictions) -> dict[str, Any]:
    """One entry of `tasks` in the record."""
    regimes = {name: predictions.regime(name) for name in REGIMES}
    found = {name: asdict(metrics.quality(*regime)) for name, regime in regimes.items()}
    chance = {name: metrics.chance(true, odds.shape[1]) for name, (odds, true) in regimes.items()}
    return {"images": len(predictions.labels), **found, "chance": chance}


@dataclass(frozen=True)
class Evaluator:
    """Judges the state of a round on the one backbone there is; the draws follow from `seed`."""

    stream: Stream
    backbone: nn.Module
    layout: Layout
    head: Head
    settings: Evaluation
    seed: int
    device: torch.device = CPU

    def __call__(self, state: State, round: int, privates: Mapping[int, bytes]) -> dict[str, Any]:
        """The evaluated part of a record; client by client where the prototypes stay with them."""
        stream, settings = self.stream, self.settings
        if "prototypes" not in state:
            own = (State.from_bytes(payload) for payload in privates.values())
            whole = (State({**state.tensors, **one.tensors}, one.classes) for one in own)
            models = (self._predictor(one, self.head) for one in whole)
            found = evaluate_clients(models, stream, round, settings)
        else:
            found = evaluate_round(self._predictor(state, self.head), stream, round, settings)
            if settings.both_heads and isinstance(self.head, GaussianHead):
                linear = self._predictor(state, LinearHead())
                found["linear"] = evaluate_round(linear, stream, round, settings)
        return {**found, "posterior": metrics.scale_quantiles(state)}

    def _predictor(self, state: State, head: Head) -> Predictor:
        """The state made ready: its draws are made here, once for all images."""
        drawn = self.settings.samples, self.seed, self.device
        return Predictor(self.backbone, self.layout, state, head, *drawn)


def evaluate_clients(
    models: Iterable[Predictor], stream: Stream, round: int, settings: Evaluation
) -> dict[str, Any]:
    """Each client's model on the classes it knows: the mean of every number they have."""
    found = [evaluate_round(one, stream, round, settings, known_only=True) for one in models]
    return dict(_mean(found))


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


class Oracle(Evaluator):
    """A run whose rounds are looked at again; the parts are those of the run."""

    def rows(self, states: Iterable[tuple[int, State]]) -> Iterator[Row]:
        """By round the accuracy in % of both heads in both regimes, averaged over tasks begun."""
        pool = JointStream(self.stream)
        for round, state in states:
            reading = self.head if isinstance(self.head, GaussianHead) else GaussianHead()
            known = self.posteriors(state, pool.train(round, 0))
            both = (state, self.head), (state.having(known.tensors()), reading)
            row: Row = {"round": round}
            for name, (seen, head) in zip(HEADS, both, strict=True):
                found = self._accuracies(self._predictor(seen, head), round)
                row |= {f"{name} {regime}": mean(found[regime]) for regime in REGIMES}
            yield row

    def posteriors(self, state: State, images: ImageSet) -> ClassPosteriors:
        """Exact class posteriors of these images under the backbone of a state.

        Those of classes it has not met are left out: a client that could not be heard held them.
        """
        self.layout.write(self.backbone, state["backbone"], state["buffers"])
        labels, nothing = images.among(state.classes).labels, replace(state, tensors={})
        met = (labels >= 0).nonzero().flatten()
        seen, labels = features(self.backbone, images.subset(met)).double(), labels[met]
        sums = seen.new_zeros(len(state.classes), seen.shape[1]).index_add_(0, labels, seen)
        counts = torch.bincount(labels, minlength=len(state.classes)).double()
        return ClassPosteriors.of(nothing, seen.shape[1]).merge(counts, sums, seen.T @ seen)

    def _accuracies(self, model: Predictor, round: int) -> dict[str, list[float]]:
        """Of every task begun, on as many of its test images as Focus-on-Now has."""
        found: dict[str, list[float]] = {regime: [] for regime in REGIMES}
        for number, started in enumerate(begun(self.stream, round)):
            if started:
                images = self.stream.test(number)
                most = min(len(images), self.settings.images or len(images))
                few = torch.linspace(0, len(images) - 1, most).long()
                task, batch = self.stream.tasks[number], self.settings.batch_size
                predicted = predict(model, images.subset(few), task, batch)
                for regime in REGIMES:
                    found[regime].append(metrics.quality(*predicted.regime(regime)).accuracy)
        return found
