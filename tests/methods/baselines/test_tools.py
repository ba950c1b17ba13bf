"""What every method has: feature distillation and the scope of the softmax, off as if not there."""

from dataclasses import replace

import pytest
import torch

from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.model import FeatureDistillation
from fedbnn.heads import HEADS
from fedbnn.methods import METHODS, Method
from fedbnn.methods.base import LocalObjective
from fedbnn.methods.bounds import Joint, Local
from fedbnn.methods.fedavg import FedAvg, FedProx
from fedbnn.methods.fedbnn import FedBNN
from fedbnn.methods.glfc import FCIL
from fedbnn.methods.importance import EWC, MAS
from fedbnn.methods.lwf import LwF
from fedbnn.methods.scaffold import Scaffold
from fedbnn.networks import MLP, Classifier
from fedbnn.seeds import forked
from lightning_modules import point_client
from lightning_modules.client_trainer import LocalTraining
from lightning_modules.point_client import PointClient
from tests.methods.baselines.test_scaffold import _Cut

ALL = [FedAvg(), FedProx(), Scaffold(), EWC(), MAS(), LwF(), FCIL(), Joint(), Local()]
TOOLS = {"server_lr": 2.0, "feature_distillation": 0.1, "scope": "seen"}


def named(method: Method) -> str:
    return type(method).__name__


def test_it_adds_to_the_loss_of_points_what_it_says_and_trains_its_map() -> None:
    """Loss with it = loss without it + lambda |f + V f + b - f_0|^2 / E |f_0|^2."""
    with forked(0):
        network, images = Classifier(MLP((1, 4, 4), (5,)), 3), torch.randn(6, 1, 4, 4)
        part = FeatureDistillation(network.backbone, layout_of(network.backbone), 2.0)
    labels, old = torch.tensor([0, 1, 2, 0, 1, 2]), network.backbone(images).detach()
    with torch.no_grad():
        for weight in network.backbone.parameters():
            weight += 0.1
    fixed = (network, LocalObjective(), FedAvg(), LocalTraining(optimizer="sgd"))
    plain, distilled = PointClient(*fixed), PointClient(*fixed, part)
    gap = (network.backbone(images) - old).square().sum(1).mean() / old.square().sum(1).mean()
    added = distilled.objective(images, labels) - plain.objective(images, labels)
    assert gap > 0.01
    assert added.item() == pytest.approx(2 * gap.item(), rel=1e-4)
    trained = distilled.configure_optimizers().param_groups[0]["params"]
    wanted = (*network.parameters(), *part.reader.parameters())
    assert list(map(id, trained)) == list(map(id, wanted))


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features are worth keeping from the second round on."""
    monkeypatch.setattr(point_client, "UNTRAINED", 1)


@pytest.mark.parametrize("method", ALL, ids=named)
def test_every_method_can_distil(method: Method, early, toy, played) -> None:
    """Not in the first rounds; then its weights differ, and prototypes of other classes do not."""
    stream = _Cut(toy(num_clients=3, per_round=3), 3)
    plain, distilled = (
        played(replace(method, feature_distillation=weight), stream) for weight in (0.0, 0.1)
    )
    same = [
        torch.equal(*pair)
        for pair in zip(*(map(weights, run.states) for run in (plain, distilled)), strict=True)
    ]
    if isinstance(method, Local):
        same = [True, *[torch.equal(*(weights(run.privates[0]) for run in (plain, distilled)))] * 2]
    assert same == [True, False, False]


def weights(state) -> torch.Tensor:
    return state["backbone"]


def test_it_waits_until_features_are_worth_keeping(toy, played) -> None:
    plain, distilled = (
        played(FedAvg(feature_distillation=weight), toy(rounds=8)).states for weight in (0.0, 0.1)
    )
    same = [torch.equal(*map(weights, pair)) for pair in zip(plain, distilled, strict=True)]
    assert same == [True] * point_client.UNTRAINED + [False] * 5


def test_strong_distillation_keeps_features_where_they_were(early, toy, played) -> None:
    adam = LocalTraining(lr=0.02, epochs=5, batch_size=8)
    stream, left = _Cut(toy(num_clients=3, per_round=3), 2), []
    images = next(iter(stream.train(1, 0).loader(12, shuffle=False)))[0]
    backbone = MLP(stream.image_shape, (8,))
    for weight in (0.0, 30.0):
        seen = []
        for state in played(FedAvg(feature_distillation=weight), stream, adam).states:
            layout_of(backbone).write(backbone, state["backbone"], state["buffers"])
            seen.append(backbone(images).detach())
        left.append(float((seen[1] - seen[0]).norm() / seen[0].norm()))
    assert left[1] < 0.8 * left[0]


def test_the_first_rounds_of_fedbnn_are_fedavg_with_the_same_tools(early, toy, played) -> None:
    """Bit for bit: a step of the server, distillation and scope are the same to both."""
    methods = FedAvg(**TOOLS), FedBNN(r_init=3, **TOOLS)
    runs = [played(method, _Cut(toy(), 3)) for method in methods]
    for one, two in zip(*(run.states for run in runs), strict=True):
        assert one.to_bytes() == two.to_bytes()


@pytest.mark.parametrize("method", [*ALL, FedBNN(r_init=1)], ids=named)
def test_a_wider_softmax_trains_against_classes_of_the_past(method: Method, toy, played) -> None:
    """It changes nothing while all classes are held, then it does; absent prototypes never move."""
    narrow, wide = (
        played(replace(method, scope=scope), toy(num_clients=3, per_round=3))
        for scope in ("local", "seen")
    )
    if isinstance(method, Local):
        pairs = [(run.privates[0]) for run in (narrow, wide)]
        assert not torch.equal(*map(weights, pairs))
        return
    states = zip(narrow.states, wide.states, strict=True)
    same = [torch.equal(*map(weights, pair)) for pair in states]
    everything = isinstance(method, FCIL | Joint)  # these hold all classes again
    assert same == [True, True, *[everything] * 2]
    for name in () if everything else ("prototypes", "prototypes.samples"):
        assert torch.equal(wide.states[1][name][:2], wide.last[name][:2])


@pytest.mark.parametrize("name", ["fedavg_plus", "fedprox_plus"])
def test_the_baselines_with_all_tools_have_those_of_fedbnn(name: str) -> None:
    preset = METHODS[name]
    made = preset.method(**preset.defaults)
    assert made.server_lr > 1
    assert made.feature_distillation > 0
    assert HEADS[preset.head] is HEADS[METHODS["fedbnn"].head]
