"""Exact class posteriors: sums in any order, the same as of all data; nothing else is trained."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from fedbnn.bayes.flatten import layout_of
from fedbnn.defense.gate import Gate
from fedbnn.defense.privacy import Privacy
from fedbnn.errors import ConfigError
from fedbnn.federation import server
from fedbnn.heads import ExactHead, GaussianHead, LinearHead, exact
from fedbnn.heads.exact import COUNT, MOMENT, ROWS, SUM, ExactAggregator, PriorMean
from fedbnn.heads.posteriors import Discriminant
from fedbnn.heads.predictive import Predictor
from fedbnn.heads.statistics import factor
from fedbnn.methods import FedAvg, FedBNN
from fedbnn.methods.bounds import Exact
from fedbnn.methods.importance import EWC
from fedbnn.networks import MLP, FixedFeatures
from fedbnn.networks.random_conv import RandomConv
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State
from tests.core.class_features import NAMES, world

HEAD = ExactHead(filters=4)
READ = replace(HEAD, prototypes=1.0)
seeds = st.integers(0, 2**32)


def sent(features: Tensor, labels: Tensor) -> Update:
    """What a client with these features sends, in float64."""
    present = labels.unique().tolist()
    sums = torch.stack([features[labels == c].sum(0) for c in present])
    counts = {NAMES[c]: int((labels == c).sum()) for c in present}
    tensors = {SUM: sums, "exact.factor": factor(features)}
    return Update("run", 1, "statistics", 0, "", len(labels), counts, tensors)


def rounds(updates: list[list[Update]], width: int = 4) -> State:
    """The state after rounds of these updates."""
    state, exchange = State({}, NAMES), ExactAggregator(HEAD, width)
    for some in updates:
        fold = exchange.fold(state)
        for update in some:
            fold.add(update)
        state = fold.close()
    return state


@given(seeds, st.integers(1, 6), st.randoms(use_true_random=False))
def test_any_order_of_rounds_clients_and_tasks_gives_the_pooled_posterior(
    seed: int, cuts: int, shuffle: Any
) -> None:
    features, labels = world(seed)
    owner = torch.randint(0, cuts, (60,), generator=torch.Generator().manual_seed(seed))
    tasks = [(labels == c) & (owner == k) for c in range(3) for k in range(cuts)]
    updates = [sent(features[part], labels[part]) for part in tasks if bool(part.any())]
    shuffle.shuffle(updates)
    cut = shuffle.randint(0, len(updates))
    found = rounds([updates[:cut], updates[cut:]])
    pooled = rounds([[sent(features, labels)]])
    for name in (COUNT, SUM, MOMENT):
        torch.testing.assert_close(found[name], pooled[name], rtol=1e-9, atol=1e-9)
    ours = exact.posteriors(found)
    means = torch.stack([features[labels == c].mean(0) for c in range(3)])
    centred = features - means[labels]
    torch.testing.assert_close(ours.mean, means, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.scatter, centred.T @ centred, rtol=1e-9, atol=1e-8)
    assert ours.weight.item() == 57


def test_a_class_without_images_lies_where_all_images_are() -> None:
    features, labels = world(1)
    some = labels < 2
    state = rounds([[sent(features[some], labels[some])]])
    assert exact.met(state) == ("a", "b")
    torch.testing.assert_close(exact.posteriors(state).mean[2], features[some].mean(0))


def test_trust_tempers_all_sums_alike() -> None:
    update, ends = sent(*world(7)), []
    for trust in (1.0, 0.25):
        fold = ExactAggregator(HEAD, 4).fold(State({}, NAMES))
        fold.add(update, trust)
        ends.append(fold.close())
    for name in (COUNT, SUM, MOMENT):
        torch.testing.assert_close(ends[1][name], 0.25 * ends[0][name])


def test_predictions_are_those_of_lda_on_all_features() -> None:
    features, labels = world(2, 240)
    state, head = rounds([[sent(features[:90], labels[:90])]]), replace(HEAD, shrinkage=0.4)
    ours = Discriminant.of(exact.posteriors(state), torch.arange(3), head).scores(features[90:])
    reference = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.4, priors=[1 / 3] * 3)
    reference.fit(features[:90].numpy(), labels[:90].numpy())
    assert ours.argmax(1).tolist() == reference.predict(features[90:].numpy()).tolist()


def test_an_honest_update_is_what_is_expected_and_a_far_class_is_a_defect() -> None:
    features, labels = world(3, 30)
    update = sent(features.abs(), labels)
    exchange, state = ExactAggregator(HEAD, 4), State({}, NAMES)
    spec = exchange.expected(state, update.counts)
    assert {name: shape for name, (shape, _) in spec.items()} == {
        name: tuple(value.shape) for name, value in update.tensors.items()
    }
    assert exchange.defect(state, update) is None
    update.tensors[SUM][1] *= 50
    assert exchange.defect(state, update) == "a class lies farther out than its images can"


def test_clients_with_other_classes_are_not_far_apart_and_forged_features_are() -> None:
    features, labels = world(5, 300)
    exchange, state = ExactAggregator(HEAD, 4), State({}, NAMES)
    one, other, forged = (
        next(exchange.influence(state, sent(scale * features[labels == c], labels[labels == c])))
        for c, scale in ((0, 1.0), (1, 1.0), (2, 10.0))
    )
    assert float((one - other).norm()) < 0.05 * float((one - forged).norm())


def test_rows_are_the_scores_of_the_discriminant_near_the_classes() -> None:
    """With many degrees of freedom; the constant all classes share is all that may differ."""
    features, labels = world(4, 3000)
    posteriors = exact.posteriors(rounds([[sent(features, labels)]]))
    found = Discriminant.of(posteriors, torch.arange(3), replace(HEAD, prior="frequency"))
    rows = found.rows().double()
    ours = features[:50] @ rows[:, :-1].T + rows[:, -1]
    wanted = found.scores(features[:50]).double()
    torch.testing.assert_close(ours.softmax(1), wanted.softmax(1), rtol=0, atol=0.02)


def test_the_prior_mean_of_a_network_is_added_to_its_logits() -> None:
    images, rows = torch.randn(5, 1, 8, 8), torch.randn(4, 37)
    head, state = replace(READ, prior_mean=0.5), State({ROWS: rows}, NAMES)
    network = layout_of(MLP((1, 8, 8), (6,))).classifier(MLP((1, 8, 8), (6,)), torch.randn(2, 7))
    plain = network(images)
    network.prior_mean = PriorMean.of(head, state, ("c", "a"))
    features = RandomConv(4, True, 0)(images)
    wanted = 0.5 * (features @ rows[[2, 0], :-1].T + rows[[2, 0], -1])
    torch.testing.assert_close(network(images) - plain, wanted, rtol=1e-4, atol=1e-4)
    assert PriorMean.of(HEAD, state, ("c", "a")) is None
    assert PriorMean.of(LinearHead(), state, ("c", "a")) is None
    assert PriorMean.of(head, State({}, NAMES), ("c", "a")) is None


def test_the_prior_mean_of_a_class_nobody_has_met_is_the_last_row() -> None:
    rows, names = torch.randn(4, 6), (*NAMES, "new", "newer")
    head = replace(READ, prior_mean=2.0, features="backbone")
    found = PriorMean.of(head, State({ROWS: rows}, names), ("newer", "b", "new"))
    assert found is not None
    torch.testing.assert_close(found.rows, 2 * rows[[3, 1, 3]])
    features = torch.randn(7, 5)
    wanted = features @ found.rows[:, :-1].T + found.rows[:, -1]
    torch.testing.assert_close(found(torch.zeros(7, 1, 4, 4), features), wanted)


def test_rows_are_of_all_images_so_far_and_of_a_class_where_they_are() -> None:
    features, labels = world(6, 300)
    head, some = replace(READ, prior_mean=1.0), labels < 2
    fold = ExactAggregator(head, 4).fold(State({}, NAMES))
    fold.add(sent(features[some], labels[some]))
    state = fold.close()
    every = Discriminant.of(exact.posteriors(state), torch.arange(3), head).rows()
    torch.testing.assert_close(state[ROWS][:3], every)
    torch.testing.assert_close(state[ROWS][3], every[2])  # nobody has met "c"


# Whole rounds on the digits.


@pytest.mark.parametrize("projections", [0, 5])
def test_exact_trains_nothing_and_ends_in_the_posterior_of_everything_shown(
    federate: Callable[..., Any], digits: Any, projections: int
) -> None:
    every = {"gate": Gate(influence_cap=None), "privacy": Privacy(smallest_class=1)}
    head = replace(HEAD, projections=projections)
    federation, start = federate(Exact(), head=head, **every)
    state = server.run(federation, start)
    assert torch.equal(state["backbone"], start["backbone"])
    assert not state["prototypes"].any()
    seen = RandomConv(4, True, 0, projections)
    total = torch.zeros(seen.width, seen.width).double()
    counts = dict.fromkeys(state.classes, 0)
    for number in range(1, digits.rounds + 1):
        for client in digits.participants(number):
            images = digits.train(number, client)
            found = seen(images.preprocess.normalise(images.pixels)).double()
            total += found.T @ found
            for name, count in images.counts().items():
                counts[name] += count
    assert state[COUNT].tolist() == list(counts.values())
    upper = total[torch.ones_like(total).triu() > 0]
    torch.testing.assert_close(state[MOMENT], upper, rtol=1e-5, atol=1e-5)


def test_a_network_learns_beside_exact_scores(federate: Callable[..., Any], digits: Any) -> None:
    head = ExactHead(filters=4, prior_mean=1.0, prototypes=1.0)
    federation, start = federate(FedAvg(), head=head)
    state = server.run(federation, start)
    assert not torch.equal(state["backbone"], start["backbone"])
    backbone = MLP(digits.image_shape, (16,))
    both, alone = (
        Predictor(backbone, layout_of(backbone), state, one).scores(digits.test(0))
        for one in (head, replace(head, prototypes=0.0, prior_mean=0.0))
    )
    linear = Predictor(backbone, layout_of(backbone), state, LinearHead()).scores(digits.test(0))
    torch.testing.assert_close(both, alone + linear, rtol=1e-4, atol=1e-4)


def test_prototypes_over_fixed_features_start_from_what_exact_scores_know(
    federate: Callable[..., Any], digits: Any
) -> None:
    """Only prototypes are trained, those of absent classes stay, and predictions are sums."""
    backbone = FixedFeatures(digits.image_shape, filters=4)
    head = ExactHead(features="backbone", prior_mean=1.0, prototypes=0.5)
    network = partial(FixedFeatures, filters=4)
    federation, state = federate(FedBNN(r_init=0), head=head, network=network)
    for number in range(1, digits.rounds + 1):
        before = state
        state = server.play(federation, state, number)
        held = {name for k in digits.participants(number) for name in digits.counts(number, k)}
        away = [name for name in before.classes if name not in held]
        for name in ("prototypes", "prototypes.scale") if away else ():
            ours, theirs = state[name][state.index(away)], before[name][before.index(away)]
            assert torch.equal(ours, theirs)
    assert not state["backbone"].numel()
    assert len(state[ROWS]) == len(state.classes) + 1
    images, layout = digits.test(0), layout_of(backbone)
    both = Predictor(backbone, layout, state, head, samples=3).scores(images)
    linear = Predictor(backbone, layout, state, LinearHead(), samples=3).scores(images)
    unread = replace(head, prototypes=0.0, prior_mean=0.0)
    alone = Predictor(backbone, layout, state, unread).scores(images)
    torch.testing.assert_close(both, alone + 0.5 * linear, rtol=1e-4, atol=1e-4)
    assert float((both - both[:1]).abs().max()) > 0


def test_a_network_that_learns_beside_exact_scores_must_be_read() -> None:
    with pytest.raises(ConfigError, match=r"never be read \(head.prototypes\)"):
        ExactHead(prior_mean=1.0)
    assert ExactHead(prior_mean=1.0, prototypes=0.1).prior_mean == 1


def test_heads_that_a_method_cannot_feed_are_refused(federate: Callable[..., Any]) -> None:
    for method, head in (
        (Exact(), LinearHead()),
        (Exact(), GaussianHead()),
        (FedAvg(), ExactHead(features="backbone")),
        (FedAvg(share="backbone_only"), HEAD),
        (EWC(), replace(READ, prior_mean=1.0)),
    ):
        with pytest.raises(ConfigError):
            federate(method, head=head)


def test_features_may_be_those_of_a_network_that_is_never_trained(
    federate: Callable[..., Any], digits: Any
) -> None:
    head = ExactHead(features="backbone")
    federation, start = federate(Exact(), head=head)
    state = server.run(federation, start)
    assert torch.equal(state["backbone"], start["backbone"])
    assert state[SUM].shape[1] == 16
    images, backbone = digits.test(0), MLP(digits.image_shape, (16,)).requires_grad_(False)
    layout = layout_of(backbone)
    ours = Predictor(backbone, layout, state, head).scores(images)
    layout.write(backbone, start["backbone"], start["buffers"])
    features = backbone(images.preprocess.normalise(images.pixels))
    rows = state.index(exact.met(state))
    wanted = Discriminant.of(exact.posteriors(state), rows, head).scores(features)
    torch.testing.assert_close(ours[0], wanted, rtol=1e-4, atol=1e-4)
