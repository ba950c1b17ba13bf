"""Statistics as plain sums: the posteriors of R factors, and what noise leaves of them."""

import math
from dataclasses import replace

import pytest
import torch

from fedbnn.bayes.flatten import layout_of
from fedbnn.defense.privacy import Privacy, Protection, Question, unit
from fedbnn.heads import ExactHead, GaussianHead
from fedbnn.heads.exact import ExactAggregator
from fedbnn.heads.exact import SumsAggregator as ExactSums
from fedbnn.heads.gaussian import SumsAggregator
from fedbnn.heads.statistics import possible, summed
from fedbnn.networks import MLP
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State
from tests.core.class_features import NAMES, exchange, folded, statistics, world

WIDTH, CLIENTS = 4, 3
LAYOUT = layout_of(MLP((1, 2, 2), (3,)))
FOREVER = Privacy(clip_images=1e12)


def sent(round: int) -> list[Update]:
    """Every class at every client, under features that move from round to round."""
    found = []
    for client in range(CLIENTS):
        old, labels = world(client, 24 + 3 * client)
        before, new = old + 0.2 * round * old.roll(1, 1), old + 0.3 * round * old.roll(1, 1)
        found.append(statistics(new, old, labels, client, before))
    return found


def protected(updates: list[Update], settings: Privacy, seed: int = 1) -> list[Update]:
    """What the server folds of clients that sent these statistics."""
    question = Question(State({}, NAMES), NAMES, LAYOUT, 10.0)
    asked, counts = tuple(range(CLIENTS)), settings.announced(NAMES)
    guard = Protection(settings, question, asked, counts, True, seed)
    return [*guard([summed(one) for one in updates])]


def test_without_noise_and_a_clip_nobody_reaches_the_posteriors_are_the_same() -> None:
    """Over rounds in which features move; up to float32, which halves the digits of moments."""
    plain = private = State({"prototypes": torch.zeros(3, WIDTH + 1)}, NAMES)
    factors = exchange(WIDTH)
    sums = SumsAggregator(factors.head, factors.before)
    for round in (1, 2, 3):
        plain = folded(plain, sent(round), factors)
        private = folded(private, protected(sent(round), FOREVER), sums)
    for name in plain.tensors:
        assert torch.allclose(plain[name], private[name], rtol=1e-4, atol=1e-4), name


def test_so_they_are_over_features_that_stay() -> None:
    updates = []
    for one in sent(1):
        wide = {"exact.sum": one.tensors["posteriors.sum"]}
        tensors = {**wide, "exact.factor": one.tensors["posteriors.factor"]}
        updates.append(replace(one, tensors=tensors))
    head, start = ExactHead(filters=1), State({}, NAMES)
    plain = folded_with(ExactAggregator(head, 3 * WIDTH), start, updates)
    private = folded_with(ExactSums(head, 3 * WIDTH), start, protected(updates, FOREVER))
    for name in plain.tensors:
        assert torch.allclose(plain[name], private[name], rtol=1e-5, atol=1e-4), name


def folded_with(aggregator: ExactAggregator, state: State, updates: list[Update]) -> State:
    fold = aggregator.fold(state)
    for one in updates:
        fold.add(one)
    return fold.close()


def test_one_client_moves_the_sums_by_at_most_the_clip() -> None:
    """In images: counts, sums by the unit and moments by its square, all as one vector."""
    settings, question = Privacy(clip_images=2.0), Question(State({}, NAMES), NAMES, LAYOUT, 10.0)
    for one in protected(sent(1), settings):
        steps = question.asked(one).values()
        assert math.sqrt(sum(float(step.square().sum()) for step in steps)) <= 2 * (1 + 1e-6)


def test_noise_on_statistics_has_the_deviation_that_is_accounted_for() -> None:
    question = Question(State({}, NAMES), NAMES, LAYOUT, 10.0)

    def total(noise: float) -> dict[str, torch.Tensor]:
        settings = Privacy(clip_images=3.0, noise=noise)
        every = [question.asked(one) for one in protected(sent(1), settings)]
        return {name: sum(one[name] for one in every) for name in every[0]}  # type: ignore[misc]

    quiet, loud = total(0.0), total(2.0)
    noise = torch.cat([(loud[name] - quiet[name]).flatten() for name in quiet])
    assert len(noise) == 3 + 3 * 3 * WIDTH + 3 * WIDTH * (3 * WIDTH + 1) // 2
    assert float(noise.std()) == pytest.approx(6.0, rel=4 / math.sqrt(len(noise)))


@pytest.mark.parametrize("seed", range(5))
def test_noise_leaves_a_moment_that_images_could_have(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    count = torch.tensor([5.0, 1.0, 0.0], dtype=torch.float64)
    sums = torch.randn(3, 6, generator=source, dtype=torch.float64) * (count > 0)[:, None]
    noise = torch.randn(6, 6, generator=source, dtype=torch.float64)
    moment = possible(count, sums, noise + noise.T)
    within = moment - sums.T @ (sums / count.clamp_min(1)[:, None])
    assert float(torch.linalg.eigvalsh(within)[0]) > -1e-9
    again = possible(count, sums, moment)
    assert torch.allclose(again, moment, atol=1e-9)


def test_the_unit_is_the_length_of_features_of_noise_and_needs_no_data() -> None:
    """Under one backbone three times as many features, all alike; under others as they are."""
    shape, backbone = (1, 2, 2), MLP((1, 2, 2), (3,))
    weights, buffers = LAYOUT.read(backbone)
    once = State({"backbone": weights, "buffers": buffers})
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    alone = float(backbone(noise).detach().norm())
    found = unit(GaussianHead(), backbone, LAYOUT, once, shape)
    assert found == pytest.approx(math.sqrt(3) * alone, rel=1e-5)
    moved = once.having({"backbone.anchor": 2 * weights, "buffers.anchor": buffers})
    LAYOUT.write(backbone, 2 * weights, buffers)
    other = float(backbone(noise).detach().norm())
    both = unit(GaussianHead(), backbone, LAYOUT, moved, shape)
    assert both == pytest.approx(math.sqrt(2 * other**2 + alone**2), rel=1e-5)
