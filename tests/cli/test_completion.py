"""The script of `fedbnn completion`, as bash itself reads it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from fedbnn.cli.main import COMMANDS, main

ASK = """source {file}; COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_fedbnn; printf '%s\\n' "${{COMPREPLY[@]}}" """
EXPECTED = {
    "fedbnn tr": {"train"},
    "fedbnn ''": {*COMMANDS},
    "fedbnn train --method fedavg": {"fedavg", "fedavg_plus"},
    "fedbnn train --config quick": {"quickstart"},
    "fedbnn train --stream.clients": {"--stream.clients", "--stream.clients_per_round"},
    "fedbnn compare --swe": {"--sweep"},
    "fedbnn predict runs/qu": {"runs/quickstart"},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script, made once."""
    folder = tmp_path_factory.mktemp("shell")
    (folder / "runs" / "quickstart").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch, (folder / "script").open("w") as out:
        patch.setattr("sys.stdout", out)
        assert main(["completion", "bash"]) == 0
    return folder / "script"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("line", EXPECTED)
def test_bash_completes(file: Path, line: str) -> None:
    words = ["bash", "--norc", "-c", ASK.format(file=file, line=line)]
    done = subprocess.run(words, cwd=file.parent, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == EXPECTED[line]


def test_zsh_reads_the_same_script(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.endswith(file.read_text())


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 2
    assert "bash" in capsys.readouterr().err
