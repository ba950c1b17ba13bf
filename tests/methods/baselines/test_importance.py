"""EWC and MAS: importances against formulas, penalties on the copy that is trained, consolidation through the real loop."""

import pytest
import torch
from torch import nn

from fedbnn.errors import ConfigError
from lightning_modules.client_trainer import LocalTraining
from fedbnn.messages import Update
from fedbnn.methods import EWC, MAS, per_sample
from fedbnn.methods.importance import fisher_sum
from fedbnn.methods.importance import ImportanceFold
from fedbnn.methods.importance import sensitivity_sum
from fedbnn.methods.objectives import Penalty
from fedbnn.networks import MLP, Classifier
from fedbnn.seeds import forked
from fedbnn.state import State


@pytest.fixture
def regression() -> tuple[Classifier, torch.Tensor]:
    """Logistic regression: five inputs, three classes, float64."""
    backbone = nn.Flatten()
    backbone.width = 5
    with forked(3):
        return Classifier(backbone, 3).double(), torch.randn(20, 5, dtype=torch.float64)


def test_the_fisher_of_logistic_regression_is_the_analytic_one(regression) -> None:
    network, inputs = regression
    found = fisher_sum(network, inputs, None)
    chances = network(inputs).softmax(1).detach()
    spread = chances * (1 - chances)
    assert torch.allclose(found["head.weight"], spread.T @ inputs.square(), rtol=1e-12)
    assert torch.allclose(found["head.bias"], spread.sum(0), rtol=1e-12)


def test_drawn_labels_give_the_same_fisher_on_average(regression) -> None:
    network, inputs = regression
    with forked(0):
        drawn = fisher_sum(network, inputs, 2000)
    assert torch.allclose(
        drawn["head.weight"], fisher_sum(network, inputs, None)["head.weight"], rtol=0.1
    )


def test_the_sensitivity_of_a_linear_map_is_the_analytic_one(regression) -> None:
    network, inputs = regression
    outputs = network(inputs).detach()
    found = sensitivity_sum(network, inputs)
    assert torch.allclose(found["head.weight"], 2 * outputs.abs().T @ inputs.abs(), rtol=1e-12)
    assert torch.allclose(found["head.bias"], 2 * outputs.abs().sum(0), rtol=1e-12)


def test_importances_do_not_depend_on_how_many_images_fit_in_memory(
    regression, monkeypatch
) -> None:
    network, inputs = regression
    whole = fisher_sum(network, inputs, None)
    monkeypatch.setattr(per_sample, "FLOATS", 60)
    parts = fisher_sum(network, inputs, None)
    assert all(torch.allclose(whole[name], parts[name], rtol=1e-12) for name in whole)


def pulled(strength: float) -> tuple[Classifier, Pull]:
    network = Classifier(MLP((1, 2, 2), (3,)), 2).double()
    stiff = {
        name: torch.full_like(weight, strength).detach()
        for name, weight in network.named_parameters()
    }
    return network, Penalty(
        {
            name: (stiff[name], weight.detach().clone())
            for name, weight in network.named_parameters()
        }
    )


def test_the_penalty_is_zero_at_the_anchor_and_pulls_the_trained_copy_elsewhere() -> None:
    network, pull = pulled(3.0)
    assert pull.penalty(network) == 0
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.1
    expected = torch.autograd.grad(pull.penalty(network), list(network.parameters()))
    for weight in network.parameters():
        weight.grad = torch.zeros_like(weight)
    pull.correct(network, lr=0.01)
    for weight, gradient in zip(network.parameters(), expected, strict=True):
        assert torch.allclose(weight.grad, gradient, rtol=1e-12)
        assert torch.allclose(weight.grad, torch.full_like(weight, 0.3))


def test_a_step_never_goes_beyond_the_anchor() -> None:
    network, pull = pulled(1e12)
    anchor = [weight.detach().clone() for weight in network.parameters()]
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.1
            weight.grad = torch.zeros_like(weight)
    pull.correct(network, lr=0.5)
    for weight, goal in zip(network.parameters(), anchor, strict=True):
        assert torch.allclose(weight - 0.5 * weight.grad, goal, atol=1e-12)


@pytest.mark.parametrize(("method", "factor"), [(EWC(strength=5), 5.0), (MAS(strength=5), 10.0)])
def test_stiffness_is_the_curvature_of_the_penalty(method, factor) -> None:
    assert method.stiffness(torch.tensor(2.0)) == 2 * factor


@pytest.mark.parametrize("kind", [EWC, MAS])
def test_consolidation_happens_at_task_ends_in_a_second_exchange(kind, toy, played) -> None:
    run = played(kind(), toy())
    assert ["anchor.backbone" in state for state in run.states] == [False, True, True, True]
    second, last = run.states[1], run.states[3]
    assert torch.equal(second["anchor.backbone"], second["backbone"])
    assert torch.equal(run.states[2]["anchor.backbone"], second["backbone"])
    assert second["importance.backbone"].min() >= 0 < second["importance.backbone"].max()
    assert (last["importance.backbone"] >= second["importance.backbone"]).all()
    assert len(last["importance.prototypes"]) == len(last.classes) == 4


def test_bytes_are_those_of_what_is_sent(toy, played) -> None:
    records = played(EWC(), toy()).records
    plain, boundary, anchored = (records[number] for number in (1, 2, 3))
    assert boundary["bytes_up"] > 1.5 * plain["bytes_up"]
    assert anchored["bytes_up"] < 1.3 * plain["bytes_up"]
    assert anchored["bytes_down"] > 1.8 * plain["bytes_down"]


@pytest.mark.parametrize("strong", [EWC(strength=1e6), MAS(strength=1e6)])
def test_a_strong_penalty_holds_the_weights_that_mattered(strong, toy, played) -> None:
    def drift(method) -> float:
        states = played(
            method, toy(), LocalTraining(optimizer="sgd", lr=0.05, epochs=4, batch_size=8)
        ).states
        weight = states[1]["importance.backbone"]
        return float((weight * (states[-1]["backbone"] - states[1]["backbone"]).square()).sum())

    free = drift(type(strong)(strength=0))
    assert free > 0
    assert drift(strong) < 0.1 * free


def update(backbone: list[float], samples: int) -> Update:
    tensors = {"backbone": torch.tensor(backbone), "prototypes": torch.zeros(1, 2)}
    return Update("r", 1, "importance", 0, "", samples, {"a": samples}, tensors)


def test_importances_add_up_with_decay_and_weigh_by_images() -> None:
    state = State(
        {
            "backbone": torch.zeros(2),
            "prototypes": torch.zeros(1, 2),
            "importance.backbone": torch.tensor([4.0, 0.0]),
        },
        ("a",),
    )
    fold = ImportanceFold(state, 0.5)
    fold.add(update([1.0, 0.0], 30))
    fold.add(update([0.0, 1.0], 10))
    assert torch.allclose(fold.close()["importance.backbone"], torch.tensor([2.75, 0.25]))


def test_a_negative_importance_is_a_defect() -> None:
    assert EWC().defect(State({}), update([-1.0, 0.0], 1)) is not None
    assert EWC().defect(State({}), update([1.0, 0.0], 1)) is None


@pytest.mark.parametrize(
    "wrong",
    [{"strength": -1}, {"decay": 2}, {"draws": 0}, {"every": 0}, {"share": "backbone_only"}],
)
def test_impossible_settings_are_refused(wrong) -> None:
    with pytest.raises(ConfigError):
        EWC(**wrong)
