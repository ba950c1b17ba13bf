"""FCIL: GLFC, federated class-incremental learning (Dong et al., CVPR 2022), with stored images.

    local    min  (1 - a) L_GC + a L_RD
             L_GC = mean_i (g_i / mean of g over its group) BCE(f(x_i), y_i),
                    g_i = 1 - p(y_i | x_i), groups: images of new and of old classes
             L_RD = BCE(f(x_i), y_i with the old model's answers in the columns of old classes)
             BCE is summed over the columns, with f - log(C - 1) as log-odds: a row of zeros
             begins at 1 / C
    server   FedAvg's mean; as proxy it keeps the best global model since the last transition
    state    exemplars on the clients (up to `memory` images each), two old models on the server
    floats per weight: up to 3 down, 1 up, and three numbers up

Transition: the normalised entropy H / log C of the global model's answers on the client's new
images exceeds the mean of the last round by `threshold`. That mean comes from the server, since a
client sampled once in ten rounds has no recent one. A client in transition learns from the best
model so far, any other from the best one before the last transition, which comes when half of the
round's images are in transition.

Proxy: the original sends gradients of perturbed prototypes, from which the server rebuilds images
to choose the best model with. Left out here: with `prototype` each client scores the global model
on its own prototypes (the image nearest to its class mean) and sends the mean loss alone, so
nothing needs to be perturbed; with `off` the newest model is taken. Exemplars of a class are those
of the client's last round with it. Main knob: `distil` (a), grid 0.25, 0.5, 0.75, 0.9.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedbnn.config.ranges import Count, Positive, UnitInterval
from fedbnn.images import ImageSet
from fedbnn.messages import Update
from fedbnn.methods.aggregation import Aggregator, Fold, PointFold, Spec, WeightedMean
from fedbnn.methods.base import Assignment, Method
from fedbnn.methods.objectives import (
    LocalObjective,
    OldColumns,
    Teacher,
    linear,
    recall,
    remember,
    rename,
)
from fedbnn.networks import Classifier
from fedbnn.state import State

BEST, OLD, ENTROPY, LOSS = "fcil.best", "fcil.old", "fcil.entropy", "fcil.loss"
SIGNALS = "fcil.signals"
MAJORITY, BATCH = 0.5, 500


@dataclass(frozen=True)
class FCIL(Method):
    """GLFC: exemplars, compensated gradients and distillation from an old model that a proxy chose.

    Args:
        memory: most images that one client stores.
        distil: a in [0, 1], the weight of the relation distillation.
        threshold: rise of the normalised entropy that means a transition.
        proxy: how the old model is chosen.
    """

    formula: ClassVar[str] = "min (1 - a) compensated BCE + a relation distillation, stored images"
    needs_prototypes: ClassVar[bool] = True

    memory: Count = 2000
    distil: UnitInterval = 0.25
    threshold: Positive = 0.25
    proxy: Literal["prototype", "off"] = "prototype"

    @property
    def replay(self) -> "Exemplars":
        """Images of every class a client has met."""
        return Exemplars()

    def aggregator(self, state: State) -> Aggregator:
        """FedAvg's exchange, and the proxy's choice."""
        return ProxyAggregator(chooses=self.proxy == "prototype")

    def objective(self, assignment: Assignment, network: Classifier) -> LocalObjective:
        """Compensated gradients, and distillation from the old model that fits the situation."""
        state = assignment.instruction.state
        limit = float(state[ENTROPY]) + self.threshold if ENTROPY in state else None
        found = signals(assignment, network.backbone, limit)
        teacher = self._teacher(assignment, bool(found[1]), network.backbone)
        columns = self.softmax(state, assignment.classes)
        old = None if teacher is None else OldColumns(teacher, state, columns)
        return Compensated(self, assignment, network, columns, old, found)

    def _teacher(self, assignment: Assignment, moved: bool, backbone: nn.Module) -> Teacher | None:
        """The best (or newest) model in transition, else the one of the last transition."""
        state, layout = assignment.instruction.state, assignment.layout
        if moved and self.proxy == "off":
            return recall(remember(state, BEST, state), BEST, backbone, layout)
        return recall(state, BEST if moved else OLD, backbone, layout)

    def facts(self) -> dict[str, Any]:
        """That it replays, how much, and how the old model is chosen."""
        return {"memory_per_client": self.memory, "proxy": self.proxy}


class Exemplars:
    """A few images of every class a client has met, chosen by herding (Rebuffi et al., 2017).

    As private state: `pixels` (m, channels, height, width) in uint8 and `labels` (m,), which number
    the state's classes.
    """

    def counts(self, shown: Mapping[str, int], private: State | None) -> dict[str, int]:
        """The images of the round, and those in memory of other classes."""
        if private is None:
            return dict(shown)
        stored = torch.bincount(private["labels"], minlength=len(private.classes)).tolist()
        old = dict(zip(private.classes, stored, strict=True))
        return {**shown, **{n: count for n, count in old.items() if count and n not in shown}}

    def images(self, shown: ImageSet, private: State | None) -> ImageSet:
        """The images, and behind them all in memory of classes that do not occur among them."""
        held = shown.counts()
        old = self.counts(held, private).keys() - held.keys()
        if private is None or not old:
            return shown
        number = [shown.classes.index(name) if name in old else -1 for name in private.classes]
        labels = torch.tensor(number)[private["labels"]]
        pixels = torch.cat([shown.pixels, private["pixels"][labels >= 0]])
        return replace(shown, pixels=pixels, labels=torch.cat([shown.labels, labels[labels >= 0]]))

    def stored(self, private: State) -> int:
        """The exemplars of one client."""
        return len(private["labels"])


def memorise(images: ImageSet, features: Tensor, memory: int) -> State:
    """The memory of a client that has just trained on these images: as many of each class."""
    classes = tuple(images.counts())
    quota, kept, labels = memory // len(classes), [], []
    for number, name in enumerate(classes):
        places = (images.labels == images.classes.index(name)).nonzero().flatten()
        if len(places) > quota:
            places = places[herding(features[places], quota)]
        kept.append(places)
        labels.append(torch.full((len(places),), number))
    return State({"pixels": images.pixels[torch.cat(kept)], "labels": torch.cat(labels)}, classes)


def herding(features: Tensor, count: int) -> Tensor:
    """Places of `count` rows, one by one, so that their mean stays nearest to the mean of all.

    i_t = argmin_i || mean - (sum of chosen + x_i) / t ||,   on features of length 1
    """
    unit = torch.nn.functional.normalize(features, dim=1)
    mean, total = unit.mean(0), torch.zeros_like(unit[0])
    chosen: list[int] = []
    for step in range(1, min(count, len(unit)) + 1):
        distances = (mean - (total + unit) / step).norm(dim=1)
        distances[chosen] = torch.inf
        chosen.append(int(distances.argmin()))
        total = total + unit[chosen[-1]]
    return torch.tensor(chosen, dtype=torch.long)


def features_of(backbone: nn.Module, images: ImageSet) -> Tensor:
    """Features of images without augmentation, in eval mode; the backbone is left as it was."""
    training = backbone.training
    backbone.eval()
    with torch.no_grad():
        features = torch.cat([backbone(batch) for batch, _ in images.loader(BATCH, shuffle=False)])
    backbone.train(training)
    return features


def signals(assignment: Assignment, backbone: nn.Module, limit: float | None) -> Tensor:
    """(entropy, 1 for a transition, prototype loss) of the global model on the round's images."""
    state, images = assignment.instruction.state, assignment.images
    shown = images.subset(torch.arange(len(images) - assignment.replayed))
    classes = tuple(shown.counts())
    features, labels = features_of(backbone, shown), shown.among(classes).labels
    scores = linear(features, state["prototypes"][state.index(classes)]).log_softmax(1)
    entropy, nearest = normalised_entropy(scores), prototypes(features, labels)
    loss = nn.functional.nll_loss(scores[nearest], labels[nearest])
    return torch.tensor([entropy, float(limit is not None and entropy >= limit), float(loss)])


def normalised_entropy(scores: Tensor) -> float:
    """Mean of -sum p log p / log C in [0, 1]; 0 with a single class."""
    entropy = -(scores.exp() * scores).sum(1).mean() / math.log(max(scores.shape[1], 2))
    return float(entropy.clamp(0, 1))


def prototypes(features: Tensor, labels: Tensor) -> Tensor:
    """For every class, the place of the image nearest to the mean of its features."""
    places = [(labels == label).nonzero().flatten() for label in labels.unique()]
    nearest = [(features[own] - features[own].mean(0)).norm(dim=1).argmin() for own in places]
    return torch.stack([own[best] for own, best in zip(places, nearest, strict=True)])


def compensation(probability: Tensor, old: Tensor) -> Tensor:
    """g_i / mean of g over its group (old or new), with g_i = 1 - p(y_i | x_i)."""
    gap = (1 - probability.detach()).clamp_min(torch.finfo(probability.dtype).eps)
    weights = torch.empty_like(gap)
    for group in (old, ~old):
        weights[group] = gap[group] / gap[group].mean()
    return weights


def relation_target(target: Tensor, answers: Tensor, inside: Tensor) -> Tensor:
    """The labels with the old model's answers in the columns of old classes; others follow."""
    replaced = target.clone()
    replaced[:, inside] = answers[:, : len(inside)]
    return torch.cat([replaced, answers[:, len(inside) :]], 1)


class Compensated(LocalObjective):
    """(1 - a) L_GC + a L_RD, or L_GC alone where there is no old model.

    p(c | x) = sigmoid(f_c(x) - log(C - 1)) over the C columns of the client: a row of zeros begins
    at 1 / C, as under a softmax. The offset is common to all columns, so it does not change which
    class is likeliest.
    """

    def __init__(
        self,
        method: FCIL,
        assignment: Assignment,
        network: Classifier,
        columns: tuple[str, ...],
        old: OldColumns | None,
        found: Tensor,
    ) -> None:
        self.method, self.assignment, self.network = method, assignment, network
        self.old, self.found, images = old, found, assignment.images
        first = len(images) - assignment.replayed
        replayed = images.subset(torch.arange(first, len(images))).counts()
        self.is_old = torch.tensor([name in replayed for name in columns])
        self.offset = math.log(max(len(columns) - 1, 1))

    def loss(self, network: Classifier, images: Tensor, labels: Tensor) -> Tensor:
        """Binary cross-entropies, summed over the columns, mean over the images."""
        features = network.backbone(images)
        logits = network.head(features) - self.offset
        target = nn.functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
        own = logits.sigmoid().gather(1, labels[:, None])[:, 0]
        compensated = (compensation(own, self.is_old[labels]) * _summed_bce(logits, target)).mean()
        if self.old is None:
            return compensated
        relation = self._relation(self.old, features, logits, target, images)
        return (1 - self.method.distil) * compensated + self.method.distil * relation

    def _relation(
        self, old: OldColumns, features: Tensor, logits: Tensor, target: Tensor, images: Tensor
    ) -> Tensor:
        """L_RD, over the client's columns and those of old classes it does not hold."""
        answers = (old.teacher.logits(images) - self.offset).sigmoid()
        scores = torch.cat([logits, linear(features, old.outside) - self.offset], 1)
        return _summed_bce(scores, relation_target(target, answers, old.inside)).mean()

    def sends(self, weights: dict[str, Tensor], steps: int, lr: float) -> dict[str, Tensor]:
        """The weights, and what it saw before training."""
        return weights | {SIGNALS: self.found}

    def keeps(self) -> State:
        """Exemplars, chosen under the trained weights."""
        images = self.assignment.images
        return memorise(images, features_of(self.network.backbone, images), self.method.memory)


def _summed_bce(logits: Tensor, target: Tensor) -> Tensor:
    """The binary cross-entropies of an image, summed over the columns."""
    each = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return each.sum(1)


@dataclass(frozen=True)
class ProxyAggregator(Aggregator):
    """FedAvg's exchange; with it entropy, transition and prototype loss of each client."""

    chooses: bool = True

    def expected(self, state: State, classes: Sequence[str]) -> Spec:
        """Weights, and the three signals."""
        return super().expected(state, classes) | {SIGNALS: ((3,), torch.float32)}

    def defect(self, state: State, update: Update) -> str | None:
        """An entropy in [0, 1], a transition or none, a loss."""
        entropy, moved, loss = update.tensors[SIGNALS].tolist()
        honest = 0 <= entropy <= 1 and moved in (0, 1) and loss >= 0
        return None if honest else "its signals are out of range"

    def fold(self, state: State) -> Fold:
        """FedAvg's fold, and the proxy's choice."""
        return ProxyFold(state, self.chooses)


class ProxyFold(PointFold):
    """FedAvg's fold; then the proxy looks at what clients said about the model they were sent."""

    def __init__(self, state: State, chooses: bool) -> None:
        super().__init__(state)
        self.chooses = chooses
        self.signals = WeightedMean(torch.zeros(3))

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Fold one update in."""
        super().add(update, trust)
        self.signals.add(update.tensors[SIGNALS], trust * update.samples)

    def close(self) -> State:
        """The folded state, with the models of the past in their new places."""
        entropy, moved, loss = self.signals.value().tolist()
        state = super().close().having({ENTROPY: torch.tensor(entropy)})
        if moved >= MAJORITY:
            known = BEST in state.notes
            return rename(state, BEST, OLD) if known else remember(state, OLD, self.state)
        if self.chooses and (BEST not in state.notes or loss <= float(state[LOSS])):
            return remember(state, BEST, self.state).having({LOSS: torch.tensor(loss)})
        return state
