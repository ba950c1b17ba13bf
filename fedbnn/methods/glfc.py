"""FCIL: GLFC, federated class-incremental learning (Dong et al., CVPR 2022), with stored images.

    local    min  (1 - a) L_GC + a L_RD
             L_GC = mean_i (g_i / mean of g over its group) BCE(f(x_i), y_i),
                    g_i = 1 - p(y_i | x_i), groups: images of new and of old classes;
                    without old ones the plain mean
             L_RD = BCE(f(x_i), y_i with the old model's answers in the columns of old classes)
             BCE is summed over the columns, one for each class seen, with f - log(C - 1) as
             log-odds: a prototype of zeros begins at 1 / C
    server   FedAvg's mean; as proxy it keeps the best global model since the last transition
    state    exemplars on the clients (a share of the images each was given, evenly over its
             classes and at least one of each), two old models on the server
    floats per weight: up to 3 down, 1 up, and two numbers up

Transition: a client holds a class that nobody was trained on, or the normalised entropy H / log C
of the global model's answers on its new images exceeds the mean of the last round by `threshold`.
That mean comes from the server, since a client sampled once in ten rounds has no recent one. A
client in transition learns from the best model so far, any other from the best one before the last
transition, which comes when more than half of the round's clients are in transition. The original
has entropies alone, and means over images. Here lower medians over clients decide, and the server
counts the votes itself, by entropies and by the roll call: of new classes nobody can lie. A client
of a single class is sure of it under any model: its signals are 0, and it has no vote.

Proxy: the original sends gradients of perturbed prototypes, from which the server rebuilds images
to choose the best model with. Left out here: each client scores the global model on its own
prototypes (the image nearest to its class mean) and sends the mean loss alone, so nothing needs to
be perturbed. Exemplars of a class are those of the client's last round with it. Main setting:
`distil` (a), grid 0.25, 0.5 (as printed), 0.75, 0.9.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from fedbnn.config.schema import Positive, Share, UnitInterval
from fedbnn.heads.gaussian import features as features_of
from fedbnn.heads.prototypes import trained
from fedbnn.images import ImageSet
from fedbnn.methods.aggregation import Aggregator, Fold, PointFold, ServerStep, Spec
from fedbnn.methods.base import Assignment, LocalObjective, Method, Replay, Tensors
from fedbnn.methods.lwf import Teacher, linear, remember, rename
from fedbnn.networks import Classifier
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State

BEST, OLD, ENTROPY, LOSS = "fcil.best", "fcil.old", "fcil.entropy", "fcil.loss"
SIGNALS, GIVEN = "fcil.signals", "given"
WORST = 1e4


@dataclass(frozen=True)
class ProxyAggregator(Aggregator):
    """FedAvg's exchange; with it entropy and prototype loss of each client."""

    threshold: float = 0.25

    def expected(self, state: State, counts: Mapping[str, int]) -> Spec:
        """Weights, and the two signals."""
        return super().expected(state, counts) | {SIGNALS: ((2,), torch.float32)}

    def defect(self, state: State, update: Update) -> str | None:
        """An entropy in [0, 1], and a loss."""
        entropy, loss = update.tensors[SIGNALS].tolist()
        honest = 0 <= entropy <= 1 and 0 <= loss <= WORST
        return super().defect(state, update) if honest else "its signals are out of range"

    def fold(self, state: State) -> Fold:
        """FedAvg's fold, and the proxy's choice."""
        return ProxyFold(state, self.step, self.threshold)


class ProxyFold(PointFold):
    """FedAvg's fold; then the proxy looks at what clients said about the model they were sent."""

    def __init__(self, state: State, step: ServerStep, threshold: float) -> None:
        super().__init__(state, step)
        self.threshold = threshold
        self.signals: list[Tensor] = []
        self.votes: list[bool] = []

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Fold one update in."""
        super().add(update, trust)
        said = update.tensors[SIGNALS]
        if update.samples and bool(said.any()):
            self.signals.append(said)
            held, entropy = update.counts, float(said[0])
            self.votes.append(in_transition(self.state, held, entropy, self.threshold))

    def close(self) -> State:
        """The folded state, with the models of the past in their new places.

        (entropy, loss) = median_k of each, the lower one; without votes all stays.
        """
        if not self.signals:
            return super().close()
        entropy, loss = torch.stack(self.signals).median(0).values.tolist()
        state = super().close().having({ENTROPY: torch.tensor(entropy)})
        if 2 * sum(self.votes) > len(self.votes):
            known = BEST in state.notes
            return rename(state, BEST, OLD) if known else remember(state, OLD, self.state)
        if BEST not in state.notes or loss <= float(state[LOSS]):
            return remember(state, BEST, self.state).having({LOSS: torch.tensor(loss)})
        return state


def in_transition(state: State, held: Collection[str], entropy: float, threshold: float) -> bool:
    """Whether a client of these classes has one that is new to a model, or H >= H_0 + threshold."""
    known = trained(state)
    sudden = ENTROPY in state and entropy >= float(state[ENTROPY]) + threshold
    return sudden or (bool(known) and not set(held) <= set(known))


@dataclass(frozen=True)
class FCIL(Method):
    """GLFC: exemplars, compensated gradients and distillation from an old model that a proxy chose.

    Args:
        memory: how many images a client stores, as a share of all it was given so far.
        distil: a in [0, 1], the weight of the relation distillation.
        threshold: rise of the normalised entropy that means a transition.
    """

    formula: ClassVar[str] = "min (1 - a) compensated BCE + a relation distillation, stored images"
    replay: ClassVar[Replay | None] = Replay()
    exchange: ClassVar[type[ProxyAggregator]] = ProxyAggregator

    scope: Literal["local", "seen"] = "seen"
    share: Literal["global"] = "global"
    memory: Share = 0.2
    distil: UnitInterval = 0.5
    threshold: Positive = 0.25

    def aggregator(self, state: State) -> Aggregator:
        """FedAvg's exchange, and two signals."""
        return self.exchange(step=self.server_step, threshold=self.threshold)

    def objective(self, assignment: Assignment, network: Classifier) -> LocalObjective:
        """Compensated gradients, and distillation from the old model that fits the situation."""
        state, shown = assignment.instruction.state, assignment.shown.counts()
        found = signals(assignment, network.backbone)
        moved = in_transition(state, shown, float(found[0]), self.threshold)
        columns, kept = self.softmax(state, assignment.classes), BEST if moved else OLD
        where = (network, assignment.layout)
        teacher = Teacher(state, kept, columns, *where) if kept in state.notes else None
        return Compensated(self, assignment, network.backbone, columns, teacher, found)

    def facts(self) -> dict[str, Any]:
        """That it replays, and how much."""
        return {"memory": f"{self.memory:.0%} of the images of a client"}


def memorise(images: ImageSet, features: Tensor, memory: int) -> State:
    """The memory of a client that has just trained on these images: as many of each class."""
    classes = tuple(images.counts())
    own, quota = images.among(classes), max(1, memory // len(classes))
    places = [(own.labels == number).nonzero().flatten() for number in range(len(classes))]
    kept = [p[herding(features[p], quota)] if len(p) > quota else p for p in places]
    chosen = own.subset(torch.cat(kept))
    return State({"pixels": chosen.pixels, "labels": chosen.labels}, classes)


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


def signals(assignment: Assignment, backbone: nn.Module) -> Tensor:
    """(entropy, prototype loss) of the global model on the round's images."""
    state, shown = assignment.instruction.state, assignment.shown
    classes = tuple(shown.counts())
    features, labels = features_of(backbone, shown), shown.among(classes).labels
    scores = linear(features, state["prototypes"][state.index(classes)]).log_softmax(1)
    entropy, nearest = normalised_entropy(scores), prototypes(features, labels)
    loss = nn.functional.nll_loss(scores[nearest], labels[nearest])
    return torch.tensor([entropy, float(loss)])


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
    both = torch.stack([old, ~old]).to(gap.dtype)
    means = (both * gap).sum(1) / both.sum(1).clamp_min(1)
    return gap / torch.where(old, means[0], means[1])


def relation_target(target: Tensor, answers: Tensor, inside: Tensor) -> Tensor:
    """The labels with the old model's answers in the columns of old classes; others follow."""
    replaced = target.clone()
    replaced[:, inside] = answers[:, : len(inside)]
    return torch.cat([replaced, answers[:, len(inside) :]], 1)


@dataclass
class Compensated(LocalObjective):
    """(1 - a) L_GC + a L_RD, or L_GC alone where there is no old model.

    p(c | x) = sigmoid(f_c(x) - log(C - 1)) over the C columns of the client: a row of zeros begins
    at 1 / C, as under a softmax. The offset is common to all columns, so it does not change which
    class is likeliest.
    """

    method: FCIL
    assignment: Assignment
    backbone: nn.Module
    columns: tuple[str, ...]
    teacher: Teacher | None
    signals: Tensor

    def __post_init__(self) -> None:
        shown, self.replays = self.assignment.shown.counts(), self.assignment.replayed > 0
        self.is_old = torch.tensor([name not in shown for name in self.columns])
        self.offset = math.log(max(len(self.columns) - 1, 1))

    def to(self, device: torch.device) -> None:
        """Which columns are old, and the teacher."""
        self.is_old = self.is_old.to(device)
        if self.teacher is not None:
            self.teacher.to(device)

    def loss(self, images: Tensor, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Binary cross-entropies, summed over the columns, mean over the images."""
        logits = logits - self.offset
        target = nn.functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
        own = logits.sigmoid().gather(1, labels[:, None])[:, 0]
        each = _summed_bce(logits, target)
        weighted = compensation(own, self.is_old[labels]) * each if self.replays else each
        compensated = weighted.mean()
        if self.teacher is None:
            return compensated
        answers = (self.teacher.logits(images) - self.offset).sigmoid()
        scores = torch.cat([logits, linear(features, self.teacher.outside) - self.offset], 1)
        relation = _summed_bce(scores, relation_target(target, answers, self.teacher.inside)).mean()
        return (1 - self.method.distil) * compensated + self.method.distil * relation

    def answer(self, weights: Tensors, steps: int, lr: float) -> tuple[Tensors, State]:
        """The weights and what it saw before training; exemplars chosen under the new weights."""
        images, before = self.assignment.images, self.assignment.private or State({})
        given = {**cast(Any, before.notes.get(GIVEN, {})), **self.assignment.shown.counts()}
        memory = int(self.method.memory * sum(given.values()))
        kept = memorise(images, features_of(self.backbone, images), memory)
        return weights | {SIGNALS: self.signals}, kept.having({}, **{GIVEN: given})


def _summed_bce(logits: Tensor, target: Tensor) -> Tensor:
    """The binary cross-entropies of an image, summed over the columns."""
    each = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return each.sum(1)
