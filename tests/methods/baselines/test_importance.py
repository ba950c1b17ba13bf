"""EWC and MAS: importances against formulas, penalties on the copy that is trained.

Consolidation goes through the real loop.
"""

import pytest
import torch
from torch import nn

from fedbnn.bayes.flatten import layout_of
from fedbnn.methods import importance
from fedbnn.methods.base import Assignment, Penalty
from fedbnn.methods.importance import EWC, MAS, ImportanceFold, fisher_sum, sensitivity_sum
from fedbnn.networks import MLP, Classifier
from fedbnn.protocol.messages import FitInstruction, Update
from fedbnn.protocol.state import State
from fedbnn.seeds import forked
from lightning_modules.client_trainer import LocalTraining

KINDS = ("importance", "anchor")


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
    monkeypatch.setattr(importance, "FLOATS", 60)
    parts = fisher_sum(network, inputs, None)
    assert all(torch.allclose(whole[name], parts[name], rtol=1e-12) for name in whole)


def pulled(strength: float) -> tuple[Classifier, Penalty]:
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
    weights = dict(network.named_parameters())
    for moved in (0.0, 0.1):
        with torch.no_grad():
            for weight in weights.values():
                weight += moved
        pairs = [(s, weights[name] - a) for name, (s, a) in pull.anchors.items()]
        penalty = 0.5 * sum((s * gap.square()).sum() for s, gap in pairs)
        expected = torch.autograd.grad(penalty, list(weights.values()))
        assert bool(penalty > 0) == bool(moved)
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
def test_stiffness_is_the_curvature_of_the_penalty(method, factor, toy) -> None:
    """lambda Omega for lambda/2 Omega (theta - theta*)^2, 2 lambda Omega without the 1/2."""
    images, backbone = toy().train(1, 0), MLP((1, 4, 4), (8,))
    layout, classes = layout_of(backbone), ("toy/0", "toy/1")
    tensors = {f"backbone.{kind}": torch.full((layout.size,), 2.0) for kind in KINDS}
    tensors |= {f"prototypes.{kind}": torch.full((2, 9), 2.0) for kind in KINDS}
    instruction = FitInstruction("r", 1, "train", State(tensors, classes))
    network = layout.classifier(backbone, torch.zeros(2, 9))
    assignment = Assignment(instruction, layout, 0, classes, images, None)
    anchors = method.objective(assignment, network).anchors
    assert anchors.keys() == dict(network.named_parameters()).keys()
    for strength, anchor in anchors.values():
        assert torch.equal(strength, torch.full_like(strength, 2 * factor))
        assert torch.equal(anchor, torch.full_like(anchor, 2.0))


@pytest.mark.parametrize("method", [EWC(draws=None), MAS()])
def test_a_client_sends_means_over_its_images(method, toy) -> None:
    """EWC of the softmax over the classes it holds, MAS of the logits of all that were trained."""
    images, backbone = toy().train(1, 0), MLP((1, 4, 4), (8,))
    layout, classes, rows = layout_of(backbone), ("toy/0", "toy/1", "toy/2"), torch.randn(3, 9)
    samples = torch.ones(3, dtype=torch.float64)
    state = State({"prototypes": rows, "prototypes.samples": samples}, classes)
    instruction, held = FitInstruction("r", 1, "importance", state), classes[:2]
    assignment = Assignment(instruction, layout, 0, held, images, None)
    narrow = layout.classifier(backbone, rows[:2])
    pixels = images.preprocess.normalise(images.pixels)
    if isinstance(method, EWC):
        wanted, met = fisher_sum(narrow, pixels, None), 2
    else:
        wanted, met = sensitivity_sum(layout.classifier(backbone, rows), pixels), 3
    found = method.consolidation.measure(assignment, narrow)
    parts = layout.from_parameters({name: one / len(images) for name, one in wanted.items()})
    torch.testing.assert_close(found["backbone"], parts["backbone"])
    torch.testing.assert_close(found["prototypes"][:met], parts["prototypes"])
    assert not found["prototypes"][met:].any()


@pytest.mark.parametrize("kind", [EWC, MAS])
def test_consolidation_happens_at_task_ends_in_a_second_exchange(kind, toy, played) -> None:
    run = played(kind(), toy())
    assert ["backbone.anchor" in state for state in run.states] == [False, True, True, True]
    second, last = run.states[1], run.states[3]
    assert torch.equal(second["backbone.anchor"], second["backbone"])
    assert torch.equal(run.states[2]["backbone.anchor"], second["backbone"])
    assert second["backbone.importance"].min() >= 0 < second["backbone.importance"].max()
    assert (last["backbone.importance"] >= second["backbone.importance"]).all()
    assert len(last["prototypes.importance"]) == len(last.classes) == 4


def test_bytes_are_those_of_what_is_sent(toy, played) -> None:
    records = played(EWC(), toy()).records
    plain, boundary, anchored = (
        {way: sum(records[number][way].values()) for way in ("bytes_up", "bytes_down")}
        for number in (1, 2, 3)
    )
    assert boundary["bytes_up"] > 1.5 * plain["bytes_up"]
    assert anchored["bytes_up"] < 1.3 * plain["bytes_up"]
    assert anchored["bytes_down"] > 1.8 * plain["bytes_down"]
    assert records[2]["bytes_up"].keys() == {"train", "importance"}


@pytest.mark.parametrize("strong", [EWC(strength=1e6), MAS(strength=1e6)])
def test_a_strong_penalty_holds_the_weights_that_mattered(strong, toy, played) -> None:
    def drift(method) -> float:
        states = played(
            method, toy(), LocalTraining(optimizer="sgd", lr=0.05, epochs=4, batch_size=8)
        ).states
        weight = states[1]["backbone.importance"]
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
            "backbone.importance": torch.tensor([4.0, 0.0]),
        },
        ("a",),
    )
    fold = ImportanceFold(state, 0.5)
    fold.add(update([1.0, 0.0], 30))
    fold.add(update([0.0, 1.0], 10))
    assert torch.allclose(fold.close()["backbone.importance"], torch.tensor([2.75, 0.25]))


def test_a_negative_importance_is_a_defect() -> None:
    exchange = EWC().consolidation.aggregator
    assert exchange.defect(State({}), update([-1.0, 0.0], 1)) is not None
    assert exchange.defect(State({}), update([1.0, 0.0], 1)) is None


@pytest.mark.parametrize(("method", "nats"), [(EWC(), 0.2), (MAS(), 0.0)])
def test_importances_below_which_there_is_nothing_to_compare_hold_nothing(method, nats) -> None:
    """If all are that small, taking every weight to 0 costs so many nats; of sensitivity none."""
    weights = torch.randn(50, generator=torch.Generator().manual_seed(1)).double()
    state = State({"backbone": weights, "prototypes": torch.ones(2, 3)}, ("a", "b"))
    aggregator = method.consolidation.aggregator
    importance = torch.full_like(weights, aggregator.calm(state) ** 2 / len(weights))
    strength = method.factor * method.strength
    assert float((strength * importance * weights.square()).sum() / 2) == pytest.approx(nats)


def test_who_alone_is_not_sure_is_not_far_out() -> None:
    """Where all others have hardly any importance, little is not much; much still is."""
    state = State({"backbone": torch.ones(4), "prototypes": torch.ones(2, 3)}, ("a", "b"))
    aggregator = EWC().consolidation.aggregator

    def apart(largest: float) -> float:
        sizes = {0: 1e-14, 1: 1e-14, 2: largest}
        tensors = {k: {"prototypes": torch.full((2, 3), one)} for k, one in sizes.items()}
        updates = [Update("run", 1, "importance", k, "", 4, {}, t) for k, t in tensors.items()]
        return float(aggregator.apart(state, updates)[2][0])

    assert apart(1e-6) < 1
    assert apart(10.0) > 2
