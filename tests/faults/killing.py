"""Kill runs with SIGKILL and start them again until they are through; each must end as if unbroken.

    python -m tests.faults.killing DIRECTORY SUBJECT WAY COUNT

SUBJECT is `federation` (the small one of these tests) or a method of `train.py`. WAY is `steps`:
attempt n dies right after its n-th call that changes the disk, from COUNT on; or `random`: COUNT
attempts die at random times. The unbroken run is made by this process and each attempt by a fork of
it, so that libraries are loaded once. Prints the kills.
"""

import faulthandler
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults import command, federation
from tests.faults.steps import ending_after

PATIENCE = 150.0
SUBJECT = federation if sys.argv[2] == "federation" else command.Method(sys.argv[2])


def attempt(run_dir: Path, prepare: Callable[[], None]) -> int:
    """Fork a child that runs; its process number."""
    pid = os.fork()
    if pid == 0:
        faulthandler.register(signal.SIGUSR1)
        prepare()
        SUBJECT.run(run_dir)
        os._exit(0)
    return pid


def survived(pid: int) -> bool:
    """Whether the child came to its end; False if killed; all else, a hang too, is a failure."""
    end = time.monotonic() + PATIENCE
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended:
        if time.monotonic() > end:
            show_and_kill(pid)
        time.sleep(0.002)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if os.WIFSIGNALED(status):
        return False
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"an attempt failed with exit code {os.waitstatus_to_exitcode(status)}")
    return True


def show_and_kill(pid: int) -> None:
    """Let a child that hangs say where, then end it."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)
    raise SystemExit("an attempt hangs")


def dying_after(count: int) -> Callable[[], None]:
    """Make this process kill itself right after its `count`-th call that changes the disk."""

    def prepare() -> None:
        for name, call in ending_after(count, lambda: os.kill(os.getpid(), signal.SIGKILL)).items():
            setattr(os, name, call)

    return prepare


def between_all_steps(directory: Path, first: int) -> int:
    """A fresh run for every step: killed there, then finished; the number of kills."""
    unbroken = unbroken_run(directory)
    for count in range(first, 10**9):
        run_dir = directory / "killed"
        shutil.rmtree(run_dir, ignore_errors=True)
        if survived(attempt(run_dir, dying_after(count))):
            return count - first
        assert finished(run_dir) == unbroken, f"step {count} changed the result"
    raise AssertionError


def at_random_times(directory: Path, kills: int) -> int:
    """Runs that are killed until there were enough kills; each ends as the unbroken one."""
    unbroken, done, number, chance = unbroken_run(directory), 0, 0, random.Random(0)
    start = time.monotonic()
    assert finished(directory / "again") == unbroken
    longest = time.monotonic() - start
    while done < kills:
        run_dir, number = directory / f"killed-{number}", number + 1
        while not killed_or_done(run_dir, chance.uniform(0, longest)):
            done += 1
        assert finished(run_dir) == unbroken, f"{done} kills changed the result"
    return done


def unbroken_run(directory: Path) -> str:
    """What a run leaves that nobody disturbs."""
    SUBJECT.run(directory / "unbroken")
    return SUBJECT.fingerprint(directory / "unbroken")


def killed_or_done(run_dir: Path, seconds: float) -> bool:
    """Run for at most so long; whether it got through."""
    pid = attempt(run_dir, lambda: None)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return survived(pid)


def finished(run_dir: Path) -> str:
    """Run to the end, undisturbed; what is left."""
    assert survived(attempt(run_dir, lambda: None))
    return SUBJECT.fingerprint(run_dir)


if __name__ == "__main__":
    ways = {"steps": between_all_steps, "random": at_random_times}
    print(ways[sys.argv[3]](Path(sys.argv[1]), int(sys.argv[4])))
