"""A trained model as two files anyone can read, and back: `model.safetensors` and `config.json`.
Loading runs nothing but the constructor of the network, if it is one of ours, of a library or of
this program, or is trusted; what a stranger made is checked like a configuration before.

backbone.<parameter>.loc, backbone.<parameter>.scale    posterior of each weight
backbone.<parameter>.constant                           a weight that was frozen
buffers                                                 statistics of batch norm, in one vector
prototypes.loc, prototypes.scale, prototypes.samples    a row (weights, bias) per class
posteriors.mean, posteriors.count, ...                  the class posteriors, where there are any
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fedbnn.bayes.flatten import Layout, constants, layout_of
from fedbnn.config import own
from fedbnn.config.own import refuse_code
from fedbnn.config.parse import restored
from fedbnn.config.schema import LONGEST_SIDE, Count, Named, Positive, Schema, Section, Value
from fedbnn.errors import ConfigError, FedBNNError, RunDirectoryError
from fedbnn.evaluation import metrics
from fedbnn.heads import HEADS, Head
from fedbnn.heads.predictive import Predictor
from fedbnn.images import ImageSet, Preprocess, stacked
from fedbnn.networks import NETWORKS
from fedbnn.protocol.state import State, digest
from fedbnn.storage import files, run_dir

FORMAT, MODEL, CARD = 1, "model.safetensors", "config.json"
_UNFIT = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, MemoryError)
KEPT = ("prototypes.scale", "prototypes.samples", "posteriors.", "exact.", "buffers")
KINDS = {"loc": "backbone", "scale": "backbone.scale"}
MORE_TENSORS, MORE_NUMBERS = 1000, 2**24
NAMES = {head: name for name, head in HEADS.items()}
TURN = Lock()
"""Threads predict one after the other: a draw of the weights stands in the network meanwhile."""


def preprocess(mean: list[float], deviation: list[Positive]) -> Preprocess:
    """How pixels become network input."""
    return Preprocess(tuple(mean), tuple(deviation))


SCHEMA: Schema = {
    "network": Named(NETWORKS, "mlp", given=("image_shape",), own=own.network),
    "head": Named(HEADS, "linear"),
    "image_shape": Value(tuple[Count, Count, Count], (1, 1, 1)),
    "classes": Value(list[str], []),
    "preprocess": Section(preprocess),
}
"""What a card holds, by type and range."""


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
        look = {"mean": list(self.preprocess.mean), "deviation": list(self.preprocess.deviation)}
        head = {"name": NAMES[type(self.head)], **asdict(self.head)}
        return {**asdict(self), "head": head, "preprocess": look}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "Card":
        """The card that `to_json` wrote; every value is of its type and in its range."""
        for key in SCHEMA:
            if facts.get(key) is None:
                raise ValueError(f"{CARD} does not say {key}")
        found = restored(facts, SCHEMA)
        shape, classes = tuple(found["image_shape"]), tuple(found["classes"])
        card = cls(found["network"], shape, classes, found.build("preprocess"), found.build("head"))
        if card.image_shape[0] not in (1, 3) or max(shape) > LONGEST_SIDE:
            raise ValueError(f"images cannot have the shape {shape}")
        if len(set(classes)) < len(classes):
            raise ValueError("a class is named twice")
        numbers = *card.preprocess.mean, *card.preprocess.deviation
        if len(numbers) != 2 * card.image_shape[0] or not all(map(isfinite, numbers)):
            raise ValueError("a mean and a deviation of each channel are needed")
        return card


@dataclass(frozen=True)
class Prediction:
    """What the model thinks of n images.

    `probabilities` (n, C) over `classes`, `labels` the likeliest class of each, `entropy` of the
    predictive distribution (total uncertainty) and `mutual_information` between prediction and
    weights (what more data would teach it), both in nats. `unknown_class` are the log-odds that an
    image is of a class the model has never met rather than of one it knows, in nats; None where
    the head is linear.
    """

    probabilities: Tensor
    classes: tuple[str, ...]
    labels: tuple[str, ...]
    entropy: Tensor
    mutual_information: Tensor
    unknown_class: Tensor | None


class Model:
    """A trained model; `predict` gives class probabilities with their uncertainty."""

    def __init__(self, card: Card, state: State, backbone: nn.Module) -> None:
        self.card, self.state = card, state
        self.backbone, self.layout = backbone, layout_of(backbone)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes it has learnt."""
        return self.state.classes

    def predict(self, images: Any, samples: int = 16, seed: int = 0) -> Prediction:
        """Predict one image or many with `samples` draws of the weights.

        An image is a picture of Pillow, or an array or tensor: uint8, or floats from 0 to 1, as
        (height, width), (channels, height, width) or (height, width, channels). Whatever its size,
        it is cropped and resized as in training. (3, height, width) is one picture to a model of
        colours and three to one of grey levels.
        """
        if samples < 1:
            raise ConfigError(f"{samples} draws of the weights", "samples", "at least 1 is needed")
        predictor = Predictor(self.backbone, self.layout, self.state, self.card.head, samples, seed)
        pixels = stacked(images, self.card.image_shape)
        labels = torch.zeros(len(pixels), dtype=torch.long)
        shown = ImageSet(pixels, labels, predictor.classes, self.card.preprocess)
        with TURN:
            scores, unknown = predictor.read(shown)
        sampled = scores.softmax(-1)
        mean = sampled.mean(0)
        names = tuple(predictor.classes[place] for place in mean.argmax(-1).tolist())
        doubt = metrics.entropy(mean), metrics.mutual_information(sampled)
        return Prediction(mean, predictor.classes, names, *doubt, unknown)


def build_backbone(card: Card) -> nn.Module:
    """The network of a card, untrained; the file it once began with need not be there."""
    options = {key: card.network[key] for key in card.network.keys() - {"name", "weights"}}
    return own.builder(str(card.network["name"]))(image_shape=card.image_shape, **options)


def save_model(directory: Path, card: Card, state: State, backbone: nn.Module) -> None:
    """Write both files, each in one piece."""
    layout = layout_of(backbone)
    sites = {name: value for name, value in state.tensors.items() if name.startswith(KEPT)}
    frozen = constants(backbone).items()  # of tied weights each name has a copy of its own
    sites |= {f"backbone.{name}.constant": value.clone() for name, value in frozen}
    sites["prototypes.loc"] = state["prototypes"]
    for kind, flat in KINDS.items():
        views = layout.views(state[flat]) if flat in state else {}
        sites |= {f"backbone.{name}.{kind}": value for name, value in views.items()}
    tensors = {name: tensor.contiguous() for name, tensor in sites.items()}
    payload = save(tensors, metadata={"format": f"fedbnn {FORMAT}"})
    facts = {**card.to_json(), "classes": list(state.classes), "model": digest(payload)}
    files.write_atomic(directory / MODEL, payload)
    files.write_atomic(directory / CARD, files.sealed(FORMAT, facts))


def load(directory: Path | str, trust: bool = False) -> Model:
    """The model of a finished run, if both files are as they were written and it can predict.

    Shapes are compared before memory is asked for: it costs no more than the file has. A network
    by import path is imported if this program has done so already, or on `trust`.
    """
    folder = run_dir.intact(Path(directory), MODEL, CARD)
    try:
        _, facts = files.unsealed(folder / CARD)
        payload = files.read(folder / MODEL)
        if digest(payload) != facts.pop("model", None):
            raise ValueError(f"the digest of {MODEL} does not match")
        if not trust:
            refuse_code({"network": _unread(facts.get("network"))}, folder)
        card, sites = Card.from_json(facts), read_tensors(payload)
        where = torch.device("meta" if card.network["name"] in NETWORKS else "cpu")
        with _no_larger(sites.values()), where:
            flat = _flat(sites, layout_of(build_backbone(card)), card)
        backbone = build_backbone(card)
        for name, value in constants(backbone).items():
            value.copy_(sites[f"backbone.{name}.constant"])
        model = Model(card, State(flat, card.classes), backbone)
        model.predict(torch.zeros(card.image_shape, dtype=torch.uint8), samples=1)
        return model
    except RunDirectoryError:
        raise
    except (*_UNFIT, SafetensorError, FedBNNError) as error:
        fix = f"give a finished run: it holds {MODEL} and {CARD}, unless clients keep models"
        raise RunDirectoryError(f"no model can be loaded: {error}", str(folder), fix) from error


@contextmanager
def _no_larger(known: Collection[Tensor]) -> Iterator[None]:
    """In here this thread builds no network of many more weights, or layers, than are known.

    It is stopped before they take memory. A classifier that the file has no need of may be there.
    """
    thread, tensors = get_ident(), MORE_TENSORS + 2 * len(known)
    numbers = MORE_NUMBERS + 2 * sum(one.numel() for one in known)

    def count(_: nn.Module, name: str, weight: Tensor | None) -> None:
        nonlocal tensors, numbers
        if weight is not None and get_ident() == thread:
            tensors, numbers = tensors - 1, numbers - weight.numel()
            if min(tensors, numbers) < 0:
                raise ValueError(f"its network is larger than {MODEL}")

    counting = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        counting.remove()


def _unread(network: Any) -> Any:
    """A network as a card has it, without the file it once began with: nobody reads that."""
    known = isinstance(network, Mapping)
    return {key: network[key] for key in network if key != "weights"} if known else network


def _flat(sites: dict[str, Tensor], layout: Layout, card: Card) -> dict[str, Tensor]:
    """The flat tensors of a state from the sites of a file, if they are those of its card."""
    for name, tensor in sites.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} is not finite")
        if name.endswith(".scale") and not bool((tensor > 0).all()):
            raise ValueError(f"{name} is not positive")
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
