"""Models to predict with: random states over small trunks, and their two files."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedbnn
from fedbnn.bayes.layout import layout_of
from fedbnn.deploy import Card, load, save_model
from fedbnn.heads import library
from fedbnn.heads.discriminant import Reading
from fedbnn.heads.places import Places
from fedbnn.heads.predictor import Predictor
from fedbnn.images import ImageSet, Look
from fedbnn.state import State

SHAPE = (1, 4, 4)
LOOK = Look((0.4,), (0.3,))


def images(count: int = 30) -> ImageSet:
    source = torch.Generator().manual_seed(2)
    return ImageSet(
        torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=source),
        torch.arange(count) % 3,
        ("a", "b", "c"),
        LOOK,
    )


def state_of(trunk: nn.Module, bayesian: bool = True, bayes_norm: bool = True, places: bool = False) -> State:
    """Random rows for three classes of which b was never trained."""
    layout = layout_of(trunk, bayes_norm)
    weights, buffers = layout.read(trunk)
    state = library.grow(State({"trunk": weights, "buffers": buffers, **library.empty(trunk.width)}), ["a", "b", "c"], None)
    state = state.having({"rows": torch.randn(3, trunk.width + 1), "rows.samples": torch.tensor([4.0, 0, 2]).double()})
    if bayesian:
        state = state.having(
            {"trunk.scale": 0.3 * layout.initial_scale(1.0), "rows.scale": torch.full((3, trunk.width + 1), 0.2)}
        )
    if places:
        width, factor = trunk.width, torch.randn(trunk.width, trunk.width).double()
        mean, count = torch.randn(3, width).double(), torch.tensor([4.0, 0, 2]).double()
        state = state.having(Places(mean, count, factor @ factor.T, torch.tensor([5.0]).double()).tensors())
    return state


def predictor(state: State, trunk: nn.Module, samples: int = 8, seed: int = 0, **reading: Any) -> Predictor:
    return Predictor(trunk, layout_of(trunk), state, samples, seed, Reading(**reading))


def card_of(bayes_norm: bool = True, network: str = "mlp", shape: tuple[int, int, int] = SHAPE, **options: Any) -> Card:
    chosen = {"hidden": [5]} if network == "mlp" else {}
    return Card({"name": network, **chosen, **options}, shape, ("a", "b", "c"), LOOK, bayes_norm)


def saved(folder: Path, trunk: nn.Module, state: State, **card: Any) -> fedbnn.deploy.Model:
    facts = card_of(**card)
    save_model(folder, facts, state, layout_of(trunk, facts.bayes_norm))
    return load(folder)
