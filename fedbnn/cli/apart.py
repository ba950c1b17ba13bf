"""Runs in processes of their own: those beside the first, and those of a comparison.

Such a process is a fork of this one, so that nothing has to be imported again; where a fork is not
safe (a GPU may be in use, or the system is not Linux) it is a new Python. It has one thread, hears
no Ctrl-C, and once its parent is gone, however that ended, it stops as SIGTERM stops a run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from tempfile import TemporaryFile
from threading import Thread
from typing import IO, Any, TextIO, TypeAlias

import torch

from fedbnn import devices

Words: TypeAlias = Sequence[str]
"""A run, as the words of `fedbnn train`."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PATIENCE_SECONDS, LOOK_SECONDS = 20.0, 0.5


class Player:
    """A process that plays some runs one after the other, until one fails."""

    def __init__(self, runs: Sequence[Words], out: IO[Any], err: IO[Any] | None = None) -> None:
        self._process: Any
        if can_fork():
            told = [file and file.fileno() for file in (out, err)]
            self._process = get_context("fork").Process(target=_forked, args=(runs, *told))
            self._process.start()
        else:
            command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), json.dumps(runs)]
            apart: Any = {"env": environment(), "start_new_session": True}
            self._process = subprocess.Popen(command, stdout=out, stderr=err, **apart)

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        forked = not isinstance(self._process, subprocess.Popen)
        code: int | None = self._process.exitcode if forked else self._process.poll()
        return code

    def wait(self, seconds: float = float("inf")) -> int | None:
        """The exit code, if it ends within so many seconds."""
        end = time.monotonic() + seconds
        while (code := self.poll()) is None and time.monotonic() < end:
            time.sleep(0.02)
        return code

    def stop(self) -> None:
        """Ask it to end."""
        if self.poll() is None:
            self._process.terminate()

    def end(self, seconds: float = PATIENCE_SECONDS) -> None:
        """See that it ends: what was asked and does not within so many seconds is made to."""
        if self.wait(seconds) is None:
            self._process.kill()
            self.wait()


def can_fork() -> bool:
    """Whether a fork of this process can train."""
    return sys.platform == "linux" and not devices.gpus()


def environment() -> dict[str, str]:
    """Of a new Python: one thread, and our import path, so that own parts are found."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONPATH": path}


def _forked(runs: Sequence[Words], out: int, err: int | None) -> None:
    """What the fork does: it leaves our terminal, signals and streams alone."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for ours, theirs in {1: out, 2: err}.items():
        if theirs is not None:
            os.dup2(theirs, ours)
    how: Any = {"encoding": "utf-8", "errors": "replace", "closefd": False}
    sys.stdout, sys.stderr = os.fdopen(1, "w", **how), os.fdopen(2, "w", **how)
    sys.exit(play(runs, os.getppid()))


def play(runs: Sequence[Words], parent: int) -> int:
    """Play the runs, as long as `parent` lives; the exit code of the first that fails."""
    from fedbnn.cli.main import ended
    from fedbnn.cli.train import main

    torch.set_num_threads(1)
    Thread(target=_follow, args=(parent,), daemon=True).start()
    return next(filter(None, (ended(partial(main, words)) for words in runs)), 0)


def _follow(parent: int) -> None:
    """End with the parent: who has lost it gets another."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def hands(configs: Sequence[Mapping[str, Any]]) -> int:
    """How many of these runs can train at once: one a core, unless they share more than cores."""
    alone = bool(devices.gpus()) or any(one["engine"]["name"] != "serial" for one in configs)
    return 1 if alone else min(len(configs), os.cpu_count() or 1)


def dealt(count: int, piles: int) -> list[list[int]]:
    """The numbers from 0 dealt to and fro: who has the first of a turn has the last of the next."""
    found: list[list[int]] = [[] for _ in range(piles)]
    for number in range(count):
        turn, place = divmod(number, piles)
        found[piles - 1 - place if turn % 2 else place].append(number)
    return found


@contextmanager
def beside(piles: Sequence[Sequence[Words]]) -> Iterator[Iterator[int]]:
    """A player for each pile, while we play our own runs; then their exit codes, one by one.

    What they say on standard output is kept until they are done.
    """
    with ExitStack() as stack:
        if piles:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        told, players = list[TextIO](), list[Player]()
        for pile in piles:
            how: Any = {"encoding": "utf-8", "errors": "replace"}
            told.append(stack.enter_context(TemporaryFile("w+", **how)))
            players.append(Player(pile, told[-1]))
            stack.callback(players[-1].end)
            stack.callback(players[-1].stop)
        yield (_told(*both) for both in zip(players, told, strict=True))


def _told(player: Player, said: TextIO) -> int:
    """Show what it says, once it is done; its exit code."""
    code = player.wait()
    said.seek(0)
    sys.stdout.write(said.read())
    return code or 0


if __name__ == "__main__":
    sys.exit(play(json.loads(sys.argv[2]), int(sys.argv[1])))
