"""Read finished runs again with other settings of their class posteriors: nothing is trained.

    python results/reread.py --runs runs/compare-NAME/fedbnn-s? --rows 0 0.1 --priors frequency

The last state of each run is judged, by the same draws, on all images its configuration tests on; a
line is a method with one reading (`head.prototypes`, `head.prior`), averaged over its runs.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch

from fedbnn import export
from fedbnn.cli.train import parse
from fedbnn.evaluation.evaluate import evaluate_round
from fedbnn.heads import GaussianHead
from fedbnn.heads.predictive import Predictor

Reading = tuple[float, str]
COLUMNS = {
    "aware @Fin": ("task_aware", "accuracy"),
    "agnostic @Fin": ("class_agnostic", "accuracy"),
    "agnostic NLL": ("class_agnostic", "nll"),
}


def judged(
    run_dir: Path, readings: Sequence[Reading], data_dir: Path | None
) -> Iterator[tuple[str, Reading, list[float]]]:
    """Method, reading, and the averages over the tasks of the run's last state."""
    elsewhere = ["--stream.data_dir", str(data_dir)] if data_dir else []
    parsed, model = (
        parse(["--config", str(run_dir / "config.yaml"), *elsewhere]),
        export.load(run_dir),
    )
    stream, settings = parsed.build("stream", seed=parsed["seed"]), parsed.build("evaluate")
    head, drawn = model.card.head, (settings.samples, parsed["seed"])
    if not isinstance(head, GaussianHead):
        raise SystemExit(f"{run_dir} has no class posteriors: train with --head gaussian")
    for rows, prior in readings:
        read = replace(head, prototypes=rows, prior=prior)
        predictor = Predictor(model.backbone, model.layout, model.state, read, *drawn)
        tasks = evaluate_round(predictor, stream, stream.rounds, settings)["tasks"]
        found = [mean(task[part][name] for task in tasks) for part, name in COLUMNS.values()]
        yield parsed["method"]["name"], (rows, prior), found


def table(found: Sequence[tuple[str, Reading, list[float]]]) -> list[str]:
    """Markdown: mean and standard deviation over the runs of a method, a line for each reading."""
    lines = [f"| method | rows | prior | {' | '.join(COLUMNS)} |"]
    lines.append("|---" * (3 + len(COLUMNS)) + "|")
    for method, reading in dict.fromkeys((method, reading) for method, reading, _ in found):
        columns = zip(*(values for *key, values in found if key == [method, reading]), strict=True)
        cells = [
            f"{mean(column):.2f}" + (f" ± {stdev(column):.2f}" if len(column) > 1 else "")
            for column in columns
        ]
        lines.append(f"| {method} | {reading[0]:g} | {reading[1]} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Judge every run with every reading, then print the table."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    add, priors = parser.add_argument, ["uniform", "frequency"]
    about = "directories of finished runs with class posteriors"
    add("--runs", nargs="+", type=Path, required=True, help=about)
    add("--rows", nargs="+", type=float, default=[0.0], help="values of head.prototypes")
    add("--priors", nargs="+", choices=priors, default=priors[:1], help="of head.prior")
    add("--data_dir", type=Path, help="where the images are, if not where the runs found them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    readings = [(rows, prior) for prior, rows in product(options.priors, options.rows)]
    found = [one for run in options.runs for one in judged(run, readings, options.data_dir)]
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
