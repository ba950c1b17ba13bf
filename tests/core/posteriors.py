"""A small posterior in float64, updates of it, and its folds."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedbnn.bayes.gaussian import Gaussian
from fedbnn.methods.posterior_fold import FOLDS, PosteriorFold, Scaled
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State

Posterior = tuple[Tensor, Tensor]
NAMES = ("a", "b", "c")


def moments(source: torch.Generator, *shape: int) -> Posterior:
    return torch.randn(shape, generator=source).double(), 0.2 + torch.rand(
        shape, generator=source
    ).double()


def prior_state(seed: int = 0) -> State:
    """A posterior over five weights and three rows of three, and one statistic, in float64."""
    source = torch.Generator().manual_seed(seed)
    backbone, scale = moments(source, 5)
    rows, row_scale = moments(source, 3, 3)
    tensors = {
        "backbone": backbone,
        "backbone.scale": scale,
        "buffers": torch.randn(1, generator=source).double(),
    }
    return State(
        {
            **tensors,
            "prototypes": rows,
            "prototypes.scale": row_scale,
            "prototypes.samples": torch.zeros(3).double(),
        },
        NAMES,
    )


def update(
    state: State,
    backbone: Posterior,
    rows: Posterior,
    counts: Mapping[str, int],
    client: int = 0,
    statistic: float = 0.0,
) -> Update:
    """What a client with these posteriors sends, in float64 so that identities are exact."""
    index = state.index(tuple(counts))
    prior = Gaussian.from_moments(state["backbone"], state["backbone.scale"])
    factor = Gaussian.from_moments(*backbone) / prior
    own = Gaussian.from_moments(*rows) / Gaussian.from_moments(
        state["prototypes"][index], state["prototypes.scale"][index]
    )
    tensors = {
        "backbone.precision": factor.precision,
        "backbone.info": factor.info,
        "prototypes.precision": own.precision,
        "prototypes.info": own.info,
        "buffers": torch.full((1,), statistic).double(),
    }
    return Update("run", 1, "train", client, "", sum(counts.values()), counts, tensors)


def random_update(state: State, counts: Mapping[str, int], client: int) -> Update:
    source = torch.Generator().manual_seed(client)
    return update(
        state, moments(source, 5), moments(source, len(counts), 3), counts, client, float(client)
    )


def folded(
    state: State,
    updates: list[Update],
    rule: str | Scaled = "scaled",
    server_lr: float = 1.0,
    trust: float = 1.0,
) -> State:
    made = FOLDS[rule](server_lr) if isinstance(rule, str) else rule
    fold = PosteriorFold(state, made)
    for one in updates:
        fold.add(one, trust)
    return fold.close()


def assert_same(one: State, other: State, rtol: float = 1e-12) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, value in one.tensors.items():
        torch.testing.assert_close(
            value, other[name], rtol=rtol, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


COUNTS = [{"a": 3, "b": 1}, {"b": 8}, {"a": 1}, {"a": 2, "b": 2}]
