"""Read finished runs again with other settings of their class posteriors: nothing is trained.

    python results/reread.py --runs runs/compare-NAME/fedbnn-s? --rows 0 0.1 --priors frequency

The last state of each run is judged, by the same draws, on all images its configuration tests on; a
line is a method with one reading, averaged over its runs.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import get_args

import torch
from fedbnn.evaluation.evaluation import evaluate_round
from fedbnn.heads.discriminant import ClassPrior, Reading
from fedbnn.heads.predictor import Predictor

from fedbnn import export
from fedbnn.cli.train import parse

COLUMNS = {
    "aware @Fin": ("task_aware", "accuracy"),
    "agnostic @Fin": ("class_agnostic", "accuracy"),
    "agnostic NLL": ("class_agnostic", "nll"),
}


def judged(
    run_dir: Path, readings: Sequence[Reading], data_dir: Path | None
) -> Iterator[tuple[str, Reading, list[float]]]:
    """Method, reading, and the averages over the tasks of the run's last state."""
    words = [
        "--config",
        str(run_dir / "config.yaml"),
        *(["--stream.data_dir", str(data_dir)] if data_dir else []),
    ]
    parsed = parse(words)
    model, stream, settings = (
        export.load(run_dir),
        parsed.build("stream", seed=parsed["seed"]),
        parsed.build("evaluate"),
    )
    if "places.count" not in model.state:
        raise SystemExit(f"{run_dir} has no class posteriors: train with --head gaussian")
    for reading in readings:
        warm = replace(reading, temperature=model.card.temperature)
        predictor = Predictor(
            model.backbone, model.layout, model.state, settings.samples, parsed["seed"], warm
        )
        tasks = evaluate_round(predictor, stream, stream.rounds, settings)["tasks"]
        yield (
            parsed["method"]["name"],
            reading,
            [mean(task[part][name] for task in tasks) for part, name in COLUMNS.values()],
        )


def table(found: Sequence[tuple[str, Reading, list[float]]]) -> list[str]:
    """Markdown: mean and standard deviation over the runs of a method, a line for each reading."""
    lines = [
        f"| method | rows | prior | {' | '.join(COLUMNS)} |",
        "|---" * (3 + len(COLUMNS)) + "|",
    ]
    for method, reading in dict.fromkeys((method, reading) for method, reading, _ in found):
        columns = zip(*(values for *key, values in found if key == [method, reading]), strict=True)
        cells = [
            f"{mean(column):.2f}" + (f" ± {stdev(column):.2f}" if len(column) > 1 else "")
            for column in columns
        ]
        lines.append(f"| {method} | {reading.rows:g} | {reading.prior} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Judge every run with every reading, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        type=Path,
        required=True,
        help="directories of finished runs with class posteriors",
    )
    parser.add_argument(
        "--rows", nargs="+", type=float, default=[0.0], help="values of head.prototypes"
    )
    parser.add_argument(
        "--priors",
        nargs="+",
        choices=get_args(ClassPrior),
        default=["uniform"],
        help="of head.prior",
    )
    parser.add_argument(
        "--data_dir", type=Path, help="where the images are, if not where the runs found them"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    readings = [
        Reading(rows=rows, prior=prior) for prior, rows in product(options.priors, options.rows)
    ]
    found = [
        line for run_dir in options.runs for line in judged(run_dir, readings, options.data_dir)
    ]
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
