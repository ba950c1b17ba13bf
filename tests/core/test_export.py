"""A model as two files that anyone can read and nobody can execute."""

import json
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentError
from PIL import Image
from safetensors.torch import load_file, save
from torch import Tensor

import fedbnn
from fedbnn.errors import ConfigError, DataError, RunDirectoryError
from fedbnn.export import CARD, MODEL, Card, load
from fedbnn.heads import GaussianHead, Head, LinearHead
from fedbnn.images import stacked
from fedbnn.networks import MLP, NETWORKS
from fedbnn.protocol.state import digest
from fedbnn.storage.files import sealed, unsealed
from tests.core.parsing import parsed
from tests.core.predictors import (
    LOOK,
    PLAIN,
    SHAPE,
    card_of,
    images,
    predictor,
    saved,
    state_of,
)

FULL = GaussianHead(0.8, 0.6, 7, 20, temperature=2.0, prototypes=0.3, prior="frequency")


def forged(folder: Path, **changes: Any) -> None:
    """Another card under a seal that is right: what somebody can make who means harm."""
    _, facts = unsealed(folder / CARD)
    (folder / CARD).write_bytes(sealed(1, {**facts, **changes}))


def with_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Other tensors, which the card is told of."""
    payload = save(change(load_file(folder / MODEL)))
    (folder / MODEL).write_bytes(payload)
    forged(folder, model=digest(payload))


@pytest.mark.parametrize("bayesian", [True, False])
@pytest.mark.parametrize("posteriors", [True, False])
@pytest.mark.parametrize("head", [LinearHead(), PLAIN, FULL], ids=["linear", "plain", "full"])
def test_a_saved_model_predicts_the_same(
    tmp_path: Path, bayesian: bool, posteriors: bool, head: Head
) -> None:
    backbone = MLP(SHAPE, (5,))
    state = state_of(backbone, bayesian, posteriors)
    model = saved(tmp_path, backbone, state, head=head)
    scores = predictor(state, backbone, 6, 1, head).scores(images())
    expected = scores.softmax(-1).mean(0)
    found = model.predict(images().pixels, samples=6, seed=1)
    torch.testing.assert_close(found.probabilities, expected, rtol=0, atol=0)
    assert found.classes == ("a", "c")


@pytest.mark.parametrize("head", [LinearHead(), GaussianHead(), FULL], ids=str)
def test_a_card_keeps_the_head_with_all_its_options(tmp_path: Path, head: Head) -> None:
    backbone = MLP(SHAPE, (5,))
    assert saved(tmp_path, backbone, state_of(backbone), head=head).card.head == head
    card = card_of(head=head)
    assert Card.from_json(json.loads(json.dumps(card.to_json()))) == card


def test_options_that_a_card_leaves_out_have_their_defaults(tmp_path: Path) -> None:
    backbone = MLP(SHAPE, (5,))
    saved(tmp_path, backbone, state_of(backbone, posteriors=True), head=FULL)
    forged(tmp_path, head={"name": "gaussian", "memory": 0.5})
    assert load(tmp_path).card.head == GaussianHead(memory=0.5)


@pytest.mark.parametrize("share", ["-0.1", "inf", "nan"])
def test_prototypes_have_a_finite_say(share: str) -> None:
    with pytest.raises(ArgumentError, match="prototypes"):
        parsed(GaussianHead, prototypes=share)
    assert parsed(GaussianHead, prototypes="0.3") == 0.3


@pytest.mark.parametrize(
    "setting",
    [
        {"anchor_rounds": "0"},
        {"memory": "-0.1"},
        {"ridge": "0"},
        {"temperature": "0"},
        {"prior": "no"},
    ],
    ids=str,
)
def test_options_of_the_head_out_of_range_are_refused(setting: dict[str, str]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(setting))):
        parsed(GaussianHead, **setting)


def test_batch_norm_and_its_statistics_are_saved(tmp_path: Path) -> None:
    backbone = NETWORKS["cifar_resnet18"]((1, 4, 4))
    state = state_of(backbone)
    state = state.having({"buffers": state["buffers"] + 0.25})
    back = saved(tmp_path, backbone, state, network="cifar_resnet18").state
    assert back.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(back[name], value) for name, value in state.tensors.items())


def test_the_look_of_images_is_saved(tmp_path: Path) -> None:
    backbone = MLP(SHAPE, (5,))
    look = saved(tmp_path, backbone, state_of(backbone)).card.preprocess
    assert (look.mean, look.deviation) == (LOOK.mean, LOOK.deviation)


def plain_model(folder: Path) -> fedbnn.export.Model:
    """A small model, saved and loaded."""
    backbone = MLP(SHAPE, (5,))
    return saved(folder, backbone, state_of(backbone))


def test_an_image_is_the_same_however_it_is_given(tmp_path: Path) -> None:
    model, pixels = plain_model(tmp_path), images(4).pixels
    wanted = model.predict(pixels).probabilities
    pictures = [Image.fromarray(one.permute(1, 2, 0).squeeze().numpy()) for one in pixels]
    ways = (pixels.numpy(), pixels.double() / 255, list(pixels), tuple(pixels.numpy()), pictures)
    for given in (*ways, pixels.permute(0, 2, 3, 1)):
        assert torch.equal(model.predict(given).probabilities, wanted)
    for given in (pixels[0], pixels[0].numpy() / 255, pictures[0], pixels[0].permute(1, 2, 0)):
        assert torch.allclose(model.predict(given).probabilities, wanted[:1])
    for given in (pixels[0, 0], torch.rand(50, 20, 3), torch.rand(50, 20, 4)):
        assert len(model.predict(given).labels) == 1
    assert torch.allclose(model.predict(pixels[:3, 0]).probabilities, wanted[:3])
    half = (pixels.double() / 255).bfloat16()
    assert torch.allclose(model.predict(half).probabilities, wanted, atol=0.05)


def test_three_planes_are_a_picture_to_a_model_of_colours_and_three_to_one_of_grey() -> None:
    planes, opaque = torch.rand(3, 8, 6), np.full((8, 6, 4), 255, np.uint8)
    assert len(stacked(planes, (3, 8, 6))) == 1
    assert len(stacked(planes, (1, 8, 6))) == 3
    assert len(stacked(planes[:2], (3, 8, 6))) == 2
    assert torch.equal(stacked(opaque, (3, 8, 6)), torch.full((1, 3, 8, 6), 255).byte())


def test_a_model_needs_a_draw_of_its_weights(tmp_path: Path) -> None:
    model = plain_model(tmp_path)
    for samples in (0, -1):
        with pytest.raises(ConfigError, match="at least 1 is needed"):
            model.predict(torch.zeros(4, 4), samples)


def test_threads_that_share_a_model_get_what_one_alone_gets(tmp_path: Path) -> None:
    backbone = MLP(SHAPE, (5,))
    model = saved(tmp_path, backbone, state_of(backbone, True, False), head=LinearHead())
    alone = [model.predict(images().pixels, seed=seed).probabilities for seed in range(4)]
    model.backbone.register_forward_pre_hook(lambda *_: time.sleep(0.001))  # others come between
    with ThreadPoolExecutor(4) as threads:
        several = threads.map(lambda seed: model.predict(images().pixels, seed=seed), range(4))
        for expected, found in zip(alone, several, strict=True):
            assert torch.equal(found.probabilities, expected)


def test_a_picture_that_breaks_off_is_refused_in_one_line(tmp_path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(
        tmp_path / "whole.png"
    )
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:900])
    (tmp_path / "model").mkdir()
    with Image.open(tmp_path / "cut.png") as lazy, pytest.raises(DataError, match="no images"):
        plain_model(tmp_path / "model").predict(lazy)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.full((8, 8), 1.5), "pixels outside of 0..1"),
        (torch.full((8, 8), torch.nan), "pixels outside of 0..1"),
        (torch.zeros(8, 8, dtype=torch.int64), "an image is of int64"),
        (torch.zeros(2, 5, 8, 8), "an image has the shape (5, 8, 8)"),
        (torch.zeros(1, 0, 8), "an image has the shape"),
        ([], "these are no images"),
        (3, "these are no images"),
        ("a.png", "'a.png' is a name and no image"),
        ([[[1, 2], [3]]], "these are no images"),
    ],
)
def test_what_is_no_image_is_refused_in_one_line(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(DataError) as failure:
        plain_model(tmp_path).predict(given)
    assert said in str(failure.value)


@pytest.mark.parametrize("name", ["os:getcwd", "subprocess:run", "builtins:print", "torch:load"])
def test_a_card_cannot_make_loading_call_what_is_no_network(tmp_path: Path, name: str) -> None:
    plain_model(tmp_path)
    forged(tmp_path, network={"name": name, "options": {"args": ["touch", str(tmp_path / "x")]}})
    with pytest.raises(RunDirectoryError, match=f"asks to import '{name}'"):
        load(tmp_path)
    with pytest.raises(RunDirectoryError, match="is no network"):
        load(tmp_path, trust=True)
    assert not (tmp_path / "x").exists()


MAKES = "torch.fx.graph_module.reduce_graph_module"
CODE = {"body": {"_code": "def forward(self): pass"}, "import_block": "open('executed', 'w')\n"}
TRAPS: dict[str, dict[str, Any]] = {
    "a module nobody imported": {"name": "trap:Net"},
    "source code for torch": {"name": "torch.fx.graph_module:reduce_graph_module", "options": CODE},
    "the same by way of this program": {"name": f"{__name__}:{MAKES}", "options": CODE},
    "the same by way of a library": {
        "name": f"torchvision.models.feature_extraction:{MAKES}",
        "options": CODE,
    },
    "an argument of a library": {"name": "torchvision.models:ResNet", "norm_layer": "trap.Net"},
    "an argument of a constructor": {
        "name": "torchvision.models:resnet18",
        "options": {"norm_layer": {"class_path": "trap.Net"}},
    },
    "a pickle for timm": {"name": "timm:create_model", "options": {"checkpoint_path": "x"}},
    "no text": {"name": ["trap:Net"]},
}


@pytest.mark.parametrize("how", TRAPS)
def test_loading_imports_and_executes_nothing_that_a_card_names(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    trap = "from torch import nn\nopen('executed', 'w')\nclass Net(nn.Module):\n    pass\n"
    (tmp_path / "trap.py").write_text(trap)
    (tmp_path / "run").mkdir()
    plain_model(tmp_path / "run")
    forged(tmp_path / "run", network=TRAPS[how])
    with pytest.raises(RunDirectoryError, match=r"asks to import .*; if you trust it: --trust"):
        load(tmp_path / "run")
    assert not (tmp_path / "executed").exists()


class Given(MLP):
    """A network of this program, which has imported it."""

    def __init__(self, image_shape: tuple[int, int, int]) -> None:
        super().__init__(image_shape, (5,))


def test_a_network_that_the_program_has_imported_is_loaded(tmp_path: Path) -> None:
    plain_model(tmp_path)
    forged(tmp_path, network={"name": f"{__name__}:Given", "weights": "package:gone.pth"})
    assert load(tmp_path).predict(images().pixels).labels


def test_the_package_loads_by_name(tmp_path: Path) -> None:
    backbone = MLP(SHAPE, (5,))
    saved(tmp_path, backbone, state_of(backbone))
    assert fedbnn.load(tmp_path).predict(images().pixels).probabilities.shape == (30, 2)


class Trap:
    """Executes when it is unpickled."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.sign,)


@pytest.mark.parametrize("file", [MODEL, CARD])
def test_loading_never_executes(tmp_path: Path, file: str) -> None:
    backbone = MLP(SHAPE, (5,))
    saved(tmp_path, backbone, state_of(backbone))
    sign = tmp_path / "executed"
    payload = pickle.dumps(Trap(sign))
    (tmp_path / file).write_bytes(payload)
    with pytest.raises(RunDirectoryError):
        load(tmp_path)
    assert not sign.exists()
    pickle.loads(payload)
    assert sign.exists(), "the trap itself works"


@pytest.mark.parametrize(
    "change",
    [
        {"network": {"name": "mlp", "hidden": [7]}},
        {"network": {"name": "nothing"}},
        {"network": {"name": "mlp", "depth": 3}},
        {"network": {}},
        {"network": {"name": "mlp", "hidden": [10**9, 10**9]}},
        {"network": {"name": "mlp", "hidden": "many"}},
        {"network": {"name": "mlp", "hidden": [-5]}},
        {"network": ["mlp"]},
        {"classes": ["a"]},
        {"classes": ["a", "b", "b"]},
        {"classes": [1, 2, 3]},
        {"classes": "abc"},
        {"classes": {"a": 1, "b": 2, "c": 3}},
        {"image_shape": [1, 0, 16]},
        {"image_shape": [1, 4, 4, 1]},
        {"image_shape": [1, 2, -8]},
        {"image_shape": [True, 4, 4]},
        {"image_shape": ["1", "4", "x"]},
        {"preprocess": {"mean": [0.5], "deviation": [0.0]}},
        {"preprocess": {"mean": [0.5], "deviation": [-1.0]}},
        {"preprocess": {"mean": [float("nan")], "deviation": [1.0]}},
        {"preprocess": {"mean": [0.5, 0.5], "deviation": [1.0, 1.0]}},
        {"preprocess": {"mean": ["x"], "deviation": [1.0]}},
        {"head": {"name": "gaussian", "temperature": 0}},
        {"head": {"name": "gaussian", "temperature": -1}},
        {"head": {"name": "gaussian", "temperature": "cold"}},
        {"head": {"name": "gaussian", "temperature": float("inf")}},
        {"head": {"name": "gaussian", "prior": "vague"}},
        {"head": 7},
        {"image_shape": [1, 9, 9]},
        {"image_shape": None},
        {"preprocess": {}},
        {"head": {"name": "nothing"}},
        {"head": {"name": "gaussian", "surprise": 1}},
        {"head": None},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_card_that_does_not_fit_its_tensors_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    backbone = MLP(SHAPE, (5,))
    saved(tmp_path, backbone, state_of(backbone))
    forged(tmp_path, **change)
    with pytest.raises(RunDirectoryError, match="no model can be loaded") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "network",
    [
        {"name": "mlp", "hidden": [1] * 5000},
        {"name": "mlp", "hidden": [10**4, 10**4]},
        {"name": "torchvision.models:resnet50", "options": {"width_per_group": 1024}},
    ],
    ids=["deep", "wide", "of a library"],
)
def test_a_network_much_larger_than_its_file_is_not_built(
    tmp_path: Path, network: dict[str, Any]
) -> None:
    plain_model(tmp_path)
    forged(tmp_path, network=network)
    with pytest.raises(RunDirectoryError, match="its network is larger than model"):
        load(tmp_path)


NEEDED = "prototypes.loc"
FORGED: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "not a number": lambda sites: {**sites, NEEDED: sites[NEEDED] * torch.nan},
    "a negative scale": lambda sites: {**sites, "prototypes.scale": -sites["prototypes.scale"]},
    "one missing": lambda sites: {name: value for name, value in sites.items() if name != NEEDED},
    "flat prototypes": lambda sites: {**sites, NEEDED: sites[NEEDED].flatten()},
    "narrow prototypes": lambda sites: {**sites, NEEDED: sites[NEEDED][:, :-2].contiguous()},
    "other posteriors": lambda sites: {**sites, "posteriors.count": torch.zeros(3).double()},
    "whole numbers": lambda sites: {name: value.long() for name, value in sites.items()},
    "nothing": lambda sites: {},
}


@pytest.mark.parametrize("how", FORGED)
def test_tensors_that_do_not_fit_are_refused_in_one_line(tmp_path: Path, how: str) -> None:
    backbone = MLP(SHAPE, (5,))
    saved(tmp_path, backbone, state_of(backbone))
    with_tensors(tmp_path, FORGED[how])
    with pytest.raises(RunDirectoryError, match="no model can be loaded"):
        load(tmp_path)


@pytest.mark.parametrize("file", [MODEL, CARD])
def test_a_flipped_bit_anywhere_is_named_and_not_served(tmp_path: Path, file: str) -> None:
    backbone = MLP(SHAPE, (5,))
    saved(tmp_path, backbone, state_of(backbone))
    whole = (tmp_path / file).read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        (tmp_path / file).write_bytes(flipped)
        with pytest.raises(RunDirectoryError, match=file):
            load(tmp_path)


def test_a_card_nested_without_end_is_refused_in_one_line(tmp_path: Path) -> None:
    backbone = MLP(SHAPE, (5,))
    saved(tmp_path, backbone, state_of(backbone))
    (tmp_path / CARD).write_bytes(b"[" * 10**5)
    with pytest.raises(RunDirectoryError, match=r"config\.json cannot be read"):
        load(tmp_path)


def test_nothing_there_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no model"):
        load(tmp_path / "absent")
