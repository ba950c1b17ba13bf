"""Prediction from a state."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedbnn.export import load
from fedbnn.heads import LinearHead
from fedbnn.heads.gaussian import without_posteriors
from fedbnn.images import ImageSet, Preprocess
from fedbnn.networks import MLP, NETWORKS
from tests.core.predictors import LOOK, PLAIN, SHAPE, images, predictor, saved, state_of


def test_only_trained_classes_are_predicted_in_the_order_of_the_library() -> None:
    backbone = MLP(SHAPE, (5,))
    found = predictor(state_of(backbone), backbone, samples=3)
    assert found.classes == ("a", "c")
    assert found.scores(images()).shape == (3, 30, 2)


@pytest.mark.parametrize("samples", [0, 3])
def test_prototypes_beside_the_class_posteriors_add_their_scores(samples: int) -> None:
    """By the same draws: both = scores of the posteriors + share * scores of the prototypes."""
    backbone = MLP(SHAPE, (5,))
    state = state_of(backbone, posteriors=True)
    both, posteriors = (
        predictor(state, backbone, samples, head=replace(PLAIN, prototypes=share)).scores(images())
        for share in (0.3, 0.0)
    )
    bare = without_posteriors(state)
    rows = predictor(bare, backbone, samples, head=replace(PLAIN, prototypes=0.3)).scores(images())
    torch.testing.assert_close(both, posteriors + 0.3 * rows)
    assert not torch.allclose(both, posteriors)


def test_a_linear_head_predicts_from_the_prototypes_whatever_else_a_state_has() -> None:
    backbone = MLP(SHAPE, (5,))
    state = state_of(backbone, posteriors=True)
    linear = predictor(state, backbone, head=LinearHead()).scores(images())
    bare = predictor(without_posteriors(state), backbone, head=LinearHead()).scores(images())
    assert torch.equal(linear, bare)
    assert not torch.allclose(linear, predictor(state, backbone).scores(images()))


def test_draws_are_made_once_and_serve_every_call_and_batch() -> None:
    backbone = MLP(SHAPE, (5,))
    found = predictor(state_of(backbone), backbone, samples=4)
    whole, many = found.scores(images(20)), images(1001)
    assert torch.equal(found.scores(images(20)), whole)
    parts = [
        found.scores(many.subset(torch.arange(start, min(start + 250, 1001))))
        for start in range(0, 1001, 250)
    ]
    torch.testing.assert_close(found.scores(many), torch.cat(parts, 1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(whole[0], whole[1])


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    backbone = MLP(SHAPE, (5,))
    state = state_of(backbone)
    first, second, other = (
        predictor(state, backbone, samples=2, seed=seed).scores(images()) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_points_are_scored_once_and_zero_draws_are_the_means() -> None:
    backbone = MLP(SHAPE, (5,))
    state = state_of(backbone)
    points = predictor(
        state.only("backbone", "buffers", "prototypes", "prototypes.samples"), backbone, samples=8
    ).scores(images())
    assert points.shape == (1, 30, 2)
    assert torch.equal(predictor(state, backbone, samples=0).scores(images()), points)
    rows = state["prototypes"][[0, 2]]
    with torch.no_grad():
        expected = backbone(LOOK.normalise(images().pixels)) @ rows[:, :-1].T + rows[:, -1]
    torch.testing.assert_close(points[0], expected)


def test_draws_have_the_moments_of_the_posterior() -> None:
    """With a backbone that adds nothing, logits are sums of normal variables whose moments are
    known.
    """

    class Pixels(nn.Module):
        width = 16

        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(16))

        def forward(self, pictures: Tensor) -> Tensor:
            return pictures.flatten(1) + self.offset

    backbone = Pixels()
    state = state_of(backbone).having({"backbone.scale": torch.full((16,), 1e-9)})
    scores = predictor(state, backbone, samples=1500).scores(images(3))
    inputs = LOOK.normalise(images(3).pixels).flatten(1)
    rows = state["prototypes"][[0, 2]]
    deviation = 0.2 * (inputs.square().sum(1) + 1).sqrt()
    torch.testing.assert_close(
        scores.mean(0), inputs @ rows[:, :-1].T + rows[:, -1], rtol=0, atol=0.15
    )
    torch.testing.assert_close(scores.std(0), deviation[:, None].expand(3, 2), rtol=0.1, atol=0)


def test_prediction_is_the_mean_of_probabilities_and_not_of_logits(tmp_path: Path) -> None:
    backbone = MLP(SHAPE, (5,))
    model = saved(tmp_path, backbone, state_of(backbone))
    found = model.predict(images().pixels, samples=5, seed=3)
    scores = predictor(load(tmp_path).state, backbone, samples=5, seed=3).scores(images())
    mean = scores.softmax(-1).mean(0)
    torch.testing.assert_close(found.probabilities, mean)
    assert not torch.allclose(found.probabilities, scores.mean(0).softmax(-1), atol=1e-3)
    entropy = -(mean * mean.log()).sum(-1)
    within = -(scores.softmax(-1) * scores.log_softmax(-1)).sum(-1).mean(0)
    torch.testing.assert_close(found.entropy, entropy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.mutual_information, entropy - within, rtol=1e-3, atol=1e-5)
    assert found.labels == tuple(("a", "c")[place] for place in mean.argmax(1).tolist())


def test_eval_mode_and_statistics_are_used_for_batch_norm() -> None:
    backbone = NETWORKS["cifar_resnet18"]((3, 8, 8))
    state = state_of(backbone, bayesian=False)
    pictures = ImageSet(
        torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8),
        torch.zeros(4, dtype=torch.long),
        ("a",),
        Preprocess(),
    )
    found = predictor(state, backbone).scores(pictures)
    alone = torch.cat(
        [
            predictor(state, backbone).scores(pictures.subset(torch.tensor([place])))
            for place in range(4)
        ],
        1,
    )
    torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-4)
    shifted = state.having({"buffers": state["buffers"] + 0.5})
    assert not torch.allclose(predictor(shifted, backbone).scores(pictures), found, atol=1e-3)
