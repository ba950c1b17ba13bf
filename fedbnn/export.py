"""A trained model as two files anyone can read, and back: `model.safetensors` and `config.json`. Loading runs nothing.

backbone.<parameter>.loc, backbone.<parameter>.scale    posterior of each weight (no scale for a point)
buffers                                           statistics of batch norm, in one vector
rows.loc, rows.scale, rows.samples                the library, one row (weights, bias) per class
places.mean, places.count, places.scatter, ...    the class posteriors, where there are any
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout, layout_of
from fedbnn.errors import RunDirectoryError
from fedbnn.evaluation import metrics
from fedbnn.heads.discriminant import ClassPrior, Reading
from fedbnn.heads.predictor import Predictor
from fedbnn.images import ImageSet, Preprocess
from fedbnn.networks import NETWORKS
from fedbnn.state import State
from fedbnn.storage.files import as_json, write_atomic

MODEL, CARD = "model.safetensors", "config.json"
KEPT = ("rows.", "places.", "buffers")


@dataclass(frozen=True)
class Card:
    """What it takes to rebuild the network and to read images the way it was trained to."""

    network: Mapping[str, Any]
    image_shape: tuple[int, int, int]
    classes: tuple[str, ...]
    preprocess: Preprocess
    bayes_norm: bool = True
    temperature: float = 1.0
    head_rows: float = 0.0
    head_prior: ClassPrior = "uniform"

    @property
    def reading(self) -> Reading:
        """How its class posteriors are read."""
        return Reading(self.temperature, self.head_rows, self.head_prior)


@dataclass(frozen=True)
class Prediction:
    """What the model thinks of n images.

    `probabilities` (n, C) over `classes`, `labels` the likeliest class of each, `entropy` of the predictive
    distribution (total uncertainty) and `mutual_information` between prediction and weights (what more data would
    teach it), both in nats.
    """

    probabilities: Tensor
    classes: tuple[str, ...]
    labels: tuple[str, ...]
    entropy: Tensor
    mutual_information: Tensor


class Model:
    """A trained model; `predict` gives class probabilities with their uncertainty."""

    def __init__(self, card: Card, state: State) -> None:
        self.card, self.state = card, state
        self.backbone = build_backbone(card)
        self.layout = layout_of(self.backbone, card.bayes_norm)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes it has learnt."""
        return self.state.classes

    def predict(self, images: Tensor, samples: int = 16, seed: int = 0) -> Prediction:
        """Predict uint8 images (n, channels, height, width) with `samples` draws of the weights."""
        predictor = Predictor(
            self.backbone, self.layout, self.state, samples, seed, self.card.reading
        )
        labels = torch.zeros(len(images), dtype=torch.long)
        scores = predictor.scores(ImageSet(images, labels, predictor.classes, self.card.preprocess))
        sampled = scores.softmax(-1)
        mean = sampled.mean(0)
        names = tuple(predictor.classes[place] for place in mean.argmax(-1).tolist())
        return Prediction(
            mean,
            predictor.classes,
            names,
            metrics.entropy(mean),
            metrics.mutual_information(sampled),
        )


def build_backbone(card: Card) -> nn.Module:
    """The network of a card, untrained."""
    options = {key: value for key, value in card.network.items() if key != "name"}
    return NETWORKS[str(card.network["name"])](tuple(card.image_shape), **options)


def save_model(run_dir: Path, card: Card, state: State, layout: Layout) -> None:
    """Write both files, each in one piece."""
    tensors = {name: tensor.contiguous() for name, tensor in _by_site(state, layout).items()}
    write_atomic(run_dir / MODEL, save(tensors, metadata={"format": "fedbnn 1"}))
    write_atomic(run_dir / CARD, as_json({**asdict(card), "classes": list(state.classes)}))


def _by_site(state: State, layout: Layout) -> dict[str, Tensor]:
    """Locations and scales by the names of the network's parameters."""
    sites = {
        f"backbone.{name}.loc": value for name, value in layout.views(state["backbone"]).items()
    }
    if state.bayesian:
        sites |= {
            f"backbone.{name}.scale": value
            for name, value in layout.views(state["backbone.scale"]).items()
        }
    sites |= {name: value for name, value in state.tensors.items() if name.startswith(KEPT)}
    return sites | {"rows.loc": state["rows"]}


def load(run_dir: Path | str) -> Model:
    """The model of a finished run."""
    folder = Path(run_dir)
    try:
        facts = json.loads((folder / CARD).read_text())
        sites = load_file(folder / MODEL)
        card = Card(**{**facts, "preprocess": _preprocess(facts["preprocess"])})
        layout = layout_of(build_backbone(card), card.bayes_norm)
        return Model(card, State(_flat(_fitting(sites, layout, card), layout), tuple(card.classes)))
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        fix = f"give the directory of a finished run: it holds {MODEL} and {CARD}"
        raise RunDirectoryError(f"no model can be loaded: {error}", str(folder), fix) from error


def _fitting(sites: dict[str, Tensor], layout: Layout, card: Card) -> dict[str, Tensor]:
    """The sites of a file, if they are those of the network and of the classes on its card."""
    for slot in layout.slots:
        if sites[f"backbone.{slot.name}.loc"].shape != slot.shape:
            raise ValueError(f"{slot.name} does not have the shape of the network in {CARD}")
    if len(card.classes) != len(sites["rows.loc"]):
        raise ValueError(
            f"{len(sites['rows.loc'])} rows for the {len(card.classes)} classes in {CARD}"
        )
    return sites


def _preprocess(facts: Mapping[str, Any]) -> Preprocess:
    return Preprocess(tuple(facts["mean"]), tuple(facts["deviation"]))


def _flat(sites: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """The flat tensors of a state from the sites of a file."""
    flat = {
        "backbone": torch.cat(
            [sites[f"backbone.{slot.name}.loc"].reshape(-1) for slot in layout.slots]
        )
    }
    scaled = [
        sites[f"backbone.{slot.name}.scale"]
        for slot in layout.slots
        if f"backbone.{slot.name}.scale" in sites
    ]
    if scaled:
        flat["backbone.scale"] = torch.cat([scale.reshape(-1) for scale in scaled])
    kept = {
        name: value for name, value in sites.items() if name.startswith(KEPT) and name != "rows.loc"
    }
    return flat | kept | {"rows": sites["rows.loc"]}
