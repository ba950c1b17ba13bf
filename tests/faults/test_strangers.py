"""Rows: a run directory from a stranger: pipes, links and folders in the place of files, damaged,
foreign and changed ones. Every command ends, in one line, and nothing outside is touched."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedbnn.cli.main import main
from fedbnn.storage.files import sealed, unsealed
from tests.cli.command import environment
from tests.faults.command import ROOT, TINY
from tests.faults.test_disk import no_file_above

SECONDS = 120


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take longer than these runs."""
    monkeypatch.setattr("fedbnn.report.figures.every", lambda *_: {})


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """A command that waits for a pipe fails its test."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, and a picture beside it."""
    run_dir = tmp_path_factory.mktemp("honest") / "run"
    assert main(["train", *TINY, "--run_dir", str(run_dir)]) == 0
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(run_dir.parent / "digit.png")
    return run_dir


@pytest.fixture
def run_dir(honest: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    shutil.copytree(honest, tmp_path / "run")
    shutil.copy(honest.parent / "digit.png", tmp_path / "digit.png")
    return tmp_path / "run"


Told = Callable[..., tuple[int, str]]


@pytest.fixture
def told(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    """Run a command on the copy; its exit code, and all it said, on one line if it failed."""
    words = {
        "resume": ["train", "--resume", str(run_dir)],
        "predict": ["predict", str(run_dir), str(run_dir.parent / "digit.png")],
        "report": ["report", str(run_dir)],
    }

    def tell(command: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(words[command])
        said = capsys.readouterr()
        assert said.err.count("\n") == (1 if code else 0), said.err
        return code, said.out + said.err

    return tell


COMMANDS = ("resume", "predict", "report")
FILES = ("results.json", "log.txt", "metrics.jsonl", "model.safetensors", "state/lock")


def outside(run_dir: Path) -> Path:
    """A file of somebody else."""
    path = run_dir.parent / "precious"
    path.write_text("precious")
    return path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", [*FILES, "config.yaml", "figures/new.png", "rejected"])
def test_a_link_is_refused_and_what_it_names_untouched(
    run_dir: Path, told: Told, name: str, command: str
) -> None:
    target, place = outside(run_dir), run_dir / name
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(target)
    code, said = told(command)
    assert (code, "no links, pipes or devices" in said) == (4, True)
    assert target.read_text() == "precious"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", [*FILES, "env.json", "config.json", "state/config.json"])
def test_a_pipe_makes_nobody_wait(run_dir: Path, told: Told, name: str, command: str) -> None:
    (run_dir / name).unlink()
    os.mkfifo(run_dir / name)
    code, said = told(command)
    assert (code, "no links, pipes or devices" in said) == (4, True)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", [*FILES, "env.json", "config.json", "config.yaml"])
def test_a_folder_in_the_place_of_a_file_is_no_traceback(
    run_dir: Path, told: Told, name: str, command: str
) -> None:
    (run_dir / name).unlink()
    (run_dir / name).mkdir()
    assert told(command)[0] in (0, 2, 4)


@pytest.mark.parametrize("command", COMMANDS)
def test_folders_without_end_are_refused(run_dir: Path, told: Told, command: str) -> None:
    run_dir.joinpath("figures", *["deep"] * 40).mkdir(parents=True)
    code, said = told(command)
    assert (code, "folders more than 32 deep" in said) == (4, True)


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl", "state/lock", "report.html"])
def test_nothing_is_written_through_a_hard_link(run_dir: Path, told: Told, name: str) -> None:
    target, place = outside(run_dir), run_dir / name
    place.unlink(missing_ok=True)
    place.hardlink_to(target)
    assert told("resume")[0] in (0, 4)
    assert target.read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "command"),
    [("results.json", "report"), ("env.json", "report"), ("config.json", "predict")],
)
def test_a_file_that_is_far_too_large_is_not_read(
    run_dir: Path, told: Told, name: str, command: str
) -> None:
    (run_dir / "state" / "finished.json").unlink()
    os.truncate(run_dir / name, 2**40)
    assert told(command)[0] == 4


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["more.bin", "model.safetensors", "state/round-000004/more"])
def test_a_file_that_is_hardly_there_is_not_read(
    run_dir: Path, told: Told, name: str, command: str
) -> None:
    """Eight terabytes that take no room: only reading them does, hours of it."""
    with (run_dir / name).open("ab") as file:
        file.truncate(2**43)
    code, said = told(command)
    assert (code, "8,192 GB, of which hardly any is there" in said) == (4, True)


def spoil(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("model.safetensors", "predict"),
        ("config.json", "predict"),
        ("results.json", "report"),
        ("diagnostics.json", "report"),
        ("env.json", "report"),
    ],
)
def test_a_flipped_bit_is_named_and_made_again_by_resuming(
    run_dir: Path, honest: Path, told: Told, name: str, command: str
) -> None:
    spoil(run_dir / name)
    code, said = told(command)
    assert (code, f"{name} is not as the run left it" in said) == (4, True)
    code, said = told("resume")
    assert (code, f"warning: {name} is not as the run left it" in said) == (0, True)
    assert told(command)[0] == 0
    if name != "env.json":
        assert (run_dir / name).read_bytes() == (honest / name).read_bytes()


def test_a_changed_line_of_a_finished_run_is_named_and_put_back(
    run_dir: Path, honest: Path, told: Told
) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text().replace('"round": 2', '"round": 7'))
    code, said = told("resume")
    assert (code, "line 2 of metrics.jsonl is not what the round recorded" in said) == (0, True)
    assert path.read_bytes() == (honest / "metrics.jsonl").read_bytes()
    assert (run_dir / "results.json").read_bytes() == (honest / "results.json").read_bytes()


@pytest.mark.parametrize("content", [b"", b"garbage", b"[]", b'{"id": 7}', b'{"id": "../x"}'])
def test_a_damaged_tracker_file_ends_nothing(run_dir: Path, told: Told, content: bytes) -> None:
    (run_dir / "wandb.json").write_bytes(content)
    spoil(run_dir / "results.json")
    code, said = told("resume")
    assert (code, "wandb.json is damaged" in said) == (0, True)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 10**5, b'{"round": {}}', b"7", b""])
@pytest.mark.parametrize("name", ["results.json", "diagnostics.json"])
def test_results_that_are_none_are_refused_by_report(
    run_dir: Path, told: Told, name: str, content: bytes
) -> None:
    (run_dir / name).write_bytes(content)
    (run_dir / "state" / "finished.json").unlink()
    assert told("report")[0] == (0 if (name, content[:1]) == ("diagnostics.json", b"{") else 4)


def forged(run_dir: Path, **changes: object) -> None:
    """Other results under digests that are right."""
    path, end = run_dir / "results.json", run_dir / "state" / "finished.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    format, body = unsealed(end)
    files = {name: sha for name, sha in body["files"].items() if name != "results.json"}
    end.write_bytes(sealed(format, {**body, "files": files}))


@pytest.mark.parametrize(
    "changes",
    [
        {"method": None},
        {"method": ["x"]},
        {"task_names": 7},
        {"task_names": ["one"]},
        {"task_aware": {}},
        {"class_agnostic": "high"},
        {"refused": [{"round": "x"}]},
        {"fon": {"task_aware": ["a"], "class_agnostic": [None]}},
        {"seconds": "long"},
    ],
    ids=str,
)
def test_results_of_other_types_are_shown_or_refused_in_one_line(
    run_dir: Path, told: Told, changes: dict[str, object]
) -> None:
    forged(run_dir, **changes)
    assert told("report")[0] in (0, 4)


def test_runs_with_other_tasks_are_not_reported_together(
    run_dir: Path, honest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged(run_dir, task_names=["one"], task_ends=[4])
    out = str(run_dir.parent / "out")
    assert main(["report", str(honest), str(run_dir), "--out", out]) in (0, 4)
    assert capsys.readouterr().err.count("\n") <= 1


@pytest.mark.parametrize("name", ["../x", "/tmp/fedbnn-x", "a/../../x", "", ".", ".."])
def test_a_name_cannot_leave_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, "--name", name]) == 2
    assert "leads out of runs/" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a" * 300, "is longer than 200 bytes"),
        ("\u00e4" * 101, "is longer than 200 bytes"),
        ("a/" * 200, "is longer than 200 bytes"),
        ("a\0b", "cannot be printed"),
        ("x\x1b[31mred", "cannot be printed"),
        ("two\nlines", "cannot be printed"),
        ("left\u202eright", "cannot be printed"),
        ("\udc80", "cannot be printed"),
        (".last", "begins with a dot"),
        ("folder/.hidden", "begins with a dot"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--run_dir", "run"), ("--dry_run",)], ids=str)
def test_a_name_that_no_directory_should_have_is_one_line(
    name: str,
    said: str,
    more: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, "--name", name, *more]) == 2
    told = capsys.readouterr().err
    assert (said in told, told.count("\n"), told.strip().isprintable()) == (True, 1, True)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_while_the_page_is_written_is_one_line(run_dir: Path, told: Told) -> None:
    with no_file_above(1000):
        code, said = told("report")
    assert (code, "File too large" in said) == (4, True)
    assert told("report")[0] == 0


def test_a_closed_pipe_and_a_closed_terminal_end_no_training(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [sys.executable, str(ROOT / "train.py"), *TINY, "--run_dir", str(run_dir)]
    words += ["--report", "false"]
    running = subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert running.stderr is not None
    with running.stdout, running.stderr:
        while not running.stdout.readline().startswith("round 1"):
            assert running.poll() is None
        running.send_signal(signal.SIGHUP)
        running.stdout.close()
        assert (running.wait(SECONDS), running.stderr.read()) == (0, "")
    log = (run_dir / "log.txt").read_text()
    assert "standard output is gone (Broken pipe): the run goes on" in log
    assert "the terminal was closed: the run goes on" in log
    assert (run_dir / "state" / "finished.json").is_file()
