"""One forger of five moves the mean of a conjugate Gaussian by no more than honest noise does."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedbnn.influence import influence_of_factor, influence_of_point, ratios, squared_distances, trust, trusts
from fedbnn.spool import Spool

CLIENTS, SITES, SEEDS = 5, 40, range(6)


@dataclass(frozen=True)
class Factor:
    """What one client says about the mean of unit-variance data: a change of precision and of information."""

    precision: Tensor
    info: Tensor
    samples: int


@dataclass(frozen=True)
class World:
    """How much data, how far the truth from the prior mean, how sure the prior."""

    samples: tuple[int, ...]
    distance: float
    prior_precision: float


WORLDS = {
    "weak prior, far truth": World((40,) * CLIENTS, 5.0, 0.01),
    "unit prior": World((40,) * CLIENTS, 1.0, 1.0),
    "strong prior, truth within noise": World((40,) * CLIENTS, 0.1, 100.0),
    "unequal clients": World((20, 40, 80, 40, 14), 1.0, 1.0),
    "much data": World((4000,) * CLIENTS, 1.0, 1.0),
}
Fold = Callable[[World, list[Factor], list[float]], Tensor]
ATTACKS: dict[str, Callable[[Factor], Factor]] = {
    "precision x 1e6": lambda f: replace(f, precision=f.precision * 1e6),
    "precision x 1e6 at the wrong place": lambda f: replace(f, precision=f.precision * 1e6, info=-f.info * 1e6),
    "sign flipped": lambda f: replace(f, info=-f.info),
    "scaled x 3": lambda f: replace(f, info=f.info * 3),
    "scaled x 10": lambda f: replace(f, info=f.info * 10),
    "scaled x 100": lambda f: replace(f, info=f.info * 100),
    "scaled x -10": lambda f: replace(f, info=f.info * -10),
    "zeros": lambda f: replace(f, precision=f.precision * 0, info=f.info * 0),
}


def truth_and_factors(world: World, seed: int) -> tuple[Tensor, list[Factor]]:
    """x ~ N(truth, 1): n samples give the factor (n, sum x), and sum x ~ N(n truth, n)."""
    random = torch.Generator().manual_seed(seed)
    truth, *noise = torch.randn(CLIENTS + 1, SITES, generator=random, dtype=torch.float64)
    truth = world.distance * truth
    sums = [n * truth + math.sqrt(n) * e for n, e in zip(world.samples, noise, strict=True)]
    return truth, [Factor(torch.full_like(x, n), x, n) for n, x in zip(world.samples, sums, strict=True)]


def judged(world: World, factors: list[Factor], cap: float) -> list[float]:
    """Trust of each, from the factor of one image."""
    prior, zero = torch.full((SITES,), world.prior_precision, dtype=torch.float64), torch.zeros(SITES)
    points = [influence_of_factor(prior, zero, f.precision / f.samples, f.info / f.samples) for f in factors]
    stacked = torch.stack([*points, torch.zeros_like(points[0])]).double()
    squares = torch.cdist(stacked, stacked).square()
    return trusts(squares, ratios(squares, [True] * len(factors)), cap)


def product(world: World, factors: list[Factor], trusts: list[float]) -> Tensor:
    """Mean of prior x prod factor^trust."""
    precision = world.prior_precision + sum(t * f.precision for f, t in zip(factors, trusts, strict=True))
    return sum(t * f.info for f, t in zip(factors, trusts, strict=True)) / precision


def scaled(world: World, factors: list[Factor], trusts: list[float]) -> Tensor:
    """Mean of the convex combination of posteriors, each with its likelihood scaled to the round."""
    total = sum(world.samples)
    weights = [t * f.samples for f, t in zip(factors, trusts, strict=True)]
    shares = [weight / sum(weights) for weight in weights]
    scaled_up = [(f.precision * total / f.samples, f.info * total / f.samples) for f in factors]
    precision = world.prior_precision + sum(w * p for w, (p, _) in zip(shares, scaled_up, strict=True))
    return sum(w * e for w, (_, e) in zip(shares, scaled_up, strict=True)) / precision


def worst_ratio(world: World, attack: Callable[[Factor], Factor], fold: Fold, cap: float) -> float:
    """Error with the last client forged over error with all honest, the worst of several draws."""
    found = []
    for seed in SEEDS:
        truth, factors = truth_and_factors(world, seed)
        honest = (fold(world, factors, judged(world, factors, cap)) - truth).norm()
        forged = [*factors[:-1], attack(factors[-1])]
        found.append(float((fold(world, forged, judged(world, forged, cap)) - truth).norm() / honest))
    return max(found)


@pytest.mark.parametrize("fold", [product, scaled])
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("world", WORLDS)
def test_a_cap_of_three_holds_every_attack_within_twice_the_honest_error(world: str, attack: str, fold: Fold) -> None:
    assert worst_ratio(WORLDS[world], ATTACKS[attack], fold, cap=3.0) < 2


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_default_cap_does_so_where_the_data_speak_clearly(attack: str) -> None:
    assert worst_ratio(WORLDS["weak prior, far truth"], ATTACKS[attack], product, cap=10.0) < 2


def test_without_a_cap_one_forged_precision_ruins_the_mean() -> None:
    assert worst_ratio(WORLDS["weak prior, far truth"], ATTACKS["precision x 1e6"], product, cap=math.inf) > 50


@pytest.mark.parametrize("world", WORLDS)
def test_honest_clients_are_left_alone(world: str) -> None:
    for seed in SEEDS:
        _, factors = truth_and_factors(WORLDS[world], seed)
        assert judged(WORLDS[world], factors, cap=3.0) == [1.0] * CLIENTS


def test_two_forgers_of_five_do_not_outvote_three() -> None:
    world = WORLDS["unit prior"]
    _, factors = truth_and_factors(world, 0)
    forged = ATTACKS["precision x 1e6"](factors[-1])
    assert judged(world, [*factors[:3], forged, forged], cap=3.0) == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_one_forger_of_three_is_outvoted_and_two_clients_cannot_judge_each_other() -> None:
    world = WORLDS["unit prior"]
    _, factors = truth_and_factors(world, 0)
    forged = ATTACKS["scaled x 100"](factors[2])
    assert judged(world, [*factors[:2], forged], cap=3.0) == [1.0, 1.0, 0.0]
    assert judged(world, [factors[0], forged], cap=3.0) == [1.0, 1.0]
    assert judged(world, [forged], cap=3.0) == [1.0]


def test_clients_that_learned_nothing_have_no_vote() -> None:
    world = WORLDS["unit prior"]
    _, factors = truth_and_factors(world, 0)
    nothing = ATTACKS["zeros"](factors[0])
    assert judged(world, [nothing, nothing, nothing, *factors[3:]], cap=3.0)[3:] == [1.0, 1.0]


def test_clients_that_learned_nothing_count_less_but_are_not_refused() -> None:
    world = WORLDS["weak prior, far truth"]
    _, factors = truth_and_factors(world, 0)
    trusted = judged(world, [*factors[:4], ATTACKS["zeros"](factors[4])], cap=3.0)
    assert trusted[:4] == [1.0] * 4
    assert 0 < trusted[4] < 1e-5


def test_rounding_is_not_a_vote() -> None:
    prior = torch.tensor([1e-3, 7.0, 3e4])
    loc = torch.tensor([0.3, -2.0, 11.0])
    rounded = (prior.sqrt().reciprocal().pow(-2), (prior * loc).mul(3).div(3))
    assert torch.equal(influence_of_factor(prior, loc, rounded[0] - prior, rounded[1] - prior * loc), torch.zeros(6))
    assert torch.equal(influence_of_point(loc, loc.mul(3).div(3)), torch.zeros(3))


def test_clients_that_agree_exactly_are_measured_by_their_length() -> None:
    points = torch.tensor([[1.0, 0.0]] * 4 + [[100.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert ratios(torch.cdist(points, points).square(), [True] * 5) == [0.0] * 4 + [99.0]


def test_half_its_square_is_the_divergence_of_a_small_step() -> None:
    prior_precision, prior_loc = torch.tensor([2.0, 50.0]), torch.tensor([0.3, -1.0])
    precision, loc = prior_precision * 1.001, prior_loc + 1e-3
    info, prior_info = precision * loc, prior_precision * prior_loc
    x = influence_of_factor(prior_precision, prior_loc, precision - prior_precision, info - prior_info)
    prior, posterior = (torch.distributions.Normal(m, p.rsqrt()) for m, p in ((prior_loc, prior_precision), (loc, precision)))
    divergence = torch.distributions.kl_divergence(posterior, prior).sum()
    assert float(x.double().square().sum() / 2) == pytest.approx(float(divergence), rel=5e-3)


@given(ratio=st.floats(0, 1e12), cap=st.floats(1, 100))
def test_the_pull_of_one_client_never_exceeds_the_cap(ratio: float, cap: float) -> None:
    assert 0 <= trust(ratio, cap) <= 1
    assert ratio * trust(ratio, cap) <= cap * (1 + 1e-9)
    assert (trust(ratio, cap) == 1) == (ratio <= cap)


@pytest.mark.parametrize("sites", [1, 7, 1000])
def test_distances_are_those_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sites: int) -> None:
    monkeypatch.setattr("fedbnn.influence.CHUNK", 64)
    points, spool = torch.randn(5, sites, generator=torch.Generator().manual_seed(0)), Spool(tmp_path)
    for client, row in enumerate(points):
        spool.put(client, row.numpy().tobytes())
    with_origin = torch.cat([points, torch.zeros(1, sites)]).double()
    assert torch.allclose(squared_distances(spool, range(5)), torch.cdist(with_origin, with_origin).square(), atol=1e-9)
    assert squared_distances(spool, []).shape == (1, 1)
