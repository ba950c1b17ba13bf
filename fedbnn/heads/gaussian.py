"""Class posteriors in the features of the trained network (`head: gaussian`), as they are learnt.

At the end of a round clients look at their images under three backbones: the anchor (features a),
an older one that is the same for many rounds, the one the round began with (b), where that is
another, and the new one (f). They send, forward passes alone,

    n_c,     s_c = sum [a b f]  by class,     R with R^T R = sum [a b f]^T [a b f]

The server adds. What it adds under the anchor are the exact class posteriors of all images since
(`fedbnn.heads.posteriors`): the features stay, so nothing goes stale. One map, with what it leaves
over, brings them to the backbone of now (`fedbnn.heads.anchor`): no boundary, no replay, no
generator. After `anchor_rounds` all is carried once to the new backbone, which is then the anchor.

With n images of d features a client sends the smaller of n and 3 d rows of at most 3 d numbers: at
d = 1,000 and n = 120 that is 1.4 MB in float32 beside the sums, where the moments that the maps
need would be 14 MB. Where clients are private they send the sums themselves (`SumsAggregator`), of
which a part can be taken and to which noise can be added.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout
from fedbnn.devices import CPU, visiting
from fedbnn.heads import GaussianHead, checks, statistics
from fedbnn.heads.anchor import ANCHOR, BEFORE, NOW, PAIRS, Anchored, RoundSums
from fedbnn.heads.drifts import apart_in_drifts
from fedbnn.heads.posteriors import ClassPosteriors
from fedbnn.heads.statistics import factor, length, unpacked
from fedbnn.images import ImageSet
from fedbnn.protocol.messages import Update, class_counts
from fedbnn.protocol.state import State

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]
Tensors = dict[str, Tensor]
EXCHANGE = "statistics"
SERVER_ONLY = ("posteriors.", "anchor.", "exact.count", "exact.sum", "exact.moment")
NAME, FACTOR = "posteriors", "posteriors.factor"
_, SUM, _ = statistics.names(NAME)
BACKBONE = ("backbone", "buffers")
WHEN = (".anchor", ".before", "")
"""Backbones of an instruction, the new one last; one that is left out is like the one before it."""
BATCH = 500


def without_posteriors(state: State) -> State:
    """The state as clients are sent it: they never need the class posteriors."""
    kept = (name for name in state.tensors if not name.startswith(SERVER_ONLY))
    return state.only(*kept)


def anchor(state: State) -> Tensors:
    """The backbone that is the anchor: until there is one, that of now."""
    there = "anchor.backbone" in state
    return {name: state[f"anchor.{name}" if there else name] for name in BACKBONE}


def measure(
    backbone: nn.Module,
    layout: Layout,
    state: State,
    images: ImageSet,
    device: torch.device = CPU,
) -> Tensors:
    """A client's statistics: features under all backbones it was sent, without augmentation."""
    seen = _under(backbone, layout, state, lambda: features(backbone, images, device))
    return summed(seen, images)


def unit(
    backbone: nn.Module, layout: Layout, state: State, shape: tuple[int, int, int]
) -> float:
    """How long [a b f] is, without any data: of an image of noise."""
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        seen = _under(backbone, layout, state, lambda: backbone.eval()(noise))
    return float(torch.cat(seen, 1).norm())


def _under(
    backbone: nn.Module, layout: Layout, state: State, look: Callable[[], Tensor]
) -> list[Tensor]:
    """a, b and f: what is seen with the weights of each backbone that an instruction has."""
    seen = {}
    for when in WHEN:
        if f"backbone{when}" in state:
            layout.write(backbone, state[f"backbone{when}"], state[f"buffers{when}"])
            seen[when] = look()
    anchored = seen.get(".anchor", seen[""])
    return [anchored, seen.get(".before", anchored), seen[""]]


def summed(seen: Sequence[Tensor], images: ImageSet) -> Tensors:
    """What is sent of features a, b and f (n, d) of images."""
    classes, wide = tuple(images.counts()), torch.cat([*seen], 1).double()
    sums = wide.new_zeros(len(classes), wide.shape[1])
    sums.index_add_(0, images.among(classes).labels, wide)
    return {SUM: sums.float(), FACTOR: factor(wide).float()}


def features(backbone: nn.Module, images: ImageSet, device: torch.device = CPU) -> Tensor:
    """Features of images without augmentation, in eval mode; the backbone is left as it was."""
    training = backbone.training
    backbone.eval()
    with visiting(backbone, device), torch.inference_mode():
        seen = [backbone(one.to(device)) for one, _ in images.loader(BATCH, shuffle=False)]
        found = torch.cat(seen).cpu()
    backbone.train(training)
    return found


@dataclass(frozen=True)
class StatisticsAggregator:
    """The last exchange of a round: statistics under the anchor, the old and the new backbone."""

    head: GaussianHead
    before: State
    exchange: str = EXCHANGE

    @property
    def width(self) -> int:
        """Features d."""
        return self.before["prototypes"].shape[1] - 1

    def broadcast(self, state: State) -> State:
        """The backbones, each once; prototypes and scales stay at home."""
        sent = state.only(*BACKBONE)
        if "anchor.backbone" not in state:
            return sent
        old, before = anchor(state), self.before
        sent = sent.having({f"{name}.anchor": one for name, one in old.items()})
        if all(torch.equal(before[name], old[name]) for name in BACKBONE):
            return sent
        return sent.having({f"{name}.before": before[name] for name in BACKBONE})

    def expected(self, state: State, counts: Mapping[str, int]) -> Spec:
        """Sums by class, and the R factor of so many images."""
        numbers = length(sum(counts.values()), 3 * self.width)
        shapes = {SUM: (len(counts), 3 * self.width), FACTOR: (numbers,)}
        return {name: (shape, torch.float32) for name, shape in shapes.items()}

    def defect(self, state: State, update: Update) -> str | None:
        """What sums of any images cannot contradict."""
        sums, upper = update.tensors[SUM].double(), self.factor(update).double()
        return checks.defect_of_factor(class_counts(update), sums, upper)

    def influence(self, state: State, update: Update) -> Iterator[Tensor]:
        """The deviation of every new feature within classes: all clients have it in common."""
        sums, upper = update.tensors[SUM][:, -self.width :], self.factor(update)[:, -self.width :]
        yield checks.variances(class_counts(update), sums, upper).sqrt()

    def known(self, state: State, update: Update) -> dict[str, list[float]]:
        """Statistics have no rows to measure."""
        return {}

    def apart(self, state: State, updates: Sequence[Update]) -> checks.Apart:
        """How far class means are from the others' in any space, and ways from those of others.

        Under the anchor the server's own sums never go stale: there a class of one client alone is
        compared with them, and its way to now with the ways of the others' classes.
        """
        rows = {one.client: self.factor(one).double().split(self.width, 1) for one in updates}
        means = {one.client: self._means(one, rows[one.client]) for one in updates}
        anchored = {client: one.under(ANCHOR) for client, one in means.items()}
        found = [checks.apart_in_means(means), checks.apart_in_means(anchored, self._met(state))]
        for place in (ANCHOR, BEFORE):
            found.append(apart_in_drifts(rows, means, (place, NOW), self.head.ridge))
            found.append(checks.apart_in_ways(means, place, NOW))
        return checks.farthest(*found)

    def _met(self, state: State) -> checks.ClassMeans | None:
        """The classes of which the server has any image, under the anchor."""
        known = ClassPosteriors.of(state, self.width, "anchor")
        rows = known.count.nonzero().flatten()
        if not len(rows):
            return None
        names = tuple(state.classes[row] for row in rows.tolist())
        mean, count = known.mean[rows][:, None], known.count[rows]
        return checks.ClassMeans(names, mean, count, torch.zeros(1))

    def _means(self, update: Update, rows: Sequence[Tensor]) -> checks.ClassMeans:
        """Of the features under each backbone."""
        squares, sums = torch.stack([each.square().sum(0) for each in rows]), update.tensors[SUM]
        by_space = sums.double().view(len(sums), *squares.shape)
        return checks.ClassMeans.of(update.classes, class_counts(update), by_space, squares)

    def factor(self, update: Update) -> Tensor:
        """R of an update."""
        return unpacked(update.tensors[FACTOR], update.samples, 3 * self.width)

    def fold(self, state: State) -> "StatisticsFold":
        """Sums, then the map."""
        return StatisticsFold(self, state)


class StatisticsFold:
    """Adds the statistics of clients and ends in a state whose class posteriors moved and grew."""

    def __init__(self, aggregator: StatisticsAggregator, state: State) -> None:
        self.aggregator, self.state = aggregator, state
        classes, width = len(state.classes), aggregator.width
        self.count = torch.zeros(classes, dtype=torch.float64)
        self.sums = torch.zeros(classes, 3 * width, dtype=torch.float64)
        self.grams = {pair: torch.zeros(width, width, dtype=torch.float64) for pair in PAIRS}

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Add a client's sums, tempered by `trust`."""
        index = self.state.index(update.classes)
        rows = self.aggregator.factor(update).double().split(self.aggregator.width, 1)
        self.count[index] += trust * class_counts(update)
        self.sums[index] += trust * update.tensors[SUM].double()
        for (one, other), gram in self.grams.items():
            gram.addmm_(rows[one].T, rows[other], alpha=trust)

    def close(self) -> State:
        """The class posteriors of now; and where its time is over, another anchor."""
        head, width = self.aggregator.head, self.aggregator.width
        sums = torch.stack(self.sums.split(width, 1))
        found = Anchored.of(self.state, width)
        found = found.after(RoundSums(self.count, sums, self.grams), head.memory, head.ridge)
        now, place = found.now().tensors(), anchor(self.state)
        if float(found.age) >= head.anchor_rounds:
            found, place = found.renewed(), {name: self.state[name] for name in BACKBONE}
        stands = {f"anchor.{name}": one for name, one in place.items()}
        return self.state.having({**now, **found.tensors(), **stands})


class SumsAggregator(StatisticsAggregator):
    """The same with sums of their own for counts and moments: what may be clipped and noised."""

    def expected(self, state: State, counts: Mapping[str, int]) -> Spec:
        """Counts, sums by class, and the triangle of the second moment of [a b f]."""
        return statistics.expected(NAME, len(counts), 3 * self.width)

    def defect(self, state: State, update: Update) -> str | None:
        """None: it may be noise, and how far it counts is limited by its length."""
        return None

    def fold(self, state: State) -> "SumsFold":
        """Sums that may be noisy, then the map."""
        return SumsFold(self, state)


class SumsFold(StatisticsFold):
    """Adds sums that may be noisy; the map is that of the nearest that images could have."""

    def __init__(self, aggregator: StatisticsAggregator, state: State) -> None:
        super().__init__(aggregator, state)
        self.moment = torch.zeros(2 * self.sums.shape[1:], dtype=torch.float64)

    def add(self, update: Update, trust: float = 1.0) -> None:
        """Add a client's sums."""
        index = self.state.index(update.classes)
        count, total, moment = statistics.read(NAME, update)
        self.count[index] += trust * count
        self.sums[index] += trust * total
        self.moment += trust * moment

    def close(self) -> State:
        """As ever."""
        self.count = statistics.counted(self.count)
        moment = statistics.possible(self.count, self.sums, self.moment)
        width = self.aggregator.width
        blocks = [row.split(width, 1) for row in moment.split(width)]
        self.grams = {(one, other): blocks[one][other] for one, other in PAIRS}
        return super().close()
