"""Feature distillation: 0 where nothing moved, free where a linear map can follow."""

import pyro
import pytest
import torch
from jsonargparse import ArgumentError
from torch import Tensor, nn

from datamodules import FederatedStream
from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.inference import ClosedFormELBO
from fedbnn.bayes.model import BayesianModel, FeatureDistillation, MeanFieldGuide
from fedbnn.methods import FedAvg, FedBNN
from fedbnn.networks import MLP, NETWORKS
from lightning_modules.point_client import UNTRAINED
from tests.core.parsing import parsed
from tests.core.playing import FAST, Federate, Short, after, sha
from tests.core.small_models import BATCH, SHAPE


def distilling(backbone: nn.Module, weight: float = 2.0) -> FeatureDistillation:
    layout = layout_of(backbone)
    prior = FeatureDistillation(backbone, layout, weight)
    prior.swap(*layout.read(backbone))
    return prior


def test_a_backbone_that_did_not_move_costs_nothing() -> None:
    backbone = MLP(SHAPE, (5,))
    assert distilling(backbone)(BATCH[0], backbone(BATCH[0])).item() == 0


def test_it_is_the_squared_distance_in_units_of_the_old_features() -> None:
    backbone = MLP(SHAPE, (5,))
    old = backbone(BATCH[0]).detach()
    new = old + torch.randn(6, 5)
    reference = (
        2.0
        * sum(float((new[i] - old[i]).norm() ** 2) for i in range(6))
        / float(old.norm() ** 2)
    )
    assert distilling(backbone)(BATCH[0], new).item() == pytest.approx(reference, rel=1e-5)


def test_twice_the_features_in_both_is_the_same_loss() -> None:
    """Relative to the size of the features: other units are the same loss."""
    backbone, moved = MLP(SHAPE, (5,)), torch.randn(6, 5)
    one = distilling(backbone)(BATCH[0], backbone(BATCH[0]) + moved)
    last = [module for module in backbone.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        last.weight.mul_(2)
        last.bias.mul_(2)
    two = distilling(backbone)(BATCH[0], backbone(BATCH[0]) + 2 * moved)
    torch.testing.assert_close(one, two)


def test_a_linear_move_of_the_features_is_free_once_the_map_has_followed() -> None:
    """f = f_0 A + c with A invertible: V = A^-1 - I, b = -c A^-1 read the old features exactly."""
    backbone = MLP(SHAPE, (5,))
    prior, old = distilling(backbone), backbone(BATCH[0]).detach()
    turn, shift = torch.eye(5) + 0.2 * torch.randn(5, 5), torch.randn(5)
    back = torch.linalg.inv(turn)
    with torch.no_grad():
        prior.reader.weight.copy_((back - torch.eye(5)).T)
        prior.reader.bias.copy_(-shift @ back)
    assert prior(BATCH[0], old @ turn + shift).item() == pytest.approx(0, abs=1e-6)


def test_swapping_forgets_the_map_of_the_last_client() -> None:
    backbone = MLP(SHAPE, (5,))
    prior = distilling(backbone)
    nn.init.normal_(prior.reader.weight)
    prior.swap(*prior.layout.read(backbone))
    assert prior(BATCH[0], backbone(BATCH[0])).item() == 0


@pytest.mark.parametrize("name", ["paper_resnet", "cifar_resnet18"])
def test_the_teacher_stays_in_eval_mode_and_keeps_its_statistics(name: str) -> None:
    backbone = NETWORKS[name]((3, 16, 16))
    prior = distilling(backbone)
    model = nn.Sequential(prior).train()
    assert not any(module.training for module in prior.teacher.modules())
    before = prior.layout.read(prior.teacher)
    prior(torch.randn(4, 3, 16, 16), torch.randn(4, int(backbone.width))).backward()
    assert all(
        torch.equal(*pair) for pair in zip(before, prior.layout.read(prior.teacher), strict=True)
    )
    assert {name for name, one in model.named_parameters() if one.grad is not None} == {
        "0.reader.weight",
        "0.reader.bias",
    }


def test_the_teacher_computes_as_exactly_as_the_backbone() -> None:
    backbone = MLP(SHAPE, (5,))
    images = BATCH[0].double()
    prior = distilling(backbone).double()
    assert prior(images, backbone.double()(images)).item() == 0


def bayesian(weight: float) -> tuple[BayesianModel, Tensor]:
    torch.manual_seed(0)
    backbone = MLP(SHAPE, (5,))
    model = BayesianModel(backbone, layout_of(backbone), weight)
    if model.distillation is not None:
        model.distillation.swap(*model.layout.read(backbone))
    loc = torch.cat([model.layout.read(backbone)[0], torch.zeros(3 * 6)])
    return model, loc


def test_the_elbo_counts_it_once_an_image() -> None:
    """Loss with it = loss without it + what distillation adds, under the same draw."""
    losses = {}
    for weight in (0.0, 3.0):
        model, loc = bayesian(weight)
        guide = MeanFieldGuide(model)
        scale = torch.full_like(loc, 0.3)
        model.swap(loc, scale)
        guide.swap(loc, scale)
        pyro.set_rng_seed(1)
        losses[weight] = ClosedFormELBO().differentiable_loss(model, guide, *BATCH).item()
        pyro.set_rng_seed(1)
        flat = guide.posterior().rsample()
    features = model.outputs(flat, BATCH[0])[0]
    assert model.distillation is not None
    extra = model.distillation(BATCH[0], features).item()
    assert extra > 0.01
    assert losses[3.0] - losses[0.0] == pytest.approx(extra, rel=1e-4)


def test_stronger_distillation_keeps_features_closer(
    federate: Federate, digits: FederatedStream
) -> None:
    moved = []
    images = next(iter(digits.test(0).loader(50, shuffle=False)))[0]
    for weight in (0.0, 30.0):
        method = FedBNN(r_init=1, feature_distillation=weight)
        lengths = UNTRAINED, UNTRAINED + 1
        states = [after(*federate(method, local=FAST, stream=Short(digits, n))) for n in lengths]
        backbone, seen = MLP(digits.image_shape, (16,)), []
        for state in states:
            layout_of(backbone).write(backbone, state["backbone"], state["buffers"])
            seen.append(backbone(images).detach())
        moved.append(float((seen[1] - seen[0]).norm() / seen[0].norm()))
    assert moved[1] < 0.8 * moved[0]


def test_a_backbone_that_has_hardly_been_trained_teaches_nothing(
    federate: Federate, digits: FederatedStream
) -> None:
    """In its first rounds distillation changes nothing, bit for bit, of points and posteriors."""
    for method in (FedAvg, FedBNN):
        found = {
            sha(after(*federate(method(feature_distillation=weight), local=FAST, stream=two)))
            for two in [Short(digits, 2)]
            for weight in (0.0, 30.0)
        }
        assert len(found) == 1


@pytest.mark.parametrize("options", [{}, {"server_lr": 1.5}])
def test_rounds_with_it_are_reproducible(
    federate: Federate, digits: FederatedStream, options: dict[str, float]
) -> None:
    method = FedBNN(r_init=0, feature_distillation=1.0, **options)  # type: ignore[arg-type]
    first, second = (
        sha(after(*federate(method, local=FAST, stream=Short(digits, 4)))) for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("weight", ["-1", "inf", "nan"])
def test_a_weight_below_zero_or_without_end_is_refused(weight: str) -> None:
    with pytest.raises(ArgumentError, match="feature_distillation"):
        parsed(FedBNN, feature_distillation=weight)
    assert parsed(FedBNN, feature_distillation="30") == 30
