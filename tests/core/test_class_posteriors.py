"""Class posteriors: exact sums under an anchor, and one map that carries them to now."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedbnn.bayes.flatten import layout_of
from fedbnn.heads.anchor import ANCHOR, BEFORE, PAIRS, Anchored, Moments, RoundSums
from fedbnn.heads.gaussian import FACTOR, measure
from fedbnn.heads.posteriors import ClassPosteriors
from fedbnn.heads.statistics import square, triangle, unpacked
from fedbnn.images import ImageSet, Preprocess
from fedbnn.protocol.state import State
from tests.core.class_features import NAMES, backbones, exchange, folded, statistics, world

seeds = st.integers(0, 2**32)


@given(seeds, st.integers(1, 7))
def test_a_triangle_is_the_whole_of_a_symmetric_matrix(seed: int, width: int) -> None:
    half = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
    symmetric = half + half.T
    assert len(triangle(symmetric)) == width * (width + 1) // 2
    assert torch.equal(square(triangle(symmetric), width), symmetric)


def pooled(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Class means and scatter within classes, from all data at once."""
    means = torch.stack([features[labels == c].mean(0) for c in range(3)])
    centred = features - means[labels]
    return means, centred.T @ centred


def assert_pooled(state: State, features: Tensor, labels: Tensor) -> None:
    means, scatter = pooled(features, labels)
    torch.testing.assert_close(state["posteriors.mean"], means, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(state["posteriors.scatter"], scatter, rtol=1e-7, atol=1e-6)
    assert state["posteriors.count"].tolist() == torch.bincount(labels, minlength=3).tolist()
    assert state["posteriors.weight"].item() == len(labels) - 3


@given(seeds, st.integers(1, 6), st.randoms(use_true_random=False))
def test_statistics_of_clients_are_those_of_the_pooled_data(
    seed: int, clients: int, shuffle: object
) -> None:
    features, labels = world(seed)
    owner = torch.randint(0, clients, (60,), generator=torch.Generator().manual_seed(seed))
    parts = [owner == k for k in range(clients) if bool((owner == k).any())]
    updates = [
        statistics(features[part], features[part], labels[part], k) for k, part in enumerate(parts)
    ]
    shuffle.shuffle(updates)  # type: ignore[attr-defined]
    assert_pooled(folded(State({}, NAMES), updates, exchange(4)), features, labels)


class Moving:
    """A backbone that moves by known affine maps x -> x T + t, a new one every round."""

    def __init__(self, seed: int, rounds: int, moves: bool) -> None:
        source = torch.Generator().manual_seed(seed)
        turns = torch.randn(rounds + 1, 4, 4, generator=source, dtype=torch.float64)
        shifts = torch.randn(rounds + 1, 4, generator=source, dtype=torch.float64)
        still = torch.eye(4).double()
        self.turns = (still + 0.3 * turns) if moves else still.expand_as(turns)
        self.shifts = shifts if moves else torch.zeros_like(shifts)

    def under(self, number: int, images: Tensor) -> Tensor:
        """Features of images under the backbone of a round; it moves on from 0 to that."""
        for turn, shift in zip(self.turns[:number], self.shifts[:number], strict=True):
            images = images @ turn + shift
        return images


def played(moving: Moving, parts: list[Tensor], world: tuple[Tensor, Tensor], every: int) -> State:
    """Rounds 1, 2, ...: each shows its part of the images, and the backbone moves before it.

    Two clients have it, the second of whom is heard first.
    """
    features, labels = world
    state, before = backbones(4, classes=NAMES), 0
    for number, part in enumerate(parts, 1):
        state = state.having({"backbone": torch.tensor([float(number)])})
        anchor = int(state["anchor.backbone"]) if "anchor.backbone" in state else number
        old = before if "anchor.backbone" in state else number
        updates = []
        for client, own in ((1, part[1::2]), (0, part[::2])):
            now, there, then = (moving.under(k, features[own]) for k in (number, anchor, old))
            updates.append(statistics(now, there, labels[own], client, before=then))
        asked = exchange(4, ridge=1e-12, anchor_rounds=every)
        state, before = folded(state, updates, asked), number
    return state


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3, 100])
@settings(max_examples=8)
@given(seed=seeds)
def test_every_class_is_carried_exactly_however_many_rounds_and_anchors(
    seed: int, every: int, moves: bool
) -> None:
    """After a first round with all, rounds of one class each: absent ones are where they are."""
    data = world(seed)
    labels = data[1]
    parts = [labels >= 0, *(labels == number % 3 for number in range(5))]
    rows = [part.nonzero().flatten() for part in parts]
    moving = Moving(seed, len(parts), moves)
    state = played(moving, rows, data, every)
    shown = torch.cat(rows)
    means, scatter = pooled(moving.under(len(parts), data[0])[shown], labels[shown])
    size = float(scatter.diagonal().mean())
    torch.testing.assert_close(state["posteriors.mean"], means, rtol=1e-3, atol=1e-3 * size**0.5)
    torch.testing.assert_close(state["posteriors.scatter"], scatter, rtol=1e-2, atol=1e-3 * size)
    assert state["posteriors.count"].tolist() == torch.bincount(labels[shown]).tolist()


@pytest.mark.parametrize("every", [1, 2, 100])
@settings(max_examples=20)
@given(seed=seeds, cut=st.integers(1, 59))
def test_rounds_with_a_resting_backbone_end_in_the_exact_pooled_posteriors(
    seed: int, cut: int, every: int
) -> None:
    """Whatever the ridge: nothing is to be carried anywhere."""
    features, labels = world(seed)
    state, asked = State({}, NAMES), exchange(4, anchor_rounds=every)
    for part in (slice(0, cut), slice(cut, 60)):
        update = statistics(features[part], features[part], labels[part])
        state = folded(state, [update], asked)
    assert_pooled(state, features, labels)


def test_a_state_in_bytes_goes_on_as_the_state_itself() -> None:
    """The state holds the anchor and all that is remembered: resumed equals uninterrupted."""
    data = world(8)
    moving, rows = Moving(8, 4, moves=True), [torch.arange(60)[k::4] for k in range(4)]
    whole = played(moving, rows, data, every=3)
    again = State.from_bytes(whole.to_bytes())
    seen = moving.under(4, data[0])
    update = statistics(seen, seen + 0.1, data[1])
    ends = [folded(state, [update], exchange(4, anchor_rounds=3)) for state in (whole, again)]
    assert ends[0].to_bytes() == ends[1].to_bytes()
    assert float(whole["anchor.backbone"]) == 3
    assert float(whole["anchor.age"]) == 1


def sums_of(here: Tensor, before: Tensor, now: Tensor) -> RoundSums:
    """Of images of one class."""
    seen = torch.stack([here, before, now])
    grams = {(one, other): seen[one].T @ seen[other] for one, other in PAIRS}
    return RoundSums(torch.tensor([len(now)]).double(), seen.sum(1, keepdim=True), grams)


def test_maps_are_ridge_regressions_of_the_images_themselves() -> None:
    """Against the stacked least-squares problem with the rows of the ridge below the images."""
    here, before, now = torch.randn(3, 30, 4).double()
    found = sums_of(here, before, now)
    for place, features in ((ANCHOR, here), (BEFORE, before)):
        ones = torch.cat([features, torch.ones(30, 1).double()], 1)
        strength = 0.1 * (ones.T @ ones).diagonal().mean()
        below = strength.sqrt() * torch.eye(5).double()
        left, right = torch.cat([ones, below]), torch.cat([now, below[:, :4]])
        expected = torch.linalg.lstsq(left, right).solution
        moments = found.moments(place)
        drift = moments.map(0.1)
        torch.testing.assert_close(drift, expected)
        rest = now - ones @ drift
        torch.testing.assert_close(moments.residual(drift), rest.T @ rest / 30)


def test_what_is_remembered_is_moved_like_its_images() -> None:
    here, now = torch.randn(2, 30, 4).double()
    step, nothing = torch.randn(5, 4).double(), torch.zeros(4, 4).double()
    moments = sums_of(here, here, now).moments(ANCHOR)
    moved = sums_of(here, here, now @ step[:-1] + step[-1]).moments(ANCHOR)
    again = sums_of(now, now, now).moments(ANCHOR)
    for found, expected in ((moments.moved(step, nothing), moved), (moments.anchored(), again)):
        for name, value in vars(expected).items():
            torch.testing.assert_close(getattr(found, name), value)


def test_what_a_step_leaves_over_is_remembered_as_spread() -> None:
    """The same images in two rounds: the old ones count as if they had been looked at again."""
    here, before, now = torch.randn(3, 30, 4).double()
    anchored = Anchored.of(State({}, NAMES[:1]), 4)
    for found in (sums_of(here, here, before), sums_of(here, before, now)):
        anchored = anchored.after(found, memory=1.0, ridge=1e-12)
    torch.testing.assert_close(anchored.moments.outer, 2 * now.T @ now)


def test_what_older_rounds_know_is_kept_where_this_round_knows_nothing() -> None:
    """A round of images in one direction alone: without memory the map forgets all others."""
    source = torch.Generator().manual_seed(0)
    first = torch.randn(200, 4, generator=source, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=source, dtype=torch.float64)).Q
    few = first[:40] * torch.tensor([1.0, 0.0, 0.0, 0.0]).double()
    labels = torch.zeros(200, dtype=torch.long)
    errors = []
    for memory in (0.0, 0.5):
        asked = exchange(4, memory=memory, ridge=1e-3)
        state = folded(State({}, NAMES), [statistics(first, first, labels)], asked)
        state = folded(state, [statistics(first @ turn, first, labels, before=first)], asked)
        rest = statistics(few @ turn, few, labels[:40], before=few @ turn)
        state = folded(state, [rest], asked)
        errors.append(float((state["anchor.drift"][:-1] - turn).norm()))
    assert errors[1] < 0.1 * errors[0]


def test_without_images_there_is_no_map_and_nothing_moves() -> None:
    assert torch.equal(Moments.none(3).map(0.1), torch.eye(4, 3).double())
    features, labels = world(1)
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4))
    again = folded(state, [], exchange(4))
    assert all(torch.equal(state[name], again[name]) for name in state.tensors)


def test_a_class_lies_where_its_images_do_though_no_map_could_say_so() -> None:
    """The anchor shows nothing: classes of the round have what the map leaves over."""
    features, labels = world(7)
    blind = torch.zeros_like(features)
    state = folded(State({}, NAMES), [statistics(features, blind, labels)], exchange(4))
    torch.testing.assert_close(state["posteriors.mean"], pooled(features, labels)[0])


def test_what_no_map_says_of_a_class_moves_with_the_backbone_while_it_is_away() -> None:
    """r_c T after a step x -> x T + t that images of another class show."""
    (features, labels), blind = world(7), torch.zeros(60, 4).double()
    turn, some = torch.randn(4, 4).double(), labels == 1
    asked = exchange(4, ridge=1e-12)
    first = folded(State({}, NAMES), [statistics(features, blind, labels)], asked)
    moved = features[some] @ turn + 1
    parts = moved, blind[some], labels[some]
    second = folded(first, [statistics(*parts, before=features[some])], asked)
    wanted = first["anchor.residual"] @ turn
    torch.testing.assert_close(second["anchor.residual"][[0, 2]], wanted[[0, 2]])


def test_what_the_map_left_over_before_counts_with_the_part_that_is_remembered() -> None:
    """Of a class with 30 images in each of three rounds: (r / 4 + r' / 2 + r'') / (7 / 4)."""
    source, still = torch.Generator().manual_seed(2), torch.zeros(30, 4).double()
    anchored, rests = Anchored.of(State({}, NAMES[:1]), 4), []
    for _ in range(3):
        now = torch.randn(30, 4, generator=source, dtype=torch.float64)
        anchored = anchored.after(sums_of(still, still, now), memory=0.5, ridge=1e9)
        rests.append(now.mean(0) - anchored.drift[-1])
    assert anchored.recent.tolist() == [30 * 1.75]
    carried = (rests[0] / 4 + rests[1] / 2 + rests[2]) / 1.75
    torch.testing.assert_close(anchored.residual[0], carried, rtol=1e-6, atol=1e-8)


def test_what_the_map_leaves_over_makes_classes_wider() -> None:
    """W_d^T S W_d + v E, from the images: features of now have noise that the anchor's have not."""
    features, labels = world(7)
    now = features + torch.randn(60, 4, generator=torch.Generator().manual_seed(7)).double()
    state = folded(State({}, NAMES), [statistics(now, features, labels)], exchange(4))
    drift = state["anchor.drift"]
    rest = now - features @ drift[:-1] - drift[-1]
    known = drift[:-1].T @ pooled(features, labels)[1] @ drift[:-1]
    wider = known + 57 * rest.T @ rest / 60
    torch.testing.assert_close(state["posteriors.scatter"], wider, rtol=1e-7, atol=1e-6)


def test_another_anchor_leaves_classes_where_they_are_and_as_wide() -> None:
    """Though no map from the old one said all of it: some is left over, and less of one class."""
    features, labels = world(7)
    now = features + torch.randn(60, 4, generator=torch.Generator().manual_seed(7)).double()
    state = folded(State({}, NAMES), [statistics(now, features, labels)], exchange(4))
    anchored = Anchored.of(state, 4)
    assert float(anchored.residual.abs().max()) > 0.01
    pairs = zip(vars(anchored.now()).values(), vars(anchored.renewed().now()).values(), strict=True)
    for before, after in pairs:
        torch.testing.assert_close(after, before)


def test_trust_tempers_counts_and_sums_alike() -> None:
    """A class with a single image, trusted by a third, lies where that image lies."""
    features, labels = torch.tensor([[3.0, 6.0]]).double(), torch.tensor([1])
    state = folded(
        State({}, NAMES), [statistics(features, features, labels)], exchange(2), trust=1 / 3
    )
    torch.testing.assert_close(state["posteriors.mean"][1], features[0])
    torch.testing.assert_close(
        state["posteriors.scatter"], torch.zeros(2, 2).double(), atol=1e-12, rtol=0
    )


def test_new_classes_have_empty_posteriors() -> None:
    features, labels = world(5)
    state = folded(State({}, NAMES), [statistics(features, features, labels)], exchange(4))
    grown = ClassPosteriors.of(State(state.tensors, (*NAMES, "d")), 4)
    assert grown.count.tolist() == [20, 20, 20, 0]
    assert grown.mean.shape == (4, 4)


def backbone_of(width: int, side: int = 4) -> nn.Module:
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(side * side, width))
    backbone.width = width
    return backbone


def pictures(count: int, side: int = 4) -> ImageSet:
    pixels = torch.randint(0, 256, (count, 1, side, side), dtype=torch.uint8)
    return ImageSet(pixels, torch.arange(count) % 3, NAMES, Preprocess(flip=True, shift=2))


def test_a_client_measures_every_backbone_without_augmentation() -> None:
    backbone, images = backbone_of(5), pictures(40)
    layout = layout_of(backbone)
    new, buffers = layout.read(backbone)
    old, older = (new + 0.1 * torch.randn(len(new)) for _ in range(2))
    plain = images.preprocess.normalise(images.pixels).flatten(1)
    weights = [layout.views(vector) for vector in (new, old, older)]
    f, b, a = ((plain @ w["1.weight"].T + w["1.bias"]).double() for w in weights)
    sent = {"backbone": new, "backbone.before": old, "backbone.anchor": older}
    sent |= {name.replace("backbone", "buffers"): buffers for name in sent}
    cases = {"": (f, f, f), ".anchor": (f, a, a), ".before": (f, a, b)}
    asked: dict[str, Tensor] = {}
    for when, (now, anchored, before) in cases.items():
        asked |= {name: sent[name] for name in (f"backbone{when}", f"buffers{when}")}
        found = measure(backbone, layout, State(asked, NAMES), images)
        expected = statistics(now, anchored, images.labels, before=before).tensors
        assert {name: one.shape for name, one in found.items()} == {
            name: one.shape for name, one in expected.items()
        }
        rows = [unpacked(one[FACTOR].double(), 40, 15) for one in (found, expected)]
        gram, exact = (upper.T @ upper for upper in rows)
        torch.testing.assert_close(gram, exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


@pytest.mark.parametrize(("images", "width"), [(30, 40), (120, 12)])
def test_the_moments_that_are_sent_are_those_of_the_images(images: int, width: int) -> None:
    """Fewer images than features and more: the same Gram matrix to 1e-6 from numbers in float32."""
    wide = torch.randn(images, 3 * width, generator=torch.Generator().manual_seed(0)).relu()
    parts = wide.double().split(width, 1)
    update = statistics(parts[2], parts[0], torch.arange(images) % 3, before=parts[1])
    sent = replace(update, tensors={name: one.float() for name, one in update.tensors.items()})
    upper = exchange(width).factor(sent).double()
    gram = wide.double().T @ wide.double()
    assert float((upper.T @ upper - gram).norm()) < 1e-6 * float(gram.norm())


def test_an_instruction_names_every_backbone_once() -> None:
    asked, state = exchange(4), backbones(4, 1.0, NAMES)
    assert {*asked.broadcast(state).tensors} == {"backbone", "buffers"}
    features, labels = world(9)
    state = folded(state, [statistics(features, features, labels)], asked)
    sent = asked.broadcast(state.having({"backbone": torch.tensor([2.0])}))
    assert [float(sent[f"backbone{one}"]) for one in (".anchor", ".before", "")] == [1, 0, 2]
    same = replace(asked, before=state)
    assert "backbone.before" not in same.broadcast(state)


def test_an_honest_update_is_what_is_expected_and_has_no_defect() -> None:
    features, labels = world(6)
    update = statistics(features, features, labels)
    spec = exchange(4).expected(State({}, NAMES), update.counts)
    assert {name: shape for name, (shape, _) in spec.items()} == {
        name: tuple(value.shape) for name, value in update.tensors.items()
    }
    assert exchange(4).defect(State({}, NAMES), update) is None
    forged = replace(update, tensors={**update.tensors, FACTOR: 0.5 * update.tensors[FACTOR]})
    assert exchange(4).defect(State({}, NAMES), forged) is not None
