"""One protocol for every method of a table: tune on the validation split, then compare on the test.

    python results/protocol.py results/protocols/cifar100_ci_fast.yaml --data_dir data --jobs 2

The file names the configuration, the methods with the setting each of them is tuned by (its main
knob) and where its grid begins, the number of trials, the same for all, and the seeds. A trial is a
run on the validation split, with what `tuning` sets (a shorter stream, say); its score is what the
table reports, the mean of the average task-aware and class-agnostic accuracy at the end of the run.
When the grid is tried, the trials that are left go where they tell most: beyond the grid while the
best value is its first or last, then between the best value and the better of its neighbours. Runs
that are finished are not run again, so the command can be stopped and started. It ends with the
comparison at the winners in runs/protocol-NAME/, and all trials in results/NAME/tuning.json and
.md. Trials that stand there already, of another day or machine, are taken from there. `--methods`
plays some of the methods only, each as it would be played with the others.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import quick
import torch
import yaml

Trials = dict[float, float]
REGIMES = ("task_aware", "class_agnostic")


@dataclass(frozen=True)
class Protocol:
    """What one file asks for; `methods` gives each method its knob and the first values of it.

    `knobs` has the knobs of all methods of the file, also where some are played only.
    """

    name: str
    config: str
    budget: int
    tuning_seed: int
    seeds: tuple[int, ...]
    tuning: Mapping[str, Any]
    shared: Mapping[str, Any]
    methods: Mapping[str, tuple[str, tuple[float, ...]] | None]
    knobs: Mapping[str, str]

    @classmethod
    def read(cls, file: Path) -> "Protocol":
        """The protocol of a YAML file; a method without a knob has nothing to tune."""
        said = yaml.safe_load(file.read_text())
        knobs = {}
        for method, knob in said.pop("methods").items():
            knobs[method] = None if knob is None else (knob["knob"], (*map(float, knob["grid"]),))
        names = {method: knob[0] for method, knob in knobs.items() if knob}
        return cls(file.stem, methods=knobs, knobs=names, seeds=tuple(said.pop("seeds")), **said)


def proposed(trials: Trials) -> float:
    """The next value of a knob: one step beyond an edge that is best, else next to the best.

    Values are positive and their grid is geometric, so a step is a factor and a middle sqrt(a b).
    """
    values = sorted(trials)
    best = max(values, key=trials.__getitem__)
    place = values.index(best)
    if place == 0:
        return best * best / values[1]
    if place == len(values) - 1:
        return best * best / values[-2]
    neighbour = max(values[place - 1], values[place + 1], key=trials.__getitem__)
    return sqrt(best * neighbour)


def search(grid: tuple[float, ...], budget: int, score: Callable[[float], float]) -> Trials:
    """`budget` trials: first the grid, then what is proposed."""
    trials = {value: score(value) for value in grid}
    while len(trials) < budget:
        value = float(f"{proposed(trials):.3g}")
        if value in trials:
            break
        trials[value] = score(value)
    return trials


@dataclass(frozen=True)
class Runs:
    """The runs of a protocol: in which folder, on which data, how many at a time."""

    protocol: Protocol
    folder: Path
    data_dir: str
    jobs: int
    known: Mapping[str, Trials]

    def settings(self, method: str) -> dict[str, Any]:
        """What all runs share, and what wins over it for this method."""
        common = {key: value for key, value in self.protocol.shared.items() if ":" not in key}
        own = {**common, **_own(self.protocol.shared, method)}
        return {**own, "stream.data_dir": self.data_dir}

    def score(self, method: str, value: float) -> float:
        """One trial on the validation split, in percent; finished before, it is only read."""
        if value in (before := self.known.get(method, {})):
            return before[value]
        out, knob = self.folder / "tuning" / method / f"{value:g}", self.protocol.methods[method]
        assert knob is not None
        only = {"stream.validation": True, "evaluate.every": 0, **self.protocol.tuning}
        only |= {"method": method, "seed": self.protocol.tuning_seed, knob[0]: value}
        found = quick.results(self.protocol.config, out, **self.settings(method) | only)
        return sum(float(found[regime]["avg_fin"]) for regime in REGIMES) / len(REGIMES)

    def trials(self, method: str) -> Trials:
        """All trials of a method; what they say is in tuning/METHOD.txt."""
        knob = self.protocol.methods[method]
        assert knob is not None
        (self.folder / "tuning").mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)
        with (self.folder / "tuning" / f"{method}.txt").open("a") as said, redirect_stdout(said):
            return search(knob[1], self.protocol.budget, partial(self.score, method))

    def tuned(self) -> dict[str, Trials]:
        """The trials of every method that has a knob, so many methods at a time."""
        found: dict[str, Trials] = {}
        knobs = [method for method, knob in self.protocol.methods.items() if knob is not None]
        with ProcessPoolExecutor(self.jobs, get_context("fork")) as pool:
            for method, trials in zip(knobs, pool.map(self.trials, knobs), strict=True):
                found[method] = trials
                self.write(found)
                best = max(trials, key=trials.__getitem__)
                print(f"{method}: {trials[best]:.2f} at {best:g}", flush=True)
        return found

    def write(self, found: Mapping[str, Trials]) -> None:
        """All trials as JSON and as a table, one line a method; the winner is bold."""
        found, place = {**self.known, **found}, kept(self.protocol.name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(found, indent=1) + "\n")
        lines = ["| method | knob | trials: value, score | inside |", "|---|---|---|---|"]
        for method, trials in found.items():
            knob, values = self.protocol.knobs[method], sorted(trials)
            best = max(values, key=trials.__getitem__)
            marks = {value: "**" if value == best else "" for value in values}
            cells = [f"{marks[v]}{v:g}: {trials[v]:.2f}{marks[v]}" for v in values]
            inside = "yes" if values[0] < best < values[-1] else "no"
            lines.append(f"| {method} | `{knob}` | {', '.join(cells)} | {inside} |")
        place.with_suffix(".md").write_text("\n".join(lines) + "\n")

    def table(self, found: Mapping[str, Trials]) -> None:
        """The comparison on the test split, every method at its winner."""
        methods, settings = [*self.protocol.methods], {**self.protocol.shared}
        for method, trials in found.items():
            knob = self.protocol.methods[method]
            assert knob is not None
            settings[f"{method}:{knob[0]}"] = max(trials, key=trials.__getitem__)
        ours = {key: value for key, value in settings.items() if _of(key) in (None, *methods)}
        ours |= {"stream.data_dir": self.data_dir, "track.wandb": "off"}
        given = [word for key, value in ours.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "fedbnn", "compare", "--config", self.protocol.config]
        command += ["--jobs", str(self.jobs), "--methods", ",".join(methods), *given]
        command += ["--seeds", ",".join(map(str, self.protocol.seeds))]
        subprocess.run([*command, "--out", str(self.folder / "table")], check=True)


def kept(name: str) -> Path:
    """Where the trials of a protocol are kept."""
    return Path(__file__).parent / name / "tuning.json"


def known(name: str) -> dict[str, Trials]:
    """Trials of a protocol that were played before, by method and value."""
    found = json.loads(kept(name).read_text()) if kept(name).is_file() else {}
    return {method: {float(v): s for v, s in trials.items()} for method, trials in found.items()}


def _own(settings: Mapping[str, Any], method: str) -> dict[str, Any]:
    """The settings of one method alone."""
    return {key.partition(":")[2]: settings[key] for key in settings if _of(key) == method}


def _of(key: str) -> str | None:
    """The method whose setting this is; None where it is everybody's."""
    method, colon, _ = key.partition(":")
    return method if colon else None


def main() -> None:
    """Tune, then compare."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("protocol", type=Path)
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--methods", type=lambda names: names.split(","), metavar="A,B")
    options = parser.parse_args()
    protocol = Protocol.read(options.protocol)
    if options.methods:
        some = {name: protocol.methods[name] for name in options.methods}
        protocol = replace(protocol, methods=some)
    folder = Path(f"runs/protocol-{protocol.name}")
    folder.mkdir(parents=True, exist_ok=True)
    runs = Runs(protocol, folder, options.data_dir, options.jobs, known(protocol.name))
    runs.table(runs.tuned())


if __name__ == "__main__":
    main()
