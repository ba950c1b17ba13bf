"""From the words of `python train.py ...` to an exit code: welcome, dry run, the run, and the runs beside it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from fedbnn.cli.outcome import ended, traceback_to
from fedbnn.cli.signals import Stopped, owned
from fedbnn.cli.welcome import WELCOME
from fedbnn.config import Parsed, Schema, parse
from fedbnn.federation.runner import Plan, conduct
from fedbnn.report import comparison_tables
from fedbnn.report import page as report
from fedbnn.storage import run_dir
from fedbnn.storage.ledger import rounds
from fedbnn.tracking import console

RUNS = Path("runs")


@dataclass(frozen=True)
class Program:
    """What the composition root alone knows: the schema, how to build a plan, how to show a stream before training."""

    schema: Schema
    plan: Callable[[Parsed, Path], Plan]
    preview: Callable[[Parsed, Path], Sequence[Mapping[str, object]]]

    def main(self, argv: Sequence[str]) -> int:
        """Run the command; the exit code is documented in fedbnn.cli.explain."""
        return ended(lambda: self._run(argv))

    def _run(self, argv: Sequence[str]) -> int:
        if not argv:
            sys.stdout.write(WELCOME)
            return 0
        parsed = self._parse(argv)
        if parsed.flags.dry_run:
            picture = Path(f"{Path(parsed['name']).name}-schedule.png")
            console.schedule(self.preview(parsed, picture))
            print(f"picture  {picture}")
            return 0
        return self._train([parsed, *self._beside(argv, parsed)])

    def _parse(self, argv: Sequence[str]) -> Parsed:
        return parse(argv, self.schema, lambda which: run_dir.find(which, RUNS))

    def _beside(self, argv: Sequence[str], parsed: Parsed) -> list[Parsed]:
        """The same configuration with the other methods it names, unless the user chose one method or one run."""
        asked = parsed.flags.resume or any(
            key.partition(".")[0] == "method" for key in parsed.flags.keys
        )
        others = [name for name in parsed["beside"] if name != parsed["method"]["name"]]
        return [] if asked else [self._parse([*argv, "--method", name]) for name in others]

    def _train(self, wanted: Sequence[Parsed]) -> int:
        """Each run in its own directory; after several, what they say together."""
        first = run_directory(wanted[0])
        directories = [
            first,
            *(first.with_name(f"{first.name}-{one['method']['name']}") for one in wanted[1:]),
        ]
        found = []
        for parsed, directory in zip(wanted, directories, strict=True):
            try:
                found.append(self._conduct(parsed, directory))
            except Stopped as stopped:
                sys.stderr.write(stopped.message(directory, last_round(directory)) + "\n")
                return int(stopped.code)
        if len(found) > 1:
            written = report.write_comparison(directories, first / "beside", str(wanted[0]["name"]))
            console.show([comparison_tables.averages(found)], f"side by side  {written.page}")
        return 0

    def _conduct(self, parsed: Parsed, directory: Path) -> dict[str, Any]:
        """One run, with signals and unexpected errors taken care of."""
        plan = self.plan(parsed, directory)
        with owned() as signals, traceback_to(directory / "log.txt"):
            found = conduct(plan)
            signals.check()
        return found


def run_directory(parsed: Parsed) -> Path:
    """The directory of a run: the one resumed, the one asked for, or the first free one of runs/NAME, runs/NAME-2, ..."""
    if parsed.flags.resume:
        return run_dir.find(parsed.flags.resume, RUNS)
    if parsed["run_dir"]:
        return Path(parsed["run_dir"])
    named = RUNS / str(parsed["name"])
    free = (named.with_name(f"{named.name}-{number}") for number in count(2))
    return named if not named.exists() else next(path for path in free if not path.exists())


def last_round(directory: Path) -> int:
    """The newest round on disk; 0 before the first."""
    return max(rounds(directory), default=0)
