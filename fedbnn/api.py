"""FedBNN from Python: `run` and `compare` do what the commands do, in the same way, and return it.

    found = fedbnn.run("quickstart", method="fedavg", **{"client.lr": 0.01})
    found.results["class_agnostic"]["avg_fin"], found.table, found.model.predict(image).labels

Settings are those of the YAML files and flags. They work in a script, a thread, a notebook and an
event loop; signals are handled on the main thread alone, and given back. Of several threads one
trains at a time.
"""

import importlib.util
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any

from fedbnn import export
from fedbnn.cli import compare as comparing
from fedbnn.cli import train
from fedbnn.cli.compose import compose
from fedbnn.errors import ConfigError, Exit, FederationError
from fedbnn.evaluation.evaluate import REGIMES
from fedbnn.export import Model
from fedbnn.report import page
from fedbnn.storage import run_dir

Config = str | Path | Sequence[str | Path]
TURN = RLock()
"""Threads train one after the other: a process has one generator of torch, and one style."""


@dataclass(frozen=True)
class Run:
    """A finished run: what its directory holds, read when it is asked for."""

    directory: Path
    trust: bool = field(default=False, repr=False)
    """Whether its model may be of a network by import path, as of a run this program has made."""

    @cached_property
    def results(self) -> dict[str, Any]:
        """What the run achieved, as in results.json."""
        return dict(json.loads((self.directory / "results.json").read_text()))

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """What was measured in each round, as in metrics.jsonl."""
        return run_dir.records(self.directory)

    @cached_property
    def model(self) -> Model:
        """The trained model; `predict` gives class probabilities with their uncertainty."""
        return export.load(self.directory, self.trust)

    @property
    def report(self) -> Path:
        """The page with its tables and figures; of a run that drew none it is drawn now."""
        path = self.directory / "report.html"
        return path if path.is_file() else page.write([self.directory], self.directory).page

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Accuracy in percent, one row for each task and regime, with that of guessing."""
        found, rows = self.results, []
        about = {name: found[name] for name in ("method", "seed")}
        for regime in REGIMES:
            reached, chance = found[regime], found["chance"][regime]
            for place, task in enumerate(found["task_names"]):
                row = {**about, "regime": regime, "task": task}
                row |= {moment: reached[moment][place] for moment in ("ts", "fin")}
                row |= {f"chance_{moment}": chance[moment][place] for moment in ("ts", "fin")}
                rows.append(row)
        return rows

    @property
    def table(self) -> Any:
        """The rows as a pandas DataFrame, or as they are where pandas is not installed."""
        return _table(self.rows)


@dataclass(frozen=True)
class Comparison:
    """Several finished runs, and why the others have no results, by their names."""

    directory: Path
    runs: Sequence[Run]
    failures: Mapping[str, str]

    @property
    def results(self) -> list[dict[str, Any]]:
        """What each run achieved."""
        return [run.results for run in self.runs]

    @property
    def report(self) -> Path:
        """The page that compares them."""
        return self.directory / "report.html"

    @property
    def table(self) -> Any:
        """The rows of all runs, each with the name of its run; pandas if it is installed."""
        return _table([{"run": run.directory.name, **row} for run in self.runs for row in run.rows])


def run(config: Config | None = None, /, **settings: Any) -> Run:
    """Train as `fedbnn train --config CONFIG --KEY VALUE ...` does; Ctrl-C is KeyboardInterrupt.

    Args:
        config: a YAML file, the name of one in conf/, or several of which the later ones win.
        settings: keys as in YAML: `seed=1`, `client={"lr": 0.01}` or `**{"client.lr": 0.01}`.
            A network, method or source of your own is an object that can be imported by its name,
            or its import path. `resume="last"` goes on with an interrupted run.
    """
    words = [*_files(config), *_words(settings)]
    with TURN:
        parsed = train.parse(words)
        directory = train.run_directory(parsed)
        composed = compose(parsed, directory, bool(parsed.flags.resume))
        try:
            train.play(composed)
        except train.Stopped as stopped:
            raise _ended(stopped) from None
    return Run(directory, trust=True)


def compare(
    config: Config,
    /,
    methods: str | Iterable[Any] = ("fedbnn", "fedavg"),
    seeds: int | Iterable[int] = (0, 1, 2),
    *,
    jobs: int | None = None,
    sweep: str | None = None,
    out: str | Path | None = None,
    **settings: Any,
) -> Comparison:
    """Compare methods over seeds as `fedbnn compare` does; called again it goes on.

    Args:
        config: as for `run`.
        methods: names, import paths or classes; one, or several.
        seeds: one run of each method for each.
        jobs: runs at the same time; None is one a core.
        sweep: `KEY=V1,V2,...`: a setting to vary.
        out: directory of the comparison; None is runs/compare-NAME.
        settings: for all runs, or with `METHOD:KEY` for one method.
    """
    methods = [methods] if isinstance(methods, str) else methods
    seeds = [seeds] if isinstance(seeds, int) else seeds
    asked = {"jobs": jobs, "sweep": sweep, "out": out}
    asked |= {"methods": ",".join(map(_text, methods)), "seeds": ",".join(map(str, seeds))}
    words = [f"--{key}={value}" for key, value in asked.items() if value is not None]
    extra = [word for pair in _words(settings) for word in ("--set", pair.removeprefix("--"))]
    options = comparing.options([*_files(config), *words, *extra])
    try:
        with TURN:
            grid = comparing.compare(options)
    except train.Stopped as stopped:
        raise _ended(stopped) from None
    runs = [Run(cell.directory, trust=True) for cell in grid.cells if cell.finished]
    failures = {cell.name: reason for cell, (_, reason) in grid.failures.items()}
    if not runs:
        raise FederationError(f"no run has finished: {min(failures.values())}", str(grid.directory))
    return Comparison(grid.directory, runs, failures)


def _files(config: Config | None) -> list[str]:
    """The words that name files."""
    several = [config] if isinstance(config, str | Path) else config or []
    return [f"--config={file}" for file in several]


def _words(settings: Mapping[str, Any]) -> list[str]:
    """Settings as the words of a command line."""
    return [f"--{key}={_text(value)}" for key, value in run_dir.flat(settings)]


def _text(value: Any) -> str:
    """A value as a flag has it."""
    plain = json.loads(json.dumps(value, default=_plain))
    return plain if isinstance(plain, str) else json.dumps(plain)


def _plain(value: Any) -> Any:
    """What NumPy and torch have as Python has it; of what can be imported the import path."""
    if isinstance(value, Path):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else _path(value)


def _path(found: Any) -> str:
    """`module:name` of a class or function, or of an object that some module holds."""
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if name is None:
        module, name = next(_holders(found), (None, None))
    if name is None or "<" in name:
        what = f"a {type(found).__name__} has no name that it could be imported by"
        raise ConfigError(what, fix="define it in a module and give it, or package.module:name")
    if module == "__main__":
        what = f"{name} is part of this program: no other one can import it to load the model,"
        warnings.warn(f"{what} as it can from a module of its own", stacklevel=4)
    return f"{module}:{name}"


def _holders(found: Any) -> Iterator[tuple[str, str]]:
    """Modules that hold this object, and under which name; the program itself comes last."""
    program = sys.modules["__main__"]
    others = [(name, one) for name, one in sys.modules.items() if one is not program]
    for module, holder in (*others, ("__main__", program)):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if value is found:
                yield module, name


def _ended(stopped: train.Stopped) -> BaseException:
    """Ctrl-C as Python programs know it; SIGTERM ends the program with its documented code."""
    interrupted = stopped.code is Exit.INTERRUPTED
    return KeyboardInterrupt() if interrupted else SystemExit(int(stopped.code))


def _table(rows: list[dict[str, Any]]) -> Any:
    if importlib.util.find_spec("pandas") is None:
        return rows
    return importlib.import_module("pandas").DataFrame(rows)
