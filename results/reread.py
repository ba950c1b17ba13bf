"""Read finished runs again with other settings of their class posteriors: nothing is trained, the same draws judge.

    python results/reread.py --rows 0,0.1,0.2 --priors uniform,frequency runs/compare-NAME/*-s?

The last state of each run is judged on the full test sets; a line is a method with one reading, averaged over its runs.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch

import train
from fedbnn import deploy
from fedbnn.config import Parsed, parse
from fedbnn.discriminant import Reading
from fedbnn.evaluation import evaluate_round
from fedbnn.predictor import Predictor

COLUMNS = {
    "aware @Fin": ("task_aware", "accuracy"),
    "agnostic @Fin": ("class_agnostic", "accuracy"),
    "agnostic NLL": ("class_agnostic", "nll"),
}


def judged(run_dir: Path, readings: Sequence[Reading], data_dir: Path | None) -> Iterator[tuple[str, Reading, list[float]]]:
    """Method, reading, and the averages over the tasks of the run's last state."""
    words = ["--config", str(run_dir / "config.yaml"), *(["--stream.data_dir", str(data_dir)] if data_dir else [])]
    parsed: Parsed = parse(words, train.SCHEMA)
    model, stream, settings = deploy.load(run_dir), parsed.build("stream", seed=parsed["seed"]), parsed.build("evaluate")
    for reading in readings:
        predictor = Predictor(model.trunk, model.layout, model.state, settings.samples, parsed["seed"], reading)
        tasks = evaluate_round(predictor, stream, stream.rounds, settings)["tasks"]
        yield parsed["method"]["name"], reading, [mean(task[part][name] for task in tasks) for part, name in COLUMNS.values()]


def table(found: Sequence[tuple[str, Reading, list[float]]]) -> list[str]:
    """Markdown: mean and standard deviation over the runs of a method, one line for each reading."""
    lines = [f"| method | rows | prior | {' | '.join(COLUMNS)} |", "|---" * (3 + len(COLUMNS)) + "|"]
    for method, reading in dict.fromkeys((method, reading) for method, reading, _ in found):
        columns = zip(*(values for *key, values in found if key == [method, reading]), strict=True)
        cells = [f"{mean(column):.2f}" + (f" ± {stdev(column):.2f}" if len(column) > 1 else "") for column in columns]
        lines.append(f"| {method} | {reading.rows:g} | {reading.prior} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Judge every run with every reading, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="directories of finished runs with class posteriors")
    parser.add_argument("--rows", default="0", help="values of method.head_rows, with commas between them")
    parser.add_argument("--priors", default="uniform", help="values of method.head_prior, with commas between them")
    parser.add_argument("--temperature", type=float, default=3.0, help="method.head_temperature")
    parser.add_argument("--data_dir", type=Path, help="where the images are, if not where the runs found them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = product(options.priors.split(","), map(float, options.rows.split(",")))
    readings = [Reading(options.temperature, rows, prior) for prior, rows in settings]
    found = [line for run_dir in options.runs for line in judged(run_dir, readings, options.data_dir)]
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
