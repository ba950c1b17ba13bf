"""`fedbnn data`: what is there, where it belongs, and making it ready."""

from pathlib import Path

import pytest
from PIL import Image

from datamodules.sources import SOURCES
from fedbnn.cli.main import main
from fedbnn.errors import Exit


def test_the_list_names_every_data_set_and_where_it_belongs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "--data_dir", str(tmp_path)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(lines) == {*SOURCES, "folder:PATH"}
    assert lines.pop("digits") == "found"
    assert all(str(tmp_path) in line for line in lines.values())
    assert not list(tmp_path.iterdir())


def test_a_data_set_is_made_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "digits", "--data_dir", str(tmp_path), "--size", "16"]) == 0
    assert (
        "ready: 1437 train and 360 test images, 10 classes, 1 x 16 x 16" in capsys.readouterr().out
    )
    assert (tmp_path / ".cache").is_dir()


def test_images_of_ones_own_are_made_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            folder = tmp_path / "pets" / part / name
            folder.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(folder / "1.png")
    assert main(["data", "folder:pets", "--data_dir", str(tmp_path)]) == 0
    assert "2 train and 2 test images, 2 classes, 3 x 8 x 8" in capsys.readouterr().out


def test_a_missing_data_set_ends_with_code_3_and_what_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "cifar100", "--data_dir", str(tmp_path)]) == Exit.DATA
    text = capsys.readouterr().err
    assert text.startswith("error: data set cifar100 is missing")
    assert str(tmp_path) in text
    assert text.count("\n") == 1
