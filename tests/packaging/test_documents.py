"""What the documents name exists."""

import re
from pathlib import Path

import pytest

from datamodules.sources import SOURCES
from fedbnn.errors import Exit

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PLACES = re.compile(
    r"(?<![\w/.-])(?:fedbnn|datamodules|lightning_modules|conf|tests)/[\w/.-]*\w+\.(?:py|yaml)"
)
TABLE_ROW = re.compile(r"^\| `?([\w:]+)`? \|", re.MULTILINE)


@pytest.mark.parametrize("place", sorted(set(PLACES.findall(README + GUIDE))))
def test_every_file_that_is_named_is_there(place: str) -> None:
    assert (ROOT / place).is_file()


def test_the_table_of_data_sets_is_complete() -> None:
    section = README.partition("## Data sets")[2].partition("\n## ")[0]
    assert set(TABLE_ROW.findall(section)) - {"name"} == {*SOURCES, "folder:PATH"}


def test_the_table_of_exit_codes_is_complete() -> None:
    section = README.partition("## What you can rely on")[2].partition("\n## ")[0]
    assert [code for code in TABLE_ROW.findall(section) if code.isdigit()] == [
        str(int(code)) for code in Exit
    ]


@pytest.mark.parametrize("part", ["method", "scenario", "data set", "engine"])
def test_there_is_a_recipe_for_every_part(part: str) -> None:
    assert re.search(rf"^## How to add an? {part}$", GUIDE, re.MULTILINE)


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", README + GUIDE, re.MULTILINE)) <= targets
