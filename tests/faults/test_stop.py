"""Row: SIGTERM, Ctrl-C in the middle of a fit -> the resume command, exit 143 / 130, no child left.

And nothing is left of the workers when their parent is killed.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedbnn.cli.train import Stopped, owned
from fedbnn.errors import Exit
from tests.faults.command import ROOT, TINY

LONG = ["--client.epochs", "100000", "--stream.clients_per_round", "2"]


def waited_for(condition: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_fitting(pid: int) -> bool:
    """Whether the process computes: it has used processor time beyond loading its libraries."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK") > 5


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Starts the command on clients that train for ever; ends what a test leaves."""
    running: list[subprocess.Popen[str]] = []

    def start(engine: str) -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            str(ROOT / "train.py"),
            *TINY,
            *LONG,
            "--run_dir",
            str(tmp_path / "run"),
            "--engine",
            engine,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        running.append(
            subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def begun(process: "subprocess.Popen[str]", run_dir: Path, workers: int) -> list[int]:
    """Wait until clients are being trained; the worker processes."""
    waited_for((run_dir / "config.yaml").exists)
    waited_for(lambda: len(children(process.pid)) == workers)
    workers_now = children(process.pid)
    for pid in workers_now or [process.pid]:
        waited_for(lambda pid=pid: is_fitting(pid))  # type: ignore[misc]
    return workers_now


@pytest.mark.parametrize(
    ("engine", "number", "code"),
    [
        ("serial", signal.SIGTERM, 143),
        pytest.param("processes", signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_a_fit_ends_the_run_and_its_workers(
    tmp_path: Path,
    started: Callable[[str], "subprocess.Popen[str]"],
    engine: str,
    number: signal.Signals,
    code: int,
) -> None:
    process = started(engine)
    workers = begun(process, tmp_path / "run", workers=0 if engine == "serial" else 2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    stopped, command = errors.splitlines()[-1].split("; go on with: ")
    assert stopped == f"stopped by {number.name} before the first round was committed"
    assert command == f"python train.py --resume {tmp_path / 'run'}"
    assert "Traceback" not in errors
    assert not [pid for pid in workers if alive(pid)]


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_parent(
    tmp_path: Path, started: Callable[[str], "subprocess.Popen[str]"]
) -> None:
    process = started("processes")
    workers = begun(process, tmp_path / "run", workers=2)
    process.kill()
    process.wait()
    waited_for(lambda: not any(map(alive, workers)), seconds=10)
    assert len(workers) == 2


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, Exit.INTERRUPTED), (signal.SIGTERM, Exit.TERMINATED)]
)
def test_a_signal_is_an_exception_that_libraries_do_not_catch(
    number: signal.Signals, code: Exit
) -> None:
    before = signal.getsignal(number)
    with owned() as signals, pytest.raises(Stopped) as caught:
        signal.raise_signal(number)
    assert not isinstance(caught.value, Exception | KeyboardInterrupt | SystemExit)
    assert (caught.value.code, signals.received) == (code, code)
    assert signal.getsignal(number) == before
    with pytest.raises(Stopped):
        signals.check()


def test_the_message_says_what_is_safe_and_how_to_go_on() -> None:
    assert Stopped(Exit.TERMINATED).message(Path("runs/x"), 7) == (
        "stopped by SIGTERM after round 7 was committed; "
        "go on with: fedbnn train --resume runs/x"
    )
    assert (
        Stopped(Exit.INTERRUPTED)
        .message(Path("runs/x"), 0)
        .startswith("stopped by SIGINT before the first round was committed; go on with")
    )


TWICE = """
import signal, time
from fedbnn.cli.train import owned
with owned():
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGINT)
        time.sleep(60)
"""


def test_a_second_signal_does_not_wait() -> None:
    assert (
        subprocess.run(
            [sys.executable, "-c", TWICE], cwd=ROOT, check=False, capture_output=True
        ).returncode
        == 130
    )
