"""One protocol for every method of a table: tune on the validation split, then compare on the test.

    python results/protocol.py results/protocols/cifar100_ci_fast.yaml --data_dir data --jobs 2

The file names the configuration, the seeds, and the methods with the settings each of them is tuned
by (its knobs), where their grids begin, and how many trials they have: together the same number for
every method. A trial is a run on the validation split, with what `tuning` sets (a shorter stream,
say); its score is what the table reports, the mean of the average task-aware and class-agnostic
accuracy at the end of the run. Knobs are tuned one after the other, each with those before it at
their best. When a grid is tried, the trials that are left go where they tell most: beyond the grid
while the best value is its first or last, then between the best value and the better of its
neighbours. A method whose best value is still an edge when its trials are used up has up to three
more. Runs that are finished are not run again, so the command can be stopped and started. It ends
with the comparison at the winners in runs/protocol-NAME/, and all trials in tuning.json and
tuning.md of results/NAME/. Trials that stand there already, of another day or machine, are taken
from there. `--methods` plays some of the methods only, each as it would be played with the others;
`--only_tune` stops before the comparison, `--seeds` compares over others.

A file whose `tuned_as` names another protocol has a table of its own and no trials: its methods
have what is shared and what won there, but for what it sets itself.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
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
"""The scores of one knob, by its value."""
Settings = dict[str, float]
Played = list[tuple[Settings, float]]
"""All trials of a method: what was set, and the score."""
REGIMES = ("task_aware", "class_agnostic")
FURTHER = 3


@dataclass(frozen=True)
class Knob:
    """A setting that is tuned with so many trials, where its grid begins, and what it is `at`."""

    name: str
    grid: tuple[float, ...]
    trials: int
    at: float | None = None


@dataclass(frozen=True)
class Protocol:
    """What one file asks for; `methods` gives each method its knobs, none where nothing is tuned.

    `knobs` has those of all methods of the file, also where some are played only.
    """

    name: str
    config: str
    budget: int
    tuning_seed: int
    seeds: tuple[int, ...]
    tuning: Mapping[str, Any]
    shared: Mapping[str, Any]
    methods: Mapping[str, tuple[Knob, ...]]
    knobs: Mapping[str, tuple[Knob, ...]]
    tuned_as: str | None = None

    @classmethod
    def read(cls, file: Path) -> "Protocol":
        """The protocol of a YAML file, in which every method has as many trials as the others."""
        said = yaml.safe_load(file.read_text())
        if "tuned_as" in said:
            return cls._like(cls.read(file.with_stem(said["tuned_as"])), file.stem, said)
        knobs = {method: _knobs(found or {}) for method, found in said.pop("methods").items()}
        for method, mine in knobs.items():
            if mine and sum(knob.trials for knob in mine) != said["budget"]:
                sys.exit(f"{file}: {method} has not {said['budget']} trials, as the others have")
        return cls(file.stem, methods=knobs, knobs=knobs, seeds=tuple(said.pop("seeds")), **said)

    @staticmethod
    def _like(other: "Protocol", name: str, said: Mapping[str, Any]) -> "Protocol":
        """The protocol of a table whose methods have what won in another."""
        methods = {method: other.knobs[method] for method in said["methods"]}
        own = {**said, "seeds": tuple(said["seeds"]), "methods": methods, "knobs": methods}
        shared = {**other.shared, **said.get("shared", {})}
        return replace(other, **{**own, "name": name, "shared": shared, "tuned_as": other.trials})

    @property
    def trials(self) -> str:
        """The protocol whose trials these methods have."""
        return self.tuned_as or self.name


def _knobs(said: Mapping[str, Any]) -> tuple[Knob, ...]:
    """The knobs of a method, in the order in which they are tuned."""
    found = []
    for name, knob in said.items():
        at = float(knob["at"]) if "at" in knob else None
        found.append(Knob(name, (*map(float, knob["grid"]),), knob["trials"], at))
    return tuple(found)


def proposed(trials: Trials) -> float:
    """The next value of a knob: one step beyond an edge that is best, else next to the best.

    Values are positive and their grid is geometric, so a step is a factor and a middle sqrt(a b).
    """
    values = sorted(trials)
    place = values.index(top := best(trials))
    if place == 0:
        return top * top / values[1]
    if place == len(values) - 1:
        return top * top / values[-2]
    neighbour = max(values[place - 1], values[place + 1], key=trials.__getitem__)
    return sqrt(top * neighbour)


def best(trials: Trials) -> float:
    """The value with the highest score."""
    return max(sorted(trials), key=trials.__getitem__)


def inside(trials: Trials) -> bool:
    """Whether the best value is neither the first nor the last."""
    return min(trials) < best(trials) < max(trials)


def search(knob: Knob, score: Callable[[float], float], known: Trials) -> Trials:
    """The grid, what is proposed, and a few more while the best is an edge; `known` are free."""
    trials = known | {value: score(value) for value in knob.grid}
    while len(trials) - len(known) - knob.trials < (0 if inside(trials) else FURTHER):
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
    known: Mapping[str, Played]

    def settings(self, method: str) -> dict[str, Any]:
        """What all runs share, and what wins over it for this method."""
        common = {key: value for key, value in self.protocol.shared.items() if ":" not in key}
        own = {**common, **_own(self.protocol.shared, method)}
        return {**own, "stream.data_dir": self.data_dir}

    def score(self, method: str, tried: Settings) -> float:
        """One trial on the validation split, in percent; finished before, it is only read."""
        for before, score in self.known.get(method, ()):
            if before == tried:
                return score
        name = "-".join(f"{value:g}" for value in tried.values())
        out = self.folder / "tuning" / method / name
        only = {"stream.validation": True, "evaluate.every": 0, **self.protocol.tuning}
        only |= {"method": method, "seed": self.protocol.tuning_seed, **tried}
        found = quick.results(self.protocol.config, out, **self.settings(method) | only)
        return sum(float(found[regime]["avg_fin"]) for regime in REGIMES) / len(REGIMES)

    def played(self, method: str) -> Played:
        """All trials of a method, one knob after the other; what they say is in tuning/."""
        (self.folder / "tuning").mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)
        found: Played = []
        chosen: Settings = {}
        with (self.folder / "tuning" / f"{method}.txt").open("a") as said, redirect_stdout(said):
            for knob in self.protocol.methods[method]:
                at = {} if knob.at is None else {knob.at: max(score for _, score in found)}
                trials = search(knob, partial(self._tried, method, chosen, knob.name), at)
                new = [({**chosen, knob.name: v}, s) for v, s in trials.items() if v not in at]
                found, chosen = [*found, *new], {**chosen, knob.name: best(trials)}
        return found

    def _tried(self, method: str, chosen: Settings, name: str, value: float) -> float:
        return self.score(method, {**chosen, name: value})

    def tuned(self) -> dict[str, Played]:
        """The trials of every method that has a knob, so many methods at a time."""
        found: dict[str, Played] = {}
        tuned = [method for method, knobs in self.protocol.methods.items() if knobs]
        if self.protocol.tuned_as is not None:
            if missing := {*tuned} - {*self.known}:
                sys.exit(f"{self.protocol.tuned_as} has no trials of {', '.join(sorted(missing))}")
            return {method: self.known[method] for method in tuned}
        with ProcessPoolExecutor(self.jobs, get_context("fork")) as pool:
            waiting = {pool.submit(self.played, method): method for method in tuned}
            for one in as_completed(waiting):
                found[method := waiting[one]] = one.result()
                self.write(found)
                won = winner(self.protocol.knobs[method], found[method])
                print(f"{method}: {max(s for _, s in found[method]):.2f} at {won}", flush=True)
        return found

    def write(self, found: Mapping[str, Played]) -> None:
        """All trials as JSON and as a table, one line a knob; the winner is bold."""
        found, place = {**self.known, **found}, kept(self.protocol.name)
        found = {method: found[method] for method in self.protocol.knobs if method in found}
        place.parent.mkdir(parents=True, exist_ok=True)
        lines = [f" {json.dumps(method)}: {_listed(found[method])}" for method in found]
        place.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        rows = ["| method | knob | trials: value, score | inside |", "|---|---|---|---|"]
        for method, played in found.items():
            for knob, trials in by_knob(self.protocol.knobs[method], played):
                marks = {value: "**" if value == best(trials) else "" for value in trials}
                cells = [f"{marks[v]}{v:g}: {trials[v]:.2f}{marks[v]}" for v in sorted(trials)]
                where = "yes" if inside(trials) else "no"
                rows.append(f"| {method} | `{knob.name}` | {', '.join(cells)} | {where} |")
        place.with_suffix(".md").write_text("\n".join(rows) + "\n")

    def table(self, found: Mapping[str, Played]) -> None:
        """The comparison on the test split, every method at its winner."""
        methods, settings = [*self.protocol.methods], dict[str, Any]()
        for method, played in found.items():
            won = winner(self.protocol.knobs[method], played)
            settings |= {f"{method}:{name}": value for name, value in won.items()}
        settings |= self.protocol.shared
        ours = {key: value for key, value in settings.items() if _of(key) in (None, *methods)}
        ours |= {"stream.data_dir": self.data_dir, "track.wandb": "off"}
        given = [word for key in ours for word in ("--set", f"{key}={_text(ours[key])}")]
        command = [sys.executable, "-m", "fedbnn", "compare", "--config", self.protocol.config]
        command += ["--jobs", str(self.jobs), "--methods", ",".join(methods), *given]
        command += ["--seeds", ",".join(map(str, self.protocol.seeds))]
        subprocess.run([*command, "--out", str(self.folder / "table")], check=True)


def by_knob(knobs: Sequence[Knob], played: Played) -> list[tuple[Knob, Trials]]:
    """The trials of each knob, where those before it are at their best."""
    found: list[tuple[Knob, Trials]] = []
    chosen: Settings = {}
    highest = 0.0
    for knob in knobs:
        trials = {} if knob.at is None else {knob.at: highest}
        for tried, score in played:
            rest = {name: value for name, value in tried.items() if name != knob.name}
            if knob.name in tried and rest == chosen:
                trials[tried[knob.name]] = score
        if not any(knob.name in tried for tried, _ in played):
            break
        chosen, highest = {**chosen, knob.name: best(trials)}, max(trials.values())
        found.append((knob, trials))
    return found


def winner(knobs: Sequence[Knob], played: Played) -> Settings:
    """The best value of every knob."""
    return {knob.name: best(trials) for knob, trials in by_knob(knobs, played)}


def _listed(played: Played) -> str:
    """Trials as JSON, one a line."""
    return "[\n  " + ",\n  ".join(json.dumps(trial) for trial in played) + "\n ]"


def _text(value: Any) -> str:
    """A value as a command is told it."""
    return value if isinstance(value, str) else json.dumps(value)


def kept(name: str) -> Path:
    """Where the trials of a protocol are kept."""
    return Path(__file__).parent / name / "tuning.json"


def known(name: str) -> dict[str, Played]:
    """Trials of a protocol that were played before, by method."""
    found = json.loads(kept(name).read_text()) if kept(name).is_file() else {}
    return {method: [(tried, score) for tried, score in found[method]] for method in found}


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
    parser.add_argument("--seeds", type=lambda seeds: (*map(int, seeds.split(",")),), metavar="A,B")
    parser.add_argument("--only_tune", action="store_true")
    options = parser.parse_args()
    protocol = Protocol.read(options.protocol)
    if options.methods:
        some = {name: protocol.methods[name] for name in options.methods}
        protocol = replace(protocol, methods=some)
    if options.seeds:
        protocol = replace(protocol, seeds=options.seeds)
    folder = Path(f"runs/protocol-{protocol.name}")
    folder.mkdir(parents=True, exist_ok=True)
    runs = Runs(protocol, folder, options.data_dir, options.jobs, known(protocol.trials))
    found = runs.tuned()
    if not options.only_tune:
        runs.table(found)


if __name__ == "__main__":
    main()
