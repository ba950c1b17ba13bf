"""Points of updates, distances between them, and the pull and the length that are capped:
identities and references."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbnn.defense import robust
from fedbnn.defense.robust import pulls, row_lengths, squared_distances, trust
from fedbnn.heads import checks
from fedbnn.methods import aggregation
from fedbnn.methods.aggregation import largest, pieces

Lengths = Mapping[int, Mapping[str, list[float]]]


def row_ratio(
    lengths: Lengths, moved: list[int], client: int, known: Mapping[str, list[float]]
) -> tuple[float, str]:
    """With as many images of every class at every client."""
    rows = {k: range(max(map(len, one.values()))) for k, one in lengths.items()}
    counts = {k: {f"class {row}": 7 for row in held} for k, held in rows.items()}
    return robust.row_ratio(lengths, counts, moved, client, known)


def influence_of_factor(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(list(aggregation.influence_of_factor(*parts)))


def influence_of_point(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(list(aggregation.influence_of_point(*parts)))


def squares(points: torch.Tensor) -> torch.Tensor:
    """Squared distances of points and of the origin behind them."""
    with_origin = torch.cat([points, torch.zeros(1, points.shape[1])]).double()
    return torch.cdist(
        with_origin, with_origin, compute_mode="donot_use_mm_for_euclid_dist"
    ).square()


def drifting() -> tuple[torch.Tensor, list[dict[str, int]]]:
    """Seven clients of an old task that hardly move, three of a new one that move far."""
    source = torch.Generator().manual_seed(0)
    old, new = torch.randn(7, 50, generator=source), 16 * torch.randn(3, 50, generator=source)
    return torch.cat([old, new]), [{"cat": 9, "dog": 3}] * 7 + [{"owl": 5, "dog": 1}] * 3


def test_peers_hold_classes_of_half_of_the_images() -> None:
    counts = [{"cat": 9, "dog": 3}, {"cat": 1}, {"dog": 50}, {"dog": 2, "owl": 2, "cat": 0}, {}]
    assert checks.peers(counts) == [{1}, {0}, {0, 3}, {0, 2}, set()]


def test_the_first_clients_of_a_new_task_are_measured_by_each_other() -> None:
    points, counts = drifting()
    assert min(pulls(squares(points), [9] * 10)[7:]) > 2 * 1.7  # by all others: refused
    found = pulls(squares(points), [9] * 10, alike=checks.peers(counts))
    assert max(found) < 1.7
    assert found[:7] == pulls(squares(points), [9] * 10)[:7]


@pytest.mark.parametrize(("liar", "by"), [(9, 20.0), (5, 16.0)])
def test_a_liar_among_peers_stands_out(liar: int, by: float) -> None:
    """One of the new task who goes much farther; one of the old task who goes as far as the new."""
    points, counts = drifting()
    points[liar] *= by
    found = pulls(squares(points), [9] * 10, alike=checks.peers(counts))
    assert found.pop(liar) > 2 * 1.7
    assert max(found) < 1.7


@given(st.integers(3, 9), st.integers(0, 5))
def test_where_all_hold_the_same_classes_peers_change_nothing(clients: int, seed: int) -> None:
    points = torch.randn(clients, 7, generator=torch.Generator().manual_seed(seed))
    alike = checks.peers([{"cat": 2, "dog": 1}] * clients)
    same = squares(points), [9] * clients
    assert pulls(*same, alike=alike) == pulls(*same)


def test_the_neutral_factor_and_the_prior_itself_are_the_origin() -> None:
    loc, scale = torch.tensor([0.3, -2.0, 0.0]), torch.tensor([0.1, 2.0, 1e-3])
    assert torch.equal(
        influence_of_factor(loc, scale, torch.zeros(3), torch.zeros(3)), torch.zeros(6)
    )
    assert torch.equal(influence_of_point(loc, loc), torch.zeros(3))


def test_half_its_square_is_the_divergence_of_a_small_step() -> None:
    prior_precision, prior_loc = torch.tensor([2.0, 50.0]), torch.tensor([0.3, -1.0])
    precision, loc = prior_precision * 1.001, prior_loc + 1e-3
    info, prior_info = precision * loc, prior_precision * prior_loc
    x = influence_of_factor(
        prior_loc, prior_precision.rsqrt(), precision - prior_precision, info - prior_info
    )
    prior, posterior = (
        torch.distributions.Normal(m, p.rsqrt())
        for m, p in ((prior_loc, prior_precision), (loc, precision))
    )
    divergence = torch.distributions.kl_divergence(posterior, prior).sum()
    assert float(x.double().square().sum() / 2) == pytest.approx(float(divergence), rel=5e-3)


def test_rounding_is_not_a_vote_but_a_step_is() -> None:
    precision, loc = torch.tensor([1e3, 7.0, 3e4, 40.0]), torch.tensor([0.3, -2.0, 11.0, 0.0])
    scale = precision.rsqrt()
    rounded = (
        scale.pow(-2) - precision,
        (precision * loc).mul(3).div(3) - precision * loc + torch.tensor([0, 0, 0, 1e-9]),
    )
    assert not torch.equal(torch.cat(rounded), torch.zeros(8))
    assert torch.equal(influence_of_factor(loc, scale, *rounded), torch.zeros(8))
    assert torch.equal(influence_of_point(loc, loc.mul(3).div(3)), torch.zeros(4))
    step = influence_of_factor(loc, scale, 0.01 * precision, 0.01 * precision * (loc + 10 * scale))
    assert torch.allclose(
        step, torch.cat([torch.full((4,), 0.1), torch.full((4,), 0.01 / math.sqrt(2))]), rtol=1e-2
    )


def test_nothing_that_is_not_finite_is_hidden() -> None:
    loc, scale = torch.zeros(2), torch.ones(2)
    for bad in (math.nan, math.inf, -math.inf):
        for precision, info in (((bad, 0.0), (0.0, 0.0)), ((0.0, 0.0), (0.0, bad))):
            point = influence_of_factor(loc, scale, torch.tensor(precision), torch.tensor(info))
            assert not math.isfinite(largest(point))
        assert not math.isfinite(largest(torch.tensor([1.0, bad])))
    assert (largest(torch.tensor([-3.0, 2.0])), largest(torch.zeros(0))) == (3.0, 0.0)


@pytest.mark.parametrize("clients", [3, 5, 20])
def test_clients_that_stand_alike_pull_alike(clients: int) -> None:
    assert pulls(squares(torch.eye(clients)), [9] * clients) == pytest.approx(
        [math.sqrt(2 / clients)] * clients
    )


@pytest.mark.parametrize("clients", [5, 20])
def test_the_pull_is_the_shift_of_the_mean_in_units_of_its_error(clients: int) -> None:
    sites, far, random = 4000, 7.0, torch.Generator().manual_seed(0)
    points = torch.randn(clients, sites, generator=random)
    points[-1, 0] += far * math.sqrt(2 * sites)
    shift, error = far * math.sqrt(2 * sites) / clients, math.sqrt(sites / clients)
    assert pulls(squares(points), [9] * clients)[-1] == pytest.approx(shift / error, rel=0.05)


def test_distances_that_are_none_to_speak_of_make_nobody_look_far_out() -> None:
    points = torch.eye(5) * torch.tensor([0.01, 0.01, 0.01, 0.01, 0.1])[:, None]
    assert pulls(squares(points), [9] * 5)[-1] > 3.4
    expected = math.sqrt(0.1**2 + 0.01**2) / 0.1 * math.sqrt(2 / 5)
    assert pulls(squares(points), [9] * 5, calm=[0.1] * 5)[-1] == pytest.approx(expected)
    assert pulls(squares(points), [9] * 5, calm=[0.0] * 4 + [0.1])[-1] == pytest.approx(expected)
    assert pulls(squares(points), [9] * 5, calm=[0.1] * 4 + [0.0])[-1] > 3.4
    far = squares(torch.eye(5)), [9] * 5
    assert pulls(*far, calm=[0.1] * 5) == pulls(*far)


def test_few_images_scatter_and_many_walk_as_the_root_of_their_number() -> None:
    same = pulls(squares(torch.eye(5)), [8] * 5)[0]
    assert pulls(squares(torch.eye(5)), [2, 8, 8, 8, 32]) == pytest.approx(
        [same / 2, same, same, same, same / 2]
    )
    assert pulls(squares(torch.eye(5)), [0, 8, 8, 8, 8])[0] == 0


def test_clients_that_agree_exactly_are_measured_by_their_length() -> None:
    points = torch.tensor([[1.0, 0.0]] * 4 + [[100.0, 0.0]])
    assert pulls(squares(points), [9] * 5) == pytest.approx([0.0] * 4 + [99.0 * math.sqrt(2 / 5)])


def test_one_liar_of_three_is_outvoted_and_two_cannot_judge_each_other() -> None:
    points = torch.tensor([[1.0, 0.1], [1.0, -0.1], [-50.0, 0.0]])
    *honest, liar = pulls(squares(points), [9] * 3)
    assert max(honest) < 1 < 100 < liar
    assert pulls(squares(points[1:]), [9] * 2) == [0.0, 0.0]
    assert pulls(squares(points), [9, 0, 9])[::2] == [0.0, 0.0]


@given(pull=st.floats(0, 1e12), cap=st.floats(1, 100))
def test_the_pull_of_one_client_never_exceeds_the_cap(pull: float, cap: float) -> None:
    assert 0 <= trust(pull, cap) <= 1
    assert pull * trust(pull, cap) <= cap * (1 + 1e-9)
    assert (trust(pull, cap) == 1) == (pull <= cap)


def test_rows_are_measured_by_a_typical_row_of_a_typical_other() -> None:
    lengths = {
        0: {"prototypes": [1.0, 3.0]},
        1: {"prototypes": [2.0, 2.0]},
        2: {"prototypes": [2.0, 2.0, 100.0]},
    }
    lengths[3] = {"prototypes": [8.0, 8.0], "other": [1.0]}
    assert row_ratio(lengths, [0, 1, 2, 3], 3, {}) == (4.0, "prototypes")
    assert row_ratio(lengths, [0, 1, 2, 3], 2, {}) == (50.0, "prototypes")
    assert row_ratio(lengths, [3, 1], 3, {}) == (0.0, "")
    assert row_ratio(lengths, [0, 1, 2], 7, {}) == (0.0, "")


def test_a_client_of_one_class_measures_nobody_but_is_measured() -> None:
    lengths = {k: {"prototypes.precision": [1e-4]} for k in range(3)} | {
        k: {"prototypes.precision": [2.0, 3.0]} for k in (3, 4, 5)
    }
    everybody = list(lengths)
    assert [row_ratio(lengths, everybody, client, {})[0] for client in (3, 4, 5)] == [1.0] * 3
    assert row_ratio(lengths | {0: {"prototypes.precision": [150.0]}}, everybody, 0, {}) == (
        50.0,
        "prototypes.precision",
    )


def test_precisions_are_measured_by_the_longest_of_any_other() -> None:
    """Some see their images told apart with ease: they say little, and others ten times as much."""
    own = {0: [1.0, 1.0], 1: [1.0, 2.0], 2: [1.0, 10.0], 3: [30.0, 1.0]}
    lengths = {client: {"prototypes.precision": rows} for client, rows in own.items()}
    assert row_ratio(lengths, list(lengths), 3, {}) == (3.0, "prototypes.precision")
    rows = {client: {"prototypes": one} for client, one in own.items()}
    assert row_ratio(rows, list(rows), 3, {}) == (30.0, "prototypes")


def test_clients_of_one_class_are_measured_by_each_other_where_nobody_has_more() -> None:
    lengths = {k: {"prototypes.precision": [1.0]} for k in range(4)} | {
        4: {"prototypes.precision": [2e6]}
    }
    assert row_ratio(lengths, list(lengths), 4, {}) == (2e6, "prototypes.precision")
    assert row_ratio(lengths, list(lengths), 0, {}) == (5e-7, "prototypes.precision")


def test_one_liar_with_two_classes_turns_nobody_out() -> None:
    """Rows that claim to have hardly changed would make all others look long."""
    lengths = {k: {"prototypes.precision": [0.5]} for k in range(8)} | {
        8: {"prototypes.precision": [1.0, 1.0]}
    }
    lengths[9] = {"prototypes.precision": [1e-6, 1e-6]}
    assert max(row_ratio(lengths, list(lengths), client, {})[0] for client in range(9)) <= 1.0


def test_a_row_that_is_known_well_is_measured_by_what_is_known() -> None:
    """The last client of an old task among the first of a new one, whose rows are unsure."""
    known = {"prototypes.precision": [200.0, 200.0, 2.0]}
    lengths = {k: {"prototypes.precision": [1.0, 1.0, 1.0]} for k in range(4)} | {
        4: {"prototypes.precision": [160.0, 1.0, 1.0]}
    }
    everybody = list(lengths)
    assert row_ratio(lengths, everybody, 4, {}) == (160.0, "prototypes.precision")
    assert row_ratio(lengths, everybody, 4, known)[0] == pytest.approx(0.8)
    forged = {4: {"prototypes.precision": [1.0, 1.0, 160.0]}}  # the row that nobody knows
    assert row_ratio(lengths | forged, everybody, 4, known)[0] == pytest.approx(80.0)
    assert row_ratio(
        lengths | {4: {"prototypes.precision": [4000.0, 1.0, 1.0]}}, everybody, 4, known
    )[0] == pytest.approx(20.0)


def test_only_row_tensors_are_measured() -> None:
    tensors = {
        "prototypes": torch.tensor([[3.0, 4.0], [0.0, 1.0]]),
        "backbone": torch.ones(3),
        "prototypes.precision": torch.zeros(0, 2),
    }
    assert row_lengths(tensors) == {"prototypes": [5.0, 1.0]}


@pytest.mark.parametrize("scale", [1.0, 1e17, 1e30])
@pytest.mark.parametrize("sites", [1, 7, 1000])
def test_distances_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, sites: int, scale: float
) -> None:
    monkeypatch.setattr("fedbnn.methods.aggregation.PIECE", 64)
    points = torch.randn(5, sites, generator=torch.Generator().manual_seed(0)) * scale
    found = squared_distances([pieces(point) for point in points])
    assert torch.allclose(found / scale**2, squares(points) / scale**2, atol=1e-9)
    assert squared_distances([]).shape == (1, 1)


def test_points_that_agree_are_at_no_distance_however_far_out() -> None:
    point = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 1e9
    found = squared_distances([pieces(point), pieces(point.clone()), pieces(-point)])
    assert found[0, 1] == 0
    assert found[0, 2] == pytest.approx(4 * float(point.double().square().sum()), rel=1e-5)


def test_what_is_not_finite_spoils_its_own_distances_only() -> None:
    points = torch.eye(4)
    points[3, 0] = math.nan
    found = squared_distances([pieces(point) for point in points])
    assert found[:3, :3].isfinite().all()
    assert not found[3, [0, 1, 2, 4]].isfinite().any()


@pytest.mark.parametrize("piece", [1, 3, 10**6])
def test_a_point_does_not_depend_on_its_pieces(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    random = torch.Generator().manual_seed(0)
    loc, precision, info = torch.randn(3, 10, generator=random)
    scale = torch.rand(10, generator=random) + 0.1
    whole = influence_of_factor(loc, scale, precision, info)
    monkeypatch.setattr("fedbnn.methods.aggregation.PIECE", piece)
    assert torch.equal(influence_of_factor(loc, scale, precision, info).sort()[0], whole.sort()[0])
    assert torch.equal(influence_of_point(loc, info), info - loc)


def test_a_row_of_few_images_counts_by_their_share() -> None:
    """A row four times as long as usual, of a third of the usual images; of more it stays four."""
    lengths = {client: {"prototypes.precision": [2.0, 2.0]} for client in range(3)}
    lengths[3] = {"prototypes.precision": [8.0, 1.0]}
    counts = {client: {"cat": 9, "dog": 9} for client in range(3)} | {3: {"cat": 3, "dog": 9}}
    ratio = robust.row_ratio(lengths, counts, list(lengths), 3, {})
    assert ratio == (pytest.approx(4 / 3), "prototypes.precision")
    more = counts | {3: {"cat": 90, "dog": 9}}
    assert robust.row_ratio(lengths, more, list(lengths), 3, {})[0] == 4


def test_a_row_that_is_long_with_everybody_is_long_with_nobody() -> None:
    """LwF on the quickstart, seed 1, round 6: everybody's row of a two is five times that of a
    three, for clients that know threes alone have shortened it."""
    said = {
        1: {"two": (12, 0.323), "three": (4, 0.076)},
        2: {"two": (9, 0.308), "three": (5, 0.060)},
        7: {"two": (1, 0.255), "three": (41, 0.070)},
        8: {"two": (9, 0.369), "three": (1, 0.113)},
        10: {"two": (3, 0.271), "three": (24, 0.055)},
    }
    counts = {k: {one: images for one, (images, _) in rows.items()} for k, rows in said.items()}
    lengths = {k: {"prototypes": [far for _, far in rows.values()]} for k, rows in said.items()}
    found = {k: robust.row_ratio(lengths, counts, [*said], k, {})[0] for k in said}
    assert max(found.values()) < 2

    lengths[8] = {"prototypes": [20 * 0.369, 0.113]}
    assert robust.row_ratio(lengths, counts, [*said], 8, {})[0] > 2 * robust.LONG
    alone = counts | {k: {"one": 9, "three": 5} for k in (1, 2, 7)}  # nobody to compare a two with
    lengths[8] = {"prototypes": [0.369, 0.113]}
    assert robust.row_ratio(lengths, alone, [*said], 8, {})[0] > 3
