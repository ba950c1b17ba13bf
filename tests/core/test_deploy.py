"""A model as two files that anyone can read and nobody can execute."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbnn
from fedbnn.bayes.flatten import layout_of
from fedbnn.errors import ConfigError, RunDirectoryError
from fedbnn.export import CARD, MODEL, load, save_model
from fedbnn.heads.predictive import Reading
from fedbnn.methods import FedBNN
from fedbnn.networks import MLP, NETWORKS
from tests.core.predictors import LOOK, SHAPE, card_of, images, predictor, saved, state_of


@pytest.mark.parametrize("bayesian", [True, False])
@pytest.mark.parametrize("places", [True, False])
def test_a_saved_model_predicts_the_same(tmp_path: Path, bayesian: bool, places: bool) -> None:
    backbone = MLP(SHAPE, (5,))
    state = state_of(backbone, bayesian, places=places)
    model = saved(tmp_path, backbone, state)
    expected = predictor(state, backbone, samples=6, seed=1).scores(images()).softmax(-1).mean(0)
    found = model.predict(images().pixels, samples=6, seed=1)
    torch.testing.assert_close(found.probabilities, expected, rtol=0, atol=0)
    assert found.classes == ("a", "c")


def test_a_saved_model_keeps_how_its_classes_are_read(tmp_path: Path) -> None:
    backbone = MLP(SHAPE, (5,))
    state = state_of(backbone, places=True)
    save_model(
        tmp_path,
        replace(card_of(), temperature=2.0, head_rows=0.3, head_prior="frequency"),
        state,
        layout_of(backbone),
    )
    reading = {"temperature": 2.0, "prototypes": 0.3, "prior": "frequency"}
    expected = (
        predictor(state, backbone, samples=6, seed=1, **reading)
        .scores(images())
        .softmax(-1)
        .mean(0)
    )
    assert torch.equal(
        load(tmp_path).predict(images().pixels, samples=6, seed=1).probabilities, expected
    )


def test_a_card_from_before_the_rows_had_a_say_still_loads(tmp_path: Path) -> None:
    backbone = MLP(SHAPE, (5,))
    saved(tmp_path, backbone, state_of(backbone, places=True))
    card = json.loads((tmp_path / CARD).read_text())
    del card["head_rows"], card["head_prior"]
    (tmp_path / CARD).write_text(json.dumps(card))
    assert load(tmp_path).card.reading == Reading()


@pytest.mark.parametrize("share", [-0.1, float("inf"), float("nan")])
def test_rows_have_a_finite_say(share: float) -> None:
    with pytest.raises(ConfigError, match="head_rows"):
        FedBNN(head_rows=share)


@pytest.mark.parametrize("bayes_norm", [True, False])
def test_batch_norm_and_its_statistics_are_saved(tmp_path: Path, bayes_norm: bool) -> None:
    backbone = NETWORKS["cifar_resnet18"]((1, 4, 4))
    state = state_of(backbone, bayes_norm=bayes_norm)
    state = state.having({"buffers": state["buffers"] + 0.25})
    back = saved(tmp_path, backbone, state, network="cifar_resnet18", bayes_norm=bayes_norm).state
    assert back.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(back[name], value) for name, value in state.tensors.items())


def test_the_look_of_images_is_saved(tmp_path: Path) -> None:
    backbone = MLP(SHAPE, (5,))
    look = saved(tmp_path, backbone, state_of(backbone)).card.preprocess
    assert (look.mean, look.deviation) == (LOOK.mean, LOOK.deviation)


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
        {"classes": ["a"]},
        {"image_shape": [1, 9, 9]},
        {"image_shape": None},
        {"preprocess": {}},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_card_that_does_not_fit_its_tensors_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    backbone = MLP(SHAPE, (5,))
    saved(tmp_path, backbone, state_of(backbone))
    facts = json.loads((tmp_path / CARD).read_text())
    (tmp_path / CARD).write_text(json.dumps({**facts, **change}))
    with pytest.raises(RunDirectoryError):
        load(tmp_path)


def test_nothing_there_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no model"):
        load(tmp_path / "absent")
