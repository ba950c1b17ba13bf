"""Whole rounds on the digits: initialisation, seeds, participation, privacy, forgetting, divergence."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.stream import FederatedStream
from fedbnn import personal, rounds
from fedbnn.engines import Private
from fedbnn.engines.serial import SerialEngine
from fedbnn.errors import FederationError
from fedbnn.evaluation import Evaluation, evaluate_round
from fedbnn.ledger import Ledger
from fedbnn.local import LocalTraining
from fedbnn.messages import Failure, Order, Reply
from fedbnn.methods import FedAvg, FedBNN
from fedbnn.networks import MLP
from fedbnn.predictor import Predictor
from fedbnn.rounds import Federation
from fedbnn.state import State
from fedbnn.updates import read_update

Federate = Callable[..., tuple[Federation, State]]
FAST = LocalTraining(epochs=1, batch_size=16, warmup_epochs=1)


class Short:
    """The first rounds of a stream."""

    def __init__(self, stream: FederatedStream, rounds: int, **changes: Any) -> None:
        self.stream, self.rounds, self.changes = stream, rounds, changes

    def __getattr__(self, name: str) -> Any:
        return self.changes[name] if name in self.changes else getattr(self.stream, name)


class Overheard:
    """An engine that keeps every byte that goes down and up."""

    def __init__(self, engine: SerialEngine, spoil: Callable[[Reply | Failure], Reply | Failure] = lambda answer: answer) -> None:
        self.engine, self.spoil = engine, spoil
        self.down: list[bytes] = []
        self.up: list[Reply | Failure] = []

    def gather(self, payload: bytes, clients: Sequence[int], private: Private) -> Iterator[Reply | Failure]:
        self.down.append(payload)
        for answer in self.engine.gather(payload, clients, private):
            self.up.append(self.spoil(answer))
            yield self.up[-1]

    def close(self) -> None:
        self.engine.close()


def sha(state: State) -> str:
    return hashlib.sha256(state.to_bytes()).hexdigest()


def after(federation: Federation, initial: State) -> State:
    return rounds.run(federation, initial)


# Initialisation.


def test_the_first_rounds_are_fedavg_bit_for_bit(federate: Federate, digits: FederatedStream) -> None:
    stream = Short(digits, 3)
    average = after(*federate(FedAvg(), local=FAST, stream=stream))
    bayes = after(*federate(FedBNN(r_init=3), local=FAST, stream=stream))
    assert sha(bayes) == sha(average)
    assert not bayes.bayesian


def test_then_means_are_the_weights_and_scales_the_initial_ones(federate: Federate, digits: FederatedStream) -> None:
    method = FedBNN(r_init=1, scale_gain=0.2)
    federation, initial = federate(method, local=FAST, stream=Short(digits, 1))
    points = after(federation, initial)
    state = method.prepare(points, 2, ["digits/7"], federation.layout)
    assert torch.equal(state["trunk"], points["trunk"])
    assert torch.equal(state["rows"][:-1], points["rows"])
    torch.testing.assert_close(state["trunk.scale"], federation.layout.initial_scale(0.2))
    assert state["rows.scale"].unique().tolist() == pytest.approx([0.2 / 17**0.5])
    assert state["rows.scale"].shape == state["rows"].shape


def test_no_initialisation_works_too(federate: Federate, digits: FederatedStream) -> None:
    state = after(*federate(FedBNN(r_init=0), local=FAST, stream=Short(digits, 2)))
    assert state.bayesian
    assert bool((state["trunk.scale"] > 0).all())
    assert bool((state["rows.samples"] > 0).all())


@pytest.mark.parametrize("fold_by", ["scaled", "product", "moments", "mean"])
@pytest.mark.parametrize(
    "options", [{}, {"bayes_norm": False}, {"flipout": True, "mc_samples": 2}, {"head": "gaussian"}, {"scope": "seen"}]
)
def test_every_fold_plays_rounds_with_every_option(
    federate: Federate, digits: FederatedStream, fold_by: str, options: Mapping[str, Any]
) -> None:
    method = FedBNN(fold_by=fold_by, r_init=0, damping=0.3, **options)  # type: ignore[arg-type]
    state = after(*federate(method, local=FAST, stream=Short(digits, 1)))
    assert bool((state["trunk.scale"] > 0).all())
    assert all(bool(value.isfinite().all()) for value in state.tensors.values())


# Seeds.


@pytest.mark.parametrize("method", [FedAvg(), FedBNN(r_init=1), FedBNN(r_init=1, head="gaussian")])
def test_the_same_seed_gives_the_same_bytes_twice_and_another_does_not(
    federate: Federate, digits: FederatedStream, method: Any
) -> None:
    stream = Short(digits, 2)
    first, second = (sha(after(*federate(method, local=FAST, stream=stream))) for _ in range(2))
    other = sha(after(*federate(method, local=FAST, stream=stream, seed=4)))
    assert first == second
    assert first != other


@pytest.mark.parametrize("method", [FedBNN(r_init=1, head="gaussian"), FedBNN(r_init=1, share="trunk_only")])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(federate: Federate, digits: FederatedStream, method: FedBNN) -> None:
    """The second half runs in new workers on a ledger that was closed in between."""
    whole = after(*federate(method, local=FAST, stream=Short(digits, 3)))
    federation, initial = federate(method, local=FAST, stream=Short(digits, 2))
    after(federation, initial)
    federation.ledger.close()
    again, initial = federate(method, local=FAST, stream=Short(digits, 3))
    with Ledger(federation.ledger.run_dir) as ledger:
        assert sha(after(replace(again, ledger=ledger), initial)) == sha(whole)


# Participation.


def test_only_participants_are_asked_and_rows_of_absent_classes_stay_bit_for_bit(
    federate: Federate, digits: FederatedStream
) -> None:
    method = FedBNN(r_init=0)
    federation, initial = federate(method, local=FAST, stream=Short(digits, 3))
    engine = Overheard(federation.engine)  # type: ignore[arg-type]
    federation = replace(federation, engine=engine)
    before = after(replace(federation, stream=Short(digits, 2)), initial)
    later = rounds.play(federation, before, 3)
    asked = {answer.client for answer in engine.up if isinstance(answer, Reply) and read_update(answer.update).round == 3}
    assert asked == set(digits.participants(3))
    assert len(asked) == 3 < digits.num_clients
    held = {name for client in asked for name in digits.counts(3, client)}
    absent = [row for row, name in enumerate(before.classes) if name not in held]
    assert absent
    for name in ("rows", "rows.scale", "rows.samples"):
        assert torch.equal(later[name][absent], before[name][absent])
    for name in held:
        assert later["rows.samples"][later.classes.index(name)] > 0


@pytest.mark.parametrize("forgetting", [0.5])
def test_forgetting_keeps_the_mean_and_that_part_of_what_was_learnt(
    federate: Federate, digits: FederatedStream, forgetting: float
) -> None:
    method, kept = FedBNN(r_init=0), FedBNN(r_init=0, forgetting=forgetting)
    federation, initial = federate(method, local=FAST, stream=Short(digits, 1))
    state = after(federation, initial)
    found = kept.settle(initial, state, federation.layout)
    first = federation.layout.initial_scale(method.scale_gain).double().pow(-2)
    learnt = state["trunk.scale"].double().pow(-2)
    torch.testing.assert_close(found["trunk.scale"].double().pow(-2), first + forgetting * (learnt - first), rtol=1e-5, atol=0)
    assert torch.equal(found["trunk"], state["trunk"])
    assert torch.equal(found["rows"], state["rows"])
    assert method.settle(initial, state, federation.layout) is state


def test_forgetting_leaves_rows_of_absent_classes_alone(federate: Federate, digits: FederatedStream) -> None:
    federation, initial = federate(FedBNN(r_init=0, forgetting=0.5), local=FAST, stream=Short(digits, 3))
    before = after(replace(federation, stream=Short(digits, 2)), initial)
    later = rounds.play(federation, before, 3)
    held = {name for client in digits.participants(3) for name in digits.counts(3, client)}
    absent = [row for row, name in enumerate(before.classes) if name not in held]
    assert torch.equal(later["rows.scale"][absent], before["rows.scale"][absent])


def test_forgetting_everything_but_a_little_returns_to_the_initial_scale(federate: Federate, digits: FederatedStream) -> None:
    method = FedBNN(r_init=0, forgetting=1e-9)
    federation, initial = federate(method, local=FAST, stream=Short(digits, 1))
    state = after(federation, initial)
    torch.testing.assert_close(state["trunk.scale"], federation.layout.initial_scale(method.scale_gain))


def test_the_totals_of_a_round_are_those_of_its_participants(federate: Federate, digits: FederatedStream) -> None:
    federation, initial = federate(FedAvg(), local=FAST, stream=Short(digits, 1))
    engine = Overheard(federation.engine)  # type: ignore[arg-type]
    after(replace(federation, engine=engine), initial)
    order = Order.from_bytes(engine.down[0])
    counts = [digits.counts(1, client) for client in digits.participants(1)]
    assert order.total == sum(sum(one.values()) for one in counts)
    assert order.class_totals == {
        name: sum(one.get(name, 0) for one in counts) for name in sorted({n for one in counts for n in one})
    }


# Divergence and failures.


@pytest.mark.parametrize("method", [FedAvg(), FedBNN(r_init=0)])
def test_a_round_in_which_everybody_diverges_folds_nothing(federate: Federate, digits: FederatedStream, method: Any) -> None:
    federation, initial = federate(method, local=LocalTraining(lr=1e30, epochs=3, warmup_epochs=0), stream=Short(digits, 1))
    with pytest.raises(FederationError, match="diverged"):
        after(federation, initial)
    assert federation.ledger.latest() is None


def test_one_failed_client_is_named_and_the_others_are_folded(federate: Federate, digits: FederatedStream) -> None:
    lost = digits.participants(1)[0]
    federation, initial = federate(FedBNN(r_init=0), local=FAST, stream=Short(digits, 1))
    engine = Overheard(federation.engine, lambda answer: Failure(lost, "diverged") if answer.client == lost else answer)  # type: ignore[arg-type]
    state = after(replace(federation, engine=engine), initial)
    committed = federation.ledger.latest()
    assert committed is not None
    assert committed.record["failed"] == {str(lost): "diverged"}
    held = sum(sum(digits.counts(1, client).values()) for client in digits.participants(1) if client != lost)
    assert state["rows.samples"].sum().item() == held == committed.record["samples"]


# Privacy mode.


@pytest.mark.parametrize("method", [FedAvg(share="trunk_only"), FedBNN(r_init=1, share="trunk_only")])
def test_trunk_only_sends_no_rows_and_no_class_names(federate: Federate, digits: FederatedStream, method: Any) -> None:
    federation, initial = federate(method, local=FAST, stream=Short(digits, 3))
    engine = Overheard(federation.engine)  # type: ignore[arg-type]
    state = after(replace(federation, engine=engine), initial)
    assert state.classes == ()
    sent = engine.down + [answer.update for answer in engine.up if isinstance(answer, Reply)]
    assert len(sent) == 3 + 9
    for payload in sent:
        assert b"rows" not in payload
        assert b"digits/" not in payload
    updates = [read_update(answer.update) for answer in engine.up if isinstance(answer, Reply)]
    assert all(update.counts == {} and update.samples > 0 for update in updates)
    privates = [answer.private for answer in engine.up if isinstance(answer, Reply)]
    assert all(payload is not None and b"digits/" in payload for payload in privates)


def test_without_the_privacy_mode_the_same_bytes_do_name_classes(federate: Federate, digits: FederatedStream) -> None:
    federation, initial = federate(FedAvg(), local=FAST, stream=Short(digits, 1))
    engine = Overheard(federation.engine)  # type: ignore[arg-type]
    after(replace(federation, engine=engine), initial)
    assert b"digits/" in engine.down[0]


def test_a_client_finds_its_own_rows_again(federate: Federate, digits: FederatedStream) -> None:
    everybody = Short(digits, 2, participants=lambda round: (0, 1, 2))
    federation, initial = federate(FedBNN(r_init=1, share="trunk_only"), local=FAST, stream=everybody)
    after(federation, initial)
    own = State.from_bytes(federation.ledger.private(0) or b"")
    counts = {name: sum(digits.counts(round, 0).get(name, 0) for round in (1, 2)) for name in own.classes}
    assert own["rows.samples"].tolist() == [counts[name] for name in own.classes]
    assert own["rows.scale"].shape == own["rows"].shape


@pytest.mark.parametrize("images", [None, 1])
def test_evaluation_is_per_client_when_rows_stay_at_home(federate: Federate, digits: FederatedStream, images: int | None) -> None:
    method, local = FedBNN(r_init=0, share="trunk_only"), LocalTraining(lr=5e-3, epochs=8, batch_size=8)
    federation, initial = federate(method, local=local, stream=Short(digits, 2, participants=lambda round: (0, 1, 2)))
    state = after(federation, initial)
    libraries = [State.from_bytes(federation.ledger.private(client) or b"") for client in (0, 1, 2)]
    predictors = [
        Predictor(MLP(digits.image_shape, (16,)), federation.layout, personal.joined(state, own), 4) for own in libraries
    ]
    found = personal.evaluate(predictors, Short(digits, 2), 2, Evaluation(images=images))
    single = [personal.evaluate([one], Short(digits, 2), 2, Evaluation(images=images)) for one in predictors]
    values = [one["fon"]["task_aware"] for one in single if one["fon"] is not None]
    assert found["fon"]["task_aware"] == pytest.approx(sum(values) / len(values))
    if images is None:
        assert found["fon"]["task_aware"] > 75


# Chance.


def test_a_random_network_scores_chance_in_both_regimes(digits: FederatedStream, federate: Federate) -> None:
    federation, initial = federate(FedAvg())
    found: dict[str, list[float]] = {"task_aware": [], "class_agnostic": []}
    for seed in range(12):
        state = FedAvg().prepare(initial, 1, digits.classes, federation.layout)
        source = torch.Generator().manual_seed(seed)
        rows, trunk = torch.randn(10, 17, generator=source), torch.randn(len(state["trunk"]), generator=source) * 0.1
        state = state.having({"rows": rows, "trunk": trunk, "rows.samples": torch.ones(10).double()})
        predictor = Predictor(MLP(digits.image_shape, (16,)), federation.layout, state)
        line: Any = evaluate_round(predictor, digits, digits.rounds, Evaluation())
        for regime, values in found.items():
            values += [task[regime]["accuracy"] for task in line["tasks"]]
    assert sum(found["task_aware"]) / 60 == pytest.approx(50, abs=8)
    assert sum(found["class_agnostic"]) / 60 == pytest.approx(10, abs=5)


# Class posteriors in whole rounds.


def test_class_posteriors_travel_as_an_exchange_of_their_own(federate: Federate, digits: FederatedStream) -> None:
    federation, initial = federate(FedAvg(head="gaussian"), local=FAST, stream=Short(digits, 1))
    engine = Overheard(federation.engine)  # type: ignore[arg-type]
    state = after(replace(federation, engine=engine), initial)
    assert [Order.from_bytes(payload).exchange for payload in engine.down] == ["train", "statistics"]
    assert "rows" not in Order.from_bytes(engine.down[1]).state
    assert state["places.count"].tolist() == state["rows.samples"].tolist()
    committed = federation.ledger.latest()
    assert committed is not None
    assert committed.record["bytes_up"] == sum(len(answer.update) for answer in engine.up if isinstance(answer, Reply))
    assert committed.record["bytes_down"] == sum(3 * len(payload) for payload in engine.down)


def test_the_linear_rows_and_the_trunk_do_not_know_which_head_predicts(federate: Federate, digits: FederatedStream) -> None:
    linear, gaussian = (
        after(*federate(FedBNN(r_init=1, head=head), local=FAST, stream=Short(digits, 2))) for head in ("linear", "gaussian")
    )  # type: ignore[arg-type]
    assert all(torch.equal(gaussian[name], value) for name, value in linear.tensors.items())


def test_it_learns(federate: Federate, digits: FederatedStream, tmp_path: Path) -> None:
    scores = {}
    for method in (FedAvg(), FedBNN(r_init=1), FedBNN(r_init=1, head="gaussian")):
        federation, initial = federate(method, local=LocalTraining(lr=5e-3, epochs=5, batch_size=8), stream=Short(digits, 2))
        state = after(federation, initial)
        predictor = Predictor(MLP(digits.image_shape, (16,)), federation.layout, state)
        line: Any = evaluate_round(predictor, digits, 2, Evaluation(images=None))
        scores[method] = line["fon"]["class_agnostic"]
    assert min(scores.values()) > 80
