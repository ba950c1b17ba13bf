"""Class statistics of one client of five: what no images can have is refused, and what images could
have but the others do not is bounded."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbnn.defense.gate import Gate
from fedbnn.heads import ExactHead, checks, drifts
from fedbnn.heads.exact import SUM, ExactAggregator
from fedbnn.heads.gaussian import FACTOR
from fedbnn.heads.gaussian import SUM as SUMS
from fedbnn.heads.statistics import factor, triangle, unpacked
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State
from tests.core.class_features import NAMES, backbones, exchange, statistics
from tests.defense.exchanges import Attack, Played
from tests.defense.worlds import RULES

WIDTH, CLIENTS = 6, 5


def features(client: int, count: int = 90, turn: float = 0.0) -> tuple[Tensor, Tensor]:
    """Three classes of a client, as many images of each up to a few; `turn` renames the classes."""
    source = torch.Generator().manual_seed(client)
    labels = torch.arange(count + client) % 3
    centres = torch.eye(3, WIDTH).double().roll(int(turn), 0) * 4 + 1
    noise = torch.randn(len(labels), WIDTH, generator=source, dtype=torch.float64)
    return (centres[labels] + noise).abs(), labels


def sent(client: int, scale: float = 1.0, turn: float = 0.0) -> Update:
    """What a client sends, in float32; its features moved a little while it trained."""
    new, labels = features(client, turn=turn)
    update = statistics(scale * new, scale * (new + 0.1), labels, client)
    return replace(update, tensors={name: value.float() for name, value in update.tensors.items()})


@pytest.fixture
def played() -> Played:
    state = State({"prototypes": torch.zeros(3, WIDTH + 1)}, NAMES)
    return Played(exchange(WIDTH), state, [sent(client) for client in range(CLIENTS)])


def times(by: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor * by


def place(by: float, *columns: int) -> Callable[[Tensor], Tensor]:
    """Some of the three parts of all rows (anchor, before, now) times a number."""

    def forged(numbers: Tensor) -> Tensor:
        wide = 3 * WIDTH
        rows = numbers if numbers.ndim > 1 else unpacked(numbers, wide, wide)
        scale = torch.ones(3, WIDTH)
        scale[list(columns)] = by
        changed = rows * scale.view(-1)
        return changed if numbers.ndim > 1 else triangle(changed)

    return forged


ATTACKS: dict[str, Attack] = {
    "sums x 10": {SUMS: times(10)},
    "sums x 1e6": {SUMS: times(1e6)},
    "sums x -1": {SUMS: times(-1)},
    "sums swapped": {SUMS: lambda rows: rows.roll(1, 0)},
    "factor x 0.5": {FACTOR: times(0.5)},
    "factor x 10": {FACTOR: times(10)},
    "factor x 100": {FACTOR: times(100)},
    "all x 1e6": dict.fromkeys((SUMS, FACTOR), times(1e6)),
    "new features x -1": dict.fromkeys((SUMS, FACTOR), place(-1, 2)),
    "new features x 1e6": dict.fromkeys((SUMS, FACTOR), place(1e6, 2)),
    "features before x 100": dict.fromkeys((SUMS, FACTOR), place(100, 1)),
    "features before x -1": dict.fromkeys((SUMS, FACTOR), place(-1, 1)),
    "features of the anchor x 100": dict.fromkeys((SUMS, FACTOR), place(100, 0)),
    "features of the anchor x -1": dict.fromkeys((SUMS, FACTOR), place(-1, 0)),
}


@pytest.mark.parametrize("kind", ["moved", "fixed"])
def test_the_influence_of_statistics_is_the_deviation_within_classes(kind: str) -> None:
    """sqrt(sum_i (f_i - m_c(i))^2 / (n - C)), feature by feature."""
    new, labels = features(0)
    sent_by = {"moved": (exchange(WIDTH), sent(0)), "fixed": (exact(), exact_update(0))}
    aggregator, update = sent_by[kind]
    means = torch.stack([new[labels == c].mean(0) for c in range(3)])
    deviation = ((new - means[labels]).square().sum(0) / (len(new) - 3)).sqrt()
    (found,) = aggregator.influence(State({}, NAMES), update)
    assert torch.allclose(found.double(), deviation, rtol=1e-4)


def exact() -> ExactAggregator:
    return ExactAggregator(HEAD, WIDTH)


def test_honest_statistics_count_in_full(played: Played, tmp_path: Path) -> None:
    assert played.judged(played.updates, tmp_path).trust == dict.fromkeys(range(CLIENTS), 1.0)


@pytest.mark.parametrize("attack", ATTACKS)
def test_forged_statistics_are_refused_and_nobody_else(
    played: Played, tmp_path: Path, attack: str
) -> None:
    candidates = played.judged(played.forged(ATTACKS[attack]), tmp_path)
    assert [*candidates.refused] == [CLIENTS - 1]
    assert candidates.trust == dict.fromkeys(range(CLIENTS - 1), 1.0)


@pytest.mark.parametrize("scale", [10.0, 0.1, 1e6])
def test_invented_features_are_refused(played: Played, tmp_path: Path, scale: float) -> None:
    """They satisfy every identity, and lie where no other client's do."""
    forged = sent(CLIENTS - 1, scale)
    assert played.aggregator.defect(played.state, forged) is None
    assert [*played.judged([*played.updates[:-1], forged], tmp_path).refused] == [CLIENTS - 1]


def test_images_under_the_names_of_other_classes_are_refused(
    played: Played, tmp_path: Path
) -> None:
    forged = sent(CLIENTS - 1, turn=1)
    assert played.aggregator.defect(played.state, forged) is None
    reasons = played.judged([*played.updates[:-1], forged], tmp_path).refused
    assert reasons[CLIENTS - 1].startswith("its class means are ")


@pytest.mark.parametrize("rule", RULES)
def test_class_means_are_compared_under_every_rule(
    played: Played, tmp_path: Path, rule: Any
) -> None:
    gate, everybody = Gate(robust=rule), dict.fromkeys(range(CLIENTS), 1.0)
    forged = [*played.updates[:-1], sent(CLIENTS - 1, turn=1)]
    assert not played.judged(played.updates, tmp_path, settings=gate).refused
    assert [*played.judged(forged, tmp_path, settings=gate).refused] == [CLIENTS - 1]
    for trusting in (Gate(influence_cap=None), replace(gate, influence_cap=None)):
        assert not played.judged(forged, tmp_path, settings=trusting).refused
    assert played.judged(played.updates, tmp_path).trust == everybody


DEVIATIONS = torch.tensor([2.0, 1.0, 0.5, 0.1, 0.1, 0.05]).double()
TURNED = {
    "all under the newest": ((), range(WIDTH)),
    "all under the anchor": (range(WIDTH), ()),
    "where they hardly scatter": ((), range(3, WIDTH)),
}


def scattered(client: int, anchor: Sequence[int] = (), newest: Sequence[int] = ()) -> Update:
    """Images that scatter more in some directions than in others; about the means of their classes
    some `turned` the other way under the anchor, or under the newest backbone."""
    seen, labels = features(client)
    means = torch.eye(3, WIDTH).double()[labels] * 4 + 1
    around = (seen - means) * DEVIATIONS
    around -= torch.stack([around[labels == c].mean(0) for c in range(3)])[labels]
    old, new = around.clone(), 1.01 * around
    old[:, [*anchor]] *= -1
    new[:, [*newest]] *= -1
    update = statistics(means + new, means + old, labels, client, means + around)
    return replace(update, tensors={name: value.float() for name, value in update.tensors.items()})


@pytest.mark.parametrize("turned", TURNED)
def test_images_that_lie_the_other_way_about_their_classes_are_refused(
    tmp_path: Path, turned: str
) -> None:
    """Means, counts and deviations are honest; the map to the newest backbone would be turned."""
    state = State({"prototypes": torch.zeros(3, WIDTH + 1)}, NAMES)
    honest = [scattered(client) for client in range(CLIENTS)]
    played = Played(exchange(WIDTH), state, honest)
    assert played.judged(honest, tmp_path).trust == dict.fromkeys(range(CLIENTS), 1.0)
    forged = scattered(CLIENTS - 1, *TURNED[turned])
    assert played.aggregator.defect(state, forged) is None
    found = played.judged([*honest[:-1], forged], tmp_path)
    assert found.refused[CLIENTS - 1].startswith("its ways of images about their classes are ")
    assert found.trust == dict.fromkeys(range(CLIENTS - 1), 1.0)


def test_how_differently_features_lie_is_measured_about_the_means_of_classes() -> None:
    """d = sum |x - y|^2 / sum (|x|^2 + |y|^2) in the metric of M, from the images themselves."""
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 40, WIDTH, generator=source, dtype=torch.float64)
    labels = torch.arange(40) % 3
    update = statistics(y, x, labels)
    rows = exchange(WIDTH).factor(update).double().split(WIDTH, 1)
    means = exchange(WIDTH)._means(update, rows)
    metric = x.T @ x + y.T @ y
    root = torch.linalg.cholesky(metric + 0.1 * metric.diagonal().mean() * torch.eye(WIDTH))
    for one in (x, y):
        one -= torch.stack([one[labels == c].mean(0) for c in range(3)])[labels]
    lengths = [float((torch.linalg.inv(root) @ one.T).square().sum()) for one in (x - y, x, y)]
    found = drifts._share(rows, means, (0, 2), drifts._root({0: rows}, (0, 2), 0.1))
    assert found == pytest.approx(lengths[0] / (lengths[1] + lengths[2]))


def lonely(client: int, held: int = 3, moved: Sequence[float] = (0.0, 0.0, 0.0)) -> Update:
    """Statistics of the first classes; the last of three `moved` so far under each backbone."""
    new, labels = (part[features(client)[1] < held] for part in features(client))
    way = torch.eye(1, WIDTH).double() * (labels == 2)[:, None]
    seen = new + 0.1 + moved[0] * way, new + 0.1 + moved[1] * way, new + moved[2] * way
    update = statistics(seen[2], seen[0], labels, client, seen[1])
    return replace(update, tensors={name: value.float() for name, value in update.tensors.items()})


LONELY = {
    "under all backbones": (1.0, 1.0, 1.0),
    "under the anchor": (1.0, 0.0, 0.0),
    "under the newest": (0.0, 0.0, 1.0),
    "before and now": (0.0, 1.0, 1.0),
}


@pytest.mark.parametrize("far", [10.0, 100.0, 1e4, 1e6])
@pytest.mark.parametrize("where", LONELY)
def test_a_class_of_the_liar_alone_is_where_the_server_knows_it(
    tmp_path: Path, where: str, far: float
) -> None:
    """Everybody showed the class once; then one client alone has it, and moves it."""
    state = State({"prototypes": torch.zeros(3, WIDTH + 1), **backbones(WIDTH).tensors}, NAMES)
    first = Played(exchange(WIDTH), state, [lonely(client) for client in range(CLIENTS)])
    known = first.folded(first.judged(first.updates, tmp_path))
    honest = [*(lonely(client, held=2) for client in range(CLIENTS - 1)), lonely(CLIENTS - 1)]
    later = Played(exchange(WIDTH), known, honest)
    assert later.judged(honest, tmp_path).trust == dict.fromkeys(range(CLIENTS), 1.0)
    forged = lonely(CLIENTS - 1, moved=[far * part for part in LONELY[where]])
    assert later.aggregator.defect(known, forged) is None
    found = later.judged([*honest[:-1], forged], tmp_path)
    assert [*found.refused] == [CLIENTS - 1]
    assert found.trust == dict.fromkeys(range(CLIENTS - 1), 1.0)


@pytest.mark.parametrize(("far", "counts"), [(1.0, True), (2.0, False), (3.0, False)])
def test_a_class_of_the_liar_alone_goes_about_as_far_as_those_of_others(
    tmp_path: Path, far: float, counts: bool
) -> None:
    """Under the newest backbone, where those of others hardly move and images scatter by 2."""
    state = State({"prototypes": torch.zeros(3, WIDTH + 1), **backbones(WIDTH).tensors}, NAMES)
    sent = [*(lonely(client, held=2) for client in range(CLIENTS - 1))]
    sent.append(lonely(CLIENTS - 1, moved=(0.0, 0.0, far)))
    found = Played(exchange(WIDTH), state, sent).judged(sent, tmp_path)
    assert (found.trust.get(CLIENTS - 1, 0.0) == 1.0) is counts
    assert [found.trust[client] for client in range(CLIENTS - 1)] == [1.0] * (CLIENTS - 1)


@pytest.mark.parametrize("counts", [{}, dict.fromkeys(NAMES, 0), {"a": 0, "b": 0, "c": 94}])
def test_counts_that_are_not_those_announced_are_refused(
    played: Played, tmp_path: Path, counts: dict[str, int]
) -> None:
    last = played.updates[-1]
    rows = {SUMS: last.tensors[SUMS][: len(counts)]}
    lying = replace(
        last, counts=counts, samples=sum(counts.values()), tensors={**last.tensors, **rows}
    )
    assert [*played.judged([*played.updates[:-1], lying], tmp_path).refused] == [CLIENTS - 1]


def test_statistics_of_no_images_are_zeros(played: Played) -> None:
    last = played.updates[-1]
    nothing = {SUMS: torch.zeros_like(last.tensors[SUMS]), FACTOR: torch.zeros(0)}
    empty = replace(last, counts=dict.fromkeys(NAMES, 0), samples=0, tensors=nothing)
    assert played.aggregator.defect(played.state, empty) is None
    some = replace(empty, tensors={**nothing, SUMS: last.tensors[SUMS]})
    assert played.aggregator.defect(played.state, some) == "statistics of no images"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_images_measure_is_no_defect(seed: int) -> None:
    """Dead features, a single image of a class, fewer images than features, other units."""
    source = torch.Generator().manual_seed(seed)
    count = int(torch.randint(3, 40, (1,), generator=source))
    new, old = torch.randn(2, count, 12, generator=source, dtype=torch.float64).relu()
    new = new * torch.logspace(-6, 6, 12) * (torch.arange(12) != seed % 12)
    labels = torch.cat([torch.arange(3), torch.randint(0, 3, (count - 3,), generator=source)])
    update = statistics(new, old, labels)
    small = replace(update, tensors={n: value.float() for n, value in update.tensors.items()})
    assert exchange(12).defect(State({}, NAMES), small) is None


@pytest.mark.parametrize("images", [4, 9, 40])
def test_sums_within_a_factor_are_those_within_its_moment(images: int) -> None:
    """The same answer from r x r numbers as from the d x d of M itself."""
    source = torch.Generator().manual_seed(images)
    wide = torch.rand(images, 9, generator=source, dtype=torch.float64)
    labels = torch.arange(images) % 2
    counts = labels.bincount().double()
    sums = torch.zeros(2, 9).double().index_add_(0, labels, wide)
    upper: Tensor = torch.linalg.qr(wide, mode="r").R
    away = torch.rand(2, 9, generator=source, dtype=torch.float64)
    for forged in (sums, sums.flip(0), sums * 1.2, sums + 2 * away, sums * 0.9):
        within = wide.T @ wide - (forged / counts[:, None]).T @ forged
        honest = float(torch.linalg.eigvalsh(within)[0]) > -1e-2
        assert checks.within_factor(counts, forged, upper) == honest


HEAD = ExactHead(filters=1)


def exact_update(client: int, scale: float = 1.0, turn: float = 0.0, count: int = 90) -> Update:
    new, labels = features(client, count, turn)
    sums = torch.zeros(3, WIDTH).double().index_add_(0, labels, new * scale)
    tensors = {SUM: sums.float(), "exact.factor": factor(new * scale).float()}
    counts = dict(zip(NAMES, labels.bincount().tolist(), strict=True))
    return Update("run", 1, "statistics", client, "", len(labels), counts, tensors)


EXACT: dict[str, Attack] = {
    "sums x 10": {SUM: times(10)},
    "sums x 1e6": {SUM: times(1e6)},
    "sums x -1": {SUM: times(-1)},
    "sums swapped": {SUM: lambda rows: rows.roll(1, 0)},
    "factor x 100": {"exact.factor": times(100)},
    "factor x 0.5": {"exact.factor": times(0.5)},
    "both x 10": {SUM: times(10), "exact.factor": times(10)},
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("attack", EXACT)
def test_forged_sums_of_fixed_features_are_refused(
    tmp_path: Path, attack: str, known: bool
) -> None:
    updates = [exact_update(client) for client in range(CLIENTS)]
    played = Played(ExactAggregator(HEAD, WIDTH), State({}, NAMES), updates)
    if known:
        played = replace(played, state=played.folded(played.judged(updates, tmp_path)))
    assert played.judged(updates, tmp_path).trust == dict.fromkeys(range(CLIENTS), 1.0)
    assert [*played.judged(played.forged(EXACT[attack]), tmp_path).refused] == [CLIENTS - 1]


@pytest.mark.parametrize("images", [6, 9, 90])
def test_few_images_under_the_names_of_other_classes_are_refused(
    tmp_path: Path, images: int
) -> None:
    """The mean of two images may lie anywhere; but not every class where another one is."""
    updates = [exact_update(client, count=images) for client in range(CLIENTS)]
    played = Played(ExactAggregator(HEAD, WIDTH), State({}, NAMES), updates)
    assert played.judged(updates, tmp_path).trust == dict.fromkeys(range(CLIENTS), 1.0)
    swapped = [*updates[:-1], exact_update(CLIENTS - 1, turn=1, count=images)]
    found = played.judged(swapped, tmp_path)
    assert [*found.refused] == [CLIENTS - 1]
    assert found.trust == dict.fromkeys(range(CLIENTS - 1), 1.0)


@pytest.mark.parametrize("rule", ["trimmed_mean", "multi_krum"])
def test_a_liar_that_is_refused_costs_no_honest_client_its_vote(tmp_path: Path, rule: Any) -> None:
    """The one of five that is taken to lie has been found: nobody else is left out."""
    updates = [exact_update(client) for client in range(CLIENTS)]
    played = Played(ExactAggregator(HEAD, WIDTH), State({}, NAMES), updates)
    lies = [*updates[:-1], exact_update(CLIENTS - 1, turn=1)]
    for gate, votes in ((Gate(robust=rule), 4), (Gate(robust=rule, forgers=0.4), 3)):
        found = played.judged(lies, tmp_path, settings=gate)
        assert [*found.refused] == [CLIENTS - 1]
        assert sum(found.trust.values()) == votes


def test_the_server_knows_a_class_that_nobody_else_holds(tmp_path: Path) -> None:
    """Images of a class under another name, by the one client that has any."""
    updates = [exact_update(client) for client in range(3)]
    known = Played(ExactAggregator(HEAD, WIDTH), State({}, NAMES), updates)
    state = known.folded(known.judged(updates, tmp_path))
    elsewhere = State({}, (*NAMES, "x", "y", "z"))
    counts = dict(zip("xyz", updates[0].counts.values(), strict=True))
    others = [replace(one, counts=counts) for one in updates[:2]]
    round_of = [*others, exact_update(3, turn=1)]
    assert known.aggregator.apart(elsewhere, round_of)[3][0] == 0
    assert known.aggregator.apart(state, round_of)[3][0] > 2


def test_class_means_of_honest_clients_are_about_one_apart() -> None:
    """D^2 has the mean 1 where class means scatter as images do."""
    means = {k: ExactAggregator(HEAD, WIDTH)._means(exact_update(k)) for k in range(40)}
    centre = torch.stack([one.mean for one in means.values()]).mean(0)
    known = checks.ClassMeans(NAMES, centre, torch.full((3,), 1e9).double(), torch.zeros(1))
    lone = [checks.apart_in_means({k: means[k], -1: means[0]}, known)[k][0] for k in range(1, 40)]
    assert 0.8 < checks.APART * math.sqrt(sum(x * x for x in lone) / len(lone)) < 1.8


@pytest.mark.parametrize("lie", [0.0, 0.1, 10.0])
def test_one_liar_of_three_makes_nobody_else_look_far(tmp_path: Path, lie: float) -> None:
    """Where one honest client is left to compare with, and where the server believed a liar."""
    forged = {SUM: times(lie), "exact.factor": times(lie)}
    updates = [exact_update(client) for client in range(3)]
    played = Played(ExactAggregator(HEAD, WIDTH), State({}, NAMES), updates)
    apart = played.aggregator.apart(played.state, played.forged(forged))
    assert max(apart[0][0], apart[1][0]) < 1
    assert apart[2][0] > 2
    alone = replace(played, updates=updates[:1])
    state = alone.folded(alone.judged(alone.forged(forged), tmp_path))
    assert max(far for far, _ in played.aggregator.apart(state, updates[1:]).values()) < 1


@pytest.mark.parametrize("more", [0.0, 1e-3, 1e-2])
def test_where_a_network_sees_the_same_in_all_images_rounding_is_no_distance(more: float) -> None:
    """And one image of one client a little else; who sees all by a fifth larger stands out."""

    def rounded(client: int, by: float = 0.7) -> checks.ClassMeans:
        source = torch.Generator().manual_seed(client)
        labels = torch.randint(0, 3, (60 + 7 * client,), generator=source)
        seen = torch.linspace(0.1, by, wide).double().expand(len(labels), -1).clone()
        seen[:1] *= 1 + more * (client == 3)
        sums = torch.zeros(3, wide).double().index_add_(0, labels, seen)
        tensors = {SUM: sums.float(), "exact.factor": factor(seen).float()}
        counts = dict(zip(NAMES, labels.bincount().tolist(), strict=True))
        said = Update("run", 1, "statistics", client, "", len(labels), counts, tensors)
        return ExactAggregator(HEAD, wide)._means(said)

    wide = 200
    clients = {client: rounded(client) for client in range(10)}
    assert max(far for far, _ in checks.apart_in_means(clients).values()) < 1
    far = checks.apart_in_means({**clients, 9: rounded(9, by=0.9)})
    assert [client for client, (one, _) in far.items() if one > 2] == [9]


Means = checks.ClassMeans


def drifted(by: float, lonely: float = 0.0) -> tuple[dict[int, Means], Means]:
    """Five clients whose images moved `by` deviations since the server met them.

    The last one alone holds owls, which it says have moved by `lonely` more.
    """
    source, width = torch.Generator().manual_seed(0), 40
    way = torch.ones(width).double() / math.sqrt(width)
    known = checks.ClassMeans(
        ("cat", "dog", "owl"),
        torch.zeros(3, 1, width).double(),
        torch.full((3,), 500.0).double(),
        torch.ones(1).double(),
    )
    clients = {}
    for client in range(5):
        names = ("cat", "dog", "owl") if client == 4 else ("cat", "dog")
        noise = torch.randn(len(names), 1, width, generator=source).double() / math.sqrt(width * 20)
        mean = noise + by * way
        mean[2:] += lonely * way
        images = torch.full((len(names),), 20.0).double()
        clients[client] = checks.ClassMeans(names, mean, images, torch.ones(1).double())
    return clients, known


@pytest.mark.parametrize("by", [0.0, 0.5, 2.0, 10.0])
def test_who_alone_holds_a_class_may_move_it_as_far_as_all_others_moved_theirs(by: float) -> None:
    clients, known = drifted(by)
    assert max(far for far, _ in checks.apart_in_means(clients, known).values()) < 1


@pytest.mark.parametrize("by", [0.5, 10.0])
def test_of_who_answers_alone_nobody_can_say_whether_all_images_drifted(by: float) -> None:
    """As `joint` does, whose images turn, and clients that are asked one at a time."""
    clients, known = drifted(by)
    assert checks.apart_in_means({4: clients[4]}, known) == {}
    assert {*checks.apart_in_means({0: clients[0], 4: clients[4]}, known)} == {0, 4}


@pytest.mark.parametrize("by", [0.0, 0.5, 2.0])
def test_but_no_further(by: float) -> None:
    clients, known = drifted(by, lonely=5.0)
    far = {client: ratio for client, (ratio, _) in checks.apart_in_means(clients, known).items()}
    assert far.pop(4) > 2
    assert max(far.values()) < 1
