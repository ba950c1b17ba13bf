"""The `trainer:` section reaches the Trainer: two devices on the CPU train points and posteriors alike."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbnn.bayes.flatten import layout_of
from fedbnn.bayes.model import BayesianModel, guide_for
from fedbnn.errors import ConfigError
from fedbnn.federation.engines import ClientFailed
from fedbnn.images import ImageSet, Preprocess
from fedbnn.methods import FedAvg, FedBNN
from fedbnn.methods.objectives import LocalObjective
from fedbnn.networks import MLP, Classifier
from lightning_modules.client_trainer import ClientTrainer, LocalTraining
from lightning_modules.point_client import PointClient
from lightning_modules.svi_client import Start, SVIClient

TWO = {"devices": 2, "strategy": "ddp_fork", "accelerator": "cpu"}
LOCAL = LocalTraining(epochs=2, batch_size=4)


class Tiny(nn.Module):
    """A convolution with batch norm and a linear layer."""

    width = 6

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.Flatten(),
            nn.Linear(16, 6),
            nn.ReLU(),
        )

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images)
        return features


def pictures() -> ImageSet:
    pixels = torch.randint(0, 256, (16, 1, 4, 4), dtype=torch.uint8)
    return ImageSet(
        pixels, torch.arange(16) % 2, ("a", "b"), Preprocess((0.5,), (0.3,))
    )


@pytest.mark.parametrize(
    "options", [TWO, {"devices": 1, "accelerator": "cpu"}], ids=["two devices", "one device"]
)
def test_points_train_on_these_devices(options: dict[str, Any]) -> None:
    network = Classifier(Tiny(), 2)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    client = PointClient(network, LocalObjective(), FedAvg(), LOCAL)
    ClientTrainer(options).fit(client, pictures(), 2)
    after = network.state_dict()
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert all(not torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("function_prior", [0.0, 1.0])
@pytest.mark.parametrize(
    "options", [TWO, {"devices": 1, "accelerator": "cpu"}], ids=["two devices", "one device"]
)
def test_posteriors_train_on_these_devices(options: dict[str, Any], function_prior: float) -> None:
    backbone = Tiny()
    layout = layout_of(backbone)
    weights, statistics = layout.read(backbone)
    model = BayesianModel(backbone, layout, function_prior=function_prior)
    guide = guide_for(model, (1, 4, 4))
    loc = torch.cat([weights, torch.zeros(14)])
    scale = torch.full_like(loc, 0.05)
    client = SVIClient(
        model, guide, Start(loc, scale, loc), torch.full_like(loc, 1e-3), FedBNN(), LOCAL
    )
    ClientTrainer(options).fit(client, pictures(), 2)
    assert torch.equal(model.loc, loc), "the prior does not move on any device"
    assert bool(guide.loc.isfinite().all())
    assert not torch.equal(guide.loc, loc)
    assert not torch.equal(guide.log_scale, scale.log())
    assert not torch.equal(layout.read(backbone)[1], statistics)


def test_precision_reaches_the_trainer() -> None:
    client = PointClient(Classifier(Tiny(), 2), LocalObjective(), FedAvg(), LOCAL)
    trainer = ClientTrainer({"precision": "bf16-mixed", "accelerator": "cpu"}).fit(
        client, pictures(), 1
    )
    assert trainer.precision == "bf16-mixed"


def test_two_devices_need_no_strategy_and_bring_their_counters_back() -> None:
    client = PointClient(
        Classifier(MLP((1, 4, 4), hidden=(6,)), 2),
        LocalObjective(),
        FedAvg(),
        LocalTraining(lr=0.1, batch_size=4),
    )
    ClientTrainer({"devices": 2}).fit(client, pictures(), 2)
    assert client.steps == -(-2 * len(pictures()) // (2 * 4))
    assert client.inner > 0


def test_divergence_on_two_devices_is_the_client_s_failure() -> None:
    client = PointClient(
        Classifier(MLP((1, 4, 4), hidden=(6,)), 2),
        LocalObjective(),
        FedAvg(),
        LocalTraining(lr=1e30),
    )
    with pytest.raises(ClientFailed, match="diverged"):
        ClientTrainer({"devices": 2}).fit(client, pictures(), 20)


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_strategies_that_start_the_script_again_are_refused(strategy: str) -> None:
    with pytest.raises(ConfigError, match="use ddp_fork"):
        ClientTrainer({"devices": 2, "strategy": strategy})


def trained(fitter: ClientTrainer, seed: int) -> Tensor:
    """The weights of a client that this fitter trained."""
    torch.manual_seed(seed)
    network = Classifier(Tiny(), 2)
    fitter.fit(PointClient(network, LocalObjective(), FedAvg(), LOCAL), pictures(), 2)
    return torch.cat([value.detach().flatten().float() for value in network.state_dict().values()])


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


def test_nothing_of_a_client_outlives_the_next() -> None:
    """Its moments and gradients go when the next client comes, not when the collector of cycles does."""
    fitter, gone = ClientTrainer({}), []
    gc.disable()
    try:
        for _ in range(3):
            client = PointClient(Classifier(Tiny(), 2), LocalObjective(), FedAvg(), LOCAL)
            fitter.fit(client, pictures(), 1)
            gone.append((weakref.ref(client), weakref.ref(client.optimizers().optimizer)))
        assert [(one() is None, moments() is None) for one, moments in gone] == [
            (True, True),
            (True, True),
            (False, False),
        ]
    finally:
        gc.enable()


def test_a_client_that_diverged_leaves_nothing_to_the_next() -> None:
    fitter = ClientTrainer({})
    client = PointClient(Classifier(Tiny(), 2), LocalObjective(), FedAvg(), replace(LOCAL, lr=1e30))
    with pytest.raises(ClientFailed, match="diverged"):
        fitter.fit(client, pictures(), 20)
    assert torch.equal(trained(fitter, 1), trained(ClientTrainer({}), 1))


def test_the_steps_of_a_client_may_be_limited() -> None:
    client = PointClient(Classifier(Tiny(), 2), LocalObjective(), FedAvg(), LOCAL)
    ClientTrainer({"max_steps": 3}).fit(client, pictures(), 2)
    assert client.steps == 3


def test_gradients_are_clipped_as_the_trainer_section_says() -> None:
    """With plain SGD at rate 1 a step is the gradient itself, and its length is capped."""
    lengths = []
    for value in (None, 1e-3):
        torch.manual_seed(0)
        network = Classifier(Tiny(), 2)
        before = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
        local = LocalTraining(optimizer="sgd", lr=1.0, batch_size=16)
        ClientTrainer({"gradient_clip_val": value}).fit(
            PointClient(network, LocalObjective(), FedAvg(), local), pictures(), 1
        )
        lengths.append(
            (
                torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
                - before
            ).norm()
        )
    assert lengths[0] > 0.01
    assert lengths[1] == pytest.approx(1e-3, rel=1e-3)


def test_accumulated_gradients_are_refused_with_the_setting_that_does_it() -> None:
    with pytest.raises(ConfigError, match=r"raise client\.batch_size"):
        ClientTrainer({"accumulate_grad_batches": 4})


@pytest.mark.parametrize(
    ("images", "size", "steps"),
    [(9, 4, 2), (8, 4, 2), (1, 4, 1), (3, 1, 3), (33, 4, 8), (65, 4, 16)],
)
def test_a_last_batch_of_one_image_is_left_out_and_no_other(
    images: int, size: int, steps: int
) -> None:
    client = PointClient(
        Classifier(Tiny(), 2), LocalObjective(), FedAvg(), LocalTraining(batch_size=size)
    )
    pixels = torch.randint(0, 256, (images, 1, 4, 4), dtype=torch.uint8)
    ClientTrainer({}).fit(
        client, ImageSet(pixels, torch.arange(images) % 2, ("a", "b")), 1
    )
    assert client.steps == steps
