"""How `python train.py` ends when it cannot do what was asked, or is asked to stop."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from tests.cli.command import TINY, command, environment, fedbnn, files, final, process, started
from tests.observe.test_tracking import mirrored

COLOUR = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
LONGER = ("--config", "tiny.yaml", "--stream.rounds_per_task", "4")


def test_a_mistake_is_exit_code_2_and_one_line_to_the_shell(home: Path) -> None:
    ended = process(home, "--config", "tiny.yaml", "--client.lrr", "1e-3")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert re.fullmatch(r"error: .*client\.lrr.*did you mean 'client\.lr'\?\n", ended.stderr)
    assert list(files(home)) == ["tiny.yaml"]


def test_a_data_set_that_is_not_there_is_named_with_its_folder(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        fedbnn(
            "train",
            "--config",
            "tiny.yaml",
            "--stream.sources",
            "cifar100",
            "--stream.data_dir",
            "elsewhere",
        )
        == 3
    )
    line = capsys.readouterr().err
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    for words in (
        "cifar100",
        "elsewhere/cifar-100-python",
        "fedbnn data cifar100 --download",
        "data_dir",
    ):
        assert words in line
    assert not (home / "runs").exists()


def test_a_directory_with_a_run_in_it_is_left_alone(
    finished: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(finished)
    assert fedbnn("train", "--config", "tiny.yaml", "--run_dir", finished) == 4
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert f"--resume {finished}" in line
    assert files(finished) == before


def test_a_finished_run_that_is_resumed_says_so_and_changes_nothing(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = final(finished), (finished / "metrics.jsonl").read_bytes()
    assert fedbnn("train", "--resume", finished) == 0
    shown = capsys.readouterr().out
    assert f"{finished} is already complete" in shown
    assert "@Fin" in shown
    assert (final(finished), (finished / "metrics.jsonl").read_bytes()) == before


CHANGING = {
    "gradient_clip_val": "0.5",
    "max_steps": "3",
    "precision": "bf16-mixed",
    "limit_train_batches": "2",
}
OBSERVING = {"enable_progress_bar": "true", "log_every_n_steps": "7", "logger": "false"}


@pytest.mark.parametrize("name", CHANGING)
def test_a_run_does_not_go_on_with_a_trainer_that_changes_the_result(
    name: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--resume", finished, f"--trainer.{name}", CHANGING[name])
    assert fedbnn("train", *asked) == 4
    assert f"trainer.{name} was absent, now it is" in capsys.readouterr().err


@pytest.mark.parametrize("name", OBSERVING)
def test_a_run_goes_on_with_a_trainer_that_only_looks_on_in_another_way(
    name: str, finished: Path
) -> None:
    assert fedbnn("train", "--resume", finished, f"--trainer.{name}", OBSERVING[name]) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_too_few_clients_is_exit_code_5_and_the_log_has_the_reasons(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long enough for a second alarm: one that rings in a callback of the collector is lost."""
    late = ("--gate.deadline_seconds", "0.001", "--client.epochs", "1000")
    assert fedbnn("train", "--config", "tiny.yaml", *late) == 5
    line = capsys.readouterr().err
    assert re.match(r"error: round 1: 0 of 2 clients count", line)
    assert line.count("\n") == 1
    assert line.removeprefix("error: ").strip() in (home / "runs" / "tiny" / "log.txt").read_text()


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("undrawn")
def test_stopped_on_a_terminal_it_tidies_up_and_goes_on_to_the_same_bytes(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen, code = on_a_terminal(
        home, LONGER, lambda: stands(home / "runs" / "tiny" / "metrics.jsonl")
    )
    assert code == 130
    assert b"\x1b[?25l" in screen
    assert screen.rindex(b"\x1b[?25h") > screen.rindex(b"\x1b[?25l")
    assert not COLOUR.search(screen)
    assert re.search(
        rb"stopped by SIGINT after round \d+ was committed; "
        rb"go on with: python train.py --resume runs/tiny",
        screen,
    )
    assert fedbnn("train", "--resume", "last") == 0
    assert re.search(r"runs/tiny goes on after round \d+\n", capsys.readouterr().out)
    assert fedbnn("train", *LONGER) == 0
    assert final(home / "runs" / "tiny") == final(home / "runs" / "tiny-2")
    rounds = [
        json.loads(line)["round"]
        for line in (home / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rounds == list(range(1, 9))


def on_a_terminal(
    folder: Path, words: tuple[str, ...], ready: Callable[[], bool]
) -> tuple[bytes, int]:
    """Interrupt the command on a terminal without colours; what it showed, and its exit code."""
    ours, theirs = os.openpty()
    told = environment(NO_COLOR="1", TERM="xterm-256color")
    shown: list[bytes] = []
    with started(
        command(*words), folder, env=told, stdin=theirs, stdout=theirs, stderr=theirs
    ) as running:
        os.close(theirs)
        reader = Thread(target=lambda: shown.extend(iter(lambda: read(ours), b"")), daemon=True)
        reader.start()
        while running.poll() is None and not ready():
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        code = running.wait()
    reader.join()
    os.close(ours)
    return b"".join(shown), code


def read(terminal: int) -> bytes:
    """Some bytes from a terminal; none when the other side is closed."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def stands(file: Path) -> bool:
    """Whether there is something in the file."""
    return file.exists() and file.stat().st_size > 0


def test_methods_beside_each_other_end_in_one_table(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "tiny.yaml").write_text(TINY + "beside: [fedbnn, fedavg]\n", encoding="utf-8")
    assert fedbnn("train", "--config", "tiny.yaml") == 0
    shown = capsys.readouterr().out
    assert [path.name for path in sorted((home / "runs").glob("[!.]*"))] == ["tiny", "tiny-fedavg"]
    table = shown[shown.index("Averages over the tasks") :]
    assert all(f"\n {name} " in table for name in ("fedbnn", "fedavg", "chance"))
    assert shown.endswith("side by side  runs/tiny/beside/report.html\n")
    beside = files(home / "runs" / "tiny" / "beside")
    assert beside.keys() == {"report.html", "tables.md", "tables.tex", "tables.csv"}
    assert beside["report.html"].count(b'<svg role="img"') > 5  # the page has its figures within
    capsys.readouterr()
    assert fedbnn("train", "--config", "tiny.yaml", "--method", "fedavg", "--run_dir", "alone") == 0
    assert final(home / "alone") == final(home / "runs" / "tiny-fedavg")
    assert "side by side" not in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_wandb_offline_groups_by_configuration_and_names_by_method_and_seed(
    finished: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedbnn("train", "--config", "tiny.yaml", "--track.wandb", "offline", "--seed", 1) == 0
    shown = capsys.readouterr()
    assert shown.out.count("wandb sync runs/tiny/wandb/offline-run-*") == 1
    assert shown.err == ""
    [(description, history)] = mirrored(home / "runs" / "tiny")
    assert (description["group"], description["name"]) == ("tiny", "fedbnn-1")
    assert sorted(history)[:4] == [1, 2, 3, 4]
    assert final(home / "runs" / "tiny") != final(finished)
