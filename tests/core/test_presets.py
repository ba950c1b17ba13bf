"""Versions of the paper's method are what they are named after: as printed, and as released."""

import pytest
import torch
from torch import Tensor

from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.gaussian import Gaussian
from fedbnn.heads import prototypes
from fedbnn.methods import METHODS, FedBNN
from fedbnn.methods.posterior_fold import factor_of
from fedbnn.networks import MLP
from fedbnn.protocol.messages import FitInstruction, Update
from fedbnn.protocol.state import State
from lightning_modules.svi_client import kl_weights
from tests.core.posteriors import COUNTS, folded, prior_state, update

PUBLISHED = ["fedbnn_paper", "fedbnn_paper_damped", "fedbnn_authors"]


def preset(name: str) -> FedBNN:
    """The method of that name, with its own defaults."""
    method = METHODS[name].method(**METHODS[name].defaults)
    assert isinstance(method, FedBNN)
    return method


def answers(state: State) -> list[Update]:
    """Clients that have moved, and are a little surer than before."""
    found = []
    for client, counts in enumerate(COUNTS):
        index = state.index(tuple(counts))
        both = (("backbone", slice(None)), ("prototypes", index))
        moved = [
            (state[site][rows] + 0.1 * client, 0.8 * state[f"{site}.scale"][rows])
            for site, rows in both
        ]
        found.append(update(state, *moved, counts, client))
    return found


@pytest.mark.parametrize(("name", "power"), [("fedbnn_paper", 1.0), ("fedbnn_paper_damped", 0.1)])
def test_the_paper_multiplies_the_prior_by_every_factor(name: str, power: float) -> None:
    """q = q_0 prod_k l_k as it is printed, with power 1: whoever damps it has another name."""
    state = prior_state()
    updates, wanted = (
        answers(state),
        Gaussian.from_moments(state["backbone"], state["backbone.scale"]),
    )
    for one in updates:
        wanted = wanted * factor_of(one, "backbone") ** power
    found = folded(state, updates, preset(name).rule)
    torch.testing.assert_close(found["backbone"], wanted.loc)
    torch.testing.assert_close(found["backbone.scale"], wanted.scale)


def test_the_authors_take_the_moments_of_the_mixture() -> None:
    state = prior_state()
    images = torch.tensor([sum(counts.values()) for counts in COUNTS]).double()
    weights, steps = images / images.sum(), 0.1 * torch.arange(len(COUNTS)).double()
    mean = weights @ steps
    spread = weights @ (steps - mean).square()
    found = folded(state, answers(state), preset("fedbnn_authors").rule)
    torch.testing.assert_close(found["backbone"], state["backbone"] + mean)
    wanted = ((0.8 * state["backbone.scale"]).square() + spread).sqrt()
    torch.testing.assert_close(found["backbone.scale"], wanted)


def shares(name: str) -> Tensor:
    """What the KL of each of 3 + 2 x 2 weights counts on a client of eight images of a hundred."""
    counts, state = {"a": 6, "b": 2}, State({})
    sent = FitInstruction("run", 4, "train", state, 100, {"a": 30, "b": 2})
    return kl_weights(preset(name), 3, 2, counts, sent)


def test_the_kl_counts_as_printed_and_as_released() -> None:
    for name in ("fedbnn_paper", "fedbnn_paper_damped"):
        torch.testing.assert_close(shares(name), torch.full((7,), 1 / 8))
    torch.testing.assert_close(shares("fedbnn_authors"), torch.full((7,), 1 / 7))


@pytest.mark.parametrize("name", PUBLISHED)
def test_after_three_rounds_of_averages_every_scale_is_a_twentieth_and_learned(name: str) -> None:
    method, backbone = preset(name), MLP((1, 4, 4), (5,))
    layout = layout_of(backbone)
    points = dict(zip(("backbone", "buffers"), layout.read(backbone), strict=True))
    state = State({**points, **prototypes.empty(backbone.width)})
    assert not method.prepare(state, 3, ["a"], layout).bayesian
    begun = method.prepare(state, 4, ["a", "b"], layout)
    for site in ("backbone", "prototypes"):
        scale = begun[f"{site}.scale"]
        assert scale.shape == begun[site].shape
        torch.testing.assert_close(scale, torch.full_like(scale, 0.05))
    assert (method.precision, method.scale_lr, METHODS[name].head) == ("learned", 1.0, "linear")
