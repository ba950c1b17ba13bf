"""The ablation of results/ablation.md: FedBNN with one factor changed at a time, three seeds.

    python results/ablation.py --data_dir data --jobs 2 --out runs/ablation

Each factor is a `fedbnn compare --sweep`; stopping and starting again continues. It ends with
results/ablation_table.md: both heads are read off every run, so the head is a column, not a row.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).resolve().parent
REGIMES = ("task_aware", "class_agnostic")
CONFIG = HERE.parent / "conf/cifar100_ci_fast.yaml"
BASE = ("defaults", "", ())
FACTORS = (
    ("drift compensation", "head.ridge=1e9", ()),
    ("anchor of one round", "head.anchor_rounds=1", ()),
    ("memory of the drift", "head.memory=0", ()),
    ("SNN initialisation", "method.r_init=3", ()),
    ("precisions", "method.precision=learned", ()),
    ("prior of new prototypes", "method.prototype_gain=0.05", ()),
    ("temperature", "method.temperature=6e-3", ()),
    ("forgetting", "method.retention=0.8", ()),
    ("fold, as large a step", "method.fold_by=product", ("method.server_lr=0.2",)),
    ("feature distillation", "method.feature_distillation=0", ()),
    ("server step", "method.server_lr=1", ()),
    ("fold, without server step", "method.fold_by=moments", ("method.server_lr=1",)),
    ("temperature", "method.temperature=6e-4", ()),
    ("rows beside the posteriors", "head.prototypes=0", ()),
)
"""What is changed, how it is swept, and what must be set beside it."""


def compare(factor: tuple[str, str, Sequence[str]], options: argparse.Namespace) -> Path:
    """Run one `fedbnn compare`; the directory of its runs."""
    _, sweep, beside = factor
    directory: Path = options.out / ("-".join([sweep, *beside]) or "defaults")
    settings = [f"stream.data_dir={options.data_dir}", "track.wandb=off", *beside]
    settings += ["evaluate.both_heads=true", "evaluate.every=0"]
    words = ["--config", str(CONFIG), "--methods", "fedbnn", "--out", str(directory)]
    words += ["--seeds", options.seeds, "--jobs", str(options.jobs)]
    words += [word for pair in settings for word in ("--set", pair)]
    words += ["--sweep", sweep] if sweep else []
    command = [sys.executable, "-m", "fedbnn", "compare", *words]
    subprocess.run(command, check=False, cwd=HERE.parent)
    return directory


def lines(
    factor: tuple[str, str, Sequence[str]], directory: Path, base: dict[int, dict]
) -> list[str]:
    """One line of the table for each value of the factor."""
    name, sweep, beside = factor
    key, _, values = sweep.partition("=")
    return [
        _line(name, [f"{key}={value}", *beside], found(directory, f"-{value}"), base)
        for value in values.split(",")
    ]


def found(directory: Path, tail: str = "") -> dict[int, dict]:
    """Results by seed."""
    files = directory.glob(f"fedbnn-s*{tail}/results.json")
    runs = [json.loads(path.read_text()) for path in files]
    return {int(run["seed"]): run for run in runs}


def _line(name: str, settings: Sequence[str], runs: dict[int, dict], base: dict[int, dict]) -> str:
    """Averages over seeds, and the difference to the defaults seed by seed."""
    cells = [
        _spread([run[regime][when] for run in runs.values()])
        for regime in REGIMES
        for when in ("avg_ts", "avg_fin")
    ]
    cells += [
        _spread([run["linear"][regime]["avg_fin"] for run in runs.values()]) for regime in REGIMES
    ]
    both = [
        (run["class_agnostic"], base[seed]["class_agnostic"])
        for seed, run in runs.items()
        if seed in base
    ]
    gained = [one["avg_fin"] - other["avg_fin"] for one, other in both]
    shown = " ".join(f"`{setting.removeprefix('method.')}`" for setting in settings if setting)
    return f"| {name} | {shown} | {' | '.join(cells)} | {_spread(gained, '+')} |"


def _spread(values: Sequence[float], sign: str = "") -> str:
    """Mean and standard deviation; a dash where every run failed."""
    if not values:
        return "–"
    return f"{mean(values):{sign}.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def main() -> None:
    """Run everything that is not done yet, then write the table."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--data_dir", default="data", type=Path)
    parser.add_argument("--out", default=Path("runs/ablation"), type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    options.out, options.data_dir = options.out.resolve(), options.data_dir.resolve()
    base = found(compare(BASE, options))
    table = [_line(BASE[0], (), base, base)]
    for factor in FACTORS:
        table += lines(factor, compare(factor, options), base)
    head = "| changed | to | aware @TS | @Fin | agnostic @TS | @Fin "
    head += "| linear rows: aware @Fin | agnostic @Fin | agnostic @Fin, to the defaults |"
    (HERE / "ablation_table.md").write_text("\n".join([head, "|---" * 9 + "|", *table]) + "\n")


if __name__ == "__main__":
    main()
