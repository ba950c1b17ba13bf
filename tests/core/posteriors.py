"""A small posterior in float64, updates of it, and its folds."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedbnn.bayes.gaussian import Gaussian
from fedbnn.messages import Update
from fedbnn.methods.posterior_folds import FOLDS, PosteriorFold
from fedbnn.state import State

Posterior = tuple[Tensor, Tensor]
NAMES = ("a", "b", "c")


def moments(source: torch.Generator, *shape: int) -> Posterior:
    return torch.randn(shape, generator=source).double(), 0.2 + torch.rand(shape, generator=source).double()


def prior_state(seed: int = 0, latent: int = 5, points: int = 2) -> State:
    """A posterior over five weights, two points, one statistic and three rows of three, in float64."""
    source = torch.Generator().manual_seed(seed)
    trunk, scale = moments(source, latent + points)
    rows, row_scale = moments(source, 3, 3)
    tensors = {"trunk": trunk, "trunk.scale": scale[:latent], "buffers": torch.randn(1, generator=source).double()}
    return State({**tensors, "rows": rows, "rows.scale": row_scale, "rows.samples": torch.zeros(3).double()}, NAMES)


def update(
    state: State, trunk: Posterior, rows: Posterior, counts: Mapping[str, int], client: int = 0, points: float = 0.0
) -> Update:
    """What a client with these posteriors sends, in float64 so that identities are exact."""
    latent, index = len(state["trunk.scale"]), state.index(tuple(counts))
    factor = Gaussian.from_moments(*trunk) / Gaussian.from_moments(state["trunk"][:latent], state["trunk.scale"])
    own = Gaussian.from_moments(*rows) / Gaussian.from_moments(state["rows"][index], state["rows.scale"][index])
    tensors = {
        "trunk.precision": factor.precision, "trunk.info": factor.info, "rows.precision": own.precision, "rows.info": own.info,
        "points": torch.full((len(state["trunk"]) - latent,), points).double(), "buffers": torch.full((1,), points).double(),
    }  # fmt: skip
    return Update("run", 1, "train", client, "", sum(counts.values()), counts, tensors)


def random_update(state: State, counts: Mapping[str, int], client: int) -> Update:
    source = torch.Generator().manual_seed(client)
    return update(state, moments(source, 5), moments(source, len(counts), 3), counts, client, float(client))


def folded(state: State, updates: list[Update], rule: str = "scaled", power: float = 1.0, trust: float = 1.0) -> State:
    fold = PosteriorFold(state, FOLDS[rule](power))
    for one in updates:
        fold.add(one, trust)
    return fold.close()


def assert_same(one: State, other: State, rtol: float = 1e-12) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, value in one.tensors.items():
        torch.testing.assert_close(value, other[name], rtol=rtol, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


COUNTS = [{"a": 3, "b": 1}, {"b": 8}, {"a": 1}, {"a": 2, "b": 2}]
