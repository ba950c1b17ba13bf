"""Networks, methods and data of the user's own, by import path, through the commands."""

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import fedbnn as package
from datamodules.sources import DatasetRegistry
from fedbnn.errors import DataError, RunDirectoryError
from tests.cli.command import fedbnn, final
from tests.cli.own_parts import Interrupting, Tiny

HERE = "tests.cli.own_parts"
ALL = (
    *("--network", f"{HERE}:Tiny", "--network.freeze", "true", "--network.dim", "9"),
    *("--method", f"{HERE}:Mine", "--method.strength", "0.25"),
    *("--stream.sources", f"{HERE}:Digits"),
)
pytestmark = pytest.mark.usefixtures("undrawn")


def train(home: Path, name: str, *words: str) -> Path:
    """A run in a folder of this name."""
    asked = ("--config", "tiny.yaml", "--run_dir", name, "--stream.data_dir", "data")
    assert fedbnn("train", *asked, *words) == 0
    return home / name


@pytest.mark.slow
def test_everything_of_ones_own_gives_the_same_bytes_in_workers(home: Path) -> None:
    serial = train(home, "serial", *ALL)
    assert final(train(home, "processes", *ALL, "--engine", "processes")) == final(serial)


def test_everything_of_ones_own_goes_on_after_ctrl_c_and_predicts(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serial = train(home, "serial", *ALL)
    results = json.loads((serial / "results.json").read_text())
    assert results["method"] == f"{HERE}:Mine"
    begun = ("--config", "tiny.yaml", "--run_dir", "cut", "--stream.data_dir", "data", *ALL)
    monkeypatch.setattr(Interrupting, "fits", 0)
    assert fedbnn("train", *begun, f"--trainer.callbacks={HERE}.Interrupting") == 130
    assert not (home / "cut" / "results.json").exists()
    assert fedbnn("train", "--resume", home / "cut", "--trainer.callbacks=null") == 0
    assert final(home / "cut") == final(serial)
    Image.new("L", (20, 30)).save(home / "black.png")
    capsys.readouterr()
    assert fedbnn("predict", serial, home / "black.png", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["label"].startswith("Digits/")


def test_a_network_that_this_process_has_not_imported_must_be_trusted(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from tests.cli.own_parts import Tiny\n\nclass Net(Tiny): ...\n"
    (home / "net_of_ones_own.py").write_text(code)
    monkeypatch.syspath_prepend(str(home))
    train(home, "run", "--network", "net_of_ones_own:Net", "--ledger.keep_rounds", "4")
    Image.new("L", (20, 30)).save(home / "black.png")
    for words in (("predict", "run", "black.png"), ("report", "run", "--oracle")):
        del sys.modules["net_of_ones_own"]
        capsys.readouterr()
        assert fedbnn(*words) == 4
        said = capsys.readouterr().err
        assert said.startswith("error: the run asks to import 'net_of_ones_own:Net' (run); ")
        assert said.count("\n") == 1
        assert "net_of_ones_own" not in sys.modules
        assert fedbnn(*words, "--trust") == 0
        assert fedbnn(*words) == 0, "imported by now"
    del sys.modules["net_of_ones_own"]
    assert package.Run(home / "run", trust=True).model.classes
    del sys.modules["net_of_ones_own"]
    with pytest.raises(RunDirectoryError, match="net_of_ones_own:Net"):
        _ = package.Run(home / "run").model


def test_a_frozen_layer_is_never_sent_has_no_posterior_and_is_in_the_model(home: Path) -> None:
    asked = ("--network", f"{HERE}:Tiny", "--network.freeze", "true")
    sites = load_file(train(home, "run", *asked) / "model.safetensors")
    assert {name for name in sites if name.startswith("backbone.conv.")} == {
        "backbone.conv.weight.constant",
        "backbone.conv.bias.constant",
    }
    assert "backbone.hidden.weight.scale" in sites
    assert not any("classifier" in name for name in sites)
    state = load_file(next((home / "run" / "state").glob("round-*/state.safetensors")))
    assert len(state["backbone"]) == 4 * 36 * 12 + 12 + 8
    image = torch.rand(8, 8)
    first, second = (package.load(home / "run").predict(image) for _ in range(2))
    assert torch.equal(first.probabilities, second.probabilities)


@pytest.mark.parametrize("name", ["READY", "FROZEN", "TiedFrozen", "in_words"])
def test_a_module_that_is_there_or_a_function_is_a_network_too(home: Path, name: str) -> None:
    run = train(home, "run", "--network", f"{HERE}:{name}")
    classes = package.load(run).predict(torch.rand(5, 8, 8)).classes
    assert len(classes) == 10


@pytest.mark.parametrize("words", [("--network.dim", "7"), ("--set=network.dim=7",)])
def test_what_a_network_must_be_told_may_be_a_flag(words: tuple[str, ...], home: Path) -> None:
    run = train(home, "run", "--network", f"{HERE}:Needy", *words)
    assert load_file(run / "model.safetensors")["prototypes.loc"].shape == (10, 8)


def test_buffers_that_are_no_running_statistics_are_constants(home: Path) -> None:
    asked = ("--network", f"{HERE}:Normed", "--method.server_lr", "0.5")
    sites = load_file(train(home, "run", *asked) / "model.safetensors")
    assert torch.equal(sites["backbone.waves.constant"], torch.arange(64.0).sin())
    assert sites["backbone.mean.constant"] == torch.tensor(0.3)
    assert sites["buffers"].shape == (2 * 64,)
    assert not any("classifier" in name for name in sites), "made first, used last"
    assert package.load(home / "run").predict(torch.rand(8, 8)).labels


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_a_backbone_begins_with_weights_from_a_file_that_may_be_gone_later(
    home: Path, ending: str
) -> None:
    pretrained = Tiny((1, 8, 8)).state_dict()
    if ending == "pth":
        torch.save({"state_dict": pretrained}, home / "weights.pth")
    else:
        save_file(pretrained, home / "weights.safetensors")
    file = str(home / f"weights.{ending}")
    last = ("--network.weights", file, "--network.trained", "[hidden]")
    run = train(home, "run", "--network", f"{HERE}:Tiny", *last)
    Path(file).unlink()
    sites = load_file(run / "model.safetensors")
    assert torch.equal(sites["backbone.conv.weight.constant"], pretrained["conv.weight"])
    assert {name for name in sites if name.endswith(".scale") and name.startswith("backbone")} == {
        "backbone.hidden.weight.scale",
        "backbone.hidden.bias.scale",
    }
    assert package.load(run).predict(torch.rand(8, 8)).labels


def test_a_constructor_of_torchvision_is_a_network(home: Path) -> None:
    colour = ("--stream.sources", f"{HERE}:nonsense", "--network", "torchvision.models:resnet18")
    assert fedbnn("train", "--config", "tiny.yaml", *colour) == 3
    assert fedbnn("train", "--config", "tiny.yaml", *colour[2:], "--dry_run") == 0


WRONG = {
    ("--network", f"{HERE}:Tied"): "first.weight and second.weight are one tensor",
    ("--network", f"{HERE}:Nothing"): "has no attribute 'Nothing'",
    ("--network", "no.such:Thing"): "No module named 'no'",
    ("--network", f"{HERE}:Mine"): "is no network",
    ("--network", "os:system"): "is no network",
    ("--network", f"{HERE}:unannotated"): "error: unannotated is no network",
    ("--network", f"{HERE}:pictures"): "features must be (images, width)",
    ("--network", f"{HERE}:scripted"): "the network cannot have constants: ScriptModule does not",
    ("--network", f"{HERE}:spectral"): "1.weight_u changes in training",
    ("--network", f"{HERE}:Double"): "must be torch.float32, not torch.float64",
    ("--network", f"{HERE}:TwoFaced"): "features must be (images, width), not tuple",
    ("--network", f"{HERE}:Boasting"): "says its width is 65, but returns 64 features",
    ("--network", f"{HERE}:Needy"): "network.dim is required",
    ("--network", f"{HERE}:Tiny", "--network.dimm", "3"): "did you mean 'network.dim'?",
    ("--network", f"{HERE}:Tiny", "--network.dim", "-3"): "the network cannot be built",
    ("--network", f"{HERE}:Tiny", "--network.weights", "x.pth"): "weights cannot be loaded",
    ("--network", f"{HERE}:Tiny", "--network.trained", "[hiden]"): "did you mean 'hidden'?",
    ("--network", f"{HERE}:Tiny", "--network.trained", "[hid]"): "no layer is called 'hid'",
    ("--network", f"{HERE}:Tiny", "--network.trained", "[classifier]"): "name layers before it",
    ("--network", "TinyNet"): "your own is package.module:name",
    ("--networc", "mlp"): "did you mean 'network'?",
    ("--network", "__main__:Lost"): "define it in a module of its own",
    ("--network", "torchvision.models:resnet18"): "the network cannot see images of 1x8x8",
    ("--method", f"{HERE}:Tiny"): "is no method",
    ("--head", f"{HERE}:Tiny"): "unknown head",
}


@pytest.mark.parametrize("words", WRONG, ids=lambda words: " ".join(words)[-40:])
def test_what_does_not_fit_is_one_line_before_anything_starts(
    words: tuple[str, ...], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedbnn("train", "--config", "tiny.yaml", "--run_dir", "run", *words) == 2
    line = capsys.readouterr().err
    assert WRONG[words] in line
    assert line.count("\n") == 1
    assert not (home / "run").exists()


@pytest.mark.parametrize(
    ("name", "counts", "first"),
    [
        ("Digits", (320, 80), "0"),
        ("Named", (320, 80), "digit-0"),
        ("pair", (300, 100), "digit-0"),
        ("joined", (320, 80), "digit-0"),
    ],
)
def test_a_dataset_or_two_are_a_source(
    tmp_path: Path, name: str, counts: tuple[int, int], first: str
) -> None:
    table = DatasetRegistry(tmp_path).open(f"{HERE}:{name}")
    assert (len(table.train_labels), len(table.test_labels)) == counts
    assert (table.name, table.classes[0], len(table.classes)) == (name, first, 10)
    assert table.train_pixels.shape[1:] == (1, 8, 8)
    assert int(table.train_pixels.max()) == 255


def test_a_lightning_data_module_is_a_source(tmp_path: Path) -> None:
    module, both = (DatasetRegistry(tmp_path).open(f"{HERE}:{name}") for name in ("Module", "pair"))
    assert torch.equal(module.train_pixels, both.train_pixels)
    assert torch.equal(module.test_labels, both.test_labels)


def test_data_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nonsense gives no images"):
        DatasetRegistry(tmp_path).open(f"{HERE}:nonsense")
    with pytest.raises(DataError, match=r"item 0 has no label: write \(image, label\)"):
        DatasetRegistry(tmp_path).open(f"{HERE}:unlabelled")
    with pytest.raises(DataError, match=r"label 0\.5 is no whole number"):
        DatasetRegistry(tmp_path).open(f"{HERE}:Halved")
    with pytest.raises(DataError, match=r"label 2 has no name in \('zero', 'one'\)"):
        DatasetRegistry(tmp_path).open(f"{HERE}:Misnamed")
    with pytest.raises(DataError, match="3 data sets are too many"):
        DatasetRegistry(tmp_path).open(f"{HERE}:three")


def test_data_that_draw_at_random_are_the_same_at_every_start(tmp_path: Path) -> None:
    first, second = (DatasetRegistry(tmp_path).open(f"{HERE}:Drawn") for _ in range(2))
    assert torch.equal(first.train_pixels, second.train_pixels)
