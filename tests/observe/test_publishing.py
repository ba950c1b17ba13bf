"""The short tables of results/README.md: what stands in the long ones, and no more."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedbnn.report import page, tables

RESULTS = Path(__file__).parents[2] / "results"
PLACE = "before\n<!-- table: this -->\nold\n<!-- end of the table -->\nafter\n"


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RESULTS))
    return importlib.import_module("publish")


def test_a_line_holds_the_cells_of_the_long_tables(publish: ModuleType, grid: Any) -> None:
    """Read back from the page of tables, every number is the one that was written there."""
    comparison = tables.every(grid)
    written = {table.title: table for table in comparison}
    read = publish.read("\n".join(map(page.markdown, comparison)))
    for title in (publish.AVERAGES, publish.PAIRED, publish.ERRORS):
        for row in written[title].rows:
            for head, cell in zip(written[title].heads[1:], row.cells, strict=True):
                assert read[title][row.name][head].strip("*") == cell.text()
    head, _, ours, theirs, *_ = publish.summary(read)
    assert head.count("|") == ours.count("|") == theirs.count("|")
    average, apart = read[publish.AVERAGES], read[publish.PAIRED]["fedbnn − fedavg"]
    assert f"{average['fedbnn']['aware @TS']} / {average['fedbnn']['aware @Fin']}" in ours
    assert theirs.endswith(f"| {apart['aware @Fin']} / {apart['agnostic @Fin']} |")


def test_only_what_stands_between_the_marks_is_new(publish: ModuleType) -> None:
    page_now = publish.between(PLACE, "this", ["| new |"])
    assert page_now == PLACE.replace("old", "\n| new |\n")
    assert publish.between(page_now, "this", ["| new |"]) == page_now
    with pytest.raises(SystemExit, match="no place for a table: <!-- table: other -->"):
        publish.between(PLACE, "other", [])


def test_what_made_a_table_is_named(publish: ModuleType, tmp_path: Path) -> None:
    """All methods of a protocol need no name, some do; and the sources of their runs."""
    some = {publish.AVERAGES: {key: {} for key in ("fedbnn", "exact", "fcil [5736]", "chance")}}
    said = publish.command("cifar100_ci_fast", some)
    assert said.startswith("python results/protocol.py results/protocols/cifar100_ci_fast.yaml")
    assert said.endswith(" --methods exact,fedbnn,fcil")
    for seed, commit in enumerate(("0123456789abcdef", "0123456789abcdef", "fedcba9876543210")):
        (run := tmp_path / f"exact-s{seed}").mkdir()
        (run / "env.json").write_text(f'{{"commit": "{commit}"}}')
    assert publish.commits(tmp_path) == "0123456, fedcba9"
