"""Two devices train points and posteriors as one does, on the CPU; and what is built on GPUs."""

import gc
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from fedbnn.cli.main import main
from fedbnn.devices import VISIBLE, gpus, pinned
from fedbnn.errors import ConfigError
from fedbnn.federation.engines import ClientFailed
from fedbnn.networks import MLP
from fedbnn.seeds import forked
from lightning_modules.client_trainer import ClientTrainer, LocalTraining
from tests.core.small_clients import LOCAL, pictures, point_client, svi_client, weights

TWO = {"devices": 2, "strategy": "ddp_fork", "accelerator": "cpu"}
ONE = {"devices": 1, "accelerator": "cpu"}


@pytest.mark.parametrize("options", [TWO, ONE], ids=["two devices", "one device"])
def test_points_train_on_these_devices(options: dict[str, Any]) -> None:
    client = point_client()
    before = {name: value.clone() for name, value in client.network.state_dict().items()}
    ClientTrainer(options).fit(client, pictures(), 2)
    after = client.network.state_dict()
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert all(not torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("distillation", [0.0, 1.0])
@pytest.mark.parametrize("options", [TWO, ONE], ids=["two devices", "one device"])
def test_posteriors_train_on_these_devices(options: dict[str, Any], distillation: float) -> None:
    client = svi_client(distillation)
    model, guide = client.elbo.model, client.elbo.guide
    layout, backbone = model.layout, model.network.backbone
    prior, statistics = model.prior(), layout.read(backbone)[1]
    loc, log_scale = prior.loc.clone(), prior.log_scale.clone()
    ClientTrainer(options).fit(client, pictures(), 2)
    assert torch.equal(model.prior().loc, loc), "the prior does not move on any device"
    assert torch.equal(model.prior().log_scale, log_scale)
    assert bool(guide.loc.isfinite().all())
    assert not torch.equal(guide.loc, loc)
    assert not torch.equal(guide.log_scale, log_scale)
    assert not torch.equal(layout.read(backbone)[1], statistics)


def test_two_devices_need_no_strategy_and_bring_steps_and_seconds_back() -> None:
    client = point_client(LocalTraining(lr=0.1), MLP((1, 4, 4), hidden=(6,)))
    ClientTrainer({"devices": 2}).fit(client, pictures(), 2)
    assert client.meter.steps == 2 * 16 // (2 * 4)
    assert client.meter.seconds > 0


def test_divergence_on_two_devices_is_the_client_s_failure() -> None:
    client = point_client(LocalTraining(lr=1e30), MLP((1, 4, 4), hidden=(6,)))
    with pytest.raises(ClientFailed, match="diverged") as failure:
        ClientTrainer({"devices": 2}).fit(client, pictures(), 20)
    assert "\n" not in str(failure.value)


def test_a_lone_image_on_each_device_is_left_out() -> None:
    """18 images are 4, 4 and 1 on either device, in each of two epochs."""
    client = point_client()
    ClientTrainer(TWO).fit(client, pictures(18), 2)
    assert client.meter.steps == 2 * 2
    assert client.network.backbone.layers[1].num_batches_tracked.item() == 2 * 2


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_strategies_that_start_the_script_again_are_refused(strategy: str) -> None:
    with pytest.raises(ConfigError, match="use ddp_fork"):
        ClientTrainer({"devices": 2, "strategy": strategy})


def trained(trainer: ClientTrainer, seed: int) -> Tensor:
    """The weights of a client that this trainer fitted."""
    torch.manual_seed(seed)
    client = point_client()
    trainer.fit(client, pictures(), 2)
    return weights(client)


@pytest.mark.parametrize(
    "options", [{}, {"max_steps": 3}, {"devices": 2}], ids=["epochs", "steps", "two devices"]
)
def test_a_trainer_that_fitted_others_before_trains_as_a_fresh_one_does(
    options: dict[str, Any],
) -> None:
    one = ClientTrainer(options)
    assert torch.equal(trained(one, 1), trained(ClientTrainer(options), 1))
    assert torch.equal(trained(one, 2), trained(ClientTrainer(options), 2))
    assert not torch.equal(trained(one, 1), trained(one, 2))


class Moments(pl.Callback):
    """Weak references to the optimisers of all fits."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[torch.optim.Optimizer]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        (optimizer,) = trainer.optimizers
        assert len(optimizer.state) > 0
        if trainer.global_step == 1:
            self.seen.append(weakref.ref(optimizer))


@pytest.mark.parametrize("lr", [1e-3, 1e30], ids=["fits", "diverges"])
def test_what_an_optimiser_remembers_goes_with_its_fit(lr: float) -> None:
    """Moments are twice the network: they must not wait until cycles are collected."""
    moments = Moments()
    trainer = ClientTrainer({"callbacks": [moments]})
    gc.disable()
    try:
        for make in (point_client, svi_client):
            with suppress(ClientFailed):
                trainer.fit(make(local=replace(LOCAL, lr=lr)), pictures(), 1)
        assert [one() is None for one in moments.seen] == [True, True]
    finally:
        gc.enable()


def test_a_client_that_diverged_leaves_nothing_to_the_next() -> None:
    trainer = ClientTrainer({})
    with pytest.raises(ClientFailed, match="diverged"):
        trainer.fit(point_client(replace(LOCAL, lr=1e30)), pictures(), 20)
    assert torch.equal(trained(trainer, 1), trained(ClientTrainer({}), 1))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs that nobody may wake: whoever touches CUDA fails."""

    def woken() -> None:
        raise AssertionError("CUDA is initialised")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", woken)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Mock 4090")


@pytest.mark.parametrize(
    "options", [{}, {"accelerator": "gpu"}, {"precision": "16-mixed"}], ids=str
)
def test_of_two_gpus_a_client_takes_one(two_gpus: None, options: dict[str, Any]) -> None:
    trainer = ClientTrainer(options)
    assert trainer._made(1).strategy.launcher is None
    assert trainer.device == torch.device("cuda:0")
    assert trainer.described == "cuda:0, Mock 4090"
    assert trainer.pinnable


@pytest.mark.parametrize("devices", [2, "2", "auto", -1, "0,1", [0, 1]], ids=str)
def test_two_gpus_that_are_asked_for_are_forked_and_not_woken_before(
    two_gpus: None, devices: Any
) -> None:
    trainer = ClientTrainer({"accelerator": "gpu", "devices": devices})
    launcher = trainer._made(1).strategy.launcher
    assert launcher is not None
    assert launcher.is_interactive_compatible, "forks, and does not start the script again"
    assert trainer.device == torch.device("cpu")
    assert trainer.described == "2 x CUDA, forked for every fit; evaluation on the CPU"
    assert not trainer.pinnable


def test_seeds_do_not_wake_a_gpu(two_gpus: None) -> None:
    with forked(3):
        first = torch.rand(3)
    with forked(3):
        assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "fsdp"])
def test_what_a_strategy_builds_is_looked_at_and_not_its_name(
    two_gpus: None, strategy: str
) -> None:
    with pytest.raises(ConfigError, match="use ddp_fork"):
        ClientTrainer({"accelerator": "gpu", "devices": 2, "strategy": strategy})
    with pytest.raises(ConfigError, match="use ddp_fork"):
        ClientTrainer({"accelerator": "gpu", "devices": 2, "strategy": DDPStrategy()})


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, ["0", "1"]), ("4,7", ["4", "7"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])],
)
def test_workers_take_gpus_in_turn(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    assert gpus() == names
    assert [pinned(number, gpus())[VISIBLE] for number in range(4)] == names * 2
    assert pinned(3, []) == {}


@pytest.mark.parametrize("engine", ["serial", "processes"])
@pytest.mark.parametrize(
    "asked", [{"accelerator": "gpu"}, {"accelerator": "cuda", "devices": 2}, {"accelerator": "tpu"}]
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(
    asked: dict[str, Any], engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for name, value in asked.items() for word in (f"--trainer.{name}", str(value))]
    words = ["train", "--config", "quickstart", "--run_dir", str(tmp_path / "run"), *flags]
    assert main([*words, "--engine", engine]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "trainer.accelerator: auto" in said
    assert not (tmp_path / "run").exists()
