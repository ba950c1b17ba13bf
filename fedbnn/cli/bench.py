"""`fedbnn bench step|engines|overhead|scale`: what things cost, as a table and as JSON."""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedbnn.cli import bench_engines as engines
from fedbnn.cli import bench_scale as scale
from fedbnn.cli import bench_step as step
from fedbnn.cli.arguments import Arguments, numbers, positive
from fedbnn.cli.bench_scale_figure import draw
from fedbnn.cli.interleaved import publish
from fedbnn.config import Parsed, parse
from fedbnn.defense.gate import Gate
from fedbnn.federation.engines import one_thread
from fedbnn.federation.runner import conduct
from fedbnn.report import figure_style
from fedbnn.storage.run_dir import records
from train import SCHEMA, engine, plan


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write `--out`."""
    options = _options(argv)
    rows = {"step": _step, "engines": _engines, "overhead": _overhead, "scale": _scale}[
        options.what
    ](options)
    publish(f"fedbnn bench {options.what}", rows, options.out)
    if options.what == "scale" and options.out is not None:
        figure_style.save({options.out.stem: draw(rows)}, options.out.parent)
    return 0


def _options(argv: Sequence[str]) -> Namespace:
    parser = Arguments(
        "bench", "Measure what things cost; ratios are taken side by side in one run."
    )
    what = ["step", "engines", "overhead", "scale"]
    parser.add_argument(
        "what", choices=what, nargs="?", default="step", help="what to measure (default: step)"
    )
    parser.add_argument(
        "--config",
        default="conf/cifar100_ci_fast.yaml",
        help="for engines and overhead: the experiment",
    )
    parser.add_argument(
        "--method", default="fedbnn", help="for engines, overhead and scale: the method"
    )
    parser.add_argument("--data_dir", default="data", help="where data sets are (default: data)")
    parser.add_argument(
        "--repeats",
        type=positive,
        default=6,
        help="turns of engines, rounds of overhead; step takes more",
    )
    parser.add_argument("--workers", type=positive, default=2, help="workers of the process engine")
    sizes = [100, 1_000, 10_000, 100_000]
    parser.add_argument(
        "--clients", type=numbers, default=sizes, help="for scale: numbers of registered clients"
    )
    few_and_many = [5, 20, 80]
    parser.add_argument(
        "--participants",
        type=numbers,
        default=few_and_many,
        help="for scale: numbers of participants a round",
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args(argv)


def _parsed(options: Namespace, *more: str) -> Parsed:
    asked = [
        "--config",
        options.config,
        "--method",
        options.method,
        "--stream.data_dir",
        options.data_dir,
    ]
    return parse([*asked, "--track.wandb", "off", "--evaluate.every", "0", *more], SCHEMA)


def _step(options: Namespace) -> list[dict[str, Any]]:
    return step.measure(options.repeats / 6)


def _engines(options: Namespace) -> list[dict[str, Any]]:
    """Serial and processes in turn on the same rounds."""
    with TemporaryDirectory() as folder:
        serial = _parsed(options, "--engine", "serial")
        many = _parsed(options, "--engine", "processes", "--engine.workers", str(options.workers))
        made = {
            name: partial(engine, parsed, Path(folder), Gate(deadline_seconds=None))
            for name, parsed in (("serial", serial), ("processes", many))
        }
        return engines.measure(plan(serial, Path(folder)), made, options.repeats)


def _overhead(options: Namespace) -> list[dict[str, Any]]:
    """A short run, and how much of its rounds was not forward, backward or optimiser."""
    with TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        parsed = _parsed(options, *_short_tasks(options), "--run_dir", str(run_dir))
        made = plan(parsed, run_dir)
        conduct(made)
        with one_thread():
            return [
                {
                    "method": options.method,
                    **engines.overhead(made, parsed.build("client"), records(run_dir)[1:]),
                }
            ]


def _short_tasks(options: Namespace) -> tuple[str, str]:
    """Tasks of `--repeats` rounds, said the way the configuration says how long they are."""
    ends = _parsed(options)["stream"]["boundaries"]
    if not ends:
        return "--stream.rounds_per_task", str(options.repeats)
    return "--stream.boundaries", str([options.repeats * (place + 1) for place in range(len(ends))])


def _scale(options: Namespace) -> list[dict[str, Any]]:
    return scale.measure(options.clients, options.participants, options.method)
