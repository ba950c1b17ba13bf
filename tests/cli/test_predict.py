"""`fedbnn predict` and `fedbnn.load`: pictures in, classes and how sure the model is out."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import fedbnn
from fedbnn.errors import RunDirectoryError
from fedbnn.storage.files import sealed, unsealed
from tests.cli.command import fedbnn as command


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten digits as PNGs of other sizes and modes than in training, one in a deeper folder."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "deeper").mkdir()
    for number, pixels in enumerate(load_digits().images[:10]):
        place = folder / ("deeper" if number == 9 else "") / f"{number}.png"
        grey = Image.fromarray((pixels * 255 / 16).astype(np.uint8))
        grey.resize((32, 32), Image.Resampling.NEAREST).convert("RGB" if number % 2 else "L").save(
            place
        )
    return folder


def predicted(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict]:
    """What the command prints with --json."""
    assert command("predict", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_for_each_picture_the_likeliest_classes_and_the_uncertainty(
    finished: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = predicted(capsys, finished, pictures)
    assert [Path(row["picture"]).name for row in rows] == [f"{number}.png" for number in range(10)]
    for row in rows:
        shares = list(row["classes"].values())
        assert len(shares) == 3
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1 + 1e-3
        assert row["label"] == next(iter(row["classes"]))
        assert row["label"].startswith("digits/")
        assert 0 <= row["mutual_information"] <= row["entropy"] <= np.log(10) + 1e-4


def test_a_wide_picture_is_cropped_as_in_training_and_not_stretched(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digit = (load_digits().images[3] * 255 / 16).astype(np.uint8)
    Image.fromarray(digit).save(tmp_path / "plain.png")
    Image.fromarray(np.pad(digit, ((0, 0), (12, 12)))).save(tmp_path / "wide.png")
    plain, wide = predicted(capsys, finished, tmp_path)
    assert wide["classes"] == plain["classes"]


def test_the_most_uncertain_come_first_on_request(
    finished: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = predicted(capsys, finished, pictures, "--samples", 4)
    sorted_rows = predicted(capsys, finished, pictures, "--samples", 4, "--uncertain_first")
    assert sorted_rows == sorted(given, key=lambda row: -row["entropy"])
    assert sorted_rows != given


def test_the_table_is_plain_and_has_a_line_for_each_picture(
    finished: Path,
    pictures: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(pictures)
    assert command("predict", finished, "0.png", "deeper", "--top", 1) == 0
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.split("\n"))
    for words in ("likeliest classes", "entropy", "mutual information", "0.png", "deeper/9.png"):
        assert words in shown
    assert shown.count("digits/") == 2


def test_long_names_of_pictures_are_shown_whole(
    finished: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"{'a_long_name_' * 4}{number}.png" for number in range(2)]
    for name in names:
        (tmp_path / name).write_bytes((pictures / "0.png").read_bytes())
    assert command("predict", finished, *(tmp_path / name for name in names)) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = "".join(line.split("│")[1].strip() for line in lines if line.startswith("│"))
    assert all(f"{tmp_path / name}" in shown for name in names)
    assert {len(line) for line in lines} == {len(lines[0])}


WRONG = {
    ("RUN", "missing.png"): (3, "there is no such picture or folder (missing.png)"),
    ("RUN", "empty"): (3, "no picture found (empty)"),
    ("RUN", "cut.png"): (3, "picture cannot be read: "),
    ("RUN", "text.png"): (3, "(text.png); replace or remove it"),
    ("nowhere", "cut.png"): (4, "no model can be loaded"),
    ("RUN", "cut.png", "--samples", "0"): (2, "invalid PositiveInt value: '0'"),
    ("RUN",): (2, "IMAGE_OR_FOLDER"),
}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_what_cannot_be_predicted_is_named_in_one_line(
    words: tuple[str, ...],
    finished: Path,
    pictures: Path,
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (home / "empty").mkdir()
    (home / "text.png").write_text("not a picture")
    (home / "cut.png").write_bytes((pictures / "0.png").read_bytes()[:60])
    code, message = WRONG[words]
    assert command("predict", *(finished if word == "RUN" else word for word in words)) == code
    line = capsys.readouterr().err
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    assert message in line


def test_a_loaded_model_gives_probabilities_labels_and_two_uncertainties(finished: Path) -> None:
    model = fedbnn.load(finished)
    images = torch.from_numpy(load_digits().images[:20] * 255 / 16).to(torch.uint8)[:, None]
    found = model.predict(images, samples=16)
    assert found.probabilities.shape == (20, 10)
    assert found.classes == tuple(f"digits/{number}" for number in range(10))
    torch.testing.assert_close(found.probabilities.sum(1), torch.ones(20))
    assert [found.classes[place] for place in found.probabilities.argmax(1).tolist()] == list(
        found.labels
    )
    entropy = -(found.probabilities * found.probabilities.clamp_min(1e-12).log()).sum(1)
    torch.testing.assert_close(found.entropy, entropy, atol=1e-4, rtol=1e-4)
    assert bool((found.mutual_information > 0).all())
    assert bool((found.mutual_information <= found.entropy).all())


def test_each_draw_of_the_weights_serves_all_images(finished: Path) -> None:
    model = fedbnn.load(str(finished))
    images = torch.from_numpy(load_digits().images[:20] * 255 / 16).to(torch.uint8)[:, None]
    together = model.predict(images, samples=3).probabilities
    apart = torch.cat([model.predict(part, samples=3).probabilities for part in images.split(7)])
    torch.testing.assert_close(together, apart)
    assert not torch.allclose(together, model.predict(images, samples=3, seed=1).probabilities)


def test_a_damaged_model_is_refused(finished: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((finished / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(RunDirectoryError, match="no model can be loaded"):
        fedbnn.load(tmp_path)


@pytest.fixture
def mixed(pictures: Path, home: Path) -> Path:
    """A folder with one good picture among all kinds of others."""
    folder = home / "mixed"
    folder.mkdir()
    whole = (pictures / "0.png").read_bytes()
    (folder / "good.png").write_bytes(whole)
    (folder / "cut.png").write_bytes(whole[:60])
    (folder / "vector.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")
    (folder / "red\x1b[31m.png").write_bytes(b"")
    os.mkfifo(folder / "pipe.png")
    return folder


def test_pictures_that_cannot_be_read_are_named_and_left_out(
    finished: Path, mixed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("predict", finished, mixed, "--json") == 0
    said = capsys.readouterr()
    assert [Path(row["picture"]).name for row in json.loads(said.out)] == ["good.png"]
    lines = said.err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["left out"] * 4
    assert all(line.isprintable() for line in lines)
    for name in ("cut.png", "pipe.png", "vector.png", r"red\x1b[31m.png"):
        assert name in said.err


def test_a_vector_graphic_starts_no_interpreter(
    finished: Path, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mixed.parent / "gs").write_text(f"#!/bin/sh\ntouch {mixed.parent}/started\n")
    (mixed.parent / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{mixed.parent}{os.pathsep}{os.environ['PATH']}")
    assert command("predict", finished, mixed / "vector.png") == 3
    assert not (mixed.parent / "started").exists()


def test_names_of_classes_and_pictures_are_shown_as_they_are(
    finished: Path, pictures: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, folder = home / "run", home / "["
    shutil.copytree(finished, run_dir, ignore=shutil.ignore_patterns("state"))
    _, facts = unsealed(run_dir / "config.json")
    names = [f"[bold]{number}[/] \x1b[2J" for number in range(10)]
    (run_dir / "config.json").write_bytes(sealed(1, {**facts, "classes": names}))
    folder.mkdir()
    shutil.copy(pictures / "0.png", folder / "][red]x.png")
    assert command("predict", run_dir, folder.name, "--top", 1) == 0
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.split("\n"))
    assert "[/][red]x.png" in shown
    assert "[bold]" in shown
