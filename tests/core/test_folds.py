"""The four folds against formulas written another way, and what no fold may do."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedbnn.folds import PointFold
from fedbnn.gaussian import Gaussian
from fedbnn.messages import Update
from fedbnn.methods.posterior_folds import FOLDS, PosteriorFold
from fedbnn.state import State

seeds = st.integers(0, 2**32)
Posterior = tuple[Tensor, Tensor]
NAMES = ("a", "b", "c")


def moments(source: torch.Generator, *shape: int) -> Posterior:
    return torch.randn(shape, generator=source).double(), 0.2 + torch.rand(shape, generator=source).double()


def prior_state(seed: int = 0, latent: int = 5, points: int = 2) -> State:
    """A posterior over five weights, two points, one statistic and three rows of three, in float64."""
    source = torch.Generator().manual_seed(seed)
    trunk, scale = moments(source, latent + points)
    rows, row_scale = moments(source, 3, 3)
    tensors = {"trunk": trunk, "trunk.scale": scale[:latent], "buffers": torch.randn(1, generator=source).double()}
    return State({**tensors, "rows": rows, "rows.scale": row_scale, "rows.samples": torch.zeros(3).double()}, NAMES)


def update(
    state: State, trunk: Posterior, rows: Posterior, counts: Mapping[str, int], client: int = 0, points: float = 0.0
) -> Update:
    """What a client with these posteriors sends, in float64 so that identities are exact."""
    latent, index = len(state["trunk.scale"]), state.index(tuple(counts))
    factor = Gaussian.from_moments(*trunk) / Gaussian.from_moments(state["trunk"][:latent], state["trunk.scale"])
    own = Gaussian.from_moments(*rows) / Gaussian.from_moments(state["rows"][index], state["rows.scale"][index])
    tensors = {
        "trunk.precision": factor.precision, "trunk.info": factor.info, "rows.precision": own.precision, "rows.info": own.info,
        "points": torch.full((len(state["trunk"]) - latent,), points).double(), "buffers": torch.full((1,), points).double(),
    }  # fmt: skip
    return Update("run", 1, "train", client, "", sum(counts.values()), counts, tensors)


def random_update(state: State, counts: Mapping[str, int], client: int) -> Update:
    source = torch.Generator().manual_seed(client)
    return update(state, moments(source, 5), moments(source, len(counts), 3), counts, client, float(client))


def folded(state: State, updates: list[Update], rule: str = "scaled", damping: float = 1.0, trust: float = 1.0) -> State:
    fold = PosteriorFold(state, FOLDS[rule](damping))
    for one in updates:
        fold.add(one, trust)
    return fold.close()


def assert_same(one: State, other: State, rtol: float = 1e-12) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, value in one.tensors.items():
        torch.testing.assert_close(value, other[name], rtol=rtol, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def likelihood(source: torch.Generator, *shape: int) -> Gaussian:
    """The evidence of one image, as a factor."""
    return Gaussian(0.5 + torch.rand(shape, generator=source).double(), torch.randn(shape, generator=source).double())


def conjugate(state: State, counts: Mapping[str, int], client: int, totals: Mapping[str, int] | None) -> Update:
    """A client with exact inference; with `totals` it scales its likelihood to the round, as `scaled` asks."""
    source, images = torch.Generator().manual_seed(client), sum(counts.values())
    latent, index = len(state["trunk.scale"]), state.index(tuple(counts))
    share = torch.tensor([totals[name] / count if totals else 1.0 for name, count in counts.items()]).double()[:, None]
    power = sum(totals.values()) / images if totals else 1.0
    trunk = Gaussian.from_moments(state["trunk"][:latent], state["trunk.scale"]) * likelihood(source, latent) ** power
    rows = Gaussian.from_moments(state["rows"][index], state["rows.scale"][index]) * likelihood(source, len(counts), 3) ** share
    return update(state, (trunk.loc, trunk.scale), (rows.loc, rows.scale), counts, client, 1.0)


COUNTS = [{"a": 3, "b": 1}, {"b": 8}, {"a": 1}, {"a": 2, "b": 2}]
TOTALS = {"a": 6, "b": 11}


@given(seeds)
def test_scaled_is_the_product_of_likelihoods_when_clients_scale_theirs_to_the_round(seed: int) -> None:
    state = prior_state(seed)
    scaled = folded(state, [conjugate(state, counts, k, TOTALS) for k, counts in enumerate(COUNTS)], "scaled")
    product = folded(state, [conjugate(state, counts, k, None) for k, counts in enumerate(COUNTS)], "product")
    assert_same(scaled, product, rtol=1e-11)


def test_the_product_is_the_pooled_posterior() -> None:
    state = prior_state()
    pooled = Gaussian.from_moments(state["trunk"][:5], state["trunk.scale"])
    for client in range(len(COUNTS)):
        pooled = pooled * likelihood(torch.Generator().manual_seed(client), 5)
    found = folded(state, [conjugate(state, counts, k, None) for k, counts in enumerate(COUNTS)], "product")
    torch.testing.assert_close(found["trunk"][:5], pooled.loc, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["trunk.scale"], pooled.scale, rtol=1e-12, atol=1e-12)


def test_damping_by_the_number_of_equal_clients_is_the_mean_of_natural_parameters() -> None:
    state, counts = prior_state(), {"a": 2, "b": 2}
    updates = [random_update(state, counts, client) for client in range(4)]
    assert_same(folded(state, updates, "product", damping=0.25), folded(state, updates, "scaled"))
    assert not torch.allclose(folded(state, updates, "product")["trunk"], folded(state, updates, "scaled")["trunk"])


def test_moments_are_those_of_the_mixture_in_closed_form_and_by_sampling() -> None:
    state, source = prior_state(), torch.Generator().manual_seed(5)
    posteriors, images = [moments(source, 5) for _ in range(3)], (1, 5, 2)
    updates = [
        update(state, q, moments(source, 1, 3), {"a": n}, k) for k, (q, n) in enumerate(zip(posteriors, images, strict=True))
    ]
    found = folded(state, updates, "moments")
    weights = torch.tensor(images).double() / 8
    means, scales = (torch.stack(part) for part in zip(*posteriors, strict=True))
    mean = weights @ means
    torch.testing.assert_close(found["trunk"][:5], mean)
    torch.testing.assert_close(found["trunk.scale"], (weights @ (scales**2 + (means - mean) ** 2)).sqrt())
    chosen = torch.multinomial(weights, 200_000, replacement=True, generator=source)
    draws = means[chosen] + scales[chosen] * torch.randn(200_000, 5, generator=source).double()
    torch.testing.assert_close(found["trunk.scale"], draws.std(0), rtol=0.01, atol=0)
    torch.testing.assert_close(found["trunk"][:5], draws.mean(0), rtol=0, atol=0.02)


def test_mean_is_the_weighted_mean_of_location_and_log_scale() -> None:
    state, source = prior_state(), torch.Generator().manual_seed(6)
    (loc, scale), (other_loc, other_scale) = moments(source, 5), moments(source, 5)
    rows = moments(source, 1, 3)
    updates = [update(state, (loc, scale), rows, {"a": 1}, 0), update(state, (other_loc, other_scale), rows, {"a": 3}, 1)]
    found = folded(state, updates, "mean")
    torch.testing.assert_close(found["trunk"][:5], 0.25 * loc + 0.75 * other_loc)
    torch.testing.assert_close(found["trunk.scale"], scale**0.25 * other_scale**0.75)


@pytest.mark.parametrize("rule", FOLDS)
def test_one_client_alone_is_the_next_posterior(rule: str) -> None:
    state = prior_state()
    alone = random_update(state, {"a": 4, "b": 1, "c": 2}, 1)
    found, source = folded(state, [alone], rule), torch.Generator().manual_seed(1)
    (trunk, scale), (rows, row_scale) = moments(source, 5), moments(source, 3, 3)
    for name, expected in {"trunk.scale": scale, "rows": rows, "rows.scale": row_scale}.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found["trunk"][:5], trunk, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", FOLDS)
@given(order=st.permutations(range(4)))
def test_the_order_of_clients_changes_nothing(rule: str, order: list[int]) -> None:
    state = prior_state()
    updates = [random_update(state, counts, k) for k, counts in enumerate(COUNTS)]
    assert_same(folded(state, [updates[k] for k in order], rule, 0.2), folded(state, updates, rule, 0.2))


@pytest.mark.parametrize("rule", ["scaled", "moments", "mean"])
def test_splitting_a_client_in_two_changes_nothing(rule: str) -> None:
    state = prior_state()
    whole, other = random_update(state, {"a": 4, "b": 2}, 1), random_update(state, {"a": 3}, 2)
    halves = [Update("run", 1, "train", k, "", 3, {"a": 2, "b": 1}, whole.tensors) for k in (1, 3)]
    assert_same(folded(state, [*halves, other], rule), folded(state, [whole, other], rule))


@pytest.mark.parametrize("rule", FOLDS)
def test_rows_of_absent_classes_stay_bit_for_bit(rule: str) -> None:
    state = prior_state()
    found = folded(state, [random_update(state, {"a": 3}, 1), random_update(state, {"a": 1}, 2)], rule, 0.5)
    for name in ("rows", "rows.scale"):
        assert torch.equal(found[name][1:], state[name][1:])
        assert not torch.equal(found[name][0], state[name][0])
    assert found["rows.samples"].tolist() == [4, 0, 0]


@pytest.mark.parametrize("rule", FOLDS)
def test_nobody_changes_nothing_bit_for_bit(rule: str) -> None:
    state = prior_state()
    for updates in ([], [Update("run", 1, "train", 0, "", 0, {}, random_update(state, {}, 0).tensors)]):
        found = folded(state, updates, rule)
        assert all(torch.equal(value, found[name]) for name, value in state.tensors.items())


@pytest.mark.parametrize("rule", FOLDS)
def test_a_client_without_data_is_neutral_beside_others(rule: str) -> None:
    state = prior_state()
    others = [random_update(state, counts, k) for k, counts in enumerate(COUNTS)]
    absent = Update("run", 1, "train", 9, "", 0, {}, random_update(state, {"a": 1}, 9).tensors)
    assert_same(folded(state, [*others, absent], rule, 0.2), folded(state, others, rule, 0.2), rtol=0)


@pytest.mark.parametrize("rule", FOLDS)
def test_rows_without_images_behind_them_do_not_count(rule: str) -> None:
    state = prior_state()
    found = folded(state, [random_update(state, {"a": 3, "b": 0}, 1)], rule, 0.5)
    assert torch.equal(found["rows"][1], state["rows"][1])
    assert torch.equal(found["rows.scale"][1], state["rows.scale"][1])


@pytest.mark.parametrize("rule", ["scaled", "product"])
def test_a_neutral_factor_leaves_the_prior(rule: str) -> None:
    state = prior_state()
    neutral = update(state, (state["trunk"][:5], state["trunk.scale"]), (state["rows"][:1], state["rows.scale"][:1]), {"a": 2})
    found = folded(state, [neutral], rule)
    torch.testing.assert_close(found["trunk"][:5], state["trunk"][:5], rtol=1e-14, atol=0)
    torch.testing.assert_close(found["trunk.scale"], state["trunk.scale"], rtol=1e-14, atol=0)


def test_rows_are_weighted_by_their_class_not_by_the_client() -> None:
    state = prior_state()
    (first, _), (second, _) = moments(torch.Generator().manual_seed(1), 3), moments(torch.Generator().manual_seed(2), 3)
    same = state["rows.scale"][:1].clone()
    trunk = (state["trunk"][:5], state["trunk.scale"])
    many = update(state, trunk, (torch.stack([first, first]), state["rows.scale"][:2]), {"a": 1, "b": 99})
    few = update(state, trunk, (second[None], same), {"a": 3}, 1)
    torch.testing.assert_close(folded(state, [many, few])["rows"][0], 0.25 * first + 0.75 * second)


@pytest.mark.parametrize("rule", ["scaled", "product"])
def test_trust_is_a_power_of_the_factor(rule: str) -> None:
    state, one = prior_state(), random_update(prior_state(), {"a": 3}, 1)
    prior = Gaussian.from_moments(state["trunk"][:5], state["trunk.scale"])
    half = prior * Gaussian(one.tensors["trunk.precision"], one.tensors["trunk.info"]) ** 0.5
    found = folded(state, [one], rule, trust=0.5)
    torch.testing.assert_close(found["trunk"][:5], half.loc)
    torch.testing.assert_close(found["trunk.scale"], half.scale)


def test_trust_tempers_points_and_statistics_as_well() -> None:
    state = prior_state()
    found = folded(state, [random_update(state, {"a": 3}, 4)], trust=0.25)
    torch.testing.assert_close(found["trunk"][5:], 0.75 * state["trunk"][5:] + 0.25 * 4)
    torch.testing.assert_close(found["buffers"], 0.75 * state["buffers"] + 0.25 * 4)


def test_points_and_statistics_are_means_by_images() -> None:
    state = prior_state()
    found = folded(state, [random_update(state, {"a": 1}, 2), random_update(state, {"a": 3}, 6)])
    assert found["trunk"][5:].tolist() == [5.0, 5.0]
    assert found["buffers"].tolist() == [5.0]


def test_the_product_keeps_a_positive_precision_and_the_mean() -> None:
    state = prior_state()
    wide = (state["trunk"][:5] + 1, 1.3 * state["trunk.scale"])
    rows = (state["rows"][:1], state["rows.scale"][:1])
    updates = [update(state, wide, rows, {"a": 1}, client) for client in range(9)]
    found = folded(state, updates, "product")
    floor = 0.1 * state["trunk.scale"].pow(-2)
    torch.testing.assert_close(found["trunk.scale"].pow(-2), floor)
    sums = [sum(one.tensors[f"trunk.{name}"] for one in updates) for name in ("precision", "info")]
    prior = Gaussian.from_moments(state["trunk"][:5], state["trunk.scale"])
    unlifted = prior * Gaussian(*sums)
    assert bool((unlifted.precision < floor).all())
    torch.testing.assert_close(found["trunk"][:5], unlifted.loc)


@pytest.mark.parametrize("rule", FOLDS)
def test_a_fold_in_float32_stays_in_float32_and_close_to_float64(rule: str) -> None:
    exact = prior_state()
    single = State({name: value.float() for name, value in exact.tensors.items()}, exact.classes).having(
        {"rows.samples": torch.zeros(3).double()}
    )
    updates = [random_update(exact, counts, k) for k, counts in enumerate(COUNTS)]
    sent = [
        Update(u.run, 1, "train", u.client, "", u.samples, u.counts, {n: t.float() for n, t in u.tensors.items()})
        for u in updates
    ]
    found = folded(single, sent, rule, 0.2)
    assert {found[name].dtype for name in ("trunk", "trunk.scale", "rows", "rows.scale", "buffers")} == {torch.float32}
    reference = folded(exact, updates, rule, 0.2)
    torch.testing.assert_close(found["trunk"].double(), reference["trunk"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["trunk.scale"].double(), reference["trunk.scale"], rtol=1e-4, atol=1e-5)


def point_update(trunk: float, rows: Mapping[str, float], counts: Mapping[str, int]) -> Update:
    tensors = {"trunk": torch.full((2,), trunk), "buffers": torch.full((1,), trunk)}
    tensors["rows"] = torch.tensor([[rows[name]] * 3 for name in counts]).reshape(-1, 3)
    return Update("run", 1, "train", 0, "", sum(counts.values()), counts, tensors)


def point_state() -> State:
    tensors = {
        "trunk": torch.zeros(2),
        "buffers": torch.zeros(1),
        "rows": torch.full((3, 3), 0.1),
        "rows.samples": torch.zeros(3).double(),
    }
    return State(tensors, NAMES)


def test_fedavg_weighs_the_trunk_by_images_and_rows_by_images_of_their_class() -> None:
    fold = PointFold(point_state())
    fold.add(point_update(1.0, {"a": 1.0, "b": 2.0}, {"a": 1, "b": 9}))
    fold.add(point_update(3.0, {"a": 5.0}, {"a": 3}))
    found = fold.close()
    assert found["trunk"].tolist() == pytest.approx([(10 * 1 + 3 * 3) / 13] * 2)
    assert found["rows"][:, 0].tolist() == pytest.approx([4.0, 2.0, 0.1])
    assert torch.equal(found["rows"][2], point_state()["rows"][2])
    assert found["rows.samples"].tolist() == [4, 9, 0]


def test_fedavg_pulls_a_distrusted_client_towards_its_start() -> None:
    fold = PointFold(point_state())
    fold.add(point_update(4.0, {"a": 4.1}, {"a": 3}), trust=0.5)
    found = fold.close()
    assert found["trunk"].tolist() == [2.0, 2.0]
    assert found["rows"][0].tolist() == pytest.approx([2.1] * 3)


def test_fedavg_of_nobody_is_the_state() -> None:
    fold = PointFold(point_state())
    fold.add(point_update(4.0, {}, {}))
    found = fold.close()
    assert all(torch.equal(found[name], value) for name, value in point_state().tensors.items())
