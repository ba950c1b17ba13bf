"""`fedbnn compare`: methods x seeds on one stream, in parallel, resumable, ending in tables."""

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from jsonargparse.typing import PositiveInt
from rich.console import Console

from fedbnn.cli.grid_progress import GridProgress
from fedbnn.cli.main import Arguments, flags, numbers, words
from fedbnn.cli.train import Stopped, owned, parse
from fedbnn.errors import ConfigError
from fedbnn.federation.experiment import MAY_DIFFER
from fedbnn.report import page, tables
from fedbnn.storage import run_dir
from fedbnn.storage.ledger import Ledger, rounds
from fedbnn.tracking import console

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LOOK_SECONDS, PATIENCE_SECONDS = 0.5, 20.0


def main(argv: Sequence[str]) -> int:
    """Run what is not done yet, then write and print what all runs say together."""
    options = _options(argv)
    title = Path(options.config).stem
    directory = Path(options.out or f"runs/compare-{title}")
    planned = grid(options.methods, options.seeds, dict(options.set), options.sweep, directory)
    cells = [replace(cell, rounds=_rounds(cell, options.config)) for cell in planned]
    pool = Pool(options.config, options.jobs, directory / "logs")
    screen = Console(highlight=False)
    try:
        with owned(), GridProgress(cells, screen) as progress:
            pool.run(cells, progress.watch)
    except Stopped as stopped:
        screen.print("stopped; the same command goes on from here", soft_wrap=True)
        return int(stopped.code)
    _write([cell for cell in cells if cell.finished], options.sweep, directory, title)
    for cell, (code, reason) in pool.failures.items():
        line = f"{cell.name} failed with exit code {code}: {reason}"
        screen.print(line, soft_wrap=True, markup=False)
    return max((abs(code) or 1 for code, _ in pool.failures.values()), default=0)


def _options(argv: Sequence[str]) -> Namespace:
    """What the command line says; a setting for one method needs that method."""
    about = "Compare methods over seeds on one stream; stopping and starting again continues."
    parser = Arguments("compare", about)
    add, several = parser.add_argument, "with commas between them"
    add("--config", required=True, help="YAML file of the experiment")
    add("--methods", type=words, default=["fedbnn", "fedavg"], help=f"names {several}")
    add("--seeds", type=numbers, default=[0, 1, 2], help=f"numbers {several} (default: 0,1,2)")
    jobs, about = os.cpu_count() or 1, "runs at the same time (default: one a core)"
    add("--jobs", type=PositiveInt, default=jobs, help=about)
    metavar, about = "[METHOD:]KEY=VALUE", "a setting for all runs, or for those of one method"
    add("--set", type=_pair, action="append", default=[], metavar=metavar, help=about)
    metavar, about = "[METHOD:]KEY=V1,V2,...", "a setting to vary, with its plot"
    add("--sweep", type=_sweep, metavar=metavar, help=about)
    add("--out", help="directory of the comparison (default: runs/compare-NAME)")
    options = parser.parse_args(argv)
    special = {key.partition(":")[0]: key for key, _ in options.set if ":" in key}
    if options.sweep and options.sweep.method:
        special[options.sweep.method] = options.sweep.key
    for method in special.keys() - set(options.methods):
        what = f"a setting is for {method}, which is not compared"
        raise ConfigError(what, special[method], "name it in --methods, or leave it out")
    return options


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value


def _sweep(text: str) -> "Sweep":
    name, values = _pair(text)
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
        return all(
            map(Path.is_file, (self._file("results.json"), self._file("state/finished.json")))
        )

    def done(self) -> int:
        """Rounds committed so far."""
        return max(rounds(self.directory), default=0)

    def words(self, config: str) -> list[str]:
        """The words of `fedbnn train`, new or begun; a setting wins over what stands before it."""
        where, group = str(self.directory), self.directory.parent.resolve().name
        own = {"config": config, "method": self.method, "seed": str(self.seed), "run_dir": where}
        own |= {"track.group": group, "track.name": self.name, **dict(self.settings)}
        begun = {"resume": where} if self._file("state/config.json").is_file() else {}
        return flags(own | begun)

    def command(self, config: str) -> list[str]:
        """The process that runs it."""
        return [sys.executable, "-m", "fedbnn", "train", *self.words(config)]

    def results(self) -> dict[str, Any]:
        """Its results.json."""
        return dict(json.loads(self._file("results.json").read_text()))

    def _file(self, name: str) -> Path:
        return self.directory / name


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
        own = {key: value for key, value in settings.items() if ":" not in key}
        special = [key for key in settings if key.startswith(f"{method}:")]
        own |= {key.removeprefix(f"{method}:"): settings[key] for key in special}
        varied: list[tuple[dict[str, str], str]] = [({}, f"{method}-s{seed}")]
        if sweep and sweep.method in (None, method):
            varied = [({sweep.key: value}, f"{method}-s{seed}-{value}") for value in sweep.values]
        for one, folder in varied:
            cells.append(Cell(method, seed, tuple((own | one).items()), directory / folder))
    return cells


def _rounds(cell: Cell, config: str) -> int:
    """How many rounds a cell has; a wrong name or value is found before anything starts.

    So are results of other settings in the place where this cell would leave its own.
    """
    parsed = parse(cell.words(config))
    if cell.finished:
        with Ledger(cell.directory) as ledger:
            run_dir.resume(ledger, parsed.values, MAY_DIFFER)
    return int(parsed.build("stream", seed=cell.seed).rounds)


@dataclass
class Pool:
    """At most `jobs` cells at a time, each a process of one thread; one that fails sinks no other.

    `failures` says why a cell has no results.
    """

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
        environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
        with self._log(cell).open("ab") as log:
            command = cell.command(self.config)
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.running[cell] = process
        self.started[cell] = time.monotonic()

    def _collect(self) -> None:
        """Take note of the cells that have ended."""
        for cell, process in list(self.running.items()):
            code = process.poll()
            if code is not None:
                del self.running[cell]
                if code or not cell.finished:
                    said = self._log(cell).read_text(errors="replace").split("\n")
                    lines = [line.strip() for line in said if line.strip()]
                    self.failures[cell] = code, lines[-1] if lines else "no word"

    def _log(self, cell: Cell) -> Path:
        return self.logs / f"{cell.name}.txt"

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


def _write(done: Sequence[Cell], sweep: Sweep | None, directory: Path, title: str) -> None:
    """What the finished cells say together: page, tables and figures; the main tables printed."""
    if not done:
        return
    run_dirs, results = [cell.directory for cell in done], [cell.results() for cell in done]
    if sweep is None:
        written, made = page.write(run_dirs, directory, title), tables.main(results)
    else:
        for value in sweep.values:
            mine = [cell.directory for cell in done if sweep.of(cell) in (value, None)]
            if mine:
                said = f"{sweep.key}={value}"
                page.write(mine, directory / said, f"{title}, {said}")
        varied = tables.Varied(sweep.key, [sweep.of(cell) for cell in done])
        title = f"{title}, {sweep.key} = {', '.join(sweep.values)}"
        written = page.write(run_dirs, directory, title, sweep=varied)
        made = [tables.averages(varied.named(results))]
    console.show(made, f"report  {written.page}")
