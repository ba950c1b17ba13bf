"""The documents of the project, and the code blocks in them."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """The text between two fences, and where it stands."""

    document: Path
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.document.name}-{self.line}"


def blocks(document: Path, language: str | None = None) -> Iterator[Block]:
    """The code blocks of a document, in order."""
    text = document.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        block = Block(document, found[2], textwrap.dedent(found[3]), line)
        if language in (None, block.language):
            yield block


def section(document: Path, title: str) -> str:
    """The text below a heading, up to the next of its kind."""
    text = document.read_text(encoding="utf-8")
    [found] = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return str(found)


def rows(document: Path, title: str) -> list[list[str]]:
    """The lines of the tables in a section that begin with a name, cell by cell."""
    lines = [line for line in section(document, title).splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
