"""The step of the server: at 1 the mean itself, beyond it by the formula, and statistics follow."""

import math
from dataclasses import replace

import pytest
import torch

from fedbnn.bayes.flatten import layout_of
from fedbnn.methods import METHODS, Method
from fedbnn.methods.aggregation import MOMENTS, PointFold, ServerStep, followed
from fedbnn.methods.fedavg import FedAvg, FedProx
from fedbnn.methods.fedbnn import FedBNN
from fedbnn.methods.glfc import FCIL
from fedbnn.methods.importance import EWC, MAS
from fedbnn.methods.lwf import LwF
from fedbnn.methods.posterior_fold import Moments, PosteriorFold, Product, Scaled
from fedbnn.methods.scaffold import Scaffold
from fedbnn.networks import NETWORKS
from fedbnn.protocol.messages import FitInstruction, Update
from fedbnn.protocol.state import State
from tests.methods.baselines.test_scaffold import _Cut

POINTS = [FedAvg(), FedProx(), Scaffold(), EWC(), MAS(), LwF(), FCIL(), FedBNN(r_init=2)]


def named(method: Method) -> str:
    return type(method).__name__


@pytest.mark.parametrize("name", [name for name, one in METHODS.items() if one.method.trains])
def test_a_step_of_one_is_none_bit_for_bit(name: str, toy, played, monkeypatch) -> None:
    made = METHODS[name].method(**METHODS[name].defaults)
    method, stream = replace(made, server_lr=1.0), toy(rounds=2, num_clients=3, per_round=3)
    stepped = played(method, stream)
    monkeypatch.setattr(ServerStep, "__call__", lambda step, before, folded: folded)
    plain = played(method, stream)
    for one, two in zip(stepped.states, plain.states, strict=True):
        assert one.to_bytes() == two.to_bytes()


@pytest.mark.parametrize("method", POINTS, ids=named)
def test_the_first_step_is_p_times_that_of_the_mean(method: Method, toy, played) -> None:
    stream = _Cut(toy(num_clients=3, per_round=3), 1)
    one, far = (played(replace(method, server_lr=p), stream) for p in (1.0, 2.5))
    start = FitInstruction.from_bytes(one.heard[0][0]).state
    for site in ("backbone", "prototypes"):
        wanted = start[site] + 2.5 * (one.last[site] - start[site])
        assert not torch.equal(one.last[site], start[site])
        torch.testing.assert_close(far.last[site], wanted, atol=1e-6, rtol=1e-5)


def fold(state: State, step: ServerStep, move: float, classes: tuple[str, ...]) -> State:
    """One client that moves every weight it holds by so much, and doubles the variances."""
    tensors = {"backbone": state["backbone"] + move, "buffers": state["buffers"].clone()}
    tensors["buffers"][0] += move
    tensors["buffers"][1] *= 2
    tensors["prototypes"] = state["prototypes"][state.index(classes)] + move
    counts = dict.fromkeys(classes, 5)
    folding = PointFold(state, step)
    folding.add(Update("run", 1, "train", 0, "", 5 * len(counts), counts, tensors))
    return folding.close()


def begin() -> State:
    samples = torch.zeros(2, dtype=torch.float64)
    rows = {"prototypes": torch.ones(2, 3), "prototypes.samples": samples}
    return State({"backbone": torch.ones(4), "buffers": torch.ones(2), **rows}, ("a", "b"))


STEPS = {
    "sgd": [0.5 * 0.4, 0.5 * 0.4 + 0.5 * -0.2],
    "momentum": [0.5 * 0.4, 0.5 * 0.4 + 0.5 * (0.9 * 0.4 - 0.2)],
    "adam": [
        0.5 * 0.04 / (0.01 * 0.16) ** 0.5,
        0.5 * 0.04 / (0.01 * 0.16) ** 0.5
        + 0.5 * (0.9 * 0.04 - 0.02) / (0.99 * 0.01 * 0.16 + 0.01 * 0.04) ** 0.5,
    ],
}


@pytest.mark.parametrize("optimizer", STEPS)
def test_two_steps_are_those_worked_out_by_hand(optimizer: str) -> None:
    """p = 1/2; the clients want to go 0.4, then -0.2. Adam's 0.001 is 2 % of its denominators."""
    step, state = ServerStep(0.5, optimizer), begin()
    for move, wanted in zip((0.4, -0.2), STEPS[optimizer], strict=True):
        state = fold(state, step, move, ("a", "b"))
        tolerance = 0.05 if optimizer == "adam" else 1e-6
        for site in ("backbone", "prototypes"):
            gone = state[site] - 1
            torch.testing.assert_close(gone, torch.full_like(gone, wanted), rtol=tolerance, atol=0)


def test_the_constant_of_adam_is_a_thousandth() -> None:
    gone = fold(begin(), ServerStep(1.0, "adam"), 0.01, ("a", "b"))["backbone"] - 1
    wanted = 0.001 / (0.1 * 0.01 + 0.001)
    torch.testing.assert_close(gone, torch.full_like(gone, wanted), rtol=1e-4, atol=0)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_prototypes_nobody_held_and_their_memory_stay_bit_for_bit(optimizer: str) -> None:
    step = ServerStep(0.7, optimizer)
    first = fold(begin(), step, 0.3, ("a", "b"))
    second = fold(first, step, 0.3, ("a",))
    names = [name for name in second.tensors if name.startswith("prototypes")]
    assert len(names) == 2 + (1 if optimizer == "momentum" else 2)
    for name in names:
        assert torch.equal(first[name][1], second[name][1]), name
        assert not torch.equal(first[name][0], second[name][0]), name


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("method", [FedAvg(), Scaffold(), FCIL()], ids=named)
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    method: Method, optimizer: str, toy, played
) -> None:
    method = replace(method, server_lr=0.5, server_optimizer=optimizer)
    stream = toy(num_clients=3, per_round=2)
    whole, _ = played(method, stream), played(method, _Cut(stream, 2), name="cut")
    rest = played(method, stream, name="cut")
    assert whole.last.to_bytes() == rest.last.to_bytes()
    assert len(rest.states) == 2
    assert "backbone.server_mean" in whole.last


def test_the_memory_of_the_server_is_not_sent(toy, played) -> None:
    run = played(FedAvg(server_optimizer="adam", server_lr=0.01), toy(rounds=2))
    for payload, _ in run.heard:
        sent = FitInstruction.from_bytes(payload).state
        assert not [name for name in sent.tensors if name.endswith(MOMENTS)]


def test_new_classes_begin_without_memory(toy, played) -> None:
    run = played(FedAvg(server_optimizer="momentum", server_lr=0.1), toy())
    assert len(run.last["prototypes.server_mean"]) == len(run.last.classes) == 4


def followed_over(rounds: list[torch.Tensor], ratio: float) -> list[torch.Tensor]:
    """The statistics of the server after each round, given what clients measure in it."""
    state, found = State({}), []
    for measured in rounds:
        state = state.having(followed(state, measured, ratio))
        found.append(state["buffers"])
    return found


def test_means_follow_the_step_on_a_line_and_variances_in_logs() -> None:
    before, after = torch.tensor([1.0, -2.0, 4.0, 1.0]), torch.tensor([3.0, -3.0, 2.0, 1.5])
    assert followed(State({}), after, 1.0) == {"buffers": after}
    found = followed_over([before, after], 2.0)
    assert torch.equal(found[0], before)
    torch.testing.assert_close(found[1], torch.tensor([4.0, -3.5, 2**0.5, 1.5**1.5]))
    assert followed_over([before, after], 50.0)[1][2:].min() > 0
    assert list(followed(State({}), torch.zeros(0), 2.0)) == ["buffers"]


@pytest.mark.parametrize("ratio", [0.5, 0.75, 1.0, 2.0, 3.0])
def test_statistics_that_move_with_the_weights_are_those_under_them(ratio: float) -> None:
    """w = w' + r and clients go 1 further: b(w) = 3 w, log variance w. Exact from round two on."""
    at, measured, wanted = 0.0, [], []
    for _ in range(4):
        mean, at = at + 1, at + ratio
        measured.append(torch.tensor([3 * mean, math.exp(mean)]))
        wanted.append(torch.tensor([3 * at, math.exp(at)]))
    found = followed_over(measured, ratio)
    torch.testing.assert_close(found[1:], wanted[1:])


@pytest.mark.parametrize(
    "step", [ServerStep(2.5), ServerStep(3e-2, "adam"), ServerStep(2, "momentum")]
)
def test_under_weights_that_stand_still_statistics_are_what_clients_measure(
    step: ServerStep,
) -> None:
    """However far the server goes: they neither swing nor grow, over rounds of clients that keep a
    third of the statistics they were sent.
    """
    truth, state = torch.tensor([-0.5, 0.25]), begin()
    for _ in range(24):
        folding = PointFold(state, step)
        buffers = state["buffers"] / 3 + truth * 2 / 3
        tensors = {"backbone": state["backbone"], "buffers": buffers}
        folding.add(Update("run", 1, "train", 0, "", 5, {}, tensors))
        state = folding.close()
    torch.testing.assert_close(state["buffers"], truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["paper_resnet", "cifar_resnet18"])
def test_the_first_half_of_the_statistics_are_means_the_second_variances(name: str) -> None:
    backbone = NETWORKS[name]((3, 16, 16))
    for key, value in backbone.named_buffers():
        value.fill_(2 if key.endswith("running_var") else 1)
    means, variances = layout_of(backbone).read(backbone)[1].tensor_split(2)
    assert len(means) == len(variances) > 0
    assert set(means.tolist()) == {1.0}
    assert set(variances.tolist()) == {2.0}


@pytest.mark.parametrize(("optimizer", "ratio"), [("sgd", 0.5), ("momentum", 0.95)])
def test_statistics_go_as_far_as_the_backbone_does(optimizer: str, ratio: float) -> None:
    """With the same delta twice, momentum goes p (0.9 + 1) times as far the second time."""
    step, first = ServerStep(0.5, optimizer), torch.tensor([1.25, 2.0])
    once = fold(begin(), step, 0.25, ("a", "b"))
    assert torch.equal(once["buffers"], first)
    twice = fold(once, step, 0.25, ("a", "b"))
    second, ahead = torch.tensor([1.5, 4.0]), (ratio - 1) / ratio
    means, variances = torch.stack([first, second]).T.tolist()
    wanted = [
        means[1] + ahead * (means[1] - means[0]),
        variances[1] ** (1 + ahead) / variances[0] ** ahead,
    ]
    assert twice["buffers"].tolist() == pytest.approx(wanted, rel=1e-5)


def posterior_folds(rule: Scaled, step: float) -> torch.Tensor:
    """Two rounds of one client whose factor says nothing, with other statistics in each."""
    scales = {"backbone": torch.ones(4), "backbone.scale": torch.ones(4)}
    state = State({**scales, "buffers": torch.tensor([9.0, 9.0])})
    factor = {f"backbone.{name}": torch.zeros(4) for name in ("precision", "info")}
    for buffers in ([1.0, 4.0], [3.0, 2.0]):
        folding = PosteriorFold(state, rule, step)
        tensors = {**factor, "buffers": torch.tensor(buffers)}
        folding.add(Update("run", 1, "train", 0, "", 5, {}, tensors))
        state = folding.close()
    return state["buffers"]


def test_statistics_beside_a_posterior_follow_its_power() -> None:
    assert torch.equal(posterior_folds(Scaled(1.0), 1.0), torch.tensor([3.0, 2.0]))
    torch.testing.assert_close(posterior_folds(Scaled(2.0), 2.0), torch.tensor([4.0, 2**0.5]))


def test_the_step_of_points_and_statistics_is_the_power_where_that_is_a_step() -> None:
    bayesian = State({"backbone": torch.ones(4), "backbone.scale": torch.ones(4)})
    wanted = {"scaled": (2.0, Scaled), "product": (1.0, Product), "moments": (1.0, Moments)}
    for fold_by, (step, rule) in wanted.items():
        method = FedBNN(fold_by=fold_by, server_lr=1.0 if fold_by == "moments" else 2.0)
        assert method.aggregator(State({})).step == ServerStep(step)
        assert method.aggregator(bayesian).step == ServerStep(step)
        assert type(method.aggregator(bayesian).rule) is rule
