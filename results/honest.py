"""The table of results/honest.md: honest clients that the gate refused, or counted less.

    python results/honest.py --out runs/honest
    python results/honest.py --config conf/cifar100_ci_fast.yaml --methods fedbnn,fedavg --seeds 0

Nobody lies here, so every number should be 0. An answer is one client in one exchange of a round.
Stopping and starting again continues.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from quick import played
from rich.progress import track

from fedbnn.cli.compose import compose
from fedbnn.cli.train import parse
from fedbnn.methods import METHODS

HERE = Path(__file__).resolve().parent
ALONE = ("joint", "local")
"""One has a single client, the other sends nothing."""


def counted(method: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Answers of one run, those refused with their reasons, and those that counted less."""
    words = [f"--config={options.config}", f"--method={method}", f"--seed={seed}"]
    words += ["--evaluate.every=0", *options.set]
    records = played(compose(parse(words), options.out / f"{method}-{seed}"))[1]
    answers = [one["clients"] for record in records for one in record["audit"].values()]
    found = [(record["round"], record["refused"], record["trust"]) for record in records]
    return {
        "answers": sum(map(len, answers)),
        "refused": [(number, *one) for number, refused, _ in found for one in refused.items()],
        "less": [(number, *one) for number, _, trust in found for one in trust.items()],
    }


def runs(options: argparse.Namespace, methods: list[str], seeds: list[int]) -> dict[str, Any]:
    """Every run, those that are done already from their file."""
    done: Path = options.out / "counted.json"
    found: dict[str, Any] = json.loads(done.read_text()) if done.is_file() else {}
    for method, seed in track([(m, s) for s in seeds for m in methods], "runs"):
        key = f"{method}/{seed}"
        if key not in found:
            found[key] = counted(method, seed, options)
            done.write_text(json.dumps(found, indent=1))
    return found


def table(found: dict[str, Any], methods: list[str], seeds: list[int]) -> list[str]:
    """A line for each method, and one for all."""
    names = ("answers", "refused", "less")
    lines = ["| method | answers | refused | counted less |", "|---|---:|---:|---:|"]
    totals = dict.fromkeys(names, 0)
    for method in methods:
        chosen = [found[f"{method}/{seed}"] for seed in seeds]
        row = {"answers": sum(one["answers"] for one in chosen)}
        row |= {name: sum(len(one[name]) for one in chosen) for name in names[1:]}
        totals = {name: totals[name] + row[name] for name in names}
        lines.append(f"| {method} | " + " | ".join(f"{row[name]:,}" for name in names) + " |")
    return [*lines, "| **all** | " + " | ".join(f"{totals[name]:,}" for name in names) + " |"]


def main() -> None:
    """Play what is not done yet, then write the table."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--out", default=Path("runs/honest"), type=Path)
    parser.add_argument("--config", default=HERE.parent / "conf/quickstart.yaml", type=Path)
    parser.add_argument("--methods", default=",".join(m for m in METHODS if m not in ALONE))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--set", nargs="*", default=[], help="more flags of every run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    methods, seeds = options.methods.split(","), [int(seed) for seed in options.seeds.split(",")]
    lines = table(runs(options, methods, seeds), methods, seeds)
    (HERE / f"honest_{options.config.stem}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
