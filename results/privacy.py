"""The curve of results/privacy.md: accuracy on the digits against the epsilon that was spent.

    python results/privacy.py --out runs/privacy

A hundred clients, all asked in every round, one round for each of the five tasks; noise from none
to much. Stopping and starting again continues.
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import pyplot as plt
from quick import played
from rich.progress import track

from fedbnn.cli.compose import compose
from fedbnn.cli.train import parse
from fedbnn.report import style

HERE = Path(__file__).resolve().parent
NOISE = (0.0, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0)
METHODS = {
    "exact": ("--method=exact", "--head.filters=4", "--privacy.clip_images=4"),
    "fedbnn": (
        *("--method=fedbnn", "--network.hidden=[20]"),
        *("--privacy.clip=20", "--privacy.clip_images=4"),
    ),
}
CLIENTS = ("--stream.clients=100", "--stream.clients_per_round=100", "--stream.rounds_per_task=1")
REGIMES = ("task_aware", "class_agnostic")


def point(method: str, noise: float, seed: int, out: Path) -> dict[str, Any]:
    """Both accuracies at the end, and epsilon; null without noise."""
    words = [f"--config={HERE.parent / 'conf/quickstart.yaml'}", *METHODS[method], *CLIENTS]
    words += [f"--seed={seed}", "--evaluate.every=0", "--gate.influence_cap=null"]
    words += [f"--privacy.noise={noise}", "--privacy.images=4", "--privacy.smallest_class=1"]
    made = compose(parse(words), out / f"{method}-{noise}-{seed}")
    last = played(made)[1][-1]
    found = {name: mean(task[name]["accuracy"] for task in last["tasks"]) for name in REGIMES}
    return {**found, "epsilon": last["privacy"]["epsilon"]}


def points(out: Path, methods: list[str], seeds: list[int]) -> dict[str, Any]:
    """Every run, those that are done already from their file."""
    done = out / "points.json"
    found: dict[str, Any] = json.loads(done.read_text()) if done.is_file() else {}
    wanted = [(m, z, s) for s in seeds for m in methods for z in NOISE]
    for method, noise, seed in track(wanted, "runs"):
        key = f"{method}/{noise}/{seed}"
        if key not in found:
            found[key] = point(method, noise, seed, out)
            done.write_text(json.dumps(found, indent=1))
    return found


def curve(
    found: dict[str, Any], methods: list[str], seeds: list[int]
) -> tuple[list[str], dict[str, Any]]:
    """The lines of a table, and by method and regime what is drawn."""
    head = "| noise z | epsilon | method | task-aware @Fin | class-agnostic @Fin |"
    lines = [head, "|---" * 5 + "|"]
    drawn: dict[str, Any] = {method: {"epsilon": []} for method in methods}
    for method in methods:
        for noise in NOISE:
            runs = [found[f"{method}/{noise}/{seed}"] for seed in seeds]
            spent = runs[0]["epsilon"]
            aware, agnostic = (mean(run[name] for run in runs) for name in REGIMES)
            shown = "∞" if spent is None else f"{spent:.3g}"
            lines.append(f"| {noise:g} | {shown} | {method} | {aware:.1f} | {agnostic:.1f} |")
            drawn[method]["epsilon"].append(spent)
            drawn[method].setdefault("class_agnostic", []).append(agnostic)
    return lines, drawn


def draw(drawn: dict[str, Any], path: Path) -> None:
    """Class-agnostic accuracy by epsilon; without noise a dashed line."""
    with style.house():
        figure, axes = plt.subplots()
        for method, one in drawn.items():
            pairs = zip(one["epsilon"], one["class_agnostic"], strict=True)
            known = [(spent, value) for spent, value in pairs if spent is not None]
            (line,) = axes.semilogx(*zip(*known, strict=True), marker="o", label=method)
            axes.axhline(one["class_agnostic"][0], color=line.get_color(), linestyle="--")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("epsilon spent at the end (delta 1e-5)")
        axes.set_ylabel("class-agnostic accuracy @Fin, %")
        axes.legend()
        figure.savefig(path, dpi=150)


def main() -> None:
    """Play what is not done yet, then write table and curve."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--out", default=Path("runs/privacy"), type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    methods = options.methods.split(",")
    lines, drawn = curve(points(options.out, methods, seeds), methods, seeds)
    (HERE / "privacy_table.md").write_text("\n".join(lines) + "\n")
    draw(drawn, HERE / "figures/privacy.png")


if __name__ == "__main__":
    main()
