"""Models to predict with: random states over small backbones, and their two files."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedbnn
from fedbnn.bayes.flatten import layout_of
from fedbnn.export import Card, load, save_model
from fedbnn.heads import GaussianHead, Head, prototypes
from fedbnn.heads.posteriors import ClassPosteriors
from fedbnn.heads.predictive import Predictor
from fedbnn.images import ImageSet, Preprocess
from fedbnn.protocol.state import State

SHAPE = (1, 4, 4)
LOOK = Preprocess((0.4,), (0.3,))
PLAIN = GaussianHead(temperature=1.0)


def images(count: int = 30) -> ImageSet:
    source = torch.Generator().manual_seed(2)
    return ImageSet(
        torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=source),
        torch.arange(count) % 3,
        ("a", "b", "c"),
        LOOK,
    )


def state_of(backbone: nn.Module, bayesian: bool = True, posteriors: bool = False) -> State:
    """Random prototypes for three classes of which b was never trained."""
    layout = layout_of(backbone)
    weights, buffers = layout.read(backbone)
    state = prototypes.grow(
        State({"backbone": weights, "buffers": buffers, **prototypes.empty(backbone.width)}),
        ["a", "b", "c"],
        None,
    )
    state = state.having(
        {
            "prototypes": torch.randn(3, backbone.width + 1),
            "prototypes.samples": torch.tensor([4.0, 0, 2]).double(),
        }
    )
    if bayesian:
        state = state.having(
            {
                "backbone.scale": 0.3 * layout.initial_scale(1.0),
                "prototypes.scale": torch.full((3, backbone.width + 1), 0.2),
            }
        )
    if posteriors:
        width, factor = backbone.width, torch.randn(backbone.width, backbone.width).double()
        mean, count = torch.randn(3, width).double(), torch.tensor([4.0, 0, 2]).double()
        state = state.having(
            ClassPosteriors(mean, count, factor @ factor.T, torch.tensor([5.0]).double()).tensors()
        )
    return state


def predictor(
    state: State, backbone: nn.Module, samples: int = 8, seed: int = 0, head: Head = PLAIN
) -> Predictor:
    return Predictor(backbone, layout_of(backbone), state, head, samples, seed)


def card_of(
    network: str = "mlp",
    shape: tuple[int, int, int] = SHAPE,
    head: Head = PLAIN,
    **options: Any,
) -> Card:
    chosen = {"hidden": [5]} if network == "mlp" else {}
    return Card({"name": network, **chosen, **options}, shape, ("a", "b", "c"), LOOK, head)


def saved(folder: Path, backbone: nn.Module, state: State, **card: Any) -> fedbnn.export.Model:
    facts = card_of(**card)
    save_model(folder, facts, state, backbone)
    return load(folder)
