"""A trained model as two files anyone can read, and back: `model.safetensors` and `config.json`.
Loading runs nothing.

backbone.<parameter>.loc, backbone.<parameter>.scale    posterior of each weight
buffers                                                 statistics of batch norm, in one vector
prototypes.loc, prototypes.scale, prototypes.samples    a row (weights, bias) per class
posteriors.mean, posteriors.count, ...                  the class posteriors, where there are any
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedbnn.bayes.flatten import Layout, layout_of
from fedbnn.errors import RunDirectoryError
from fedbnn.evaluation import metrics
from fedbnn.heads import HEADS, Head
from fedbnn.heads.predictive import Predictor
from fedbnn.images import ImageSet, Preprocess
from fedbnn.networks import NETWORKS
from fedbnn.state import State
from fedbnn.storage.files import as_json, write_atomic

MODEL, CARD = "model.safetensors", "config.json"
KEPT = ("prototypes.scale", "prototypes.samples", "posteriors.", "exact.", "buffers")
KINDS = {"loc": "backbone", "scale": "backbone.scale"}
NAMES = {head: name for name, head in HEADS.items()}


@dataclass(frozen=True)
class Card:
    """What it takes to rebuild the network, and to read images and prototypes as in training."""

    network: Mapping[str, Any]
    image_shape: tuple[int, int, int]
    classes: tuple[str, ...]
    preprocess: Preprocess
    head: Head

    def to_json(self) -> dict[str, Any]:
        """As it stands in config.json."""
        return {**asdict(self), "head": {"name": NAMES[type(self.head)], **asdict(self.head)}}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "Card":
        """The card that `to_json` wrote."""
        if unknown := facts.keys() - {field.name for field in fields(cls)}:
            raise ValueError(f"{CARD} has an unknown key {min(unknown)!r}")
        options = dict(facts["head"])
        head = HEADS[options.pop("name")](**options)
        look = {key: tuple(facts["preprocess"][key]) for key in ("mean", "deviation")}
        shape, classes = tuple(facts["image_shape"]), tuple(facts["classes"])
        return cls(facts["network"], shape, classes, Preprocess(**look), head)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Prediction:
    """What the model thinks of n images.

    `probabilities` (n, C) over `classes`, `labels` the likeliest class of each, `entropy` of the
    predictive distribution (total uncertainty) and `mutual_information` between prediction and
    weights (what more data would teach it), both in nats.
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
        self.layout = layout_of(self.backbone)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes it has learnt."""
        return self.state.classes

    def predict(self, images: Tensor, samples: int = 16, seed: int = 0) -> Prediction:
        """Predict uint8 images (n, channels, height, width) with `samples` draws of the weights."""
        predictor = Predictor(self.backbone, self.layout, self.state, self.card.head, samples, seed)
        labels = torch.zeros(len(images), dtype=torch.long)
        shown = ImageSet(images, labels, predictor.classes, self.card.preprocess)
        sampled = predictor.scores(shown).softmax(-1)
        mean = sampled.mean(0)
        names = tuple(predictor.classes[place] for place in mean.argmax(-1).tolist())
        doubt = metrics.entropy(mean), metrics.mutual_information(sampled)
        return Prediction(mean, predictor.classes, names, *doubt)


def build_backbone(card: Card) -> nn.Module:
    """The network of a card, untrained."""
    options = {key: value for key, value in card.network.items() if key != "name"}
    return NETWORKS[str(card.network["name"])](card.image_shape, **options)


def save_model(run_dir: Path, card: Card, state: State, layout: Layout) -> None:
    """Write both files, each in one piece."""
    sites = {name: value for name, value in state.tensors.items() if name.startswith(KEPT)}
    sites["prototypes.loc"] = state["prototypes"]
    for kind, flat in KINDS.items():
        views = layout.views(state[flat]) if flat in state else {}
        sites |= {f"backbone.{name}.{kind}": value for name, value in views.items()}
    tensors = {name: tensor.contiguous() for name, tensor in sites.items()}
    write_atomic(run_dir / MODEL, save(tensors, metadata={"format": "fedbnn 1"}))
    write_atomic(run_dir / CARD, as_json({**card.to_json(), "classes": list(state.classes)}))


def load(run_dir: Path | str) -> Model:
    """The model of a finished run."""
    folder = Path(run_dir)
    try:
        card = Card.from_json(json.loads((folder / CARD).read_text()))
        sites, layout = load_file(folder / MODEL), layout_of(build_backbone(card))
        return Model(card, State(_flat(sites, layout, card), card.classes))
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        fix = f"give the directory of a finished run: it holds {MODEL} and {CARD}"
        raise RunDirectoryError(f"no model can be loaded: {error}", str(folder), fix) from error


def _flat(sites: dict[str, Tensor], layout: Layout, card: Card) -> dict[str, Tensor]:
    """The flat tensors of a state from the sites of a file, if they are those of its card."""
    for slot in layout.slots:
        if sites[f"backbone.{slot.name}.loc"].shape != slot.shape:
            raise ValueError(f"{slot.name} does not have the shape of the network in {CARD}")
    flat = {name: value for name, value in sites.items() if name.startswith(KEPT)}
    flat["prototypes"] = sites["prototypes.loc"]
    if len(card.classes) != (rows := len(flat["prototypes"])):
        raise ValueError(f"{rows} prototypes for the {len(card.classes)} classes in {CARD}")
    for kind, name in KINDS.items():
        if kind == "loc" or "prototypes.scale" in flat:
            own = {slot.name: sites[f"backbone.{slot.name}.{kind}"] for slot in layout.slots}
            flat[name] = layout.flatten(own)
    return flat
