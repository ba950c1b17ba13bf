"""How far a client moved the model: the formulas against plain vectors and the real folds."""

from pathlib import Path

import pytest
import torch

from fedbnn.bayes.gaussian import Gaussian
from fedbnn.defense.gate import Gate
from fedbnn.defense.robust import moves_of_means, moves_of_points, squared_distances
from fedbnn.methods.aggregation import influence_of_factor
from fedbnn.methods.fedbnn import FedBNN
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State
from tests.defense.worlds import CLIENTS, World, forged, judged, truth_and_updates


def test_parts_and_whole_are_those_of_the_vectors() -> None:
    points, weights = torch.randn(4, 50), torch.tensor([0.5, 0.2, 0.0, 0.3]).double()
    found = moves_of_points([3, 5, 7, 9], squared_distances([[point] for point in points]), weights)
    assert found.whole == pytest.approx(float((weights @ points.double()).norm()), rel=1e-5)
    lengths = (weights * points.double().norm(dim=1)).tolist()
    assert found.parts == pytest.approx(dict(zip([3, 5, 7, 9], lengths, strict=True)), rel=1e-5)


@pytest.mark.parametrize("fold_by", ["scaled", "product"])
@pytest.mark.parametrize("cap", [1.7, None])
def test_the_whole_is_the_folded_factor_in_the_metric_of_the_prior(
    tmp_path: Path, fold_by: str, cap: float | None
) -> None:
    """As the fold has it: posterior over prior, put as a point like any factor."""
    world, method = World(samples=(30, 60, 120, 60, 45)), FedBNN(fold_by=fold_by)  # type: ignore[arg-type]
    _, updates = truth_and_updates(world, fold_by, 0)
    gate, state = judged(world, method, updates, tmp_path, Gate(influence_cap=cap)), world.state()
    aggregator = method.aggregator(state)
    fold = aggregator.fold(state)
    for update, trust in gate:
        fold.add(update, trust)
    after = fold.close()
    prior, now = (
        Gaussian.from_moments(one["backbone"].double(), one["backbone.scale"].double())
        for one in (state, after)
    )
    factor = (now.precision - prior.precision).float(), (now.info - prior.info).float()
    point = torch.cat([*influence_of_factor(state["backbone"], state["backbone.scale"], *factor)])
    assert gate.moves(aggregator.weights).whole == pytest.approx(float(point.norm()), rel=1e-3)


def test_who_is_refused_moves_nothing_and_is_on_record(tmp_path: Path) -> None:
    world, method = World(), FedBNN()
    _, updates = truth_and_updates(world, "scaled", 0)
    updates[-1] = forged(updates[-1], lambda p, i: (p * 1e6, i), ("backbone",))
    gate = judged(world, method, updates, tmp_path, Gate())
    moves = gate.moves(method.aggregator(world.state()).weights)
    assert sorted(moves.parts) == list(range(CLIENTS - 1))
    told = gate.audited(moves)["clients"]
    assert [entry[2] for entry in told.values()] == [1.0] * 4 + [0.0]  # type: ignore[attr-defined]
    assert told[str(CLIENTS - 1)] == [len(updates[-1].to_bytes()), 60, 0.0, 0.0]  # type: ignore[index]


def statistics(client: int, counts: dict[str, int], sums: torch.Tensor) -> Update:
    tensors = {"exact.sum": sums}
    return Update("run", 1, "statistics", client, "", sum(counts.values()), counts, tensors)


def test_parts_of_class_means_add_up_to_how_far_they_moved() -> None:
    """One old class that both clients hold: m - r = sum_k n_k (m_k - r) / n, exactly."""
    before = State({"exact.count": torch.tensor([10.0]), "exact.sum": torch.tensor([[20.0, 0.0]])})
    before = State({k: v.double() for k, v in before.tensors.items()}, ("a",))
    one, two = torch.tensor([[9.0, 3.0]]), torch.tensor([[16.0, 0.0]])
    sums = {"exact.count": before["exact.count"] + 6, "exact.sum": before["exact.sum"] + one + two}
    after = before.having(sums)
    updates = [(statistics(0, {"a": 2}, one), 1.0), (statistics(1, {"a": 4}, two), 1.0)]
    found = moves_of_means(before, after, updates)
    start, end = torch.tensor([2.0, 0.0]), torch.tensor([45.0, 3.0]) / 16
    assert found.whole == pytest.approx(float((end - start).norm()))
    assert found.parts[0] == pytest.approx(float(((one[0] - 2 * start) / 16).norm()))
    assert found.parts[1] == pytest.approx(float(((two[0] - 4 * start) / 16).norm()))


def test_a_client_that_says_what_is_known_moves_nothing() -> None:
    known = {"posteriors.count": torch.tensor([8.0]), "posteriors.mean": torch.tensor([[1.0, 2.0]])}
    before = State({name: value.double() for name, value in known.items()}, ("a",))
    after = before.having({"posteriors.count": before["posteriors.count"] + 4})
    sums = torch.tensor([[4.0, 8.0]])
    update = Update("run", 1, "statistics", 2, "", 4, {"a": 4}, {"posteriors.sum": sums})
    assert moves_of_means(before, after, [(update, 1.0)]).parts == {2: 0.0}
