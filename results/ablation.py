"""One factor of FedBNN changed at a time, three seeds: the table of results/ablation.md.

    python results/ablation.py --config conf/quickstart.yaml --jobs 2

Every line is FedBNN as the configuration has it but for what the line says; the last column is the
difference to the configuration itself, seed by seed. What the configuration has already is no line;
`--set KEY=VALUE` changes it for all of them. Seeds have an order of the classes and a partition of
their own. Runs that are finished are not run again, so the command can be stopped and started. It
ends with `table.md` in runs/ablation-NAME/.
"""

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import quick
import torch

from fedbnn.cli.train import parse

SEEDS = (0, 1, 2)
REGIMES = ("task_aware", "class_agnostic")
Settings = Mapping[str, Any]
AS_IT_IS = "as configured"
FACTORS: Mapping[str, Settings] = {
    AS_IT_IS: {},
    "anchor: another one every round": {"head.anchor_rounds": 1},
    "memory: none of earlier drift": {"head.memory": 0},
    "transport: classes stay where they were": {"head.ridge": 1e9},
    "fixed features: exact head over random filters": {"head": "exact"},
    "prior mean: the network learns what those posteriors do not know": {
        "head": "exact",
        "head.prior_mean": 1,
        "head.prototypes": 1,
    },
    "curvature: scales learned instead": {"method.precision": "learned"},
    "curvature: learned, prototypes of a narrow prior": {
        "method.precision": "learned",
        "method.prototype_gain": 0.05,
    },
    "prototypes: a narrow prior": {"method.prototype_gain": 0.05},
    "server step: 1": {"method.server_lr": 1},
    "server step: 2": {"method.server_lr": 2},
    "function prior: none": {"method.feature_distillation": 0},
    "function prior: 1.5": {"method.feature_distillation": 1.5},
    "SNN initialisation: three rounds": {"method.r_init": 3},
    "temperature: a third": {"times": 1 / 3},
    "temperature: three times": {"times": 3},
    "aggregation: moments": {"method.fold_by": "moments", "method.server_lr": 1},
    "aggregation: product, damped": {"method.fold_by": "product", "method.server_lr": 0.2},
    "linear prototypes: read beside": {"head.prototypes": 1},
    "linear head": {"head": "linear"},
}
"""What is changed, and to what; `times` multiplies the temperature."""


def telling(config: str, told: Sequence[str], factors: Mapping[str, Settings]) -> list[str]:
    """The lines that change something of this configuration, and the first, which is itself."""
    words = [f"--config={config}", *(f"--{one}" for one in told)]
    base = parse(words).values
    found = [AS_IT_IS]
    for name, settings in factors.items():
        changed = [f"--{key}={value}" for key, value in settings.items() if key != "times"]
        if "times" in settings or parse([*words, *changed]).values != base:
            found.append(name)
    return found


def play(options: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """One run; what it says is in its log."""
    place = list(FACTORS).index(name)
    out = Path(options.out) / f"{place:02d}-s{seed}"
    settings = dict(FACTORS[name])
    if times := settings.pop("times", None):
        settings["method.temperature"] = times * options.temperature
    shared = {"stream.data_dir": options.data_dir, "stream.shuffle_classes": True}
    shared |= dict(one.split("=", 1) for one in options.set)
    torch.set_num_threads(1)
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f"{out.name}.txt").open("a") as said, redirect_stdout(said):
        told = {**shared, "evaluate.every": 0, "seed": seed, **settings}
        return quick.results(options.config, out, **told)


def line(name: str, runs: Sequence[Settings], base: Sequence[Settings]) -> str:
    """Averages over the seeds, and the differences to the configuration itself."""
    whens = [(regime, when) for regime in REGIMES for when in ("avg_ts", "avg_fin")]
    cells = [_spread([run[regime][when] for run in runs]) for regime, when in whens]
    both = list(zip(runs, base, strict=True))
    for regime in REGIMES:
        gained = [one[regime]["avg_fin"] - other[regime]["avg_fin"] for one, other in both]
        cells.append("" if runs is base else _spread(gained, "+"))
    return f"| {name} | {' | '.join(cells)} |"


def _spread(values: Sequence[float], sign: str = "") -> str:
    return f"{mean(values):{sign}.1f} ± {stdev(values):.1f}"


def main() -> None:
    """Run everything that is not done yet, then write the table."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--config", default="conf/quickstart.yaml")
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    options.out = options.out or Path(f"runs/ablation-{Path(options.config).stem}")
    options.temperature = parse([f"--config={options.config}"])["method"]["temperature"]
    lines = telling(options.config, options.set, FACTORS)
    names, seeds = [[one for _ in SEEDS] for one in lines], [[*SEEDS] for _ in lines]
    with ProcessPoolExecutor(options.jobs, get_context("fork")) as pool:
        found = list(pool.map(partial(play, options), chain(*names), chain(*seeds)))
    runs = dict(zip(lines, zip(*[iter(found)] * len(SEEDS), strict=True), strict=True))
    head = "| | aware @TS | aware @Fin | agnostic @TS | agnostic @Fin "
    head += "| aware @Fin, difference | agnostic @Fin, difference |"
    rows = [line(name, runs[name], runs[AS_IT_IS]) for name in lines]
    (options.out / "table.md").write_text("\n".join([head, "|---" * 7 + "|", *rows]) + "\n")


if __name__ == "__main__":
    main()
