"""One progress display for a whole grid; the time left is estimated from measured rounds."""

import time
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from fedbnn.cli.compare import Cell, Pool

PLAIN_SECONDS = 30.0


class GridProgress:
    """Rounds of all cells in one bar; plain lines now and then where there is no terminal."""

    def __init__(self, cells: Sequence["Cell"], screen: Console) -> None:
        self.cells, self.screen = cells, screen
        self.rates: dict[Cell, float] = {}
        self.before = {cell: cell.done() for cell in cells}
        self.total, self._said = sum(cell.rounds for cell in cells), 0.0
        words, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
        moving = BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn()
        self.progress = Progress(words, *moving, note, console=screen, transient=True)
        self.bar = self.progress.add_task("rounds", total=self.total, note="")

    def __enter__(self) -> "GridProgress":
        if self.screen.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def watch(self, pool: "Pool") -> None:
        """Show where everything stands."""
        done = {cell: cell.rounds if cell.finished else cell.done() for cell in self.cells}
        left, made = self.seconds_left(pool, done), sum(done.values())
        note = ", ".join(f"{cell.name} {done[cell]}/{cell.rounds}" for cell in pool.running)
        if left is not None:
            note = f"{spoken(left)} left; {note}"
        self.progress.update(self.bar, completed=made, note=note)
        if not self.screen.is_terminal and time.monotonic() - self._said > PLAIN_SECONDS:
            self._said = time.monotonic()
            self.screen.print(f"{made}/{self.total} rounds, {note}", soft_wrap=True)

    def seconds_left(self, pool: "Pool", done: dict["Cell", int]) -> float | None:
        """Rounds left times seconds per round, over the jobs; None before the first round of all.

        It takes at least as long as the longest cell, however many jobs there are.
        """
        now = time.monotonic()
        for cell, start in pool.started.items():
            made = done[cell] - self.before[cell]
            if cell in pool.running and made > 0:
                self.rates[cell] = (now - start) / made
        if not self.rates:
            return None
        going = [cell for cell in self.cells if cell not in pool.failures]
        work = [(cell.rounds - done[cell]) * expected(cell, self.rates) for cell in going]
        return max(sum(work) / pool.jobs, *work, 0.0)


def expected(cell: "Cell", rates: Mapping["Cell", float]) -> float:
    """Mean seconds a round, measured with its method and settings, else its method, else of all."""
    method = {other: rate for other, rate in rates.items() if other.method == cell.method}
    same = {other: rate for other, rate in method.items() if other.settings == cell.settings}
    return mean((same or method or rates).values())


def spoken(seconds: float) -> str:
    """A duration as people say it."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute"
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
