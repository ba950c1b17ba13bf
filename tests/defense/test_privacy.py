"""Differential privacy of clients: what one may change, what is added, what it costs, who stops."""

import json
import math
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm

from fedbnn.bayes.flatten import Layout, layout_of
from fedbnn.defense import privacy
from fedbnn.defense.budget import FILE, Budget, epsilon
from fedbnn.defense.gate import Gate
from fedbnn.defense.privacy import Privacy, Protection, Question
from fedbnn.errors import ConfigError, Exit, PrivacyError, RunDirectoryError
from fedbnn.heads import ExactHead, GaussianHead, LinearHead
from fedbnn.methods import FedAvg, FedBNN
from fedbnn.methods.bounds import Exact
from fedbnn.methods.scaffold import Scaffold
from fedbnn.networks import MLP
from fedbnn.protocol.messages import Update
from fedbnn.protocol.state import State
from tests.defense.worlds import CLIENTS, WIDTH, World, truth_and_updates

WORLD, OPEN = World(new_class=True), Gate(influence_cap=None)
LAYOUT = replace(layout_of(MLP((1, 2, 2), (3,))), width=WIDTH - 1)
Answers = list[Update]


def protected(updates: Answers, state: State, settings: Privacy, seed: int = 1) -> Answers:
    """What is folded of these clients, all of whom were asked."""
    question = Question(state, WORLD.classes, LAYOUT)
    counts = settings.announced(WORLD.classes)
    asked = tuple(range(CLIENTS))
    return [*Protection(settings, question, asked, counts, False, seed)(updates)]


def total(updates: Answers, state: State) -> dict[str, torch.Tensor]:
    """The sum of all answers in the units of the question."""
    question = Question(state, WORLD.classes, LAYOUT)
    every = [question.asked(update) for update in updates]
    return {name: sum(one[name] for one in every) for name in every[0]}  # type: ignore[misc]


def length(steps: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(step.square().sum()) for step in steps.values()))


@pytest.fixture
def factors() -> Answers:
    return truth_and_updates(WORLD, "scaled", 0)[1]


@pytest.fixture
def points(factors: Answers) -> tuple[Answers, State]:
    """Updates of weights that have no posterior."""
    state = WORLD.state()
    plain = State({n: t for n, t in state.tensors.items() if "scale" not in n}, state.classes)
    layout_size = {"backbone": torch.zeros(LAYOUT.size)}
    return [
        replace(
            one,
            tensors={
                "backbone": torch.randn(LAYOUT.size),
                "buffers": torch.zeros(0),
                "prototypes": torch.randn(len(one.counts), WIDTH),
            },
        )
        for one in factors
    ], plain.having(layout_size)


@pytest.mark.parametrize("kind", ["factors", "points"])
def test_one_client_more_or_less_moves_the_sum_by_at_most_the_clip(
    kind: str, factors: Answers, points: tuple[Answers, State]
) -> None:
    updates, state = points if kind == "points" else (factors, WORLD.state())
    settings = Privacy(clip=2.0)
    grown = {name: 1e3 * value for name, value in updates[2].tensors.items()}
    updates[2] = replace(updates[2], tensors=grown)
    without = updates[:2] + updates[3:]
    there, gone = (protected(some, state, settings) for some in (updates, without))
    assert len(there) == len(gone) == CLIENTS
    sums = total(there, state), total(gone, state)
    moved = length({name: sums[0][name] - sums[1][name] for name in sums[0]})
    assert moved == pytest.approx(2.0, rel=1e-3)


def test_what_is_folded_says_nothing_of_how_many_images_or_which_classes(factors: Answers) -> None:
    found = protected(factors, WORLD.state(), Privacy(clip=1.0, images=30))
    assert factors[0].counts != factors[1].counts
    assert {tuple(one.counts.items()) for one in found} == {(("a", 10), ("b", 10), ("c", 10))}
    assert {one.samples for one in found} == {30}
    assert not found[1].tensors["prototypes.precision"][2].any()


def test_without_noise_and_a_clip_nobody_reaches_it_is_the_mean_of_equal_clients() -> None:
    """The fold of what is left is the fold of what was sent, where all have as many images."""
    world, state = World(), World().state()
    _, updates = truth_and_updates(world, "scaled", 0)
    method, folded = FedBNN(), []
    for some in (updates, protected(updates, state, Privacy(clip=1e12))):
        fold = method.aggregator(state).fold(state)
        for one in some:
            fold.add(one)
        folded.append(fold.close())
    for name in ("backbone", "backbone.scale", "prototypes", "prototypes.scale"):
        assert torch.allclose(folded[0][name], folded[1][name], rtol=1e-5, atol=1e-6)


def test_noise_has_the_deviation_that_is_accounted_for(points: tuple[Answers, State]) -> None:
    updates, state = points
    quiet, loud = (
        total(protected(updates, state, Privacy(clip=3.0, noise=noise)), state)
        for noise in (0.0, 2.0)
    )
    noise = torch.cat([(loud[name] - quiet[name]).flatten() for name in quiet])
    assert len(noise) == LAYOUT.size + 3 * WIDTH
    assert float(noise.std()) == pytest.approx(6.0, rel=5 / math.sqrt(len(noise)))


def test_another_seed_is_other_noise_and_the_same_is_the_same(factors: Answers) -> None:
    settings, state = Privacy(clip=1.0, noise=1.0), WORLD.state()
    first, again, other = (
        protected(factors, state, settings, seed)[0].tensors["backbone.info"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.isclose(first, other).any()


@pytest.mark.parametrize("noise", [0.0, 0.01, 1.0, 30.0])
def test_noise_of_a_client_makes_its_answer_so_long_and_no_longer(
    points: tuple[Answers, State], noise: float
) -> None:
    """|x| <= C (1 + z (sqrt(dim) + 5)) of whoever clips; what is longer is refused."""
    (first, *_), state = points
    settings, question = (
        Privacy(clip=3.0, noise=noise, at="client"),
        Question(state, WORLD.classes, LAYOUT),
    )
    door = Protection(settings, question, (0,), settings.announced(WORLD.classes), False, 0)
    steps = privacy.clipped(question.asked(first), 3.0)
    numbers = sum(step.numel() for step in steps.values())
    for seed in range(50):
        sent = question.answer(privacy.noised(steps, 3.0 * noise, seed), first, door.counts)
        assert door.defect(sent) is None
    most = 3.0 * (1 + noise * (math.sqrt(numbers) + 5))
    assert privacy.longest(steps, 3.0, noise) == pytest.approx(most)
    for by in (1.05, 1e6):
        long = {name: by * most / length(steps) * step for name, step in steps.items()}
        assert "its length is" in str(door.defect(question.answer(long, first, door.counts)))


def gaussian_epsilon(noise: float, questions: int, delta: float) -> float:
    """Exactly: T Gaussian mechanisms are one of multiplier z / sqrt(T) (Balle and Wang, 2018)."""
    mu = math.sqrt(questions) / noise

    def excess(eps: float) -> float:
        below = math.exp(eps + norm.logcdf(-mu / 2 - eps / mu))
        return float(norm.cdf(mu / 2 - eps / mu) - below - delta)

    return float(brentq(excess, 0, 500))


@pytest.mark.parametrize(("noise", "questions"), [(0.7, 1), (1.0, 10), (4.0, 30), (20.0, 8)])
def test_epsilon_is_that_of_the_closed_form_and_never_below_the_exact_one(
    noise: float, questions: int
) -> None:
    delta, found = 1e-5, epsilon(noise, questions, 1e-5)
    orders = [1 + math.exp(place / 100) for place in range(-700, 900)]
    closed = min(
        questions * a / (2 * noise**2)
        + math.log((a - 1) / a)
        - (math.log(delta) + math.log(a)) / (a - 1)
        for a in orders
    )
    exact = gaussian_epsilon(noise, questions, delta)
    assert found == pytest.approx(closed, rel=2e-3)
    assert exact <= found <= 1.35 * exact


@pytest.fixture
def account(tmp_path: Path) -> Any:
    """An account of rounds in which client 0 takes part, and one of four others."""

    def opened(*committed: dict[str, Any], **settings: Any) -> Budget:
        chosen = Privacy(clip=1.0, noise=2.0, **settings)
        return Budget(chosen, tmp_path, lambda round: {0: 1, 1 + round % 4: 1}, committed)

    return opened


def test_the_client_asked_most_is_the_one_that_counts(account: Any) -> None:
    budget = account()
    for round in (1, 2, 3):
        budget.begin(round)
        assert budget.record(round)["epsilon"] == epsilon(2.0, round, 1e-5)


def test_a_run_stops_before_it_spends_too_much_and_says_so(account: Any, tmp_path: Path) -> None:
    most = epsilon(2.0, 2, 1e-5) + 1e-6
    budget = account(epsilon=most)
    budget.begin(1)
    budget.begin(2)
    with pytest.raises(PrivacyError, match=r"round 3 would spend epsilon .* the budget is") as stop:
        budget.begin(3)
    assert stop.value.code == Exit.PRIVACY
    assert "\n" not in str(stop.value)
    assert json.loads((tmp_path / FILE).read_bytes())["begun"] == {"1": 1, "2": 1}


KEY = "0" * 64
DAMAGED = {
    "garbage": "no JSON",
    "nothing": "",
    "a list": "[]",
    "no key": '{"begun": {"1": 1}}',
    "no rounds": json.dumps({"key": KEY}),
    "a number as key": '{"key": 1, "begun": {"1": 1}}',
    "a key that can be guessed": '{"key": "", "begun": {"1": 1}}',
    "rounds in a list": json.dumps({"key": KEY, "begun": [1]}),
    "a round without number": json.dumps({"key": KEY, "begun": {"x": 1}}),
    "round 0": json.dumps({"key": KEY, "begun": {"0": 1}}),
    "less than nothing": json.dumps({"key": KEY, "begun": {"1": -5}}),
    "half a time": json.dumps({"key": KEY, "begun": {"1": 1.5}}),
    "null": json.dumps({"key": KEY, "begun": {"1": None}}),
    "a debt to a client": json.dumps({"key": KEY, "begun": {"1": 1}, "before": {"0": -1}}),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_an_account_that_is_none_is_one_line(account: Any, tmp_path: Path, how: str) -> None:
    (tmp_path / FILE).write_text(DAMAGED[how])
    with pytest.raises(
        RunDirectoryError, match="the account of privacy is none of ours"
    ) as failure:
        account()
    assert FILE in str(failure.value)


def test_an_account_cannot_forget_what_committed_rounds_spent(account: Any, tmp_path: Path) -> None:
    budget, records = account(), []
    for round in (1, 2, 2, 3):
        budget.begin(round)
        records = [*records[: round - 1], {"privacy": budget.record(round)}]
    whole = json.loads((tmp_path / FILE).read_text())
    assert account(*records).record(3) == budget.record(3)
    for begun in ({"1": 1, "2": 1, "3": 1}, {"2": 2, "3": 1}, {}):
        (tmp_path / FILE).write_text(json.dumps({**whole, "begun": begun}))
        with pytest.raises(RunDirectoryError, match=r"round \d was begun \d times, the account"):
            account(*records)
    (tmp_path / FILE).unlink()
    with pytest.raises(RunDirectoryError, match="the account of privacy is gone, but 3 rounds"):
        account(*records)


def test_an_account_goes_on_in_a_branch_and_cannot_forget_it(account: Any, tmp_path: Path) -> None:
    budget, out = account(), tmp_path / "out"
    out.mkdir()
    for round in (1, 2, 3, 3):
        budget.begin(round)
    budget.branch(out, 3)
    with pytest.raises(RunDirectoryError, match="there is an account of privacy already"):
        budget.branch(out, 3)
    branched = Budget(budget.privacy, out, lambda round: {0: 1})
    branched.begin(3)
    assert branched.record(3)["epsilon"] == epsilon(2.0, 2 + 2 + 1, 1e-5)
    assert branched.seed(3, "train") != budget.seed(3, "train")
    records = [{}, {}, {"privacy": branched.record(3)}]
    again = Budget(budget.privacy, out, lambda round: {0: 1}, records)
    assert again.record(3) == branched.record(3)
    kept = json.loads((out / FILE).read_text())
    (out / FILE).write_text(json.dumps({**kept, "before": {}}))
    with pytest.raises(RunDirectoryError, match=r"epsilon was .*, the account of privacy has"):
        Budget(budget.privacy, out, lambda round: {0: 1}, records)


def test_a_round_that_is_begun_again_counts_again_with_noise_of_its_own(
    account: Any, tmp_path: Path
) -> None:
    first = account()
    first.begin(1)
    again = account()
    assert again.seed(1, "train") == first.seed(1, "train") != again.seed(1, "statistics")
    again.begin(1)
    assert again.seed(1, "train") != first.seed(1, "train")
    assert again.record(1)["epsilon"] == epsilon(2.0, 2, 1e-5)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("settings", "gate", "method", "head", "says"),
    [
        ({"clip": 1.0}, Gate(), FedBNN(), LinearHead(), "gate.influence_cap: null"),
        ({"clip": 1.0}, Gate(robust="krum"), FedBNN(), LinearHead(), "comparison of clients"),
        ({"clip": 1.0}, OPEN, Scaffold(), LinearHead(), "Scaffold sends more"),
        ({"clip": 1.0}, OPEN, FedBNN(fold_by="moments"), LinearHead(), "no sum of factors"),
        ({"clip": 1.0}, OPEN, FedBNN(), GaussianHead(), "privacy.clip_images"),
        ({"clip": 1.0}, OPEN, FedAvg(), ExactHead(), "privacy.clip_images"),
        ({"clip_images": 1.0}, OPEN, FedAvg(), LinearHead(), "privacy.clip"),
    ],
)
def test_what_would_leak_is_refused_in_one_line(
    settings: Any, gate: Gate, method: Any, head: Any, says: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        privacy.check(Privacy(**settings), gate, method, head, LAYOUT)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_batch_norm_is_refused() -> None:
    layout: Layout = replace(LAYOUT, buffers=("mean", "variance"))
    with pytest.raises(ConfigError, match=r"network.norm: group"):
        privacy.check(Privacy(clip=1.0), OPEN, FedAvg(), LinearHead(), layout)


@pytest.mark.parametrize("settings", [{"noise": 1.0}, {"clip": 1.0, "epsilon": 3.0}])
def test_settings_that_hide_nothing_are_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match="set it"):
        Privacy(**settings)


def test_without_the_library_one_line_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setattr(privacy, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r'pip install -c constraints.txt "\.\[privacy\]"'):
        privacy.check(Privacy(clip=1.0, noise=1.0), OPEN, FedBNN(), LinearHead(), LAYOUT)
    privacy.check(Privacy(clip_images=1.0), OPEN, Exact(), ExactHead(), LAYOUT)
