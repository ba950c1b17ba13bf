"""Runs at the same time as the first, on the cores that it leaves idle: `beside:` on two cores.

Each helper is a process that plays some runs one after the other. What it says is kept until it is
done. It hangs by its standard input: once that is closed, by us or by our end, whatever that was,
it stops as SIGTERM stops a run.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread
from typing import Any, TextIO, TypeAlias

import torch

from fedbnn import devices

Task: TypeAlias = tuple[Mapping[str, Any], Path]
"""The values of a configuration, and the directory of its run."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PATIENCE_SECONDS = 20.0


def environment(threads: int = 1) -> dict[str, str]:
    """Of a run in another process: its threads, and our import path, so own parts are found."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, **dict.fromkeys(THREADS, str(threads)), "PYTHONPATH": path}


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


class Helper:
    """A process that plays these runs; what it says goes to `said`."""

    def __init__(self, tasks: Sequence[Task], threads: int, said: TextIO) -> None:
        self._said = said
        command = [sys.executable, "-P", "-m", __name__]
        apart: Any = {"env": environment(threads), "start_new_session": True}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._said, text=True, **apart
        )
        assert self._process.stdin is not None
        self._string = self._process.stdin
        wanted = json.dumps([(dict(values), str(directory)) for values, directory in tasks])
        self._string.write(f"{wanted}\n")
        self._string.flush()

    def wait(self) -> int:
        """Show what it says, once it is done; its exit code."""
        code = self._process.wait()
        self._said.seek(0)
        sys.stdout.write(self._said.read())
        return code

    def close(self) -> None:
        """Let go of it, and see that it ends."""
        self._string.close()
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def helping(piles: Sequence[Sequence[Task]]) -> Iterator[list[Helper]]:
    """A helper for each pile of runs, while we play our own; all have as many threads."""
    threads, helpers = max(1, (os.cpu_count() or 1) // (1 + len(piles))), list[Helper]()
    with ExitStack() as stack:
        if piles:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(threads)
        for pile in piles:
            said = stack.enter_context(TemporaryFile("w+", encoding="utf-8", errors="replace"))
            helpers.append(Helper(pile, threads, said))
            stack.callback(helpers[-1].close)
        yield helpers


def serve() -> int:
    """Play the runs that the first line of standard input names, until one fails."""
    from fedbnn.cli.compose import SCHEMA, compose
    from fedbnn.cli.main import ended
    from fedbnn.cli.train import alone
    from fedbnn.config.parse import restored

    tasks = json.loads(sys.stdin.readline())
    Thread(target=_hang, daemon=True).start()
    made = (compose(restored(values, SCHEMA), Path(directory)) for values, directory in tasks)
    return ended(lambda: next(filter(None, map(alone, made)), 0))


def _hang() -> None:
    """Nobody writes more: when reading ends, so does this process.

    Not through `sys.stdin`, whose lock this thread would hold while the interpreter ends.
    """
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(serve())
