"""Flipout: the same mean and variance as plain draws, and gradients that vary less."""

import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.model import BayesianModel, ClosedFormELBO, MeanFieldGuide, guide_for
from fedbnn.networks import MLP, NETWORKS, Classifier
from tests.core.small_models import BATCH, SHAPE, small


def logits_of(model: BayesianModel, guide: MeanFieldGuide, draws: int) -> Tensor:
    return torch.stack(
        [model.outputs(guide.posterior().rsample(), BATCH[0])[1] for _ in range(draws)]
    )


def test_flipout_without_centres_is_the_plain_network() -> None:
    model, guide = small(flipout=True)
    plain = Classifier(MLP(SHAPE, (5,)), 3)
    model.layout.write(plain.backbone, guide.loc[: model.layout.latent].detach(), torch.zeros(0))
    rows = guide.loc[model.layout.latent :].view(3, 6).detach()
    with torch.no_grad():
        plain.head.weight.copy_(rows[:, :5]), plain.head.bias.copy_(rows[:, 5])
    torch.testing.assert_close(model.outputs(guide.loc, BATCH[0])[1], plain(BATCH[0]))


def linear_pair(flipout: bool) -> tuple[BayesianModel, MeanFieldGuide]:
    """A model without hidden layers, where the mean of the logits is known: f(x; m)."""
    backbone = nn.Flatten()
    backbone.width = 16
    model = BayesianModel(backbone, layout_of(backbone), flipout)
    guide = guide_for(model, SHAPE)
    torch.manual_seed(5)
    start = torch.randn(3 * 17), torch.full((3 * 17,), 0.5)
    model.swap(*start)
    guide.swap(*start)
    return model, guide


def test_flipout_keeps_mean_and_variance_of_the_logits_and_decorrelates_images() -> None:
    plain, flipped = linear_pair(False), linear_pair(True)
    flipped[0].centre = flipped[1].loc
    with torch.no_grad():
        centre = plain[0].outputs(plain[1].loc, BATCH[0])[1]
        ours, theirs = logits_of(*flipped, 1500), logits_of(*plain, 1500)
    torch.testing.assert_close(ours.mean(0), centre, rtol=0, atol=0.25)
    torch.testing.assert_close(ours.std(0), theirs.std(0), rtol=0.12, atol=0)
    shared = [torch.corrcoef(draws[:, :2, 0].T)[0, 1].abs().item() for draws in (ours, theirs)]
    assert shared[0] < 0.5 * shared[1]


def gradient_variance(
    model: BayesianModel, guide: MeanFieldGuide, draws: int = 150
) -> tuple[Tensor, Tensor]:
    images = torch.randn(256, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(256) % 3
    elbo, found = ClosedFormELBO(), []
    elbo.kl_weight = 0.0
    for _ in range(draws):
        guide.loc.grad = None
        elbo.differentiable_loss(model, guide, images, labels).backward()
        found.append(guide.loc.grad.clone())
    stacked = torch.stack(found)
    return stacked.mean(0), stacked.var(0).sum()


def test_flipout_cuts_the_variance_of_the_gradient_and_not_its_mean() -> None:
    plain, flipped = linear_pair(False), linear_pair(True)
    flipped[0].centre = flipped[1].loc
    (mean, variance), (flipped_mean, flipped_variance) = (
        gradient_variance(*plain),
        gradient_variance(*flipped),
    )
    assert flipped_variance < 0.5 * variance
    error = (variance / 150).sqrt() + (flipped_variance / 150).sqrt()
    assert (mean - flipped_mean).norm() < 3 * error


def test_flipout_works_for_convolutions_with_batch_norm() -> None:
    backbone = NETWORKS["paper_resnet"]((3, 16, 16))
    layout = layout_of(backbone, bayes_norm=False)
    weights, _ = layout.read(backbone)
    model = BayesianModel(backbone, layout, use_flipout=True)
    guide = guide_for(model, (3, 16, 16))
    loc = torch.cat([weights[: layout.latent], torch.zeros(2 * 1001)])
    model.swap(loc, torch.full_like(loc, 0.01))
    guide.swap(loc, torch.full_like(loc, 0.01))
    model.centre = guide.loc
    ClosedFormELBO().differentiable_loss(
        model, guide, torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 0, 1])
    ).backward()
    assert bool(guide.loc.grad.isfinite().all())
    assert bool(guide.log_scale.grad.isfinite().all())
