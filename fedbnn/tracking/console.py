"""What a person sees: a start-up card, one live progress display, the final table. Plain lines when nobody watches live."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console as Screen
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table as Grid
from rich.text import Text

from fedbnn.evaluation.predictions import REGIMES
from fedbnn.report import table_formats, tables

Record = Mapping[str, Any]
MOST_LINES = 100


class Display(Protocol):
    """How the rounds are shown as they pass."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def round_started(self, round: int, clients: Sequence[int]) -> None: ...
    def client_done(self, client: int) -> None: ...
    def round_done(self, record: Record) -> None: ...


class Console:
    """The face of a run. Use it as a context manager around the rounds; `say` is for single lines at any time."""

    def __init__(self, rounds: int, done: int = 0, file: TextIO | None = None) -> None:
        self.screen = Screen(file=file, highlight=False, soft_wrap=False)
        live = self.screen.is_terminal and not self.screen.is_dumb_terminal
        self._display: Display = (
            LiveRounds(self.screen, rounds, done) if live else PlainRounds(self.screen, rounds)
        )
        self._live = live

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._display.stop()

    def say(self, text: str) -> None:
        """One line, above the progress display if there is one."""
        _line(self.screen, text)

    def card(self, facts: Mapping[str, str], title: str = "FedBNN") -> None:
        """What will happen, before it does: scenario, clients, method with its formula, seed, run directory, engine."""
        if not self._live:
            for name, text in facts.items():
                _line(self.screen, f"{name:<13} {text}")
            return
        grid = Grid.grid(padding=(0, 2))
        for name, text in facts.items():
            grid.add_row(Text(name, "bold cyan"), Text(text))
        self.screen.print(Panel.fit(grid, title=title, title_align="left", border_style="cyan"))

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        """A round begins with these clients."""
        self._display.round_started(round, clients)

    def client_done(self, client: int) -> None:
        """One client of the round has answered, or has failed."""
        self._display.client_done(client)

    def round_done(self, record: Record) -> None:
        """The round is over; `record` is its line of metrics.jsonl."""
        self._display.round_done(record)

    def finished(self, results: Mapping[str, Any], run_dir: Path) -> None:
        """The table of the run, and where everything is."""
        self._display.stop()
        self.screen.print()
        self.screen.print(table_formats.terminal(tables.of_run(results)))
        _line(
            self.screen,
            f"{results['method']}, seed {results['seed']}: {results['rounds_done']} rounds in {results['seconds']:.0f} s",
        )
        _line(self.screen, f"report  {run_dir / 'report.html'}")


class LiveRounds:
    """Two bars that move: the rounds of the run, and the clients of the round."""

    def __init__(self, screen: Screen, rounds: int, done: int = 0) -> None:
        moving = [
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
        ]
        self._progress = Progress(
            TextColumn("{task.description}"), *moving, console=screen, transient=True
        )
        self._rounds: TaskID = self._progress.add_task(
            "rounds", total=rounds, completed=done, now=""
        )
        self._clients: TaskID = self._progress.add_task("clients", total=None, now="")
        self._screen = screen

    def start(self) -> None:
        """Show the bars."""
        self._progress.start()

    def stop(self) -> None:
        """Take the bars away."""
        self._progress.stop()

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        """Fill the lower bar with the clients of this round."""
        names = ", ".join(map(str, clients[:8])) + (", …" if len(clients) > 8 else "")
        self._progress.reset(self._clients, total=len(clients), now=f"of round {round}: {names}")

    def client_done(self, client: int) -> None:
        """Move the lower bar."""
        self._progress.advance(self._clients)

    def round_done(self, record: Record) -> None:
        """Move the upper bar, with the accuracy of now; name clients that did not count."""
        self._progress.update(self._rounds, completed=record["round"])
        if record.get("fon"):
            self._progress.update(self._rounds, now=_accuracy(record))
        for text in _incidents(record):
            _line(self._screen, f"round {record['round']}: {text}")


class PlainRounds:
    """At most one line per round, and about a hundred in all."""

    def __init__(self, screen: Screen, rounds: int) -> None:
        self._screen, self._last = screen, rounds
        self._step = -(-rounds // MOST_LINES)

    def start(self) -> None:
        """Nothing to prepare."""

    def stop(self) -> None:
        """Nothing to take away."""

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        """Said when the round is over."""

    def client_done(self, client: int) -> None:
        """Said when the round is over."""

    def round_done(self, record: Record) -> None:
        """One line, when it is this round's turn or something went wrong in it."""
        incidents, number = list(_incidents(record)), record["round"]
        if number % self._step and number not in (1, self._last) and not incidents:
            return
        seconds = record.get("seconds", {}).get("round", 0.0)
        parts = [
            f"round {number:>{len(str(self._last))}}/{self._last}",
            f"{len(record['clients'])} clients",
            _accuracy(record),
        ]
        _line(
            self._screen,
            "  ".join(part for part in (*parts, f"{seconds:.1f} s", *incidents) if part),
        )


def _accuracy(record: Record) -> str:
    """The Focus-on-Now accuracy in both regimes."""
    now = record.get("fon")
    return (
        "now " + ", ".join(f"{now[name]:.1f} % {tables.SPOKEN[name]}" for name in REGIMES)
        if now
        else ""
    )


def _incidents(record: Record) -> list[str]:
    """Clients that sent nothing or were refused, each by name with the reason."""
    words = {"failed": "failed", "refused": "was refused"}
    return [
        f"client {client} {word}: {why}"
        for key, word in words.items()
        for client, why in (record.get(key) or {}).items()
    ]


def _line(screen: Screen, text: str) -> None:
    """Plain text on one line, however long, with nothing read as mark-up."""
    screen.print(Text(" ".join(text.split()) if "\n" in text else text), soft_wrap=True)


def schedule(rows: Sequence[Mapping[str, object]], file: TextIO | None = None) -> None:
    """Print the schedule of a dry run: one line per row, the keys of the first row are the columns."""
    drawn = Grid(
        *(str(name).replace("_", " ") for name in rows[0]), title="Schedule", title_justify="left"
    )
    for row in rows:
        drawn.add_row(*(Text(_plain(value)) for value in row.values()))
    Screen(file=file, highlight=False).print(drawn)


def _plain(value: object) -> str:
    """Numbers short, sequences as a list with commas."""
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def show(made: Sequence[tables.Table], last: str, file: TextIO | None = None) -> None:
    """Print tables, and a last line."""
    screen = Screen(file=file, highlight=False)
    for table in made:
        screen.print(table_formats.terminal(table))
    _line(screen, last)
