"""`fedbnn compare`: methods x seeds on one stream, in parallel, resumable, ending in the tables of the field."""

import os
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fedbnn.cli import grid
from fedbnn.cli.arguments import Arguments, numbers, positive, words
from fedbnn.cli.grid import Cell, Sweep
from fedbnn.cli.grid_progress import GridProgress
from fedbnn.cli.pool import Pool
from fedbnn.cli.signals import Stopped, owned
from fedbnn.config import parse
from fedbnn.errors import ConfigError
from fedbnn.federation.runner import MAY_DIFFER
from fedbnn.report import page as report
from fedbnn.report import tables
from fedbnn.storage import runs
from fedbnn.storage.ledger import Ledger
from fedbnn.tracking import console
from train import SCHEMA

SET = "a setting for all runs, or for those of one method"


def main(argv: Sequence[str]) -> int:
    """Run what is not done yet, then write and print what all runs say together."""
    options = _options(argv)
    sweep, title = options.sweep, Path(options.config).stem
    directory = Path(options.out or f"runs/compare-{title}")
    _check_special(options)
    planned = grid.cells(options.methods, options.seeds, dict(options.set), sweep, directory)
    cells = [replace(cell, rounds=_rounds(cell, options.config)) for cell in planned]
    pool = Pool(options.config, options.jobs, directory / "logs")
    screen = Console(highlight=False)
    try:
        with owned(), GridProgress(cells, screen) as progress:
            pool.run(cells, progress.watch)
    except Stopped as stopped:
        screen.print("stopped; the same command goes on from here", soft_wrap=True)
        return int(stopped.code)
    _write(cells, sweep, directory, title)
    for cell, (code, reason) in pool.failures.items():
        screen.print(
            f"{cell.name} failed with exit code {code}: {reason}", soft_wrap=True, markup=False
        )
    return max((abs(code) or 1 for code, _ in pool.failures.values()), default=0)


def _options(argv: Sequence[str]) -> Namespace:
    parser = Arguments(
        "compare",
        "Compare methods over seeds on one stream; stopping and starting again continues.",
    )
    parser.add_argument("--config", required=True, help="YAML file of the experiment")
    parser.add_argument(
        "--methods", type=words, default=["fedbnn", "fedavg"], help="names with commas between them"
    )
    parser.add_argument(
        "--seeds",
        type=numbers,
        default=[0, 1, 2],
        help="numbers with commas between them (default: 0,1,2)",
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        default=os.cpu_count() or 1,
        help="runs at the same time (default: one a core)",
    )
    parser.add_argument(
        "--set", type=_pair, action="append", default=[], metavar="[METHOD:]KEY=VALUE", help=SET
    )
    parser.add_argument(
        "--sweep",
        type=_sweep,
        metavar="[METHOD:]KEY=V1,V2,...",
        help="a setting to vary, with its plot",
    )
    parser.add_argument("--out", help="directory of the comparison (default: runs/compare-NAME)")
    return parser.parse_args(argv)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value


def _check_special(options: Namespace) -> None:
    """A setting for one method needs that method."""
    special = [(key.partition(":")[0], key) for key, _ in options.set if ":" in key]
    if options.sweep and options.sweep.method:
        special.append((options.sweep.method, options.sweep.key))
    for method, key in special:
        if method not in options.methods:
            raise ConfigError(
                f"a setting is for {method}, which is not compared",
                key,
                "name it in --methods, or leave it out",
            )


def _sweep(text: str) -> Sweep:
    """The setting to vary, its values, and perhaps the one method it is for."""
    name, values = _pair(text)
    method, _, key = name.rpartition(":")
    return Sweep(key, tuple(words(values)), method or None)


def _rounds(cell: Cell, config: str) -> int:
    """How many rounds a cell has; a wrong name or value, or results of other settings, are found before anything starts."""
    parsed = parse(cell.words(config), SCHEMA)
    if cell.finished:
        with Ledger(cell.directory, parsed["keep_rounds"]) as ledger:
            runs.resume(ledger, parsed.values, MAY_DIFFER)
    return int(parsed.build("stream", seed=cell.seed).rounds)


def _write(cells: Sequence[Cell], sweep: Sweep | None, directory: Path, title: str) -> None:
    """What the finished cells say together; of a sweep, first each value by itself, then all of them."""
    done = [cell for cell in cells if cell.finished]
    if sweep is None:
        _together(done, directory, title)
        return
    for value in sweep.values:
        mine = [cell for cell in done if sweep.of(cell) in (value, None)]
        if mine:
            named = directory / f"{sweep.key}={value}", f"{title}, {sweep.key} = {value}"
            report.write([cell.directory for cell in mine], *named)
    _swept(done, sweep, directory, f"{title}, {sweep.key} = {', '.join(sweep.values)}")


def _together(cells: Sequence[Cell], directory: Path, title: str) -> None:
    """Report, tables and figures of these cells, and the main tables on the screen."""
    if cells:
        written = report.write([cell.directory for cell in cells], directory, title)
        console.show(tables.main([cell.results() for cell in cells]), f"report  {written.page}")


def _swept(cells: Sequence[Cell], sweep: Sweep, directory: Path, title: str) -> None:
    """Report, tables and figures with a line per method and value, and the averages on the screen."""
    if cells:
        varied = tables.Varied(sweep.key, [sweep.of(cell) for cell in cells])
        run_dirs = [cell.directory for cell in cells]
        written = report.write(run_dirs, directory, title, sweep=varied)
        named = varied.named([cell.results() for cell in cells])
        console.show([tables.averages(named)], f"report  {written.page}")
