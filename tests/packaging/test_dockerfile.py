"""The Dockerfile, read as its builder does: what it copies is there, what it starts works."""

import fnmatch
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from fedbnn.cli.main import main

ROOT = Path(__file__).parents[2]
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8")).splitlines()
STEPS = [line.split(maxsplit=1) for line in LINES if line.strip() and not line.startswith("#")]
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def of(instruction: str) -> list[list[str]]:
    """The words of each such line."""
    return [shlex.split(words) for name, words in STEPS if name == instruction]


def ignored(name: str) -> bool:
    """Whether the builder is not given this file."""
    return any(fnmatch.fnmatch(part, one) for one in IGNORED for part in (name, Path(name).name))


def test_every_instruction_is_one_that_builders_know() -> None:
    known = {"FROM", "COPY", "RUN", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in STEPS} == known
    assert STEPS[0][0] == "FROM"


def test_what_is_copied_is_there() -> None:
    stages = {words[2] for words in of("FROM") if words[1:2] == ["AS"]}
    for words in of("COPY"):
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists()
            assert not ignored(source)


def test_the_wheel_can_be_built_from_what_the_builder_is_given() -> None:
    needed = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "train.py")
    for name in (*needed, "fedbnn", "lightning_modules", "datamodules", "conf"):
        assert (ROOT / name).exists()
        assert not ignored(name)
    assert [words[:2] for words in of("RUN") if "wheel" in words] == [["pip", "wheel"]]


def test_python_is_new_enough() -> None:
    wanted = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    for image, *_ in of("FROM"):
        found = re.fullmatch(r"python:(\d+)\.(\d+)-slim", image)
        assert found is not None
        assert tuple(map(int, found.groups())) >= wanted


def test_versions_are_those_that_were_tested() -> None:
    [install] = [words for words in of("RUN") if words[:2] == ["pip", "install"]]
    constraints = install[install.index("--constraint") + 1]
    [copied] = [words for words in of("COPY") if words[-1] == constraints]
    assert (ROOT / copied[0]).samefile(ROOT / "constraints.txt")


def test_what_it_starts_works(capsys: pytest.CaptureFixture[str]) -> None:
    [(program,), words] = [
        json.loads(text) for name, text in STEPS if name in ("ENTRYPOINT", "CMD")
    ]
    assert PROJECT["scripts"][program] == f"{main.__module__}:{main.__name__}"
    assert main(words) == 0
    assert "usage: fedbnn COMMAND" in capsys.readouterr().out
