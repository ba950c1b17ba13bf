"""The table of results/attacks.md: attack x defence on the digits of the quickstart.

    python results/attacks.py --out runs/attacks

Each cell is a run of FedBNN with one liar among the five clients of every round (results/forgers.py
has what they do); stopping and starting again continues. Of every defence the row `none` is what it
costs where everybody is honest. Cells of a seed share what clients answer to the same question.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import quick
from forgers import ON_IMAGES, ON_UPDATES, Forgers, Poisoned, marked
from rich.progress import track

from fedbnn.cli.compose import client_runner, compose
from fedbnn.cli.train import parse
from fedbnn.federation.engines import Answer, Engine, SerialEngine
from fedbnn.federation.experiment import Experiment
from fedbnn.heads.predictive import Predictor
from fedbnn.images import joined
from fedbnn.protocol.state import State

HERE = Path(__file__).resolve().parent
ATTACKS = ("none", *ON_UPDATES, *ON_IMAGES)
DEFENCES = {
    "no defence": ("--gate.influence_cap=null",),
    "influence (ours)": (),
    **{
        name: (f"--gate.robust={name}",)
        for name in ("trimmed_mean", "median", "krum", "multi_krum", "clipping")
    },
}
REGIMES = ("task_aware", "class_agnostic")
Answers = dict[str, dict[quick.Asked, Answer]]
"""What clients answered in the runs of a seed, by whose images the liars have."""


def played(
    attack: str, defence: str, seed: int, answers: Answers, options: argparse.Namespace
) -> dict[str, Any]:
    """One cell: both accuracies at the end, how often the mark wins, who was refused or weighed."""
    name = f"{attack}-{defence}-{seed}".replace(" ", "_")
    words = [f"--config={HERE.parent / 'conf/quickstart.yaml'}", "--method=fedbnn"]
    words += [f"--seed={seed}", "--evaluate.every=0", *DEFENCES[defence]]

    def engine(parsed: Any) -> Engine:
        runner = client_runner(parsed.values)
        if attack in ON_IMAGES:
            runner.stream = Poisoned(runner.stream, attack, options.liars)
        images = attack if attack in ON_IMAGES else "honest"
        inner = quick.Remembering(SerialEngine(runner), answers.setdefault(images, {}))
        forge = ON_UPDATES.get(attack)
        return Forgers(inner, forge, options.liars) if forge else inner

    made = compose(parse(words), options.out / name, engine=engine)
    if attack in ON_IMAGES:
        made = replace(made, stream=Poisoned(made.stream, attack, options.liars))
    state, records = quick.played(made)
    tasks = records[-1]["tasks"]
    found = {regime: mean(one[regime]["accuracy"] for one in tasks) for regime in REGIMES}
    stopped = sum(len(record["refused"]) for record in records)
    lighter = sum(len(record["trust"]) for record in records)
    return {**found, "success": success(made, state), "refused": stopped, "trust": lighter}


def success(made: Experiment, state: State) -> float:
    """Of the test images of all other classes, with the mark: how many are taken for the first."""
    model = Predictor(made.backbone, made.layout, state, made.head)
    images = joined([made.stream.test(task) for task in range(len(made.stream.tasks))])
    others = images.subset((images.labels != 0).nonzero()[:, 0])
    scores = model.scores(replace(others, pixels=marked(others.pixels)))
    best = scores.softmax(-1).mean(0).argmax(1)
    hit = model.classes.index(images.classes[0])
    return 100 * float((best == hit).float().mean())


def cells(options: argparse.Namespace, seeds: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Every run, those that are done already from their file."""
    done: Path = options.out / "cells.json"
    found: dict[str, dict[str, Any]] = json.loads(done.read_text()) if done.is_file() else {}
    for seed in seeds:
        answers: Answers = {}
        for attack, defence in track([*product(ATTACKS, DEFENCES)], f"runs of seed {seed}"):
            key = f"{attack}/{defence}/{seed}"
            if key not in found:
                found[key] = played(attack, defence, seed, answers, options)
                done.write_text(json.dumps(found, indent=1))
    return found


def table(found: dict[str, dict[str, Any]], seeds: Sequence[int]) -> list[str]:
    """A line for each attack, task-aware / class-agnostic; of the backdoor its success, too."""
    lines = [f"| attack | {' | '.join(DEFENCES)} |", "|---" * (len(DEFENCES) + 1) + "|"]
    for attack in ATTACKS:
        row = []
        for defence in DEFENCES:
            runs = [found.get(f"{attack}/{defence}/{seed}", {}) for seed in seeds]
            if not all(runs):
                row.append("–")
                continue
            aware, agnostic, hits = (mean(r[k] for r in runs) for k in (*REGIMES, "success"))
            mark = f" ({hits:.0f})" if attack in ("none", "backdoor") else ""
            row.append(f"{aware:.1f} / {agnostic:.1f}{mark}")
        lines.append(f"| {attack} | {' | '.join(row)} |")
    return lines


def main() -> None:
    """Play what is not done yet, then write the table."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--out", default=Path("runs/attacks"), type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--liars", type=int, default=1, help="of the five clients of a round")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    lines = table(cells(options, seeds), seeds)
    (HERE / "attacks_table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
