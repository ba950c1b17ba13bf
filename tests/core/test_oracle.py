"""The oracle: class posteriors of all images so far under the backbone of a round, as a head."""

from dataclasses import replace

import pytest
import torch

from datamodules.stream import FederatedStream
from fedbnn.bayes.flatten import layout_of
from fedbnn.evaluation.evaluate import REGIMES, Evaluation, Oracle
from fedbnn.heads import GaussianHead
from fedbnn.heads.posteriors import ClassPosteriors
from fedbnn.methods.bounds import JointStream
from fedbnn.networks import MLP
from fedbnn.protocol.state import State

ROUND = 3
"""Of the second task, so images of the first are those of rounds before."""
Looked = tuple[Oracle, State, ClassPosteriors]


@pytest.fixture
def looked(digits: FederatedStream) -> Looked:
    """An oracle whose backbone has other weights than the state, and what it should find there."""
    backbone, pool = MLP(digits.image_shape, (16,)), JointStream(digits).train(ROUND, 0)
    layout, classes = layout_of(backbone), tuple(pool.counts())
    weights, buffers = layout.read(backbone)
    moved = weights + 0.3 * torch.randn_like(weights)
    layout.write(backbone, moved, buffers)
    with torch.no_grad():
        features = backbone(pool.preprocess.normalise(pool.pixels)).double()
    layout.write(backbone, weights, buffers)
    labels = pool.among(classes).labels
    count = torch.bincount(labels).double()
    mean = torch.stack([features[labels == c].mean(0) for c in range(len(classes))])
    gap = features - mean[labels]
    weight = torch.tensor([float(len(labels) - len(classes))]).double()
    rows = torch.zeros(len(classes), backbone.width + 1)
    state = {"backbone": moved, "buffers": buffers, "prototypes": rows, "prototypes.samples": count}
    oracle = Oracle(digits, backbone, layout, GaussianHead(), Evaluation(), 0)
    return oracle, State(state, classes), ClassPosteriors(mean, count, gap.T @ gap, weight)


def test_it_has_the_class_posteriors_of_all_images_so_far_as_the_backbone_sees_them(
    looked: Looked, digits: FederatedStream
) -> None:
    oracle, state, wanted = looked
    found = oracle.posteriors(state, JointStream(digits).train(ROUND, 0))
    for one, other in zip(vars(found).values(), vars(wanted).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_head_that_knows_as_much_is_level_with_it_and_one_that_is_stale_is_not(
    looked: Looked,
) -> None:
    oracle, state, known = looked
    stale = replace(known, mean=known.mean.roll(1, 0))
    heads = [(ROUND, state.having(one.tensors())) for one in (known, stale)]
    level, behind = oracle.rows(heads)
    for regime in REGIMES:
        assert level[f"ours {regime}"] == level[f"oracle {regime}"] == behind[f"oracle {regime}"]
        assert behind[f"ours {regime}"] < behind[f"oracle {regime}"] - 20


def test_images_of_a_class_that_the_state_has_not_met_are_left_out(
    looked: Looked, digits: FederatedStream
) -> None:
    """The one client that held them could not be heard."""
    oracle, state, wanted = looked
    few = State({**state.tensors, "prototypes": state["prototypes"][1:]}, state.classes[1:])
    found = oracle.posteriors(few, JointStream(digits).train(ROUND, 0))
    assert found.count.tolist() == wanted.count[1:].tolist()
    torch.testing.assert_close(found.mean, wanted.mean[1:], rtol=1e-4, atol=1e-4)
