"""What is installed: declared in pyproject.toml, pinned in constraints.txt."""

import re
import tomllib
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from fedbnn import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LINES = [
    line
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
PINNED = {canonicalize_name(line.split("==")[0]): Version(line.split("==")[1]) for line in LINES}
ASKED = [Requirement(text) for text in [*PROJECT["dependencies"], *chain(*EXTRAS.values())]]
REQUIRED = [requirement for requirement in ASKED if requirement.name != PROJECT["name"]]


@pytest.mark.parametrize("line", LINES)
def test_a_constraint_is_a_name_and_an_exact_version(line: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][0-9a-z.]*", line)


@pytest.mark.parametrize("requirement", REQUIRED, ids=str)
def test_what_is_declared_is_pinned_within_its_range(requirement: Requirement) -> None:
    assert PINNED[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize("text", PROJECT["dependencies"])
def test_without_constraints_nothing_is_chosen_that_a_major_version_broke(text: str) -> None:
    """Of torch, whose minor versions break things, not even the next minor one."""
    requirement = Requirement(text)
    tested = PINNED[canonicalize_name(requirement.name)]
    later = f"{tested.major + 1}.0"
    if requirement.name in ("torch", "torchvision"):
        later = f"{tested.major}.{tested.minor + 1}.0"
    assert not requirement.specifier.contains(later)


def test_broken_lightning_releases_are_excluded() -> None:
    lightning = next(
        requirement for requirement in REQUIRED if requirement.name == "pytorch-lightning"
    )
    assert [
        version
        for version in ("2.6.1", "2.6.2", "2.6.3", "2.6.6")
        if version in lightning.specifier
    ] == ["2.6.1", "2.6.6"]


def test_the_console_command_is_the_one_tested() -> None:
    assert PROJECT["scripts"] == {"fedbnn": "fedbnn.cli.main:main"}
    installed = [point for point in entry_points(group="console_scripts") if point.name == "fedbnn"]
    assert all(point.value == "fedbnn.cli.main:main" for point in installed)


def test_the_citation_names_this_version_and_the_paper() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == __version__
    assert cited["license"] == PROJECT["license"]
    assert cited["preferred-citation"]["title"].endswith("Federated Continual Learning")
    assert len(cited["preferred-citation"]["authors"]) == 7


def test_the_image_is_built_of_files_that_are_there() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1] for line in lines if line.startswith("COPY") and "--from" not in line]
    assert copied == [".", "constraints.txt"]
    assert all((ROOT / name).exists() for name in copied)
    assert 'ENTRYPOINT ["fedbnn"]' in lines


def test_the_licence_and_the_lowest_python_are_stated() -> None:
    assert PROJECT["license"] == "MIT"
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")
    assert PROJECT["requires-python"] == ">=3.11"
