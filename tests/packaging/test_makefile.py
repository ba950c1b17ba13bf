"""`make`: its targets explain themselves, and the environment is made once."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ("help", "demo", "test", "test-slow", "lint", "docs", "bench", "clean")


def make(folder: Path, *words: str) -> str:
    """The standard output of make in a folder."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(
        ["make", *words], cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the Makefile and what the environment depends on."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def pretend_installed(folder: Path) -> None:
    """The stamps that an installation leaves, in the order it leaves them."""
    (folder / ".venv").mkdir()
    for name in ("python", "installed", "installed-dev"):
        (folder / ".venv" / name).touch()


def test_make_alone_lists_every_target_with_a_sentence(project: Path) -> None:
    lines = make(project).splitlines()
    assert lines == make(project, "help").splitlines()
    assert [line.split()[1] for line in lines] == list(TARGETS)
    assert all(re.fullmatch(r"make \S+ +[A-Z].*\.", line) for line in lines)


def test_the_first_call_installs_through_the_constraints(project: Path) -> None:
    plan = make(project, "-n", "test")
    assert "-m venv .venv" in plan
    assert plan.count("PIP_CONSTRAINT=constraints.txt") == 2
    assert '--editable ".[dev]"' in plan


@pytest.mark.parametrize("target", ["demo", "test", "lint", "test-slow", "docs"])
def test_the_second_call_does_not_install_again(project: Path, target: str) -> None:
    pretend_installed(project)
    assert "pip install" not in make(project, "-n", target)


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_change_of_what_is_needed_installs_again(project: Path, name: str) -> None:
    pretend_installed(project)
    later = (project / ".venv" / "installed-dev").stat().st_mtime + 10
    os.utime(project / name, (later, later))
    plan = make(project, "-n", "demo")
    assert "pip install" in plan
    assert "-m venv" not in plan


def test_ci_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [
        line
        for line in script.read_text().splitlines()
        if line and not line.startswith(("#", "set ", "cd "))
    ]
    assert commands == ["exec make test"]
