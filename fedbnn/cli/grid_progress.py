"""One progress display for a whole grid, with an estimate of the time left that is made of measured rounds."""

import time
from collections.abc import Mapping, Sequence
from statistics import mean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedbnn.cli.grid import Cell
from fedbnn.cli.pool import Pool

PLAIN_SECONDS = 30.0


class GridProgress:
    """Rounds of all cells in one bar; plain lines now and then when the output is not a terminal."""

    def __init__(self, cells: Sequence[Cell], screen: Console) -> None:
        self.cells, self.screen = cells, screen
        self.rates: dict[Cell, float] = {}
        self.before = {cell: cell.done() for cell in cells}
        self._said = 0.0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.progress = Progress(
            *columns, TextColumn("{task.fields[note]}"), console=screen, transient=True
        )
        self.bar = self.progress.add_task(
            "rounds", total=sum(cell.rounds for cell in cells), note=""
        )

    def __enter__(self) -> "GridProgress":
        if self.screen.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def watch(self, pool: Pool) -> None:
        """Show where everything stands."""
        done = {cell: cell.rounds if cell.finished else cell.done() for cell in self.cells}
        left = self.seconds_left(pool, done)
        names = ", ".join(f"{cell.name} {done[cell]}/{cell.rounds}" for cell in pool.running)
        note = f"{spoken(left)} left; {names}" if left is not None else names
        self.progress.update(self.bar, completed=sum(done.values()), note=note)
        if not self.screen.is_terminal and time.monotonic() - self._said > PLAIN_SECONDS:
            self._said = time.monotonic()
            self.screen.print(
                f"{sum(done.values())}/{sum(cell.rounds for cell in self.cells)} rounds, {note}",
                soft_wrap=True,
            )

    def seconds_left(self, pool: Pool, done: dict[Cell, int]) -> float | None:
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


def expected(cell: Cell, rates: Mapping[Cell, float]) -> float:
    """Seconds per round of a cell: the mean of those measured with its method and settings, else with its method, else of all."""
    method = {other: rate for other, rate in rates.items() if other.method == cell.method}
    same = {other: rate for other, rate in method.items() if other.settings == cell.settings}
    return mean((same or method or rates).values())


def spoken(seconds: float) -> str:
    """A duration as people say it."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute"
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
