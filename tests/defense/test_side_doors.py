"""No tensor of any exchange is beyond judgement: a forged one is refused, or what it moves stays
within what there is and what honest clients move."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from datamodules.stream import FederatedStream
from fedbnn.heads import ExactHead, GaussianHead, LinearHead, checks, exact, gaussian
from fedbnn.heads.exact import ExactAggregator
from fedbnn.heads.gaussian import StatisticsAggregator
from fedbnn.methods import METHODS, FedBNN, Method
from fedbnn.methods.aggregation import Aggregator
from fedbnn.methods.fedbnn import FactorAggregator, _rows
from fedbnn.methods.importance import ImportanceMethod
from fedbnn.protocol.state import State
from tests.core.conftest import digits, federate
from tests.core.playing import FAST, Federate, Short, after
from tests.defense.exchanges import Attack, Played, overhear

__all__ = ["digits", "federate"]
HEADS = {"gaussian": GaussianHead(), "exact": ExactHead(filters=4), "linear": LinearHead()}
ALONE = {"joint", "local"}
"""One has a single client, the other sends nothing."""
FORGERIES: dict[str, Callable[[Tensor], Tensor]] = {
    "x 1e6": lambda tensor: tensor * 1e6,
    "x -1": torch.neg,
    "x -1e6": lambda tensor: tensor * -1e6,
}


class Normed(nn.Module):
    """A convolution with batch norm, and a linear layer."""

    width = 8

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(shape[0], 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
        )
        self.last = nn.Sequential(nn.Linear(4 * ((shape[1] - 3) // 2 + 1) ** 2, 8), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.last(self.layers(images))
        return features


def method_of(name: str) -> Method:
    """With everything it has in the first two rounds: points, then posteriors, and importances."""
    preset = METHODS[name]
    method: Method = preset.method(**preset.defaults)
    if isinstance(method, FedBNN):
        return replace(method, r_init=1)
    return replace(method, every=1) if isinstance(method, ImportanceMethod) else method


def exchanges_of(
    name: str, federate: Federate, stream: FederatedStream, monkeypatch: pytest.MonkeyPatch
) -> list[Played]:
    """All exchanges of two rounds with five clients; nobody is refused."""
    heard, method = overhear(monkeypatch), method_of(name)
    everybody = Short(stream, 2, participants=lambda round: (0, 1, 2, 3, 4))
    head = HEADS[METHODS[name].head]
    federation, initial = federate(method, local=FAST, stream=everybody, head=head, network=Normed)
    after(federation, method.start(initial, federation.layout, 8))
    assert all(len(one.updates) == 5 for one in heard)
    return heard


def moved(start: State, end: State) -> dict[str, float]:
    """How far every tensor went in this exchange."""
    return {
        name: float((value.double() - start[name].double()).norm())
        for name, value in end.tensors.items()
        if name in start and value.shape == start[name].shape
    }


def descendants(kind: type) -> set[type]:
    """A class and all that extend it in the package."""
    below = {one for child in kind.__subclasses__() for one in descendants(child)}
    return {one for one in {kind, *below} if one.__module__.startswith("fedbnn.")}


def test_every_method_head_and_exchange_is_tried() -> None:
    """Whoever adds an exchange comes by here; sums with noise of their own are judged by nobody."""
    assert {preset.head for preset in METHODS.values()} == set(HEADS)
    assert set(METHODS) > ALONE
    methods = [method_of(name) for name in set(METHODS) - ALONE]
    later = [one.consolidation.aggregator for one in methods if one.consolidation]
    tried = {type(one).exchange for one in methods} | {type(one) for one in later if one}
    tried |= {FactorAggregator for one in methods if isinstance(one, FedBNN)}
    assert tried == descendants(Aggregator)
    assert descendants(StatisticsAggregator) == {StatisticsAggregator, gaussian.SumsAggregator}
    assert descendants(ExactAggregator) == {ExactAggregator, exact.SumsAggregator}


@pytest.mark.parametrize("name", sorted(set(METHODS) - ALONE))
def test_a_forged_tensor_is_refused_or_moves_no_more_than_honest_ones(
    name: str,
    record_property: Callable[[str, object], None],
    federate: Federate,
    digits: FederatedStream,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    unjudged, tried = [], 0
    for played in exchanges_of(name, federate, digits, monkeypatch):
        honest = played.judged(played.updates, tmp_path)
        end = played.folded(honest)
        usual = moved(played.state, end)
        usual = {name: max(far, float(end[name].norm())) for name, far in usual.items()}
        for tensor, value in played.updates[-1].tensors.items():
            for how, forge in FORGERIES.items():
                if torch.equal(forge(value), value):
                    continue
                tried += 1
                candidates = played.judged(played.forged({tensor: forge}), tmp_path)
                if played.updates[-1].client in candidates.refused:
                    continue
                shift = moved(end, played.folded(candidates))
                worst = max((shift[n] / usual[n] for n in usual if usual[n]), default=0.0)
                if not worst < 2:
                    unjudged.append((played.name, tensor, how, worst))
    record_property("tried", tried)
    assert unjudged == []


def far_rows(played: Played) -> Attack:
    """Natural parameters under which every prototype of the client has -20 times its mean."""
    update, state = played.updates[-1], played.state
    prior, client = _rows(state, update)
    info = (client.precision * -20 * client.loc - prior.info).float()
    return {"prototypes.info": lambda _: info}


ROWS: dict[str, tuple[str, str, Callable[[Played], Attack]]] = {
    "buffers -1000, points": ("fedavg", "Aggregator", lambda _: {"buffers": at(-1000.0)}),
    "buffers 1e17, points": ("fedavg", "Aggregator", lambda _: {"buffers": at(1e17)}),
    "buffers -1000": ("fedbnn", "FactorAggregator", lambda _: {"buffers": at(-1000.0)}),
    "buffers 1e17": ("fedbnn", "FactorAggregator", lambda _: {"buffers": at(1e17)}),
    "rows x -20, points": ("fedavg", "Aggregator", lambda _: {"prototypes": lambda x: -20 * x}),
    "rows x -20": ("fedbnn_paper", "FactorAggregator", far_rows),
    "control of rows x 1e6": (
        "scaffold",
        "ScaffoldAggregator",
        lambda _: {"prototypes.scaffold": lambda x: 1e6 * x},
    ),
    "control of rows x -1": (
        "scaffold",
        "ScaffoldAggregator",
        lambda _: {"prototypes.scaffold": torch.neg},
    ),
    "control x -1": (
        "scaffold",
        "ScaffoldAggregator",
        lambda _: {"backbone.scaffold": torch.neg},
    ),
    "one variance 1e17": ("fedavg", "Aggregator", lambda _: {"buffers": one_variance}),
}


def at(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def one_variance(buffers: Tensor) -> Tensor:
    forged = buffers.clone()
    forged[-1] = 1e17
    return forged


@pytest.mark.parametrize("row", ROWS)
def test_what_once_went_through_is_refused(
    row: str,
    federate: Federate,
    digits: FederatedStream,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    name, kind, attack = ROWS[row]
    heard = exchanges_of(name, federate, digits, monkeypatch)
    played = [one for one in heard if type(one.aggregator).__name__ == kind][-1]
    candidates = played.judged(played.forged(attack(played)), tmp_path)
    assert [*candidates.refused] == [played.updates[-1].client]
    assert candidates.trust == dict.fromkeys((one.client for one in played.updates[:-1]), 1.0)
    assert all(bool(value.isfinite().all()) for value in played.folded(candidates).tensors.values())


@pytest.mark.parametrize("still", [0.0, 3.0])
def test_what_all_others_leave_where_it_was_is_judged(still: float) -> None:
    """Nobody else moves a statistic of batch norm: one client may, a little, and not at will."""

    def far(by: float) -> list[float]:
        points = {client: torch.full((4,), still) for client in range(4)}
        found = checks.apart_in_points(points | {4: points[0] + by}, "points")
        return [found[client][0] for client in range(5)]

    assert max(far(0.2)) < 1
    assert far(1e6)[4] > 2
    assert max(far(1e6)[:4]) < 1


def test_a_size_that_nobody_else_has_is_judged() -> None:
    found = checks.apart_in_size({0: 0.0, 1: 0.0, 2: 1e-9, 3: 0.0}, "size")
    assert {client: far > 2 for client, (far, _) in found.items()} == {2: True} | dict.fromkeys(
        (0, 1, 3), False
    )
