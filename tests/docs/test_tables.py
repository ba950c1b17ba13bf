"""Tables of the documents name what there is, and what they link to is there."""

import re
from pathlib import Path

import pytest

from datamodules.sources import SOURCES
from fedbnn.cli.compose import SCHEMA
from fedbnn.errors import Exit
from fedbnn.methods import METHODS
from tests.docs.blocks import DOCUMENTS, ROOT, rows, section

README, DOCS = ROOT / "README.md", ROOT / "docs"
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
FIRST_COMMANDS = ["make demo", "python train.py --config conf/gradual_ci.yaml"]


def test_the_front_page_begins_with_the_two_commands_and_has_the_picture_and_the_paper() -> None:
    text = README.read_text(encoding="utf-8")
    first = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)[0].splitlines()
    assert [line.partition(" #")[0].strip() for line in first] == FIRST_COMMANDS
    assert "make test" in section(README, "Working on it")
    paper = section(README, "The paper")
    assert all(word in paper for word in ("Variational Bayes", "arxiv.org", "@article", "Sun"))


def test_the_front_page_has_its_parts_in_order() -> None:
    """What it is, how it looks, what it implements, how to begin, what it reaches, how to use."""
    text = README.read_text(encoding="utf-8")
    parts = (
        *("**One model", "figures/quickstart.png)", "## The paper", "@article", "badges/"),
        *("## Install", "## The demo", "## Results", "## Ten lines of Python"),
        *("## Your own data, network and method", "## Methods", "## Documentation"),
    )
    places = [text.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)


def test_the_table_of_methods_is_complete_and_true() -> None:
    table = rows(README, "Methods")
    assert [name for name, *_ in table] == list(METHODS)
    for name, _, told, stores in table:
        method = METHODS[name].method()
        assert (told == "yes") == (method.consolidation is not None)
        assert (stores == "yes") == (method.replay is not None)


def test_the_figures_on_the_front_page_are_those_of_the_table_they_come_from() -> None:
    """Each cell of CIFAR-100 on the front page: the methods of its line, one after the other."""
    made = (ROOT / "results/cifar100_ci_fast/tables.md").read_text(encoding="utf-8")
    averages = made.partition("**Averages over the tasks")[2].partition("**Paired")[0]
    lines = [line[2:-2].split(" | ") for line in averages.splitlines() if line.startswith("| ")]
    known = {line[0].partition(" [")[0]: line for line in lines}
    seen = set()
    for who, aware, agnostic in rows(README, "Results"):
        methods = [word for word in re.findall(r"\w+", who) if word in METHODS]
        for column, cell in ((2, aware), (5, agnostic)):
            assert cell.split("; ") == [known[method][column] for method in methods]
        seen |= {*methods}
    assert seen == {*known} & {*METHODS} - {"local"}


def test_the_table_of_engines_is_complete() -> None:
    assert [name for name, _ in rows(DOCS / "engines.md", "Engines")] == list(
        SCHEMA["engine"].choices
    )


def test_the_table_of_data_sets_is_complete() -> None:
    named = {name for name, *_ in rows(DOCS / "data.md", "Data sets")}
    assert named == {*SOURCES, "folder:PATH"}


def test_the_table_of_exit_codes_is_complete() -> None:
    table = re.findall(r"^\| (\d+) \|", section(DOCS / "resuming.md", "Exit codes"), re.MULTILINE)
    assert table == [str(int(code)) for code in Exit]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_links_to_is_there(document: Path) -> None:
    for path, anchor in LINK.findall(document.read_text(encoding="utf-8")):
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), path
        assert not anchor or anchor in headings(target), f"{path}#{anchor}"


def headings(document: Path) -> set[str]:
    """The anchors of a page."""
    found = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in found}
