"""Robust rules of the literature: identities, where they break down, and the real gate and fold."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedbnn.defense import robust, rules
from fedbnn.defense.gate import Gate
from fedbnn.methods.fedbnn import FedBNN
from fedbnn.protocol.messages import Update
from tests.defense.worlds import CLIENTS, RULES, World, errors, forged, judged, truth_and_updates

EQUAL = World(samples=(60,) * CLIENTS)


def squares(points: torch.Tensor) -> torch.Tensor:
    """Squared distances as the gate measures them."""
    return robust.squared_distances([[point] for point in points])


def update(client: int, value: float, classes: tuple[str, ...]) -> Update:
    counts = dict.fromkeys(classes, 2)
    tensors = {
        "backbone": torch.full((5,), value),
        "prototypes": torch.full((len(classes), 3), value),
    }
    return Update("run", 1, "train", client, "prior", 2 * len(classes), counts, tensors)


def test_without_trimming_it_is_the_mean() -> None:
    values = torch.randn(7, 4, 3, dtype=torch.float64)
    assert torch.allclose(rules.middle(values, 0), values.mean(0), atol=1e-15)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_the_median_is_numpys(count: int) -> None:
    values = torch.randn(count, 11)
    left_out = rules.cut("median", 0.0)(count)
    expected = torch.quantile(values.double(), 0.5, dim=0)
    assert torch.allclose(rules.middle(values, left_out).double(), expected, atol=1e-7)


@pytest.mark.parametrize(("clients", "share", "lying"), [(5, 0.2, 1), (4, 0.2, 1), (10, 0.3, 3)])
def test_so_many_are_taken_to_lie(clients: int, share: float, lying: int) -> None:
    assert rules.liars(share, clients) == lying
    assert rules.liars(0.9, clients) == (clients - 1) // 2


@pytest.mark.parametrize("rule", ["trimmed_mean", "median"])
def test_up_to_f_forgers_leave_every_number_among_the_honest_and_more_do_not(rule: Any) -> None:
    honest, cut = torch.randn(7, 50), rules.cut(rule, 0.3)
    for lying in (1, 2, 3):
        values = torch.cat([honest[lying:], torch.full((lying, 50), 1e9)])
        found = rules.middle(values, cut(7))
        inside = bool(((found >= honest[lying:].amin(0)) & (found <= honest[lying:].amax(0))).all())
        assert inside == (lying <= cut(7))


def test_krum_picks_the_one_in_the_middle() -> None:
    line = torch.tensor([[0.0], [1.5], [2.0], [2.5], [4.0]])
    assert rules.trusts("krum", squares(line), 0.2) == [0, 0, 1, 0, 0]


def test_krum_scores_are_those_of_the_definition() -> None:
    points = torch.randn(8, 3, dtype=torch.float64)
    between, lying = torch.cdist(points, points).square(), 2
    for k, score in enumerate(rules.krum_scores(between, lying).tolist()):
        others = sorted(float(between[k, j]) for j in range(8) if j != k)
        assert score == pytest.approx(sum(others[: 8 - lying - 2]))


def test_multi_krum_leaves_out_the_forgers_alone() -> None:
    points = torch.cat([torch.randn(8, 20), torch.randn(2, 20) + 50])
    assert rules.trusts("multi_krum", squares(points), 0.2) == [1] * 8 + [0] * 2


def test_clipping_shortens_to_the_median_length() -> None:
    points = torch.tensor([[1.0], [-2.0], [3.0], [-40.0], [0.0]])
    assert rules.trusts("clipping", squares(points), 0.2) == [1, 1, pytest.approx(2 / 3), 0.05, 1]


def test_the_geometric_median_has_no_pull_left() -> None:
    """At z the unit vectors towards the points cancel, whatever their distance."""
    points = torch.randn(9, 4, dtype=torch.float64)
    points[-1] += 1e4
    weights, distances = rules.geometric_median(torch.cdist(points, points).square())
    centre = (weights[:, None] * points).sum(0) / weights.sum()
    assert torch.allclose(distances, (points - centre).norm(dim=1), rtol=1e-3)
    pull = ((points - centre) / (points - centre).norm(dim=1, keepdim=True)).sum(0)
    assert pull.norm() < 1e-2
    assert weights[-1] < 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_clients_that_agree_are_folded_as_they_are(tmp_path: Path, rule: Any) -> None:
    """Every rule of identical updates is the mean, through the real gate and fold."""
    _, updates = truth_and_updates(EQUAL, "scaled", 0)
    same = [replace(updates[0], client=client) for client in range(CLIENTS)]
    method, state = FedBNN(), EQUAL.state()
    folded = []
    for gate in (Gate(influence_cap=None), Gate(robust=rule)):
        fold = method.aggregator(state).fold(state)
        for one, trust in judged(EQUAL, method, same, tmp_path / gate.robust, gate):
            fold.add(one, trust)
        folded.append(fold.close())
    for name in ("backbone", "backbone.scale", "prototypes", "prototypes.scale"):
        assert torch.allclose(folded[0][name], folded[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_one_forger_of_five_does_little_under_any_rule(tmp_path: Path, rule: Any) -> None:
    world, method, gate = World(spread=0.3), FedBNN(), Gate(robust=rule)
    truth, updates = truth_and_updates(world, "scaled", 0)
    honest = errors(world, method, judged(world, method, updates, tmp_path / "a", gate), truth)
    updates[-1] = forged(updates[-1], lambda dL, de: (dL, -30 * de), ("backbone",))
    found = judged(world, method, updates, tmp_path / "b", gate)
    spoiled = errors(world, method, found, truth)["backbone"] / honest["backbone"]
    assert not found.refused
    assert spoiled < 3
    bare = judged(world, method, updates, tmp_path / "c", Gate(influence_cap=None))
    assert errors(world, method, bare, truth)["backbone"] / honest["backbone"] > 5


@pytest.mark.parametrize("rule", RULES)
def test_rows_are_measured_under_every_rule(tmp_path: Path, rule: Any) -> None:
    """A forger whose backbone is honest: rules of whole clients do not see its rows."""
    world, method, gate = World(spread=0.3), FedBNN(), Gate(robust=rule)
    _, updates = truth_and_updates(world, "scaled", 0)
    assert not judged(world, method, updates, tmp_path / "a", gate).refused
    updates[-1] = forged(updates[-1], lambda dL, de: (1e6 * dL, 1e6 * de), ("prototypes",))
    found = judged(world, method, updates, tmp_path / "b", gate)
    assert [*found.refused] == [CLIENTS - 1]
    trusting = replace(gate, influence_cap=None)
    assert not judged(world, method, updates, tmp_path / "c", trusting).refused


def test_a_prototype_is_agreed_on_by_those_who_hold_its_class() -> None:
    some = [update(0, 1.0, ("a", "b")), update(1, 2.0, ("a",)), update(2, 9.0, ("b", "a"))]
    found = rules.agreed(some, rows=True, left_out=rules.cut("median", 0.2))
    assert all(bool((one.tensors["backbone"] == 2.0).all()) for one in found)
    assert found[0].tensors["prototypes"][:, 0].tolist() == [2.0, 5.0]
    assert found[2].tensors["prototypes"][:, 0].tolist() == [5.0, 2.0]
    assert [one.counts for one in found] == [one.counts for one in some]


def test_who_is_not_chosen_has_the_trust_0_and_is_not_folded(tmp_path: Path) -> None:
    _, updates = truth_and_updates(World(spread=0.3), "scaled", 1)
    found = judged(World(spread=0.3), FedBNN(), updates, tmp_path, Gate(robust="krum"))
    assert sorted(found.trust.values()) == [0, 0, 0, 0, 1]
    assert [one.client for one, _ in found] == [k for k, trust in found.trust.items() if trust]
    assert not found.refused
