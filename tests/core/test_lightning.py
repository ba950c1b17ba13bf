"""Every option in `trainer:` means what Lightning documents, or is refused by name."""

import csv
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn

from datamodules.stream import FederatedStream
from fedbnn.cli.compose import SCHEMA
from fedbnn.config.parse import restored
from fedbnn.errors import ConfigError
from fedbnn.federation.engines import ClientFailed
from fedbnn.methods import FedAvg, FedBNN, Method
from lightning_modules.client_trainer import ClientTrainer, LocalTraining
from tests.core.listeners import Keeps, Notes
from tests.core.playing import FAST, Federate, Short, after
from tests.core.small_clients import LOCAL, pictures, point_client, svi_client, weights

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


# Options, against a Trainer and a module that are Lightning's alone.


class Plain(pl.LightningModule):
    """The module of a client as Lightning's tutorial would write it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), LOCAL.lr, fused=True)


def plainly(options: dict[str, Any]) -> Tensor:
    """The weights after two epochs of a plain Trainer."""
    torch.manual_seed(5)
    module = Plain(point_client().network)
    pl.Trainer(**QUIET, **options, max_epochs=2).fit(module, datamodule=pictures(18))
    return weights(module)


def by_client(options: dict[str, Any]) -> Tensor:
    """The weights after two epochs of a client with these options."""
    torch.manual_seed(5)
    client = point_client()
    ClientTrainer(options).fit(client, pictures(18), 2)
    return weights(client)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 1e-3},
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
        {"max_steps": 3},
        {"limit_train_batches": 2},
        {"limit_train_batches": 0.5},
        {"overfit_batches": 1},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*overfit.*")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
def test_a_client_trains_with_an_option_as_a_plain_trainer_does(options: dict[str, Any]) -> None:
    found = by_client(options)
    assert torch.equal(found, plainly(options))
    assert not torch.equal(found, by_client({})), "the option does something"


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 2 * 5),
        ({"accumulate_grad_batches": 2}, 2 * 3),
        ({"max_steps": 3}, 3),
        ({"limit_train_batches": 2}, 2 * 2),
        ({"limit_train_batches": 0.5}, 2 * 2),
        ({"max_steps": 7, "accumulate_grad_batches": 2}, 6),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [point_client, svi_client])
def test_optimiser_steps_are_those_that_the_options_ask_for(
    make: Any, options: dict[str, Any], steps: int
) -> None:
    client = make()
    ClientTrainer(options).fit(client, pictures(18), 2)
    assert client.meter.steps == steps


@pytest.mark.parametrize("make", [point_client, svi_client])
def test_gradients_are_clipped_as_the_trainer_section_says(make: Any) -> None:
    """With plain SGD at rate 1 a step is the gradient itself, and its length is capped."""
    lengths = []
    for value in (None, 1e-3):
        torch.manual_seed(0)
        client = make(local=LocalTraining(optimizer="sgd", lr=1.0))
        (group, *_) = client.configure_optimizers().param_groups
        before = [parameter.detach().clone() for parameter in group["params"]]
        ClientTrainer({"gradient_clip_val": value, "max_steps": 1}).fit(client, pictures(), 1)
        pairs = zip(group["params"], before, strict=True)
        moved = torch.cat([(now.detach() - then).flatten() for now, then in pairs])
        lengths.append(float(moved.norm()))
    assert lengths[0] > 0.01
    assert 0 < lengths[1] <= 1e-3 * 1.001


@pytest.mark.parametrize("method", [FedAvg(), FedBNN(r_init=0)])
def test_rounds_in_mixed_precision_end_in_other_weights_of_the_same_type(
    federate: Federate, digits: FederatedStream, method: Method
) -> None:
    stream = Short(digits, 1)
    mixed = {"precision": "bf16-mixed"}
    full, half = (
        after(*federate(method, local=FAST, stream=stream, trainer=trainer))
        for trainer in ({}, mixed)
    )
    assert {name: value.dtype for name, value in half.tensors.items()} == {
        name: value.dtype for name, value in full.tensors.items()
    }
    assert not torch.equal(half["backbone"], full["backbone"])
    torch.testing.assert_close(half["backbone"], full["backbone"], rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("method", "atol"), [(FedAvg(), 1e-4), (FedBNN(r_init=1, feature_distillation=1.0), 0.02)]
)
def test_rounds_in_double_precision_send_float32(
    federate: Federate, digits: FederatedStream, method: Method, atol: float
) -> None:
    """Almost the weights that float32 finds; draws of a posterior are others in float64."""
    stream = Short(digits, 2)
    single, double = (
        after(*federate(method, local=FAST, stream=stream, trainer={"precision": precision}))
        for precision in ("32-true", "64-true")
    )
    assert double["backbone"].dtype == torch.float32
    assert not torch.equal(double["backbone"], single["backbone"])
    torch.testing.assert_close(double["backbone"], single["backbone"], rtol=0, atol=atol)


def test_precision_and_devices_reach_the_trainer() -> None:
    keeps = Keeps()
    options = {"precision": "bf16-mixed", "devices": 1, "callbacks": [keeps]}
    ClientTrainer(options).fit(point_client(), pictures(), 1)
    assert keeps.trainer.precision == "bf16-mixed"
    assert keeps.trainer.max_epochs == 1


@pytest.mark.parametrize(
    "options", [{}, {"max_steps": 30}, {"accumulate_grad_batches": 2}], ids=str
)
@pytest.mark.parametrize("make", [point_client, svi_client])
def test_a_loss_that_diverges_is_the_client_s_failure_with_its_epoch(
    make: Any, options: dict[str, Any]
) -> None:
    client = make(local=LocalTraining(lr=1e30))
    with pytest.raises(ClientFailed, match=r"diverged: the loss is .* in epoch \d+$"):
        ClientTrainer(options).fit(client, pictures(), 10)


# Callbacks and loggers of a user.


def test_a_callback_of_the_user_s_own_is_called(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    trainer = ClientTrainer({"callbacks": [Notes(str(notes))]})
    for client in (point_client(), svi_client()):
        trainer.fit(client, pictures(), 1)
    lines = [line.split() for line in notes.read_text().splitlines()]
    assert [line[0] for line in lines] == ["fit", *["step"] * 4, "end"] * 2
    assert [lines[0][1], lines[6][1]] == ["PointClient", "SVIClient"]
    assert [int(line[1]) for line in lines[1:5]] == [1, 2, 3, 4]
    assert all(0 < float(line[2]) < 10 for line in lines if line[0] == "step")


def test_a_callback_may_stop_a_client() -> None:
    stop = EarlyStopping(monitor="train/loss", stopping_threshold=1e9)
    client = point_client()
    ClientTrainer({"callbacks": [stop]}).fit(client, pictures(), 5)
    assert client.meter.steps == 4


def csv_logger(folder: Path) -> dict[str, Any]:
    return {"logger": CSVLogger(str(folder), "clients", "all"), "log_every_n_steps": 1}


def logged(folder: Path) -> list[dict[str, str]]:
    with (folder / "clients" / "all" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("make", [point_client, svi_client])
def test_a_csv_logger_writes_the_loss_of_every_step(tmp_path: Path, make: Any) -> None:
    client = make()
    ClientTrainer(csv_logger(tmp_path)).fit(client, pictures(), 2)
    lines = logged(tmp_path)
    assert [int(line["step"]) for line in lines] == list(range(client.meter.steps))
    assert [int(line["epoch"]) for line in lines] == [0] * 4 + [1] * 4
    assert all(0 < float(line["train/loss"]) < 10 for line in lines)


@pytest.mark.parametrize("method", [FedAvg(), FedBNN(r_init=1)])
def test_callback_and_logger_hear_all_clients_and_change_nothing(
    federate: Federate, digits: FederatedStream, method: Method, tmp_path: Path
) -> None:
    stream, notes = Short(digits, 2), tmp_path / "notes"
    named = {"class_path": "tests.core.listeners.Notes", "init_args": {"path": str(notes)}}
    made = restored({"trainer": {"callbacks": [named]}}, SCHEMA).build("trainer")
    trainer = {**made, **csv_logger(tmp_path)}
    heard = after(*federate(method, local=FAST, stream=stream, trainer=trainer))
    assert heard.to_bytes() == after(*federate(method, local=FAST, stream=stream)).to_bytes()
    lines = [line.split() for line in notes.read_text().splitlines()]
    fits = [line[1] for line in lines if line[0] == "fit"]
    assert sum(name != "WarmUp" for name in fits) == 2 * 3
    assert ("SVIClient" in fits) == isinstance(method, FedBNN)
    assert len(logged(tmp_path)) == sum(line[0] == "step" for line in lines) > 0


# Refused by name.


@pytest.mark.parametrize(
    "named",
    [
        {"class_path": "pytorch_lightning.callbacks.Nothing"},
        {"class_path": "no_such_package.Callback"},
        {"class_path": "pytorch_lightning.callbacks.Timer", "init_args": {"surprise": 1}},
        {"class_path": "tests.core.listeners.Notes"},
        {"class_path": None},
    ],
    ids=str,
)
def test_what_cannot_be_made_is_one_line_that_names_it(named: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.callbacks") as refusal:
        restored({"trainer": {"callbacks": [named]}}, SCHEMA)
    assert str(named["class_path"]) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"precision": "nonsense"}, "nonsense"),
        ({"devices": "many"}, "devices"),
        ({"nonsense": 1}, "nonsense"),
        ({"gradient_clip_algorithm": "no"}, "gradient_clip_algorithm"),
    ],
    ids=str,
)
def test_what_lightning_refuses_is_one_line_before_any_client_starts(
    options: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word) as refusal:
        ClientTrainer(options)
    assert "\n" not in str(refusal.value)


# Odd last batches.


@pytest.mark.parametrize(
    ("images", "size", "steps"),
    [(9, 4, 2), (8, 4, 2), (1, 4, 1), (3, 1, 3), (33, 4, 8), (65, 4, 16)],
)
def test_a_last_batch_of_one_image_is_left_out_and_no_other(
    images: int, size: int, steps: int
) -> None:
    client = point_client()
    ClientTrainer({}).fit(client, pictures(images, size), 1)
    assert client.meter.steps == steps
