"""Exact Bayes over features that never move (`head: exact`).

Features f of class c are N(m_c, S). Where no training moves them, nothing goes stale: the sums

    n_c,     s_c = sum f,     M = sum f f^T

over all images of all clients, rounds and tasks are the product of all likelihoods, exactly and in
any order. A class asks for d + 1 numbers, all classes together for the d (d + 1) / 2 of M:

    m_c = s_c / n_c,      scatter = M - sum_c s_c s_c^T / n_c      (Normal-inverse-Wishart)

With 300 filters d = 2,700: the server keeps 29 MB in float64 and 22 kB a class; a client with n
images in k classes sends k d numbers and the R factor of its features (`fedbnn.heads.statistics`),
in float32 1.3 MB for 125 images, and is sent nothing but names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedbnn.devices import CPU, visiting
from fedbnn.heads import ExactHead, Head, checks, statistics
from fedbnn.heads.gaussian import BATCH, EXCHANGE, Spec
from fedbnn.heads.posteriors import ClassPosteriors, Discriminant
from fedbnn.heads.statistics import factor, length, square, triangle, unpacked
from fedbnn.images import ImageSet
from fedbnn.networks.random_conv import RandomConv
from fedbnn.protocol.messages import Update, class_counts
from fedbnn.protocol.state import State

NAME, ROWS = "exact", "exact.rows"
COUNT, SUM, MOMENT = statistics.names(NAME)


def features(head: ExactHead, backbone: nn.Module) -> Callable[[Tensor], Tensor]:
    """What gives the features, of images as networks see them."""
    if head.features == "backbone":
        return backbone.eval()
    return fixed(head)


def fixed(head: ExactHead) -> RandomConv:
    """The random convolutions of a head."""
    return RandomConv(head.filters, head.mirror, head.seed, head.projections)


def width(head: ExactHead, state: State) -> int:
    """Number of features d."""
    if head.features == "backbone":
        return state["prototypes"].shape[1] - 1
    return fixed(head).width


def met(state: State) -> tuple[str, ...]:
    """Classes of which any image has been counted."""
    counts = state[COUNT].tolist()
    return tuple(name for name, count in zip(state.classes, counts, strict=False) if count > 0)


def posteriors(state: State) -> ClassPosteriors:
    """Mean and count of every class, and the scatter within classes.

    A class without images is where all images are.
    """
    count, sums = state[COUNT][:, None], state[SUM]
    mean = torch.where(count > 0, sums / count.clamp_min(1e-300), sums.sum(0) / count.sum())
    scatter = square(state[MOMENT], sums.shape[1]) - sums.T @ mean
    weight = (count.sum() - (count > 0).sum()).clamp_min(0).view(1)
    return ClassPosteriors(mean, count[:, 0], scatter, weight)


def reader(
    head: ExactHead, backbone: nn.Module, state: State, rows: Tensor, device: torch.device = CPU
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What reads a batch: log-scores (n, C) of the classes in these rows, log-odds of no class."""
    found = Discriminant.of(posteriors(state), rows, head).on(device)
    seen = features(head, backbone)
    return lambda images: found.read(seen(images))


def measure(
    head: ExactHead, backbone: nn.Module, images: ImageSet, device: torch.device = CPU
) -> dict[str, Tensor]:
    """A client's statistics, of images without augmentation."""
    classes = tuple(images.counts())
    labels = images.among(classes).labels
    seen = features(head, backbone)
    with visiting(backbone, device), torch.inference_mode():
        batches = [seen(batch.to(device)) for batch, _ in images.loader(BATCH, shuffle=False)]
    wide = torch.cat(batches).cpu().double()
    sums = wide.new_zeros(len(classes), wide.shape[1]).index_add_(0, labels, wide)
    return {SUM: sums.float(), "exact.factor": factor(wide).float()}


@dataclass(frozen=True)
class PriorMean:
    """alpha (w_c . f + b_c): what the exact scores let a network begin with; no gradient.

    They are those of the rounds before, so that no image counts twice; a class nobody has met yet
    is where all images are. Where f are the features of the network itself, which nothing trains,
    this is a prior mean of its prototypes.
    """

    features: RandomConv | None
    rows: Tensor

    @classmethod
    def of(cls, head: Head, state: State, classes: tuple[str, ...]) -> "PriorMean | None":
        """For the classes of a client's softmax, where the head asks for it and knows any."""
        if not isinstance(head, ExactHead) or not head.prior_mean or ROWS not in state:
            return None
        unmet = len(state[ROWS]) - 1
        rows = head.prior_mean * state[ROWS][state.index(classes).clamp(max=unmet)]
        return cls(fixed(head) if head.features == "random_conv" else None, rows)

    def __call__(self, images: Tensor, features: Tensor) -> Tensor:
        """Scores (n, C) of a batch, given what the network sees in it."""
        with torch.no_grad():
            rows, seen = self.rows.to(images), self.features(images) if self.features else features
            return nn.functional.linear(seen, rows[:, :-1], rows[:, -1])


@dataclass(frozen=True)
class ExactAggregator:
    """The exchange of statistics: nothing goes down but a frozen backbone, sums come up."""

    head: ExactHead
    width: int
    exchange: str = EXCHANGE

    def broadcast(self, state: State) -> State:
        """The backbone where its features are used; else nothing."""
        return state.only(*(("backbone", "buffers") if self.head.features == "backbone" else ()))

    def expected(self, state: State, counts: Mapping[str, int]) -> Spec:
        """Sums by class, and the R factor of so many images."""
        numbers = length(sum(counts.values()), self.width)
        shapes = {SUM: (len(counts), self.width), "exact.factor": (numbers,)}
        return {name: (shape, torch.float32) for name, shape in shapes.items()}

    def defect(self, state: State, update: Update) -> str | None:
        """What sums of any images cannot contradict."""
        counts, sums = class_counts(update), update.tensors[SUM].double()
        if self.head.features == "random_conv" and bool((sums < 0).any()):
            return "a feature that is never negative is"
        return checks.defect_of_factor(counts, sums, self._factor(update).double())

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """The deviation of every feature within classes: all clients have it in common."""
        upper = self._factor(update)
        yield checks.variances(class_counts(update), update.tensors[SUM], upper).sqrt()

    def known(self, state: State, update: Update) -> dict[str, list[float]]:
        """Statistics have no rows to measure."""
        return {}

    def apart(self, state: State, updates: Sequence[Update]) -> checks.Apart:
        """How far class means lie from those the server has, or from the other clients'."""
        own = {update.client: self._means(update) for update in updates}
        seen = met(state) if COUNT in state else ()
        rows = state.index(seen)
        if not seen:
            return checks.apart_in_means(own)
        mean = (state[SUM][rows] / state[COUNT][rows, None])[:, None]
        known = checks.ClassMeans(seen, mean, state[COUNT][rows], torch.zeros(1))
        return checks.apart_in_means(own, known)

    def _means(self, update: Update) -> checks.ClassMeans:
        squares = self._factor(update).double().square().sum(0)
        sums = update.tensors[SUM].double()
        return checks.ClassMeans.of(update.classes, class_counts(update), sums, squares)

    def _factor(self, update: Update) -> Tensor:
        return unpacked(update.tensors["exact.factor"], update.samples, self.width)

    def fold(self, state: State) -> "ExactFold":
        """Sums."""
        return ExactFold(self, state)


class SumsAggregator(ExactAggregator):
    """The same with sums of their own for counts and moments: what may be clipped and noised."""

    def expected(self, state: State, counts: Mapping[str, int]) -> Spec:
        """Counts, sums by class, and the triangle of the second moment."""
        return statistics.expected(NAME, len(counts), self.width)

    def defect(self, state: State, update: Update) -> str | None:
        """None: it may be noise, and how far it counts is limited by its length."""
        return None

    def fold(self, state: State) -> "SumsFold":
        """Sums."""
        return SumsFold(self, state)


def unit(head: ExactHead, shape: tuple[int, int, int]) -> float:
    """How long features are, without any data: those of an image of noise."""
    if head.features == "backbone":
        return 1.0
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    return float(fixed(head)(noise).norm())


class ExactFold:
    """Adds the statistics of clients to those there are."""

    def __init__(self, aggregator: ExactAggregator, state: State) -> None:
        self.aggregator, self.state, width = aggregator, state, aggregator.width
        self.count = torch.zeros(len(state.classes), dtype=torch.float64)
        self.sum = torch.zeros(len(state.classes), width, dtype=torch.float64)
        self.moment = torch.zeros(width, width, dtype=torch.float64)
        if COUNT in state:
            self.count[: len(state[COUNT])] = state[COUNT]
            self.sum[: len(state[SUM])] = state[SUM]
            self.moment = square(state[MOMENT], width)

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Add a client's sums, tempered by `trust`."""
        index, upper = self.state.index(update.classes), self.aggregator._factor(update).double()
        self.count[index] += trust * class_counts(update)
        self.sum[index] += trust * update.tensors[SUM].double()
        self.moment.addmm_(upper.T, upper, alpha=trust)

    def close(self) -> State:
        """The state with these sums, and where clients start from them the scores as rows.

        The last row is that of a class that nobody has met.
        """
        sums = {COUNT: self.count, SUM: self.sum, MOMENT: triangle(self.moment)}
        state, head = self.state.having(sums), self.aggregator.head
        if not head.prior_mean:
            return state
        found, unmet = posteriors(state), self.sum.sum(0, keepdim=True) / self.count.sum()
        everybody = torch.cat([found.count, self.count.new_zeros(1)])
        found = replace(found, mean=torch.cat([found.mean, unmet]), count=everybody)
        rows = Discriminant.of(found, torch.arange(len(everybody)), head).rows()
        return state.having({ROWS: rows})


class SumsFold(ExactFold):
    """Adds sums that may be noisy; a class that was asked for has at least one image."""

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Add a client's sums."""
        index = self.state.index(update.classes)
        count, total, moment = statistics.read(NAME, update)
        self.count[index] += trust * count
        self.sum[index] += trust * total
        self.moment += trust * moment

    def close(self) -> State:
        """As ever."""
        self.count = statistics.counted(self.count)
        return super().close()
