"""What the documents name exists."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import DOCUMENTS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ALL = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
PLACES = re.compile(
    r"(?<![\w/.-])(?:fedbnn|datamodules|lightning_modules|conf|tests)/[\w/.-]*\w+\.(?:py|yaml)"
)


@pytest.mark.parametrize("place", sorted(set(PLACES.findall(ALL))))
def test_every_file_that_is_named_is_there(place: str) -> None:
    assert (ROOT / place).is_file()


@pytest.mark.parametrize("part", ["method", "scenario", "data set", "engine"])
def test_there_is_a_recipe_for_every_part(part: str) -> None:
    assert re.search(rf"^## How to add an? {part}$", GUIDE, re.MULTILINE)


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", ALL, re.MULTILINE)) <= targets
