"""The Pyro model works for every network, and its loss is the one it should be."""

import pytest
import torch
from torch import nn

from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.inference import ClosedFormELBO
from fedbnn.bayes.model import BayesianModel, MeanFieldGuide
from fedbnn.methods import FedBNN
from fedbnn.networks import MLP, NETWORKS, Classifier
from lightning_modules.client_trainer import LocalTraining
from lightning_modules.svi_client import Start, SVIClient
from tests.core.small_models import BATCH, SHAPE, small

EVERY = [("mlp", {}), ("lenet", {})] + [
    (name, {"norm": norm})
    for name in ("paper_resnet", "cifar_resnet18")
    for norm in ("batch", "group")
]


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_every_network_trains(name: str, options: dict[str, str]) -> None:
    side = 32 if name == "lenet" else 16
    backbone = NETWORKS[name]((3, side, side), **options)
    layout = layout_of(backbone)
    statistics = layout.read(backbone)[1]
    model = BayesianModel(backbone, layout)
    guide = MeanFieldGuide(model)
    size = layout.size + 2 * (backbone.width + 1)
    loc = torch.cat([layout.read(backbone)[0], torch.zeros(2 * (backbone.width + 1))])
    model.swap(loc, torch.full((size,), 0.01))
    guide.swap(loc, torch.full((size,), 0.01))
    loss = ClosedFormELBO().differentiable_loss(
        model, guide, torch.randn(4, 3, side, side), torch.tensor([0, 1, 0, 1])
    )
    loss.backward()
    assert guide.loc.grad is not None
    assert bool(guide.loc.grad.isfinite().all())
    assert bool((guide.loc.grad[: layout.size] != 0).any())
    assert bool((guide.log_scale.grad[: layout.size] != 0).any())
    assert not any(parameter.requires_grad for parameter in model.network.parameters())
    assert torch.equal(layout.read(backbone)[1], statistics) == (not layout.buffers)


def test_swap_takes_any_number_of_rows() -> None:
    model, guide = small(rows=3)
    for rows in (7, 1, 4):
        size = model.layout.size + rows * 6
        model.swap(torch.zeros(size), torch.ones(size))
        guide.swap(torch.zeros(size), torch.ones(size))
        images, labels = BATCH[0], torch.zeros(6, dtype=torch.long)
        assert model.outputs(guide.loc, images)[1].shape == (6, rows)
        ClosedFormELBO().differentiable_loss(model, guide, images, labels).backward()
        assert guide.loc.grad.shape == (size,)


def test_the_flat_vector_is_the_backbone_then_the_rows_with_their_bias() -> None:
    model, guide = small()
    network = Classifier(MLP(SHAPE, (5,)), 3)
    rows = guide.loc[model.layout.size :].view(3, 6)
    model.layout.write(network.backbone, guide.loc[: model.layout.size].detach(), torch.zeros(0))
    with torch.no_grad():
        network.head.weight.copy_(rows[:, :5]), network.head.bias.copy_(rows[:, 5])
    torch.testing.assert_close(model.outputs(guide.loc, BATCH[0])[1], network(BATCH[0]))


def test_at_no_width_the_loss_is_the_cross_entropy_of_the_means() -> None:
    model, guide = small(scale=1e-20)
    loss = ClosedFormELBO().differentiable_loss(model, guide, *BATCH).item()
    reference = nn.functional.cross_entropy(model.outputs(guide.loc, BATCH[0])[1], BATCH[1]).item()
    assert loss == pytest.approx(reference, rel=1e-5)


def test_an_svi_client_puts_prior_and_start_in_place() -> None:
    model, guide = small()
    loc = torch.randn(len(guide.loc))
    start = Start(loc, torch.full_like(loc, 0.2), loc + 1, torch.full_like(loc, 0.1))
    client = SVIClient(model, guide, start, torch.ones_like(loc), FedBNN(), LocalTraining())
    assert torch.equal(model.prior().loc, loc)
    assert torch.equal(guide.loc, loc + 1)
    torch.testing.assert_close(guide.posterior().scale, start.guide_scale)
    groups = client.configure_optimizers().param_groups
    assert [group["lr"] for group in groups] == [1e-3, 1e-3 * FedBNN().scale_lr]
    assert [parameter is guide.log_scale for parameter in groups[1]["params"]] == [True]
