"""Runs side by side in processes of one thread each; one that fails is reported and does not sink the others."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fedbnn.cli.grid import Cell

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LOOK_SECONDS = 0.5
PATIENCE_SECONDS = 20.0


@dataclass
class Pool:
    """At most `jobs` cells at a time. `failures` says why a cell has no results."""

    config: str
    jobs: int
    logs: Path
    running: dict[Cell, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    started: dict[Cell, float] = field(default_factory=dict)
    failures: dict[Cell, tuple[int, str]] = field(default_factory=dict)

    def run(self, cells: Sequence[Cell], watch: Callable[["Pool"], None]) -> None:
        """Run the cells that are not finished; `watch` is called about twice a second."""
        waiting = [cell for cell in cells if not cell.finished]
        self.logs.mkdir(parents=True, exist_ok=True)
        with self._ending_all():
            while waiting or self.running:
                while waiting and len(self.running) < self.jobs:
                    self._start(waiting.pop(0))
                time.sleep(LOOK_SECONDS)
                self._collect()
                watch(self)

    def _start(self, cell: Cell) -> None:
        with self._log(cell).open("ab") as log:
            process = subprocess.Popen(
                cell.command(self.config), stdout=log, stderr=log, env=_one_thread()
            )
        self.running[cell], self.started[cell] = process, time.monotonic()

    def _collect(self) -> None:
        """Take note of the cells that have ended."""
        for cell, process in list(self.running.items()):
            code = process.poll()
            if code is not None:
                del self.running[cell]
                if code or not cell.finished:
                    self.failures[cell] = (code, self._last_line(cell))

    def _log(self, cell: Cell) -> Path:
        return self.logs / f"{cell.name}.txt"

    def _last_line(self, cell: Cell) -> str:
        lines = [
            line
            for line in self._log(cell).read_text(errors="replace").splitlines()
            if line.strip()
        ]
        return lines[-1].strip() if lines else "no word"

    @contextmanager
    def _ending_all(self) -> Iterator[None]:
        """However this ends, no process is left behind: asked first, then made to."""
        try:
            yield
        finally:
            for process in self.running.values():
                process.terminate()
            end = time.monotonic() + PATIENCE_SECONDS
            for process in self.running.values():
                try:
                    process.wait(max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()


def _one_thread() -> Mapping[str, str]:
    """This environment, with one thread for everything that counts threads."""
    return {**os.environ, **dict.fromkeys(THREADS, "1")}
