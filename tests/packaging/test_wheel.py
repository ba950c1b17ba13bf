"""The wheel: one name of ours at its top, and it works in an empty folder beside foreign names."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("fedbnn", "lightning_modules", "datamodules", "conf")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "train.py")
BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist')"
FOREIGN = ("train", "datamodules", "lightning_modules", "conf", "tests")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked as pip does."""
    clone = tmp_path_factory.mktemp("clone")
    for name in SOURCES:
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, clone)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = (clone / "dist").glob("fedbnn-*.whl")
    site = clone / "site"
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_nothing_but_fedbnn_is_at_the_top(installed: Path) -> None:
    [info] = installed.glob("*.dist-info")
    assert {path.name for path in installed.iterdir()} == {"fedbnn", info.name}
    assert (info / "top_level.txt").read_text() == "fedbnn\n"
    packaged = {str(path.relative_to(ROOT / "conf")) for path in (ROOT / "conf").rglob("*.yaml")}
    conf = installed / "fedbnn" / "conf"
    assert {str(path.relative_to(conf)) for path in conf.rglob("*.yaml")} == packaged
    assert (installed / "fedbnn" / "py.typed").is_file()


@pytest.mark.parametrize("engine", ["serial", pytest.param("processes", marks=pytest.mark.slow)])
def test_the_demo_runs_in_an_empty_folder_beside_foreign_names(
    installed: Path, tmp_path: Path, engine: str
) -> None:
    for name in FOREIGN:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is not yours')\n")
    short = ("--stream.tasks", "2", "--stream.rounds_per_task", "1", "--client.epochs", "1")
    words = ("train", "--config", "quickstart", "--method", "fedavg", *short)
    environment = {**os.environ, "PYTHONPATH": str(installed), "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, "-m", "fedbnn", *words, "--engine", engine],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()
    assert "report  runs/quickstart/report.html" in done.stdout
