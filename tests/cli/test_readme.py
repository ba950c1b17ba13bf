"""Every command in the README can be typed, and its tables name what there is."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from fedbnn.cli.compose import SCHEMA
from fedbnn.cli.main import COMMANDS, subcommand
from fedbnn.cli.train import parse
from fedbnn.methods import METHODS
from tests.cli.command import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
TYPED = [shlex.split(line, comments=True) for line in SHELL.splitlines()]


def rows(section: str) -> list[list[str]]:
    """The lines of the first table of a section, cell by cell."""
    text = README.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    table = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line] for line in table]


@pytest.mark.parametrize(
    "words",
    [words[2:] for words in TYPED if words[1:2] == ["train.py"] and words[2:]],
    ids=" ".join,
)
def test_a_training_command_is_understood(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    if {"--help", "--print_config"} & set(words):
        with pytest.raises(SystemExit, match="0"):
            parse(words)
    else:
        parsed = parse(words)
        assert parsed.build("stream", seed=0).rounds > 1


@pytest.mark.parametrize(
    "words", [words[1:] for words in TYPED if words[:1] == ["fedbnn"]], ids=" ".join
)
def test_another_command_is_understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    name, *rest = words
    assert name in COMMANDS
    module = sys.modules[subcommand(name).__module__]
    if hasattr(module, "_options"):
        options = module._options(rest)
        assert not hasattr(options, "config") or Path(options.config).is_file()


def test_the_table_of_methods_is_complete_and_true() -> None:
    table = rows("Methods")
    assert [name for name, *_ in table] == list(METHODS)
    for name, _, told, stores in table:
        method = METHODS[name].method()
        assert (told == "yes") == (method.consolidation is not None)
        assert (stores == "yes") == (method.replay is not None)


def test_the_table_of_engines_is_complete() -> None:
    assert [name for name, _ in rows("Engines")] == list(SCHEMA["engine"].choices)


def test_every_file_a_run_leaves_is_in_the_table(finished: Path) -> None:
    named = {
        part.strip(" `/") for first, *_ in rows("What a run gives") for part in first.split(",")
    }
    assert {path.name for path in finished.iterdir()} == named - {"rejected"}


def test_every_picture_shown_is_there() -> None:
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert pictures
    assert all((ROOT / picture).stat().st_size > 10_000 for picture in pictures)
