"""What a person sees: a start-up card, one progress display, the final table; and log.txt.

Plain lines when nobody watches live. Libraries may talk in log.txt, but not on the console.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self, TextIO

from rich import box, progress
from rich.console import Console as Screen
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table as Grid
from rich.text import Text

from fedbnn.errors import escaped, silence
from fedbnn.evaluation.evaluate import REGIMES
from fedbnn.report import tables, words
from fedbnn.report.values import Table
from fedbnn.storage.files import write

Record = Mapping[str, Any]
MOST_LINES = 100
LIGHTNING = ("pytorch_lightning", "lightning.pytorch", "lightning.fabric", "lightning_fabric")
CHATTY = (*LIGHTNING, "wandb", "matplotlib", "flwr", "ray", "urllib3")
FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
LOG = logging.getLogger("fedbnn")


class Output:
    """Standard output, which may go away: a closed pipe or terminal, a full disk behind it.

    What is written from then on is lost; the run goes on, and log.txt says so.
    """

    def __init__(self, file: TextIO) -> None:
        self._file, self._gone = file, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write, if somebody is there."""
        return len(text) if self._gone else self._tried(self._file.write, text) or 0

    def flush(self) -> None:
        """Flush, if somebody is there."""
        if not self._gone:
            self._tried(self._file.flush)

    def _tried(self, action: Callable[..., Any], *arguments: object) -> Any:
        try:
            return action(*arguments)
        except OSError as error:
            self._gone = True
            LOG.warning("standard output is gone (%s): the run goes on without it", error.strerror)
            silence(self._file)


def screen(file: TextIO) -> Screen:
    """What prints to a stream; a cell of a notebook is one, and no terminal, though it says so."""
    how: Any = {"force_terminal": file.isatty(), "force_jupyter": False}
    return Screen(file=file, highlight=False, **how)


def notebook_bar(total: int, file: IO[str]) -> Callable[[int], None]:
    """Draw a bar if the stream is a cell of a notebook; what moves it."""
    if not type(file).__module__.startswith("ipykernel."):
        return lambda done: None
    drawn = import_module("IPython.display").ProgressBar(total)
    drawn.display()
    return partial(setattr, drawn, "progress")


class Watcher:
    """Somebody who wants to know how the rounds go; what is not overridden is not of interest."""

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        """A round begins with these clients."""

    def client_done(self, client: int) -> None:
        """One client of the round has answered, or has failed."""

    def round_done(self, record: Record) -> None:
        """The round is over; `record` is its line of metrics.jsonl."""


class Console(Watcher):
    """The face of a run. Use it as a context manager around the rounds.

    In a terminal two bars move: the rounds of the run, and the clients of the round. Elsewhere
    there is at most one line a round, and about a hundred in all; a notebook has a bar, too.
    """

    def __init__(self, rounds: int, done: int = 0, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout
        output: Any = Output(self._file)
        self.screen = drawn = screen(output)
        self._live = drawn.is_terminal and not drawn.is_dumb_terminal
        self._last, self._step = rounds, -(-rounds // MOST_LINES)
        self._move: Callable[[int], None] = lambda done: None
        moving = progress.BarColumn(bar_width=24), progress.MofNCompleteColumn()
        times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
        columns = ("{task.description}", *moving, *times, "{task.fields[now]}")
        self._bars = Progress(*columns, console=drawn, transient=True, disable=not self._live)
        self._rounds = self._bars.add_task("rounds", total=rounds, completed=done, now="")
        self._clients = self._bars.add_task("clients", total=None, now="")

    def __enter__(self) -> Self:
        self._bars.start()
        self._move = notebook_bar(self._last, self._file)
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Plain text on one line, however long, above the bars if there are any."""
        line = text if text.isprintable() else escaped(" ".join(text.split()))
        self.screen.print(Text(line), soft_wrap=True)

    def card(self, facts: Mapping[str, str], title: str = "FedBNN") -> None:
        """What will happen, before it does: scenario, clients, method with its formula, seed."""
        grid = Grid.grid(padding=(0, 2))
        for name, text in facts.items():
            grid.add_row(Text(name, "bold cyan"), Text(escaped(text)))
            if not self._live:
                self.say(f"{name:<13} {text}")
        if self._live:
            self.screen.print(Panel.fit(grid, title=title, title_align="left", border_style="cyan"))

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        """Fill the lower bar with the clients of this round."""
        names = ", ".join(map(str, clients[:8])) + (", …" if len(clients) > 8 else "")
        self._bars.reset(self._clients, total=len(clients), now=f"of round {round}: {names}")

    def client_done(self, client: int) -> None:
        """Move the lower bar."""
        self._bars.advance(self._clients)

    def round_done(self, record: Record) -> None:
        """Move the upper bar, with the accuracy of now; name clients that did not count."""
        number, facts, incidents = record["round"], _facts(record), _incidents(record)
        first = f"round {number:>{len(str(self._last))}}/{self._last}"
        seconds = f"{record.get('seconds', {}).get('round', 0.0):.1f} s"
        parts = [first, f"{len(record['clients'])} clients", facts, seconds, *incidents]
        line = "  ".join(filter(None, parts))
        LOG.log(logging.WARNING if incidents else logging.INFO, "%s", line)
        self._bars.update(self._rounds, completed=number)
        self._move(number)
        if facts:
            self._bars.update(self._rounds, now=facts)
        if self._live:
            for text in incidents:
                self.say(f"round {number}: {text}")
        elif incidents or number % self._step == 0 or number in (1, self._last):
            self.say(line)

    def finished(self, results: Mapping[str, Any], run_dir: Path) -> None:
        """The table of the run, who did not count or counted less, and where everything is."""
        self._bars.stop()
        self.screen.print()
        self.screen.print(terminal(tables.of_run(results)))
        took = f"{results['rounds_done']} rounds in {results['seconds']:.0f} s"
        self.say(f"{results['method']}, seed {results['seed']}: {took}")
        if text := words.incidents(results):
            self.say(text)
        page, later = run_dir / "report.html", f"not drawn; to draw it: fedbnn report {run_dir}"
        self.say(f"report  {page if page.is_file() else later}")


def _facts(record: Record) -> str:
    """The Focus-on-Now accuracy in both regimes, the loss; who counted less, with their trust."""
    now, trust = record.get("fon") or {}, record.get("trust") or {}
    both = ", ".join(f"{now[name]:.1f} % {tables.SPOKEN[name]}" for name in REGIMES if name in now)
    less = ", ".join(f"{client} ({share:.2f})" for client, share in trust.items())
    train = record.get("train") or {}
    loss = ", ".join(f"{name} {train[name]:.3g}" for name in train)
    lost = f"{len(trust)} down-weighted: {less}" if less else ""
    spent = (record.get("privacy") or {}).get("epsilon")
    private = f"epsilon {spent:.3g}" if spent is not None else ""
    return "  ".join(filter(None, (f"now {both}" if both else "", loss, private, lost)))


def _incidents(record: Record) -> list[str]:
    """Clients that sent nothing or were refused, each by name with the reason."""
    said = {"failed": "failed", "refused": "was refused"}
    found = [(word, record.get(key) or {}) for key, word in said.items()]
    lost = [f"client {who} {word}: {why}" for word, some in found for who, why in some.items()]
    late = (record.get("late") or {}).items()
    return [*lost, *(f"client {who} counted {age} round(s) late" for who, age in late)]


def rows(title: str, found: Sequence[Mapping[str, object]], file: TextIO | None = None) -> None:
    """Print rows as a table; the keys of the first row are the columns."""
    drawn = Grid(*(name.replace("_", " ") for name in found[0]), title=title, title_justify="left")
    for row in found:
        drawn.add_row(*(Text(escaped(_plain(value))) for value in row.values()))
    screen(file or sys.stdout).print(drawn)


def _plain(value: object) -> str:
    """Numbers short, sequences as a list with commas."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)


def terminal(table: Table) -> Grid:
    """For a terminal of any width: nothing is cut off, and the best have a star besides colour."""
    drawn = Grid(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    drawn.title, drawn.title_justify = Text(table.title, "bold"), "left"
    drawn.caption, drawn.caption_justify = Text("\n".join(table.notes), "dim"), "left"
    drawn.add_column(table.heads[0], overflow="fold")
    for head in table.heads[1:]:
        drawn.add_column(head.replace(" ", "\n"), justify="right", overflow="fold")
    for row in table.rows:
        last_task = row is table.rows[-1] and row.name == "average"
        style = "dim" if row.quiet else "bold" if last_task else ""
        texts = [(cell.text("±"), cell.best) for cell in row.cells]
        cells = [Text(f"*{one}", "bold green") if best else Text(one) for one, best in texts]
        drawn.add_row(Text(row.name), *cells, style=style)
    return drawn


def show(made: Sequence[Table], last: str, file: TextIO | None = None) -> None:
    """Print tables, and a last line."""
    console = Console(rounds=1, file=file)
    for table in made:
        console.screen.print(terminal(table))
    console.say(last)


class LogFile(logging.FileHandler):
    """A log that costs nothing but its lines where it cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: the disk is full, and the run will say so itself."""


@contextmanager
def logging_to(run_dir: Path) -> Iterator[logging.Logger]:
    """Write our log, and warnings of chatty libraries, to `run_dir/log.txt` and nowhere else."""
    write(run_dir / "log.txt", b"", "ab")
    handler = LogFile(run_dir / "log.txt", encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter(FORMAT))
    found = [LOG, *map(logging.getLogger, CHATTY)]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in found]
    for logger in found:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if logger is LOG else logging.WARNING)
    try:
        yield LOG
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
        handler.close()
