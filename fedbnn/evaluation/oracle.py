"""Where the forgetting is: the head of a run against one that forgets nothing, round by round.

The oracle has the class posteriors of all images shown so far, each once, under the backbone of the
round itself. No run could have them: the images are gone. What it loses over the rounds the
backbone has forgotten; what is between it and the run's own head, the head has.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import mean

import torch
from torch import nn

from fedbnn.bayes.flatten import Layout
from fedbnn.evaluation import metrics
from fedbnn.evaluation.evaluate import REGIMES, Evaluation, begun, predict
from fedbnn.heads import GaussianHead, Head
from fedbnn.heads.gaussian import features
from fedbnn.heads.posteriors import ClassPosteriors
from fedbnn.heads.predictive import Predictor
from fedbnn.images import ImageSet
from fedbnn.methods.bounds import JointStream
from fedbnn.protocol.state import State
from fedbnn.protocol.stream import Stream

HEADS = ("ours", "oracle")
Row = dict[str, float]


@dataclass(frozen=True)
class Oracle:
    """A run whose rounds are looked at again; the parts are those of the run."""

    stream: Stream
    backbone: nn.Module
    layout: Layout
    head: Head
    settings: Evaluation
    seed: int

    def rows(self, states: Iterable[tuple[int, State]]) -> Iterator[Row]:
        """By round the accuracy in % of both heads in both regimes, averaged over tasks begun."""
        pool = JointStream(self.stream)
        for round, state in states:
            reading = self.head if isinstance(self.head, GaussianHead) else GaussianHead()
            known = self.posteriors(state, pool.train(round, 0))
            both = (state, self.head), (state.having(known.tensors()), reading)
            row: Row = {"round": round}
            for name, (seen, head) in zip(HEADS, both, strict=True):
                model = Predictor(self.backbone, self.layout, seen, head, *self._draws)
                found = self._accuracies(model, round)
                row |= {f"{name} {regime}": mean(found[regime]) for regime in REGIMES}
            yield row

    @property
    def _draws(self) -> tuple[int, int]:
        return self.settings.samples, self.seed

    def posteriors(self, state: State, images: ImageSet) -> ClassPosteriors:
        """Exact class posteriors of these images under the backbone of a state."""
        self.layout.write(self.backbone, state["backbone"], state["buffers"])
        seen = features(self.backbone, images).double()
        labels, nothing = images.among(state.classes).labels, replace(state, tensors={})
        sums = seen.new_zeros(len(state.classes), seen.shape[1]).index_add_(0, labels, seen)
        counts = torch.bincount(labels, minlength=len(state.classes)).double()
        return ClassPosteriors.of(nothing, seen.shape[1]).merge(counts, sums, seen.T @ seen)

    def _accuracies(self, model: Predictor, round: int) -> dict[str, list[float]]:
        """Of every task begun, on as many of its test images as Focus-on-Now has."""
        found: dict[str, list[float]] = {regime: [] for regime in REGIMES}
        for number, started in enumerate(begun(self.stream, round)):
            if started:
                images = self.stream.test(number)
                few = torch.linspace(0, len(images) - 1, min(len(images), self._most)).long()
                task, batch = self.stream.tasks[number], self.settings.batch_size
                predicted = predict(model, images.subset(few), task, batch)
                for regime in REGIMES:
                    found[regime].append(metrics.quality(*predicted.regime(regime)).accuracy)
        return found

    @property
    def _most(self) -> int:
        return self.settings.images or 10**9
