"""`fedbnn train`, or `python train.py`: welcome, dry run, the run, and the runs beside it.

SIGINT and SIGTERM belong to us: both end the run by one exception that no library takes for its
own. Lightning turns a KeyboardInterrupt into `sys.exit(1)` and, left alone, a SIGTERM into a fit
that ends as if it were done. It keeps a SIGTERM handler that was there before it and calls it after
its own, and it passes on whatever is not a KeyboardInterrupt; so a handler that raises `Stopped` is
enough, also in the middle of a fit.
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

from fedbnn.cli import apart
from fedbnn.cli.compose import SCHEMA, Engines, compose
from fedbnn.config.parse import Parsed
from fedbnn.config.parse import parse as parse_by
from fedbnn.errors import ConfigError, Exit, FedBNNError, called
from fedbnn.federation import experiment
from fedbnn.federation.experiment import Experiment
from fedbnn.report import page, schedule, tables
from fedbnn.storage import run_dir
from fedbnn.storage.files import write, writing
from fedbnn.storage.ledger import rounds
from fedbnn.tracking import console

RUNS = Path("runs")
UNEXPECTED, LONGEST = 1, 200
EXHAUSTED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENFILE)
"""What the system says when there is no more room, or no more open files."""
CODES = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}


def main(argv: Sequence[str], engine: Engines | None = None) -> int:
    """Train as these words say; `engine` makes another engine than the one configured."""
    parsed = parse(argv)
    if parsed.flags.dry_run:
        return _dry_run(parsed)
    others = _beside(argv, parsed)
    if others and "report" not in parsed.flags.asked:
        parsed = replace(parsed, values={**parsed.values, "report": False})
    return _train(parsed, others, engine)


def parse(argv: Sequence[str]) -> Parsed:
    """The configuration that these words stand for."""
    parsed = parse_by(argv, SCHEMA, lambda which: run_dir.find(which, RUNS))
    _check_name(str(parsed["name"]))
    return parsed


def _check_name(name: str) -> None:
    """A name is that of directories and files, on screens, too; files with a dot are ours."""
    hidden = any(part.startswith(".") and part.strip(".") for part in name.split("/"))
    wrong = {
        "has characters that cannot be printed": not name.isprintable(),
        f"is longer than {LONGEST} bytes": len(name.encode(errors="replace")) > LONGEST,
        "begins with a dot": hidden,
    }
    for what in (what for what, is_so in wrong.items() if is_so):
        raise ConfigError(f"the name {name[:40]!r} {what}", "name", "use a plain word")


def _dry_run(parsed: Parsed) -> int:
    """The schedule of a stream as rows and as a picture, and who holds what as a moving one.

    They go where runs go: beside the run directory that was asked for, or to runs/.
    """
    stream = parsed.build("stream", seed=parsed["seed"])
    shares = [stream.shares(number) for number in range(1, stream.rounds + 1)]
    drawn = schedule.schedule(shares, [task.name for task in stream.tasks])
    shown, clients = schedule.frames(stream.rounds), range(stream.num_clients)
    held = {number: {k: stream.counts(number, k) for k in clients} for number in shown}
    asked = {number: stream.participants(number) for number in shown}
    where = Path(parsed["run_dir"]).parent if parsed["run_dir"] else RUNS
    where.mkdir(parents=True, exist_ok=True)
    still = where / f"{Path(parsed['name']).name}-schedule.png"
    drawn.savefig(still, dpi=150)
    moving = still.with_name(still.name.replace("schedule.png", "clients.gif"))
    schedule.moving(held, asked, moving)
    title = "Schedule: from the first to the last round, with clients and shares in both"
    console.rows(title, stream.schedule_rows())
    said = "images of a class on a client by area, blue where it is asked in the round"
    print(f"picture  {still}\nmoving   {moving}: {said}")
    return 0


def _beside(argv: Sequence[str], parsed: Parsed) -> dict[str, list[str]]:
    """The other methods it names, unless the user chose one method or one run: words by name.

    One page shows all of them: they have none of their own unless that is asked for.
    """
    if parsed.flags.resume or "method" in parsed.flags.asked:
        return {}
    others = [entry.split() for entry in parsed["beside"]]
    chosen = [words for words in others if words[:1] != [parsed["method"]["name"]]]
    return {words[0]: ["--report=false", *argv, "--method", *words] for words in chosen}


def _train(first: Parsed, others: Mapping[str, Sequence[str]], engine: Engines | None) -> int:
    """Each run in its own directory, several at a time; after them, what they say together.

    What cannot be composed is refused before anything is started.
    """
    named = run_directory(first)
    directories = [named, *(named.with_name(f"{named.name}-{name}") for name in others)]
    told = zip(others.values(), directories[1:], strict=True)
    words = [[], *([*words, "--run_dir", str(place)] for words, place in told)]
    wanted = [first, *map(parse, words[1:])]
    hands = 1 if engine else apart.hands([parsed.values for parsed in wanted])
    mine, *theirs = apart.dealt(len(wanted), hands)
    resumed = bool(first.flags.resume)
    composed = (compose(wanted[one], directories[one], resumed, engine) for one in mine)
    played = map(alone, chain([next(composed)], composed))
    with apart.beside([[words[one] for one in pile] for pile in theirs]) as codes:
        code = next(filter(None, chain(played, codes)), 0)
    if not code and others:
        title, place = str(first["name"]), named / "beside"
        written = page.write(directories, place, title, pictures=False)
        averages = tables.averages(list(map(page.results_of, directories)))
        console.show([averages], f"side by side  {written.page}")
    return code


def alone(composed: Experiment) -> int:
    """One run; its exit code, which says if somebody stopped it."""
    directory = composed.run_dir
    try:
        with traceback_to(directory / "log.txt"):
            play(composed)
    except Stopped as stopped:
        sys.stderr.write(stopped.message(directory, max(rounds(directory), default=0)) + "\n")
        return int(stopped.code)
    return 0


def play(composed: Experiment) -> dict[str, Any]:
    """Run what was composed; SIGINT and SIGTERM end it as `Stopped`."""
    run_dir.note_last(composed.run_dir, RUNS)
    with owned() as signals:
        found = experiment.run(composed)
        signals.check()
    return found


def run_directory(parsed: Parsed) -> Path:
    """The one resumed, the one asked for, or the first free of runs/NAME, runs/NAME-2, ..."""
    if parsed.flags.resume:
        return run_dir.find(parsed.flags.resume, RUNS)
    if parsed["run_dir"]:
        return Path(parsed["run_dir"])
    named = RUNS / str(parsed["name"])
    if RUNS.resolve() not in named.resolve().parents:
        what = f"the name {parsed['name']!r} leads out of {RUNS}/"
        raise ConfigError(what, "name", "use a plain word; run_dir may be any directory")
    return first_free(named)


def first_free(named: Path) -> Path:
    """The first of NAME, NAME-2, NAME-3, ... that is not there."""
    others = (named.with_name(f"{named.name}-{number}") for number in count(2))
    return next(path for path in chain([named], others) if not path.exists())


@contextmanager
def traceback_to(log: Path) -> Iterator[None]:
    """Errors nobody expected in here leave their traceback in `log`, and one line on the screen."""
    try:
        yield
    except FedBNNError:
        raise
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        with suppress(FedBNNError):
            write(log, text.encode(errors="backslashreplace"), "ab")
        if isinstance(error, OSError) and error.errno in EXHAUSTED:
            with writing(log.parent):
                raise
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
        go_on = f"go on with: {called()} --resume {run_dir}"
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


def _hung_up(_number: int, _frame: FrameType | None) -> None:
    """The terminal was closed, which ends no training."""
    go_on = "the terminal was closed: the run goes on; SIGTERM to process %d stops it"
    console.LOG.warning(go_on, os.getpid())


@contextmanager
def owned() -> Iterator[Signals]:
    """Handle SIGINT, SIGTERM and SIGHUP in here, and leave the handlers as they were found.

    Only the main thread may; in any other nothing is touched.
    """
    signals, main = Signals(), current_thread() is main_thread()
    handlers = {**dict.fromkeys(CODES, signals.handle), signal.SIGHUP: _hung_up} if main else {}
    before = {number: signal.signal(number, handle) for number, handle in handlers.items()}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
