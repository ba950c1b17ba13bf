"""The command `fedbnn`."""

import ast
import gc
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedbnn.cli
from fedbnn import __version__
from fedbnn.cli.main import ABOUT_ALL, COMMANDS, main, subcommand
from fedbnn.errors import Exit
from tests.cli.command import environment

FOLDER = Path(fedbnn.cli.__file__).parent


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_named_has_a_main(name: str) -> None:
    assert callable(subcommand(name))


def test_every_file_with_a_main_is_named() -> None:
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.py")}
    functions = {
        stem: [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        for stem, tree in trees.items()
    }
    named = {stem for stem, names in functions.items() if "main" in names}
    assert named - {"main"} == COMMANDS.keys() - ABOUT_ALL


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_command_alone_lists_its_subcommands(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == Exit.DONE
    text = capsys.readouterr().out
    assert all(f"fedbnn {name} " in text and summary in text for name, summary in COMMANDS.items())


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == Exit.DONE
    assert capsys.readouterr().out == f"fedbnn {__version__}\n"


def test_the_package_and_its_version_cost_no_import_of_torch() -> None:
    code = "import sys, fedbnn, fedbnn.cli.main as m; m.main(['--version'])"
    code += "; assert {'run', 'compare', 'load', '__version__'} <= set(dir(fedbnn))"
    code += "; assert not {'torch', 'torchvision', 'jsonargparse', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_garbage_collector_looks_at_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def imported(name: str) -> SimpleNamespace:
        seen.extend((name, gc.isenabled()))
        return SimpleNamespace(main=len)

    monkeypatch.setattr("fedbnn.cli.main.import_module", imported)
    monkeypatch.setattr(gc, "freeze", lambda: seen.append("kept"))
    monkeypatch.delitem(sys.modules, "fedbnn.cli.data", raising=False)
    assert subcommand("data") is len
    assert seen == ["fedbnn.cli.data", False, "kept"]
    assert gc.isenabled()


def test_what_a_program_has_imported_before_is_left_to_its_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: pytest.fail("a program keeps its own objects"))
    monkeypatch.setitem(sys.modules, "fedbnn.cli.data", SimpleNamespace(main=len))
    assert subcommand("data") is len


def test_torchvision_can_be_imported_after_the_package_whoever_does() -> None:
    code = "import fedbnn, pytorch_lightning, torchvision; torchvision.models.resnet18()"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr


WRONG = {
    ("explian",): "error: unknown command 'explian' (fedbnn); did you mean 'explain'?\n",
    (
        "explain",
        "x",
    ): "error: argument code: invalid int value: 'x' (fedbnn explain); see fedbnn explain --help\n",
    ("explain", "9"): "error: there is no exit code 9; known: 0, 2, 3, 4, 5, 6, 7, 130, 143\n",
    (
        "data",
        "--sise",
        "3",
    ): "error: unrecognized arguments: --sise (fedbnn data); see fedbnn data --help\n",
}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_wrong_command_line_is_one_line_and_code_2(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == Exit.CONFIGURATION
    assert capsys.readouterr().err == WRONG[words]


def test_explain_prints_one_text_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "4"]) == 0
    one = capsys.readouterr().out
    assert main(["explain"]) == 0
    everything = capsys.readouterr().out
    assert one.startswith("4 (run directory): ")
    assert one.strip() in everything
    assert everything.count("\n\n") == len(Exit) - 1
