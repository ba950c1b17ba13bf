"""The three folds against formulas written another way."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentError

from fedbnn.bayes.gaussian import Gaussian
from fedbnn.errors import ConfigError
from fedbnn.methods import FedBNN
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State
from tests.core.parsing import parsed
from tests.core.posteriors import (
    COUNTS,
    assert_same,
    folded,
    moments,
    prior_state,
    random_update,
    update,
)

seeds = st.integers(0, 2**32)


def likelihood(source: torch.Generator, *shape: int) -> Gaussian:
    """The evidence of one image, as a factor."""
    return Gaussian(
        0.5 + torch.rand(shape, generator=source).double(),
        torch.randn(shape, generator=source).double(),
    )


def conjugate(
    state: State, counts: Mapping[str, int], client: int, totals: Mapping[str, int] | None
) -> Update:
    """A client with exact inference; with `totals` it scales its likelihood to the round, as
    `scaled` asks.
    """
    source, images = torch.Generator().manual_seed(client), sum(counts.values())
    index = state.index(tuple(counts))
    share = torch.tensor(
        [totals[name] / count if totals else 1.0 for name, count in counts.items()]
    ).double()[:, None]
    server_lr = sum(totals.values()) / images if totals else 1.0
    backbone = (
        Gaussian.from_moments(state["backbone"], state["backbone.scale"])
        * likelihood(source, 5) ** server_lr
    )
    rows = (
        Gaussian.from_moments(state["prototypes"][index], state["prototypes.scale"][index])
        * likelihood(source, len(counts), 3) ** share
    )
    return update(
        state, (backbone.loc, backbone.scale), (rows.loc, rows.scale), counts, client, 1.0
    )


TOTALS = {"a": 6, "b": 11}


@given(seeds)
def test_scaled_is_the_product_of_likelihoods_when_clients_scale_theirs_to_the_round(
    seed: int,
) -> None:
    state = prior_state(seed)
    scaled = folded(
        state, [conjugate(state, counts, k, TOTALS) for k, counts in enumerate(COUNTS)], "scaled"
    )
    product = folded(
        state, [conjugate(state, counts, k, None) for k, counts in enumerate(COUNTS)], "product"
    )
    assert_same(scaled, product, rtol=1e-11)


def test_the_product_is_the_pooled_posterior() -> None:
    state = prior_state()
    pooled = Gaussian.from_moments(state["backbone"], state["backbone.scale"])
    for client in range(len(COUNTS)):
        pooled = pooled * likelihood(torch.Generator().manual_seed(client), 5)
    found = folded(
        state, [conjugate(state, counts, k, None) for k, counts in enumerate(COUNTS)], "product"
    )
    torch.testing.assert_close(found["backbone"], pooled.loc, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["backbone.scale"], pooled.scale, rtol=1e-12, atol=1e-12)


def test_a_power_of_one_over_the_number_of_equal_clients_is_the_mean_of_natural_parameters() -> (
    None
):
    state, counts = prior_state(), {"a": 2, "b": 2}
    updates = [random_update(state, counts, client) for client in range(4)]
    assert_same(folded(state, updates, "product", server_lr=0.25), folded(state, updates, "scaled"))
    assert not torch.allclose(
        folded(state, updates, "product")["backbone"], folded(state, updates, "scaled")["backbone"]
    )


@pytest.mark.parametrize("server_lr", [0.5, 1.5, 3.0])
def test_a_step_of_the_server_goes_so_far_and_counts_no_image_twice(server_lr: float) -> None:
    """Conjugate clients: the mean goes p times as far as that of the pooled posterior, whose
    precision it has whatever p is.
    """
    state = prior_state()
    pooled = Gaussian.from_moments(state["backbone"], state["backbone.scale"])
    for client in range(len(COUNTS)):
        pooled = pooled * likelihood(torch.Generator().manual_seed(client), 5)
    updates = [conjugate(state, counts, k, TOTALS) for k, counts in enumerate(COUNTS)]
    found = folded(state, updates, "scaled", server_lr=server_lr)
    step = server_lr * (pooled.loc - state["backbone"])
    torch.testing.assert_close(found["backbone"], state["backbone"] + step, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found["backbone.scale"], pooled.scale, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("server_lr", [0.25, 0.5])
def test_a_power_of_the_product_is_that_power_of_its_factors(server_lr: float) -> None:
    """Conjugate clients: q_0 times likelihood ** p, as if every image had been seen p times."""
    state = prior_state()
    pooled = Gaussian.from_moments(state["backbone"], state["backbone.scale"])
    for client in range(len(COUNTS)):
        pooled = pooled * likelihood(torch.Generator().manual_seed(client), 5) ** server_lr
    updates = [conjugate(state, counts, k, None) for k, counts in enumerate(COUNTS)]
    found = folded(state, updates, "product", server_lr=server_lr)
    torch.testing.assert_close(found["backbone"], pooled.loc, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found["backbone.scale"], pooled.scale, rtol=1e-11, atol=1e-12)


def test_a_step_above_one_takes_the_precision_of_its_client() -> None:
    """A client that widened to a third of the precision and moved by 0.1: three times as far."""
    state = prior_state()
    found = state["backbone"] + 0.1, state["backbone.scale"] * 3**0.5
    wide = update(state, found, moments(torch.Generator(), 1, 3), {"a": 4})
    after = folded(state, [wide], server_lr=3.0)
    torch.testing.assert_close(after["backbone.scale"], found[1])
    torch.testing.assert_close(after["backbone"], state["backbone"] + 0.3)


@pytest.mark.parametrize("server_lr", ["0", "-1", "inf", "nan"])
def test_a_power_is_above_zero_and_finite(server_lr: str) -> None:
    with pytest.raises(ArgumentError, match="server_lr"):
        parsed(FedBNN, server_lr=server_lr)
    assert parsed(FedBNN, server_lr="1.5") == 1.5


def test_a_fold_without_factors_refuses_a_power() -> None:
    with pytest.raises(ConfigError, match="no factors"):
        FedBNN(fold_by="moments", server_lr=0.5)


def test_moments_are_those_of_the_mixture_in_closed_form_and_by_sampling() -> None:
    state, source = prior_state(), torch.Generator().manual_seed(5)
    posteriors, images = [moments(source, 5) for _ in range(3)], (1, 5, 2)
    updates = [
        update(state, q, moments(source, 1, 3), {"a": n}, k)
        for k, (q, n) in enumerate(zip(posteriors, images, strict=True))
    ]
    found = folded(state, updates, "moments")
    weights = torch.tensor(images).double() / 8
    means, scales = (torch.stack(part) for part in zip(*posteriors, strict=True))
    mean = weights @ means
    torch.testing.assert_close(found["backbone"], mean)
    torch.testing.assert_close(
        found["backbone.scale"], (weights @ (scales**2 + (means - mean) ** 2)).sqrt()
    )
    chosen = torch.multinomial(weights, 200_000, replacement=True, generator=source)
    draws = means[chosen] + scales[chosen] * torch.randn(200_000, 5, generator=source).double()
    torch.testing.assert_close(found["backbone.scale"], draws.std(0), rtol=0.01, atol=0)
    torch.testing.assert_close(found["backbone"], draws.mean(0), rtol=0, atol=0.02)


def test_rows_are_weighted_by_their_class_not_by_the_client() -> None:
    state = prior_state()
    (first, _), (second, _) = (
        moments(torch.Generator().manual_seed(1), 3),
        moments(torch.Generator().manual_seed(2), 3),
    )
    same = state["prototypes.scale"][:1].clone()
    backbone = (state["backbone"], state["backbone.scale"])
    many = update(
        state,
        backbone,
        (torch.stack([first, first]), state["prototypes.scale"][:2]),
        {"a": 1, "b": 99},
    )
    few = update(state, backbone, (second[None], same), {"a": 3}, 1)
    torch.testing.assert_close(
        folded(state, [many, few])["prototypes"][0], 0.25 * first + 0.75 * second
    )


@pytest.mark.parametrize("rule", ["scaled", "product"])
def test_trust_is_a_power_of_the_factor(rule: str) -> None:
    state, one = prior_state(), random_update(prior_state(), {"a": 3}, 1)
    prior = Gaussian.from_moments(state["backbone"], state["backbone.scale"])
    half = prior * Gaussian(one.tensors["backbone.precision"], one.tensors["backbone.info"]) ** 0.5
    found = folded(state, [one], rule, trust=0.5)
    torch.testing.assert_close(found["backbone"], half.loc)
    torch.testing.assert_close(found["backbone.scale"], half.scale)


def test_trust_tempers_statistics_as_well() -> None:
    state = prior_state()
    found = folded(state, [random_update(state, {"a": 3}, 4)], trust=0.25)
    torch.testing.assert_close(found["buffers"], 0.75 * state["buffers"] + 0.25 * 4)


def test_statistics_are_means_by_images() -> None:
    state = prior_state()
    found = folded(state, [random_update(state, {"a": 1}, 2), random_update(state, {"a": 3}, 6)])
    assert found["buffers"].tolist() == [5.0]


def test_the_product_keeps_a_positive_precision_and_a_bounded_step() -> None:
    state = prior_state()
    wide = (state["backbone"] + 1, 1.3 * state["backbone.scale"])
    rows = (state["prototypes"][:1], state["prototypes.scale"][:1])
    updates = [update(state, wide, rows, {"a": 1}, client) for client in range(9)]
    found = folded(state, updates, "product")
    floor = 0.1 * state["backbone.scale"].pow(-2)
    torch.testing.assert_close(found["backbone.scale"].pow(-2), floor)
    sums = [
        sum(one.tensors[f"backbone.{name}"] for one in updates) for name in ("precision", "info")
    ]
    prior = Gaussian.from_moments(state["backbone"], state["backbone.scale"])
    assert bool(((prior * Gaussian(*sums)).precision < 0).all())
    torch.testing.assert_close(
        found["backbone"], prior.loc + (sums[1] - sums[0] * prior.loc) / floor
    )
