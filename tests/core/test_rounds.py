"""Whole rounds on the digits: initialisation, seeds, chance, class posteriors, learning."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from datamodules.stream import FederatedStream
from fedbnn.defense.gate import Gate
from fedbnn.evaluation.evaluate import Evaluation, evaluate_round
from fedbnn.heads import GaussianHead, Head, LinearHead
from fedbnn.heads.predictive import Predictor
from fedbnn.methods import FedAvg, FedBNN
from fedbnn.networks import MLP
from fedbnn.protocol.messages import FitInstruction, FitResult
from fedbnn.storage.ledger import Ledger
from lightning_modules.client_trainer import LocalTraining
from tests.core.playing import FAST, Federate, Overheard, Short, after, sha

# Initialisation.


def test_the_first_rounds_are_fedavg_bit_for_bit(
    federate: Federate, digits: FederatedStream
) -> None:
    stream = Short(digits, 3)
    average = after(*federate(FedAvg(), local=FAST, stream=stream))
    bayes = after(*federate(FedBNN(r_init=3), local=FAST, stream=stream))
    assert sha(bayes) == sha(average)
    assert not bayes.bayesian


def test_then_means_are_the_weights_and_scales_the_initial_ones(
    federate: Federate, digits: FederatedStream
) -> None:
    method = FedBNN(r_init=1, scale_gain=0.2, prototype_gain=0.5)
    federation, initial = federate(method, local=FAST, stream=Short(digits, 1))
    points = after(federation, initial)
    state = method.prepare(points, 2, ["digits/7"], federation.layout)
    assert torch.equal(state["backbone"], points["backbone"])
    assert torch.equal(state["prototypes"][:-1], points["prototypes"])
    torch.testing.assert_close(state["backbone.scale"], federation.layout.initial_scale(0.2))
    assert state["prototypes.scale"].unique().tolist() == pytest.approx([0.5 / 17**0.5])
    assert state["prototypes.scale"].shape == state["prototypes"].shape


def test_no_initialisation_works_too(federate: Federate, digits: FederatedStream) -> None:
    state = after(*federate(FedBNN(r_init=0), local=FAST, stream=Short(digits, 2)))
    assert state.bayesian
    assert bool((state["backbone.scale"] > 0).all())
    assert bool((state["prototypes.samples"] > 0).all())


@pytest.mark.parametrize("fold_by", ["scaled", "product", "moments"])
@pytest.mark.parametrize("head", [LinearHead(), GaussianHead()], ids=["linear", "gaussian"])
@pytest.mark.parametrize("options", [{}, {"scope": "seen"}], ids=str)
def test_every_fold_plays_rounds_with_every_option(
    federate: Federate,
    digits: FederatedStream,
    fold_by: str,
    options: Mapping[str, Any],
    head: Head,
) -> None:
    server_lr = {"scaled": 2.0, "product": 0.3}.get(fold_by, 1.0)
    method = FedBNN(fold_by=fold_by, r_init=0, server_lr=server_lr, **options)  # type: ignore[arg-type]
    state = after(*federate(method, local=FAST, stream=Short(digits, 1), head=head))
    assert bool((state["backbone.scale"] > 0).all())
    assert ("posteriors.mean" in state) == isinstance(head, GaussianHead)
    assert all(bool(value.isfinite().all()) for value in state.tensors.values())


# Seeds.


@pytest.mark.parametrize(
    ("method", "head"),
    [
        (FedAvg(), LinearHead()),
        (FedBNN(r_init=1), LinearHead()),
        (FedBNN(r_init=1), GaussianHead()),
    ],
)
def test_the_same_seed_gives_the_same_bytes_twice_and_another_does_not(
    federate: Federate, digits: FederatedStream, method: Any, head: Head
) -> None:
    parts = {"local": FAST, "stream": Short(digits, 2), "head": head}
    first, second = (sha(after(*federate(method, **parts))) for _ in range(2))
    other = sha(after(*federate(method, **parts, seed=4)))
    assert first == second
    assert first != other


@pytest.mark.parametrize(
    ("method", "head"),
    [
        (FedBNN(r_init=1), GaussianHead()),
        (FedBNN(r_init=1, share="backbone_only"), LinearHead()),
        (FedBNN(r_init=1, server_lr=2.0, feature_distillation=1.0), GaussianHead()),
    ],
)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    federate: Federate, digits: FederatedStream, method: FedBNN, head: Head
) -> None:
    """The second half runs in new workers on a ledger that was closed in between."""
    whole = after(*federate(method, local=FAST, stream=Short(digits, 3), head=head))
    federation, initial = federate(method, local=FAST, stream=Short(digits, 2), head=head)
    after(federation, initial)
    federation.ledger.close()
    again, initial = federate(method, local=FAST, stream=Short(digits, 3), head=head)
    with Ledger(federation.ledger.run_dir) as ledger:
        assert sha(after(replace(again, ledger=ledger), initial)) == sha(whole)


# Chance.


def test_a_random_network_scores_chance_in_both_regimes(
    digits: FederatedStream, federate: Federate
) -> None:
    federation, initial = federate(FedAvg())
    found: dict[str, list[float]] = {"task_aware": [], "class_agnostic": []}
    for seed in range(12):
        state = FedAvg().prepare(initial, 1, digits.classes, federation.layout)
        source = torch.Generator().manual_seed(seed)
        rows, backbone = (
            torch.randn(10, 17, generator=source),
            torch.randn(len(state["backbone"]), generator=source) * 0.1,
        )
        state = state.having(
            {
                "prototypes": rows,
                "backbone": backbone,
                "prototypes.samples": torch.ones(10).double(),
            }
        )
        predictor = Predictor(
            MLP(digits.image_shape, (16,)), federation.layout, state, LinearHead()
        )
        line: Any = evaluate_round(predictor, digits, digits.rounds, Evaluation())
        for regime, values in found.items():
            values += [task[regime]["accuracy"] for task in line["tasks"]]
    assert sum(found["task_aware"]) / 60 == pytest.approx(50, abs=8)
    assert sum(found["class_agnostic"]) / 60 == pytest.approx(10, abs=5)


# Class posteriors in whole rounds.


def test_class_posteriors_travel_as_an_exchange_of_their_own(
    federate: Federate, digits: FederatedStream
) -> None:
    federation, initial = federate(
        FedAvg(),
        local=FAST,
        stream=Short(digits, 1),
        head=GaussianHead(),
        gate=Gate(influence_cap=None),
    )
    engine = Overheard(federation.engine)  # type: ignore[arg-type]
    state = after(replace(federation, engine=engine), initial)
    assert [FitInstruction.from_bytes(payload).exchange for payload in engine.down] == [
        "train",
        "statistics",
    ]
    assert "prototypes" not in FitInstruction.from_bytes(engine.down[1]).state
    assert state["posteriors.count"].tolist() == state["prototypes.samples"].tolist()
    committed = federation.ledger.latest()
    assert committed is not None
    sizes = [len(answer.update) for answer in engine.up if isinstance(answer, FitResult)]
    assert committed.record["bytes_up"] == {"train": sum(sizes[:3]), "statistics": sum(sizes[3:])}
    down = [3 * len(payload) for payload in engine.down]
    assert committed.record["bytes_down"] == {"train": down[0], "statistics": down[1]}


def test_prototypes_and_backbone_do_not_know_which_head_predicts(
    federate: Federate, digits: FederatedStream
) -> None:
    linear, gaussian = (
        after(*federate(FedBNN(r_init=1), local=FAST, stream=Short(digits, 2), head=head))
        for head in (LinearHead(), GaussianHead())
    )
    assert all(torch.equal(gaussian[name], value) for name, value in linear.tensors.items())
    more = gaussian.tensors.keys() - linear.tensors.keys()
    shown = ("mean", "count", "scatter", "weight")
    assert {name for name in more if not name.startswith("anchor.")} == {
        f"posteriors.{name}" for name in shown
    }


@pytest.mark.parametrize(
    ("method", "head"),
    [
        (FedAvg(), LinearHead()),
        (FedAvg(), GaussianHead()),
        (FedBNN(r_init=1), LinearHead()),
        (FedBNN(r_init=1), GaussianHead()),
    ],
)
def test_it_learns(federate: Federate, digits: FederatedStream, method: Any, head: Head) -> None:
    local = LocalTraining(lr=5e-3, epochs=5, batch_size=8)
    federation, initial = federate(method, local=local, stream=Short(digits, 2), head=head)
    state = after(federation, initial)
    predictor = Predictor(MLP(digits.image_shape, (16,)), federation.layout, state, head)
    line: Any = evaluate_round(predictor, digits, 2, Evaluation(images=None))
    assert line["fon"]["class_agnostic"] > 80
