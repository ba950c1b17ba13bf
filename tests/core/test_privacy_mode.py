"""The privacy mode: rows and class names stay at home, and evaluation is per client."""

from dataclasses import replace
from typing import Any

import pytest

from datamodules.stream import FederatedStream
from fedbnn.errors import ConfigError
from fedbnn.evaluation.evaluate import Evaluation, evaluate_clients
from fedbnn.heads import GaussianHead, LinearHead
from fedbnn.heads.predictive import Predictor
from fedbnn.methods import FedAvg, FedBNN
from fedbnn.networks import MLP
from fedbnn.protocol.messages import FitResult, read_update
from fedbnn.protocol.state import State
from lightning_modules.client_trainer import LocalTraining
from tests.core.playing import FAST, Federate, Overheard, Short, after


@pytest.mark.parametrize(
    "method", [FedAvg(share="backbone_only"), FedBNN(r_init=1, share="backbone_only")]
)
def test_backbone_only_sends_no_rows_and_no_class_names(
    federate: Federate, digits: FederatedStream, method: Any
) -> None:
    federation, initial = federate(method, local=FAST, stream=Short(digits, 3))
    engine = Overheard(federation.engine)  # type: ignore[arg-type]
    state = after(replace(federation, engine=engine), initial)
    assert state.classes == ()
    sent = engine.down + [answer.update for answer in engine.up if isinstance(answer, FitResult)]
    assert len(sent) == 3 + 9
    for payload in sent:
        assert b"prototypes" not in payload
        assert b"digits/" not in payload
    updates = [read_update(answer.update) for answer in engine.up if isinstance(answer, FitResult)]
    assert all(update.counts == {} and update.samples > 0 for update in updates)
    privates = [answer.private for answer in engine.up if isinstance(answer, FitResult)]
    assert all(payload is not None and b"digits/" in payload for payload in privates)


def test_without_the_privacy_mode_the_same_bytes_do_name_classes(
    federate: Federate, digits: FederatedStream
) -> None:
    federation, initial = federate(FedAvg(), local=FAST, stream=Short(digits, 1))
    engine = Overheard(federation.engine)  # type: ignore[arg-type]
    after(replace(federation, engine=engine), initial)
    assert b"digits/" in engine.down[0]


def test_a_client_finds_its_own_rows_again(federate: Federate, digits: FederatedStream) -> None:
    everybody = Short(digits, 2, participants=lambda round: (0, 1, 2))
    federation, initial = federate(
        FedBNN(r_init=1, share="backbone_only"), local=FAST, stream=everybody
    )
    after(federation, initial)
    own = State.from_bytes(federation.ledger.private(0) or b"")
    counts = {
        name: sum(digits.counts(round, 0).get(name, 0) for round in (1, 2)) for name in own.classes
    }
    assert own["prototypes.samples"].tolist() == [counts[name] for name in own.classes]
    assert own["prototypes.scale"].shape == own["prototypes"].shape


def test_class_posteriors_cannot_stay_at_home(federate: Federate) -> None:
    with pytest.raises(ConfigError, match="use head: linear"):
        federate(FedAvg(share="backbone_only"), head=GaussianHead())


@pytest.mark.parametrize("images", [None, 1])
def test_evaluation_is_per_client_when_rows_stay_at_home(
    federate: Federate, digits: FederatedStream, images: int | None
) -> None:
    method, local = (
        FedBNN(r_init=0, share="backbone_only"),
        LocalTraining(lr=5e-3, epochs=8, batch_size=8),
    )
    federation, initial = federate(
        method, local=local, stream=Short(digits, 2, participants=lambda round: (0, 1, 2))
    )
    state = after(federation, initial)
    libraries = [State.from_bytes(federation.ledger.private(client) or b"") for client in (0, 1, 2)]
    backbone = MLP(digits.image_shape, (16,))
    whole = [State({**state.tensors, **own.tensors}, own.classes) for own in libraries]
    predictors = [Predictor(backbone, federation.layout, one, LinearHead(), 4) for one in whole]
    found = evaluate_clients(predictors, Short(digits, 2), 2, Evaluation(images=images))
    single = [
        evaluate_clients([one], Short(digits, 2), 2, Evaluation(images=images))
        for one in predictors
    ]
    values = [one["fon"]["task_aware"] for one in single if one["fon"] is not None]
    assert found["fon"]["task_aware"] == pytest.approx(sum(values) / len(values))
    if images is None:
        assert found["fon"]["task_aware"] > 75
