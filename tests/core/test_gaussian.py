"""Gaussians in natural parameters: Bayes' rule is addition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbnn.bayes.gaussian import Gaussian

EXACT = {"rtol": 1e-12, "atol": 1e-12}
seeds = st.integers(0, 2**32)


def drawn(seed: int, count: int = 7) -> Gaussian:
    """A random density."""
    source = torch.Generator().manual_seed(seed)
    loc = torch.randn(count, generator=source, dtype=torch.float64)
    return Gaussian.from_moments(
        loc, 0.1 + torch.rand(count, generator=source, dtype=torch.float64)
    )


def assert_same(one: Gaussian, other: Gaussian) -> None:
    torch.testing.assert_close(one.precision, other.precision, **EXACT)
    torch.testing.assert_close(one.info, other.info, **EXACT)


@given(seeds, seeds)
def test_a_quotient_undoes_a_product(first: int, second: int) -> None:
    prior, factor = drawn(first), drawn(second)
    assert_same((prior * factor) / factor, prior)


@given(seeds, st.floats(0.1, 5), st.floats(0.1, 5))
def test_powers_add_and_multiply(seed: int, a: float, b: float) -> None:
    factor = drawn(seed)
    assert_same(factor**a * factor**b, factor ** (a + b))
    assert_same((factor**a) ** b, factor ** (a * b))


@given(seeds)
def test_moments_survive_the_natural_parameters(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    loc, scale = torch.randn(5, generator=source), 0.01 + torch.rand(5, generator=source)
    density = Gaussian.from_moments(loc, scale)
    assert density.precision.dtype == torch.float64
    torch.testing.assert_close(density.loc, loc.double(), **EXACT)
    torch.testing.assert_close(density.scale, scale.double(), **EXACT)


def test_the_neutral_factor_changes_nothing() -> None:
    prior = drawn(1)
    product = prior * prior**0
    assert torch.equal(product.precision, prior.precision)
    assert torch.equal(product.info, prior.info)


def conjugate_posterior(prior: Gaussian, images: torch.Tensor, noise: float) -> Gaussian:
    """The textbook posterior of a mean m given x_i ~ N(m, noise^2), in moments: an independent way
    to the same.
    """
    count, mean = len(images), images.mean(0) if len(images) else torch.zeros_like(prior.loc)
    gain = (
        prior.scale**2 / (prior.scale**2 + noise**2 / max(count, 1))
        if count
        else torch.zeros_like(prior.loc)
    )
    return Gaussian.from_moments(
        prior.loc + gain * (mean - prior.loc), (prior.scale**2 * (1 - gain)).sqrt()
    )


@given(seeds, st.integers(1, 9), st.floats(0.3, 3), st.randoms(use_true_random=False))
def test_product_of_conjugate_clients_is_the_pooled_posterior(
    seed: int, clients: int, noise: float, shuffle: object
) -> None:
    source = torch.Generator().manual_seed(seed)
    prior, data = drawn(seed + 1), torch.randn(30, 7, generator=source, dtype=torch.float64)
    owner = torch.randint(0, clients, (30,), generator=source)
    factors = [conjugate_posterior(prior, data[owner == k], noise) / prior for k in range(clients)]
    shuffle.shuffle(factors)  # type: ignore[attr-defined]
    folded = prior
    for factor in factors:
        folded = folded * factor
    assert_same(folded, conjugate_posterior(prior, data, noise))


@given(seeds, st.integers(0, 30))
def test_splitting_a_client_in_two_changes_nothing(seed: int, cut: int) -> None:
    data, prior = (
        torch.randn(30, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),
        drawn(seed),
    )
    whole = conjugate_posterior(prior, data, 1.0) / prior
    parts = [conjugate_posterior(prior, part, 1.0) / prior for part in (data[:cut], data[cut:])]
    assert_same(parts[0] * parts[1], whole)


@given(seeds)
def test_a_move_is_the_product_where_that_is_certain_enough(seed: int) -> None:
    prior, factor = drawn(seed), drawn(seed + 1)
    assert_same(prior.moved(factor, 0.1), prior * factor)


@pytest.mark.parametrize("left", [0.5, 1e-9, 0.0, -0.4, -3.0])
def test_a_move_that_leaves_too_little_certainty_is_bounded_and_keeps_its_direction(
    left: float,
) -> None:
    """The prior N(2, 1); a client at 2.1 that left `left` of the precision pulls by 0.1 * left, and
    is followed a tenth as far as with that little precision left, never away from where it pulls.
    """
    prior = Gaussian(torch.ones(1).double(), torch.full((1,), 2.0).double())
    factor = Gaussian(
        torch.full((1,), left - 1).double(), torch.full((1,), left * 2.1 - 2.0).double()
    )
    moved = prior.moved(factor, 0.6)
    assert moved.precision.tolist() == [0.6]
    assert moved.loc.tolist() == pytest.approx([2 + 0.1 * left / 0.6])


def test_a_gaussian_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        drawn(1).precision = torch.zeros(7)  # type: ignore[misc]


def test_the_package_offers_it_by_name() -> None:
    import fedbnn

    assert fedbnn.Gaussian is Gaussian
