"""The client's side of FCIL: what it tells the proxy, its loss, and its memory."""

import math

import torch
from torch import Tensor, nn

from fedbnn.images import ImageSet
from fedbnn.methods.base import Assignment, LocalObjective
from fedbnn.methods.exemplars import memorise
from fedbnn.methods.snapshots import OldColumns, linear
from fedbnn.networks import Classifier
from fedbnn.state import State

SIGNALS = "fcil.signals"
BATCH = 500


def features_of(backbone: nn.Module, images: ImageSet) -> Tensor:
    """Features of images without augmentation, in eval mode; the backbone is left as it was."""
    training = backbone.training
    backbone.eval()
    with torch.no_grad():
        features = torch.cat([backbone(batch) for batch, _ in images.loader(BATCH, shuffle=False)])
    backbone.train(training)
    return features


def signals(assignment: Assignment, backbone: nn.Module, limit: float | None) -> Tensor:
    """(normalised entropy, 1 for a transition, prototype loss) of the global model on the client's images of the round."""
    state, images = assignment.instruction.state, assignment.images
    shown = images.subset(torch.arange(len(images) - assignment.replayed))
    classes = tuple(shown.counts())
    features, labels = features_of(backbone, shown), shown.among(classes).labels
    scores = linear(features, state["rows"][state.index(classes)]).log_softmax(1)
    entropy = normalised_entropy(scores)
    loss = nn.functional.nll_loss(scores[nearest := prototypes(features, labels)], labels[nearest])
    return torch.tensor([entropy, float(limit is not None and entropy >= limit), float(loss)])


def normalised_entropy(scores: Tensor) -> float:
    """Mean of -sum p log p / log C in [0, 1]; 0 with a single class."""
    classes = scores.shape[1]
    entropy = -(scores.exp() * scores).sum(1).mean() / math.log(max(classes, 2))
    return float(entropy.clamp(0, 1))


def prototypes(features: Tensor, labels: Tensor) -> Tensor:
    """For every class, the place of the image nearest to the mean of its features."""
    places = [(labels == label).nonzero().flatten() for label in labels.unique()]
    nearest = [int((features[own] - features[own].mean(0)).norm(dim=1).argmin()) for own in places]
    return torch.stack([own[best] for own, best in zip(places, nearest, strict=True)])


def compensation(probability: Tensor, old: Tensor) -> Tensor:
    """g_i / mean of g over its group, g_i = 1 - p(y_i | x_i): weights whose mean is 1 over new and over old images."""
    gap = (1 - probability.detach()).clamp_min(torch.finfo(probability.dtype).eps)
    weights = torch.empty_like(gap)
    for group in (old, ~old):
        weights[group] = gap[group] / gap[group].mean()
    return weights


def relation_target(target: Tensor, answers: Tensor, inside: Tensor) -> Tensor:
    """The labels with the old model's answers in the columns of old classes; columns outside follow at the end."""
    replaced = target.clone()
    replaced[:, inside] = answers[:, : len(inside)]
    return torch.cat([replaced, answers[:, len(inside) :]], 1)


class Compensated(LocalObjective):
    """(1 - a) L_GC + a L_RD, or L_GC alone where there is no old model.

    p(c | x) = sigmoid(f_c(x) - log(C - 1)) over the C columns of the client: a row of zeros begins at 1 / C, as under a
    softmax. The offset is common to all columns, so it does not change which class is likeliest.
    """

    def __init__(
        self,
        assignment: Assignment,
        network: Classifier,
        columns: tuple[str, ...],
        old: OldColumns | None,
        found: Tensor,
        distil: float,
        memory: int,
    ) -> None:
        self.assignment, self.network, self.old = assignment, network, old
        self.found, self.distil, self.memory = found, distil, memory
        images = assignment.images
        replayed = images.subset(
            torch.arange(len(images) - assignment.replayed, len(images))
        ).counts()
        self.is_old = torch.tensor([name in replayed for name in columns])
        self.offset = math.log(max(len(columns) - 1, 1))

    def loss(self, network: Classifier, images: Tensor, labels: Tensor) -> Tensor:
        """Binary cross-entropies, summed over the columns, mean over the images."""
        features = network.backbone(images)
        logits = network.head(features) - self.offset
        target = nn.functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
        own = logits.sigmoid().gather(1, labels[:, None])[:, 0]
        each = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(
            1
        )
        compensated = (compensation(own, self.is_old[labels]) * each).mean()
        if self.old is None:
            return compensated
        return (1 - self.distil) * compensated + self.distil * self._relation(
            features, logits, target, images
        )

    def _relation(self, features: Tensor, logits: Tensor, target: Tensor, images: Tensor) -> Tensor:
        """L_RD, over the client's columns and those of old classes it does not hold."""
        assert self.old is not None
        answers = (self.old.teacher.logits(images) - self.offset).sigmoid()
        scores = torch.cat([logits, linear(features, self.old.outside) - self.offset], 1)
        wanted = relation_target(target, answers, self.old.inside)
        return (
            nn.functional.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
            .sum(1)
            .mean()
        )

    def sends(self, weights: dict[str, Tensor], steps: int, lr: float) -> dict[str, Tensor]:
        """The weights, and what it saw before training."""
        return weights | {SIGNALS: self.found}

    def keeps(self) -> State:
        """Exemplars, chosen under the trained weights."""
        images = self.assignment.images
        return memorise(images, features_of(self.network.backbone, images), self.memory)
