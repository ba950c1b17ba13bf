"""Runs at the same time as the first: who plays what, and how a helper ends."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedbnn import devices
from fedbnn.cli import apart
from fedbnn.errors import Exit
from tests.cli.command import ROOT, TINY, command, environment, process, started

SERIAL = {"engine": {"name": "serial"}}


@pytest.mark.parametrize("piles", [1, 2, 3, 7])
def test_every_run_is_dealt_once_and_evenly(piles: int) -> None:
    found = apart.dealt(7, piles)
    assert sorted(number for pile in found for number in pile) == list(range(7))
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert found[0][0] == 0


def test_four_runs_on_two_cores_give_this_process_the_first_and_the_last() -> None:
    assert apart.dealt(4, 2) == [[0, 3], [1, 2]]


def test_as_many_at_once_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert apart.hands([SERIAL] * 4) == 2
    assert apart.hands([SERIAL]) == 1


def test_other_engines_and_gpus_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert apart.hands([SERIAL, {"engine": {"name": "processes"}}]) == 1
    monkeypatch.setattr(devices, "gpus", lambda: ["0"])
    assert apart.hands([SERIAL] * 2) == 1


def test_a_run_in_another_process_finds_what_this_one_can_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    found = apart.environment()
    assert str(tmp_path) in found["PYTHONPATH"].split(os.pathsep)
    assert {found[name] for name in apart.THREADS} == {"1"}


@pytest.mark.slow
def test_a_fork_and_a_new_python_play_the_same_runs_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    for fork in (True, False):
        monkeypatch.setattr(apart, "can_fork", lambda fork=fork: fork)
        words = ["--config", "tiny.yaml", "--method", "fedavg", "--run_dir"]
        with (tmp_path / f"{fork}.txt").open("w+", encoding="utf-8") as said:
            player = apart.Player([[*words, f"{fork}-{number}"] for number in (1, 2)], said, said)
            assert player.wait(120) == 0
            player.stop()
            player.end()
        assert (tmp_path / f"{fork}.txt").read_text(encoding="utf-8").count("round 4/4") == 2
    models = [path.read_bytes() for path in tmp_path.glob("*/model.safetensors")]
    assert len(models) == 4
    assert len(set(models)) == 1


def test_what_nobody_expected_is_said_where_the_player_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_words: object) -> int:
        raise RuntimeError("nobody expected this")

    monkeypatch.setattr("fedbnn.cli.train.main", broken)
    with (tmp_path / "said.txt").open("w+") as said:
        assert apart.Player([[]], said, said).wait(60) == 1
        said.seek(0)
        assert said.read().endswith("RuntimeError: nobody expected this\n")


def test_a_player_that_does_not_end_is_made_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf(_words: object) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / "here").touch()
        time.sleep(600)
        return 0

    monkeypatch.setattr("fedbnn.cli.train.main", deaf)
    with (tmp_path / "said.txt").open("w") as said:
        player = apart.Player([[]], said)
        wait_until((tmp_path / "here").exists)
        assert player.poll() is None
        player.stop()
        player.end(0.2)
    assert player.poll() == -signal.SIGKILL


@pytest.mark.slow
def test_a_run_beside_that_fails_gives_its_exit_code_and_its_line(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY + "beside: [fedavg]\n", encoding="utf-8")
    there = ("--method", "fedavg", "--run_dir", "taken-fedavg")
    assert process(tmp_path, "--config", "tiny.yaml", *there).returncode == 0
    ran = process(tmp_path, "--config", "tiny.yaml", "--run_dir", "taken")
    assert ran.returncode == Exit.RUN_DIRECTORY
    assert ran.stderr.startswith("error: this directory holds a run already (taken-fedavg)")
    assert ran.stderr.count("\n") == 1
    assert (tmp_path / "taken" / "results.json").is_file()
    assert not (tmp_path / "taken" / "beside").exists()


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_no_helper_outlives_the_command(tmp_path: Path, end: signal.Signals) -> None:
    words = ["--config", str(ROOT / "conf" / "quickstart.yaml"), "--run_dir", "first"]
    with started(command(*words), tmp_path, env=environment()) as running:
        wait_until(lambda: list(tmp_path.glob("first-*/state/records/*")))
        helpers = children(running.pid)
        assert helpers
        running.send_signal(end)
        running.wait()
    wait_until(lambda: not any(map(alive, helpers)))
    assert not (tmp_path / "first" / "results.json").is_file()


def wait_until(holds: Callable[[], object], seconds: float = 120.0) -> None:
    """Look ten times a second."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def children(parent: int) -> list[int]:
    """The processes that it started."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii")
    return [int(word) for word in listed.split()]


def alive(process: int) -> bool:
    """Whether it runs: neither gone nor waiting to be."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.split()[0] != "Z"
