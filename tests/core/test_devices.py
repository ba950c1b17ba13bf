"""Two devices on the CPU train points and posteriors as one does, and come back whole."""

import gc
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from fedbnn.errors import ConfigError
from fedbnn.federation.engines import ClientFailed
from fedbnn.networks import MLP
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
