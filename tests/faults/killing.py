"""Kill a run with SIGKILL, start it again, until it is through. `python -m tests.faults.killing DIRECTORY WAY COUNT`.

Each attempt is a fork of this process, so that one import of torch serves them all. WAY is `steps`: attempt n dies
right after its n-th call that changes the disk; or `random`: attempts die at random times. Prints one JSON line.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.federation import fingerprint, run

ROUNDS = {"steps": 2, "random": 6}
CALLS = ("open", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir")


def attempt(run_dir: Path, prepare: Callable[[], None]) -> int:
    """Fork a child that runs; its process number."""
    pid = os.fork()
    if pid == 0:
        prepare()
        run(run_dir, ROUNDS[sys.argv[2]], keep=1)
        os._exit(0)
    return pid


def survived(pid: int) -> bool:
    """Whether the child came to its end; False if it was killed; anything else is a failure of the run."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return False
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"an attempt failed with exit code {os.waitstatus_to_exitcode(status)}")
    return True


def dying_after(count: int) -> Callable[[], None]:
    """Make this process kill itself right after its `count`-th call that changes the disk."""
    calls = iter(range(1, 10**9))

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            if next(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    def prepare() -> None:
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))

    return prepare


def between_all_steps(directory: Path, first: int) -> int:
    """A fresh run for every step: killed there, then finished; the number of kills."""
    unbroken = finished(directory / "unbroken")
    for count in range(first, 10**9):
        run_dir = directory / "killed"
        shutil.rmtree(run_dir, ignore_errors=True)
        if survived(attempt(run_dir, dying_after(count))):
            return count - first
        assert finished(run_dir) == unbroken, f"step {count} changed the result"
    raise AssertionError


def at_random_times(directory: Path, kills: int) -> int:
    """Runs that are killed again and again until there were enough kills; each ends as the unbroken one."""
    start = time.monotonic()
    unbroken, done, random_seconds = finished(directory / "unbroken"), 0, random.Random(0)
    longest, number = time.monotonic() - start, 0
    while done < kills:
        run_dir, number = directory / f"killed-{number}", number + 1
        while not killed_or_done(run_dir, random_seconds.uniform(0, longest / 2)):
            done += 1
        assert finished(run_dir) == unbroken, f"{done} kills changed the result"
    return done


def killed_or_done(run_dir: Path, seconds: float) -> bool:
    """Run for at most so long; whether it got through."""
    pid = attempt(run_dir, lambda: None)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return survived(pid)


def finished(run_dir: Path) -> str:
    """Run to the end, undisturbed; what is left."""
    assert survived(attempt(run_dir, lambda: None))
    return fingerprint(run_dir)


if __name__ == "__main__":
    ways = {"steps": between_all_steps, "random": at_random_times}
    print(json.dumps({"kills": ways[sys.argv[2]](Path(sys.argv[1]), int(sys.argv[3]))}))
