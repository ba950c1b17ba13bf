"""`fedbnn train`, or `python train.py`: welcome, dry run, the run, and the runs beside it.

SIGINT and SIGTERM belong to us: both end the run by one exception that no library takes for its
own. Lightning turns a KeyboardInterrupt into `sys.exit(1)` and, left alone, a SIGTERM into a fit
that ends as if it were done. It keeps a SIGTERM handler that was there before it and calls it after
its own, and it passes on whatever is not a KeyboardInterrupt; so a handler that raises `Stopped` is
enough, also in the middle of a fit.
"""

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

from fedbnn.cli.compose import SCHEMA, compose
from fedbnn.config.parse import Parsed
from fedbnn.config.parse import parse as parse_by
from fedbnn.errors import Exit, FedBNNError
from fedbnn.federation import experiment
from fedbnn.federation.experiment import Experiment
from fedbnn.report import figures, page, tables
from fedbnn.storage import run_dir as directories
from fedbnn.storage.ledger import rounds
from fedbnn.tracking import console

RUNS = Path("runs")
UNEXPECTED = 1
CODES = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}
START = "python train.py --config conf/quickstart.yaml"
WELCOME = f"""\
FedBNN trains one model over many clients whose data drift. Three commands to begin with:

  {START}            train on small digits for a minute; no download
  {START} --dry_run  show which client meets which classes when
  {START} --help     list every setting; each is a key in YAML and a flag
"""


def main(argv: Sequence[str]) -> int:
    """Train; without words, say how to begin."""
    if not argv:
        sys.stdout.write(WELCOME)
        return 0
    parsed = parse(argv)
    return _dry_run(parsed) if parsed.flags.dry_run else _train([parsed, *_beside(argv, parsed)])


def parse(argv: Sequence[str]) -> Parsed:
    """The configuration that these words stand for."""
    return parse_by(argv, SCHEMA, lambda which: directories.find(which, RUNS))


def _dry_run(parsed: Parsed) -> int:
    """The schedule of a stream as rows, and as a picture."""
    stream = parsed.build("stream", seed=parsed["seed"])
    picture = Path(f"{Path(parsed['name']).name}-schedule.png")
    shares = [stream.shares(number) for number in range(1, stream.rounds + 1)]
    figures.schedule(shares, [task.name for task in stream.tasks]).savefig(picture, dpi=150)
    console.schedule(stream.schedule_rows())
    print(f"picture  {picture}")
    return 0


def _beside(argv: Sequence[str], parsed: Parsed) -> list[Parsed]:
    """The same with the other methods it names, unless the user chose one method or one run."""
    if parsed.flags.resume or "method" in parsed.flags.asked:
        return []
    others = [name for name in parsed["beside"] if name != parsed["method"]["name"]]
    return [parse([*argv, "--method", name]) for name in others]


def _train(wanted: Sequence[Parsed]) -> int:
    """Each run in its own directory; after several, what they say together."""
    first, found = run_directory(wanted[0]), []
    names = [first.name, *(f"{first.name}-{one['method']['name']}" for one in wanted[1:])]
    directories = [first.with_name(name) for name in names]
    for parsed, directory in zip(wanted, directories, strict=True):
        composed = compose(parsed, directory, bool(parsed.flags.resume))
        try:
            with traceback_to(directory / "log.txt"):
                found.append(play(composed))
        except Stopped as stopped:
            sys.stderr.write(stopped.message(directory, max(rounds(directory), default=0)) + "\n")
            return int(stopped.code)
    if len(found) > 1:
        written = page.write(directories, first / "beside", str(wanted[0]["name"]))
        console.show([tables.averages(found)], f"side by side  {written.page}")
    return 0


def play(composed: Experiment) -> dict[str, Any]:
    """Run what was composed; SIGINT and SIGTERM end it as `Stopped`."""
    with owned() as signals:
        found = experiment.run(composed)
        signals.check()
    return found


def run_directory(parsed: Parsed) -> Path:
    """The one resumed, the one asked for, or the first free of runs/NAME, runs/NAME-2, ..."""
    if parsed.flags.resume:
        return directories.find(parsed.flags.resume, RUNS)
    if parsed["run_dir"]:
        return Path(parsed["run_dir"])
    named = RUNS / str(parsed["name"])
    free = (named.with_name(f"{named.name}-{number}") for number in count(2))
    return named if not named.exists() else next(path for path in free if not path.exists())


@contextmanager
def traceback_to(log: Path) -> Iterator[None]:
    """Errors nobody expected in here leave their traceback in `log`, and one line on the screen."""
    try:
        yield
    except FedBNNError:
        raise
    except Exception as error:
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
        name = type(error).__name__
        sys.stderr.write(f"error: unexpected {name}; the traceback is in {log}; please report it\n")
        raise SystemExit(UNEXPECTED) from error


class Stopped(BaseException):
    """The user, or the system, asked the run to end."""

    def __init__(self, code: Exit) -> None:
        self.code = code
        super().__init__(code)

    def message(self, run_dir: Path, round: int) -> str:
        """What happened after this round and how to go on, in one line."""
        name = {code: number.name for number, code in CODES.items()}[self.code]
        where = f"after round {round}" if round else "before the first round"
        go_on = f"go on with: python train.py --resume {run_dir}"
        return f"stopped by {name} {where} was committed; {go_on}"


@dataclass
class Signals:
    """Which signal has arrived: `check` raises it again where a library has lost the exception."""

    received: Exit | None = None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The first signal raises `Stopped`; a second ends the process: commits are on disk."""
        code = CODES[signal.Signals(number)]
        if self.received is not None:
            os._exit(code)
        self.received = code
        raise Stopped(code)

    def check(self) -> None:
        """Raise `Stopped` if a signal has arrived."""
        if self.received is not None:
            raise Stopped(self.received)


@contextmanager
def owned() -> Iterator[Signals]:
    """Handle SIGINT and SIGTERM in here, and leave the handlers as they were found.

    Only the main thread may; in any other nothing is touched.
    """
    signals, main = Signals(), current_thread() is main_thread()
    before = {number: signal.signal(number, signals.handle) for number in CODES if main}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
