"""`fedbnn compare`: methods x seeds on one stream, in parallel, resumable, ending in tables."""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

from jsonargparse.typing import PositiveInt
from rich import progress
from rich.console import Console

from fedbnn.cli.apart import LOOK_SECONDS, PATIENCE_SECONDS, Player, can_fork
from fedbnn.cli.compose import compose
from fedbnn.cli.main import Arguments, flags, numbers, pair, words
from fedbnn.cli.train import Stopped, owned, parse
from fedbnn.config import own
from fedbnn.errors import ConfigError, RunDirectoryError
from fedbnn.federation.experiment import MAY_DIFFER
from fedbnn.report import page, tables
from fedbnn.report.values import Varied
from fedbnn.storage import files, run_dir
from fedbnn.storage.ledger import EVERY, Ledger, rounds
from fedbnn.tracking import console

OURS = {"method": "--methods", "method.name": "--methods", "seed": "--seeds", "run_dir": "--out"}
"""Settings in which the runs of a comparison differ, and what sets them."""
PLAIN_SECONDS, SPEED_SECONDS = 30.0, 600.0


def main(argv: Sequence[str]) -> int:
    """Compare; the exit code is that of a run that failed, if any did."""
    try:
        compared = compare(options(argv))
    except Stopped as stopped:
        return int(stopped.code)
    return max((abs(code) or 1 for code, _ in compared.failures.values()), default=0)


@dataclass(frozen=True)
class Compared:
    """A comparison that has ended: all its runs, and why some of them have no results."""

    directory: Path
    cells: "Sequence[Cell]"
    failures: "Mapping[Cell, tuple[int, str]]"


def compare(asked: Namespace) -> Compared:
    """Run what is not done yet, then write and print what all runs say together."""
    title = "-".join(Path(file).stem for file in asked.config)
    directory = Path(asked.out or f"runs/compare-{title}")
    planned = grid(asked.methods, asked.seeds, dict(asked.set), asked.sweep, directory)
    cells = _checked(planned, asked.config)
    pool, screen = Pool(asked.config, asked.jobs, directory / "logs"), console.screen(sys.stdout)
    shown = GridProgress(cells, screen)
    try:
        with owned(), shown.bar:
            pool.run(cells, shown.watch)
    except Stopped:
        screen.out("stopped; the same command goes on from here")
        raise
    _write([cell for cell in cells if cell.finished], asked.sweep, directory, title)
    for cell, (code, reason) in pool.failures.items():
        screen.out(f"{cell.name} failed with exit code {code}: {reason}")
    return Compared(directory, cells, pool.failures)


def options(argv: Sequence[str]) -> Namespace:
    """What the command line says; a setting for one method needs that method."""
    about = "Compare methods over seeds on one stream; stopping and starting again continues."
    parser = Arguments("compare", about)
    add, several = parser.add_argument, "with commas between them"
    about = "YAML file, or the name of one in conf/; of several the later ones win"
    add("--config", required=True, action="append", help=about)
    add("--methods", type=words, default=["fedbnn", "fedavg"], help=f"names {several}")
    add("--seeds", type=numbers, default=[0, 1, 2], help=f"numbers {several} (default: 0,1,2)")
    jobs, about = os.cpu_count() or 1, "runs at the same time (default: one a core)"
    add("--jobs", type=PositiveInt, default=jobs, help=about)
    about = "a setting for all runs (--KEY VALUE is the same), or for those of one method"
    add("--set", type=pair, action="append", default=[], metavar="[METHOD:]KEY=VALUE", help=about)
    metavar, about = "[METHOD:]KEY=V1,V2,...", "a setting to vary, with its plot"
    add("--sweep", type=_sweep, metavar=metavar, help=about)
    add("--out", help="directory of the comparison (default: runs/compare-NAME)")
    asked = parser.parse_settings(argv)
    varied = [asked.sweep.key] if asked.sweep else []
    for key in (*varied, *(key for key, _ in asked.set)):
        if flag := OURS.get(key.rpartition(":")[2]):
            raise ConfigError("every run of a comparison has one of its own", key, f"use {flag}")
    special = {key.rpartition(":")[0]: key for key, _ in asked.set if ":" in key}
    if asked.sweep and asked.sweep.method:
        special[asked.sweep.method] = asked.sweep.key
    for method in special.keys() - set(asked.methods):
        what = f"a setting is for {method}, which is not compared"
        raise ConfigError(what, special[method], "name it in --methods, or leave it out")
    return asked


def _sweep(text: str) -> "Sweep":
    name, values = pair(text)
    method, _, key = name.rpartition(":")
    return Sweep(key, tuple(words(values)), method or None)


@dataclass(frozen=True)
class Cell:
    """One run: which method and seed, what else is set, where it lives, how many rounds it has."""

    method: str
    seed: int
    settings: tuple[tuple[str, str], ...]
    directory: Path
    rounds: int = 0

    @property
    def name(self) -> str:
        """What people call it."""
        return self.directory.name

    @property
    def finished(self) -> bool:
        """Whether its results are there."""
        wanted = self.directory / "results.json", self.directory / "state/finished.json"
        return all(map(Path.is_file, wanted))

    def done(self) -> int:
        """Rounds committed so far."""
        return max(rounds(self.directory), default=0)

    def words(self, config: Sequence[str]) -> list[str]:
        """The words of `fedbnn train`, new or begun; a setting wins over what stands before it."""
        where, group = str(self.directory), self.directory.parent.resolve().name
        own = {"method": self.method, "seed": str(self.seed), "run_dir": where}
        own |= {"track.group": group, "track.name": self.name, "report": "false"}
        own |= dict(self.settings)
        begun = {"resume": where} if (self.directory / "state/config.json").is_file() else {}
        return [*(f"--config={file}" for file in config), *flags(own | begun)]


@dataclass(frozen=True)
class Sweep:
    """One setting that takes several values, such as `stream.clients_per_round=10,20,40,60`.

    With a `method` it is a setting of that method alone; the others are run once, to compare with.
    """

    key: str
    values: tuple[str, ...]
    method: str | None = None

    def of(self, cell: Cell) -> str | None:
        """The value a cell has; None if it is not varied."""
        return dict(cell.settings).get(self.key) if self.method in (None, cell.method) else None


def grid(
    methods: Sequence[str],
    seeds: Sequence[int],
    settings: Mapping[str, str],
    sweep: Sweep | None,
    directory: Path,
) -> list[Cell]:
    """Every cell; the seeds of all methods first, so that a table fills evenly.

    A setting `KEY` is for all methods, `METHOD:KEY` for one of them, where it wins.
    """
    cells = []
    for seed, method in product(seeds, methods):
        own, name = {key: settings[key] for key in settings if ":" not in key}, f"{method}-s{seed}"
        special = [key for key in settings if key.startswith(f"{method}:")]
        own |= {key.removeprefix(f"{method}:"): settings[key] for key in special}
        varied = {name: own}
        if sweep and sweep.method in (None, method):
            varied = {f"{name}-{value}": {**own, sweep.key: value} for value in sweep.values}
        for folder, set_to in varied.items():
            cells.append(Cell(method, seed, tuple(set_to.items()), directory / folder))
    return cells


def _checked(cells: Sequence[Cell], config: Sequence[str]) -> list[Cell]:
    """The cells with their rounds; what is wrong with any of them is found before anything starts.

    Names and values of all of them first, then whether their parts go together, and whether there
    are results of other settings in the place where one would leave its own.
    """
    configured = [(cell, parse(cell.words(config))) for cell in cells]
    for cell, parsed in configured:
        if cell.directory.is_symlink() and not cell.finished:
            fix = "remove it; only finished runs may be elsewhere"
            raise RunDirectoryError("a link in the place of a run", str(cell.directory), fix)
        if not can_fork():
            own.refuse_program(parsed.values, "a run in a process of its own")
        if cell.finished:
            with Ledger(cell.directory, EVERY) as ledger:
                run_dir.resume(ledger, parsed.values, MAY_DIFFER)
    return [
        replace(cell, rounds=compose(parsed, cell.directory).stream.rounds)
        for cell, parsed in configured
    ]


@dataclass
class Pool:
    """At most `jobs` cells at a time, each a process of one thread; one that fails sinks no other.

    `failures` says why a cell has no results.
    """

    config: Sequence[str]
    jobs: int
    logs: Path
    running: dict[Cell, Player] = field(default_factory=dict)
    failures: dict[Cell, tuple[int, str]] = field(default_factory=dict)

    def run(self, cells: Sequence[Cell], watch: Callable[["Pool"], None]) -> None:
        """Run the cells that are not finished; `watch` is called about twice a second."""
        waiting = [cell for cell in cells if not cell.finished]
        files.folder(self.logs)
        try:
            while waiting or self.running:
                while waiting and len(self.running) < self.jobs:
                    self._start(waiting.pop(0))
                time.sleep(LOOK_SECONDS)
                self._collect()
                watch(self)
        finally:
            self._end_all()

    def _start(self, cell: Cell) -> None:
        with files.appending(self._log(cell)) as log:
            self.running[cell] = Player([cell.words(self.config)], log, log)

    def _collect(self) -> None:
        """Take note of the cells that have ended."""
        for cell, player in list(self.running.items()):
            if (code := player.poll()) is not None:
                del self.running[cell]
                if code or not cell.finished:
                    said = files.read(self._log(cell)).decode(errors="replace").strip()
                    self.failures[cell] = code, said.split("\n")[-1].strip() or "no word"

    def _log(self, cell: Cell) -> Path:
        return self.logs / f"{cell.name}.txt"

    def _end_all(self) -> None:
        """However a comparison ends, no process is left behind: asked first, then made to."""
        for player in self.running.values():
            player.stop()
        end = time.monotonic() + PATIENCE_SECONDS
        for player in self.running.values():
            player.end(max(0.1, end - time.monotonic()))


class GridProgress:
    """Rounds of all cells in one bar; plain lines now and then where there is no terminal."""

    def __init__(self, cells: Sequence[Cell], screen: Console) -> None:
        self.cells, self.screen, self._said = cells, screen, 0.0
        moving = progress.BarColumn(bar_width=30), progress.MofNCompleteColumn()
        times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
        columns = ("{task.description}", *moving, *times, "{task.fields[note]}")
        how: Any = {
            "transient": True,
            "speed_estimate_period": SPEED_SECONDS,
            "auto_refresh": False,
        }
        disable = not screen.is_terminal
        self.bar = progress.Progress(*columns, console=screen, disable=disable, **how)
        total, done = sum(cell.rounds for cell in cells), sum(cell.done() for cell in cells)
        self.bar.add_task("rounds", total=total, completed=done, note="")
        self._move = console.notebook_bar(total, screen.file)

    def watch(self, pool: Pool) -> None:
        """Show where everything stands."""
        done = sum(cell.done() for cell in self.cells)
        note = ", ".join(f"{cell.name} {cell.done()}/{cell.rounds}" for cell in pool.running)
        task = self.bar.tasks[0]
        self.bar.update(task.id, completed=done, note=note, refresh=True)
        self._move(done)
        if not self.screen.is_terminal and time.monotonic() - self._said > PLAIN_SECONDS:
            self._said, seconds = time.monotonic(), task.time_remaining
            left = "" if seconds is None else f"{timedelta(seconds=round(seconds))} left; "
            self.screen.out(f"{done}/{task.total:g} rounds, {left}{note}")


def _write(done: Sequence[Cell], sweep: Sweep | None, directory: Path, title: str) -> None:
    """What the finished cells say together: page, tables and figures; the main tables printed."""
    if not done:
        return
    run_dirs = [cell.directory for cell in done]
    results = [page.results_of(folder) for folder in run_dirs]
    if sweep is None:
        written, made = page.write(run_dirs, directory, title), tables.main(results)
    else:
        for value in sweep.values:
            said = f"{sweep.key}={value}"
            if mine := [cell.directory for cell in done if sweep.of(cell) in (value, None)]:
                page.write(mine, files.folder(directory / said), f"{title}, {said}")
        varied = Varied(sweep.key, [sweep.of(cell) for cell in done])
        title = f"{title}, {sweep.key} = {', '.join(sweep.values)}"
        written = page.write(run_dirs, directory, title, sweep=varied)
        made = [tables.averages(varied.named(results))]
    console.show(made, f"report  {written.page}")
