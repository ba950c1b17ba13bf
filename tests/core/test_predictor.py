"""Prediction from a state, and a model as two files that anyone can read and nobody can execute."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedbnn
from fedbnn import library
from fedbnn.deploy import CARD, MODEL, Card, load, save_model
from fedbnn.errors import ConfigError, RunDirectoryError
from fedbnn.images import ImageSet, Look
from fedbnn.layout import layout_of
from fedbnn.methods import FedBNN
from fedbnn.networks import MLP, NETWORKS
from fedbnn.places import Places, without_places
from fedbnn.predictor import Predictor
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


def predictor(state: State, trunk: nn.Module, **options: Any) -> Predictor:
    return Predictor(trunk, layout_of(trunk), state, **options)


def test_only_trained_classes_are_predicted_in_the_order_of_the_library() -> None:
    trunk = MLP(SHAPE, (5,))
    found = predictor(state_of(trunk), trunk, samples=3)
    assert found.classes == ("a", "c")
    assert found.scores(images()).shape == (3, 30, 2)


@pytest.mark.parametrize("samples", [0, 3])
def test_rows_beside_the_class_posteriors_add_their_scores(samples: int) -> None:
    """The same draws judge: scores of both = scores of the posteriors + weight * scores of the rows."""
    trunk = MLP(SHAPE, (5,))
    state = state_of(trunk, places=True)
    both, posteriors = (predictor(state, trunk, samples=samples, head_rows=weight).scores(images()) for weight in (0.3, 0.0))
    rows = predictor(without_places(state), trunk, samples=samples, head_rows=0.3).scores(images())
    torch.testing.assert_close(both, posteriors + 0.3 * rows)
    assert not torch.allclose(both, posteriors)


def test_draws_are_made_once_and_serve_every_call_and_batch() -> None:
    trunk = MLP(SHAPE, (5,))
    found = predictor(state_of(trunk), trunk, samples=4)
    whole, many = found.scores(images(20)), images(1001)
    assert torch.equal(found.scores(images(20)), whole)
    parts = [found.scores(many.subset(torch.arange(start, min(start + 250, 1001)))) for start in range(0, 1001, 250)]
    torch.testing.assert_close(found.scores(many), torch.cat(parts, 1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(whole[0], whole[1])


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    trunk = MLP(SHAPE, (5,))
    state = state_of(trunk)
    first, second, other = (predictor(state, trunk, samples=2, seed=seed).scores(images()) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_points_are_scored_once_and_zero_draws_are_the_means() -> None:
    trunk = MLP(SHAPE, (5,))
    state = state_of(trunk)
    points = predictor(state.only("trunk", "buffers", "rows", "rows.samples"), trunk, samples=8).scores(images())
    assert points.shape == (1, 30, 2)
    assert torch.equal(predictor(state, trunk, samples=0).scores(images()), points)
    rows = state["rows"][[0, 2]]
    with torch.no_grad():
        expected = trunk(LOOK.normalise(images().pixels)) @ rows[:, :-1].T + rows[:, -1]
    torch.testing.assert_close(points[0], expected)


def test_draws_have_the_moments_of_the_posterior() -> None:
    """With a trunk that adds nothing, logits are sums of normal variables whose moments are known."""

    class Pixels(nn.Module):
        width = 16

        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(16))

        def forward(self, pictures: Tensor) -> Tensor:
            return pictures.flatten(1) + self.offset

    trunk = Pixels()
    state = state_of(trunk).having({"trunk.scale": torch.full((16,), 1e-9)})
    scores = predictor(state, trunk, samples=1500).scores(images(3))
    inputs = LOOK.normalise(images(3).pixels).flatten(1)
    rows = state["rows"][[0, 2]]
    deviation = 0.2 * (inputs.square().sum(1) + 1).sqrt()
    torch.testing.assert_close(scores.mean(0), inputs @ rows[:, :-1].T + rows[:, -1], rtol=0, atol=0.15)
    torch.testing.assert_close(scores.std(0), deviation[:, None].expand(3, 2), rtol=0.1, atol=0)


def test_prediction_is_the_mean_of_probabilities_and_not_of_logits(tmp_path: Path) -> None:
    trunk = MLP(SHAPE, (5,))
    model = saved(tmp_path, trunk, state_of(trunk))
    found = model.predict(images().pixels, samples=5, seed=3)
    scores = predictor(state_of_file(tmp_path), trunk, samples=5, seed=3).scores(images())
    mean = scores.softmax(-1).mean(0)
    torch.testing.assert_close(found.probabilities, mean)
    assert not torch.allclose(found.probabilities, scores.mean(0).softmax(-1), atol=1e-3)
    entropy = -(mean * mean.log()).sum(-1)
    within = -(scores.softmax(-1) * scores.log_softmax(-1)).sum(-1).mean(0)
    torch.testing.assert_close(found.entropy, entropy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.mutual_information, entropy - within, rtol=1e-3, atol=1e-5)
    assert found.labels == tuple(("a", "c")[place] for place in mean.argmax(1).tolist())


def test_eval_mode_and_statistics_are_used_for_batch_norm() -> None:
    trunk = NETWORKS["cifar_resnet18"]((3, 8, 8))
    state = state_of(trunk, bayesian=False)
    pictures = ImageSet(torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8), torch.zeros(4, dtype=torch.long), ("a",), Look())
    found = predictor(state, trunk).scores(pictures)
    alone = torch.cat([predictor(state, trunk).scores(pictures.subset(torch.tensor([place]))) for place in range(4)], 1)
    torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-4)
    shifted = state.having({"buffers": state["buffers"] + 0.5})
    assert not torch.allclose(predictor(shifted, trunk).scores(pictures), found, atol=1e-3)


# Two files.


def card_of(bayes_norm: bool = True, network: str = "mlp", shape: tuple[int, int, int] = SHAPE, **options: Any) -> Card:
    chosen = {"hidden": [5]} if network == "mlp" else {}
    return Card({"name": network, **chosen, **options}, shape, ("a", "b", "c"), LOOK, bayes_norm)


def saved(folder: Path, trunk: nn.Module, state: State, **card: Any) -> fedbnn.deploy.Model:
    facts = card_of(**card)
    save_model(folder, facts, state, layout_of(trunk, facts.bayes_norm))
    return load(folder)


def state_of_file(folder: Path) -> State:
    return load(folder).state


@pytest.mark.parametrize("bayesian", [True, False])
@pytest.mark.parametrize("places", [True, False])
def test_a_saved_model_predicts_the_same(tmp_path: Path, bayesian: bool, places: bool) -> None:
    trunk = MLP(SHAPE, (5,))
    state = state_of(trunk, bayesian, places=places)
    model = saved(tmp_path, trunk, state)
    expected = predictor(state, trunk, samples=6, seed=1).scores(images()).softmax(-1).mean(0)
    found = model.predict(images().pixels, samples=6, seed=1)
    torch.testing.assert_close(found.probabilities, expected, rtol=0, atol=0)
    assert found.classes == ("a", "c")


def test_a_saved_model_keeps_what_its_rows_have_to_say(tmp_path: Path) -> None:
    trunk = MLP(SHAPE, (5,))
    state = state_of(trunk, places=True)
    save_model(tmp_path, replace(card_of(), temperature=2.0, head_rows=0.3), state, layout_of(trunk))
    expected = predictor(state, trunk, samples=6, seed=1, temperature=2.0, head_rows=0.3).scores(images()).softmax(-1).mean(0)
    assert torch.equal(load(tmp_path).predict(images().pixels, samples=6, seed=1).probabilities, expected)


def test_a_card_from_before_the_rows_had_a_say_still_loads(tmp_path: Path) -> None:
    trunk = MLP(SHAPE, (5,))
    saved(tmp_path, trunk, state_of(trunk, places=True))
    card = json.loads((tmp_path / CARD).read_text())
    del card["head_rows"]
    (tmp_path / CARD).write_text(json.dumps(card))
    assert load(tmp_path).card.head_rows == 0


@pytest.mark.parametrize("share", [-0.1, float("inf"), float("nan")])
def test_rows_have_a_finite_say(share: float) -> None:
    with pytest.raises(ConfigError, match="head_rows"):
        FedBNN(head_rows=share)


@pytest.mark.parametrize("bayes_norm", [True, False])
def test_batch_norm_and_its_statistics_are_saved(tmp_path: Path, bayes_norm: bool) -> None:
    trunk = NETWORKS["cifar_resnet18"]((1, 4, 4))
    state = state_of(trunk, bayes_norm=bayes_norm)
    state = state.having({"buffers": state["buffers"] + 0.25})
    back = saved(tmp_path, trunk, state, network="cifar_resnet18", bayes_norm=bayes_norm).state
    assert back.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(back[name], value) for name, value in state.tensors.items())


def test_the_look_of_images_is_saved(tmp_path: Path) -> None:
    trunk = MLP(SHAPE, (5,))
    look = saved(tmp_path, trunk, state_of(trunk)).card.look
    assert (look.mean, look.deviation) == (LOOK.mean, LOOK.deviation)


def test_the_package_loads_by_name(tmp_path: Path) -> None:
    trunk = MLP(SHAPE, (5,))
    saved(tmp_path, trunk, state_of(trunk))
    assert fedbnn.load(tmp_path).predict(images().pixels).probabilities.shape == (30, 2)


class Trap:
    """Executes when it is unpickled."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.sign,)


@pytest.mark.parametrize("file", [MODEL, CARD])
def test_loading_never_executes(tmp_path: Path, file: str) -> None:
    trunk = MLP(SHAPE, (5,))
    saved(tmp_path, trunk, state_of(trunk))
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
        {"look": {}},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_card_that_does_not_fit_its_tensors_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    trunk = MLP(SHAPE, (5,))
    saved(tmp_path, trunk, state_of(trunk))
    facts = json.loads((tmp_path / CARD).read_text())
    (tmp_path / CARD).write_text(json.dumps({**facts, **change}))
    with pytest.raises(RunDirectoryError):
        load(tmp_path)


def test_nothing_there_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no model"):
        load(tmp_path / "absent")
