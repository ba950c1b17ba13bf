"""Methods x seeds (x values of one setting) as cells, each a run of its own in its own directory."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from fedbnn.storage.ledger import rounds


@dataclass(frozen=True)
class Cell:
    """One run of a comparison: which method and seed, what else is set, where it lives, how many rounds it has."""

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
        return (self.directory / "results.json").is_file() and (
            self.directory / "state" / "finished.json"
        ).is_file()

    @property
    def begun(self) -> bool:
        """Whether there is something to go on with."""
        return (self.directory / "state" / "config.json").is_file()

    def done(self) -> int:
        """Rounds committed so far."""
        return max(rounds(self.directory), default=0)

    def words(self, config: str) -> list[str]:
        """The words of `python train.py` for this cell, whether new or begun; a setting wins over what stands before it."""
        own = [
            "--config",
            config,
            "--method",
            self.method,
            "--seed",
            str(self.seed),
            "--run_dir",
            str(self.directory),
        ]
        own += ["--track.group", self.directory.parent.resolve().name, "--track.name", self.name]
        own += [word for key, value in self.settings for word in (f"--{key}", value)]
        return own + (["--resume", str(self.directory)] if self.begun else [])

    def command(self, config: str) -> list[str]:
        """The process that runs it."""
        return [sys.executable, "-m", "train", *self.words(config)]

    def results(self) -> dict[str, object]:
        """Its results.json."""
        found: dict[str, object] = json.loads((self.directory / "results.json").read_text())
        return found


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


def cells(
    methods: Sequence[str],
    seeds: Sequence[int],
    settings: Mapping[str, str],
    sweep: Sweep | None,
    directory: Path,
) -> list[Cell]:
    """Every cell of the grid; the seeds of all methods first, so that a table fills evenly.

    A setting `KEY` is for all methods, `METHOD:KEY` for one of them, where it wins.
    """
    grid = []
    for seed, method in product(seeds, methods):
        own, name = _own(settings, method), f"{method}-s{seed}"
        if sweep and sweep.method in (None, method):
            varied = [((*own, (sweep.key, value)), f"{name}-{value}") for value in sweep.values]
        else:
            varied = [(own, name)]
        grid += [Cell(method, seed, settled, directory / folder) for settled, folder in varied]
    return grid


def _own(settings: Mapping[str, str], method: str) -> tuple[tuple[str, str], ...]:
    """The settings of one method."""
    common = {key: value for key, value in settings.items() if ":" not in key}
    special = {
        key.removeprefix(f"{method}:"): value
        for key, value in settings.items()
        if key.startswith(f"{method}:")
    }
    return tuple((common | special).items())
