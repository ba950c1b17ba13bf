"""Every code block of the documents works: typed, parsed or run, each by the real thing."""

import re
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import fedbnn
from fedbnn.cli.main import Arguments, subcommand
from fedbnn.cli.train import parse
from tests.docs.blocks import DOCUMENTS, ROOT, Block, blocks

KINDS = {"bash", "python", "yaml", "bibtex", "mermaid", "text", ""}
SHELL = [block for document in DOCUMENTS for block in blocks(document, "bash")]
SETTINGS = [block for document in DOCUMENTS for block in blocks(document, "yaml")]
PROGRAMS = [
    pytest.param(path, marks=[pytest.mark.slow] if "fedbnn.compare" in path.read_text() else [])
    for path in DOCUMENTS
    if any(blocks(path, "python"))
]
TYPED = sorted(
    {
        tuple(shlex.split(line, comments=True))
        for block in SHELL
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.startswith(("python train.py", "fedbnn ", "make "))
    }
)
TINY = {
    "stream.tasks": 2,
    "stream.rounds_per_task": 1,
    "stream.clients": 6,
    "stream.clients_per_round": 2,
    "client.epochs": 1,
    "track.wandb": "off",
}
"""What makes a run of the quickstart short, where a block does not say otherwise."""


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {block.language for document in DOCUMENTS for block in blocks(document)} <= KINDS


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_block_of_shell_is_shell(block: Block) -> None:
    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert not checked.stderr


@pytest.mark.parametrize("words", TYPED, ids=" ".join)
def test_a_command_is_understood(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, name, *rest = words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert name in targets
    elif name in ("train.py", "train"):
        _train(rest)
    else:
        _other(name, rest)


def _train(words: list[str]) -> None:
    """The words of `python train.py` or `fedbnn train`: a configuration, or a screen of text."""
    if not words or "--resume" in words:
        assert set(words) <= {"--resume", "last", "runs/quickstart"}
    elif {"--help", "--print_config"} & set(words):
        with pytest.raises(SystemExit, match="0"):
            parse(words)
    else:
        assert parse(words).build("stream", seed=0).rounds > 1


class Understood(Exception):
    """Raised where a command would begin, with what it was asked."""


def _other(name: str, words: list[str]) -> None:
    """The words of another command of `fedbnn`, up to where it has understood them."""
    with pytest.MonkeyPatch.context() as patch:
        for parsing in ("parse_args", "parse_settings"):
            patch.setattr(Arguments, parsing, _stopping(getattr(Arguments, parsing)))
        with pytest.raises(Understood) as understood:
            subcommand(name)(words)
    [asked] = understood.value.args
    for file in np.atleast_1d(getattr(asked, "config", None) or []):
        assert Path(file).is_file()


def _stopping(real: Callable[..., Namespace]) -> Callable[..., Namespace]:
    """The same parser, which goes no further."""

    def parsed(parser: Arguments, argv: Sequence[str]) -> Namespace:
        raise Understood(real(parser, argv))

    return parsed


@pytest.mark.parametrize("block", SETTINGS, ids=str)
def test_a_block_of_settings_is_a_configuration(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "block.yaml"
    file.write_text(block.text, encoding="utf-8")
    said = parse(["--config", "quickstart", "--config", str(file)]).values
    assert holds(said, yaml.safe_load(block.text))


def holds(said: Any, asked: Any) -> bool:
    """Whether a configuration says all that was asked for."""
    if not isinstance(asked, dict):
        return bool(said == asked)
    return all(key in said and holds(said[key], value) for key, value in asked.items())


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An empty folder, names a reader has of his own, and runs that are short."""
    monkeypatch.chdir(tmp_path)
    real_run, real_compare = fedbnn.run, fedbnn.compare
    monkeypatch.setattr(fedbnn, "run", lambda *a, **own: real_run(*a, **{**TINY, **own}))
    short = {"jobs": 1, "seeds": [0]}
    monkeypatch.setattr(
        fedbnn, "compare", lambda *a, **own: real_compare(*a, **{**TINY, **own, **short})
    )
    return {"images": np.zeros((3, 8, 8), np.uint8)}


@pytest.mark.parametrize("document", PROGRAMS, ids=lambda path: path.stem)
def test_the_python_of_a_document_runs_from_top_to_bottom(
    document: Path, tiny: dict[str, Any]
) -> None:
    if "runs/quickstart" in document.read_text(encoding="utf-8"):
        fedbnn.run("quickstart")
    for block in blocks(document, "python"):
        named = re.match(r"# file: (\w+\.py)\n", block.text)
        if named:
            Path(named[1]).write_text(block.text, encoding="utf-8")
        else:
            exec(compile(block.text, str(block), "exec"), tiny)
