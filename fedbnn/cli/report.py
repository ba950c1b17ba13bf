"""`fedbnn report RUN_DIR ...`: the page of a run, of several together, or a board of many."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from fedbnn.cli.compose import compose
from fedbnn.cli.main import Arguments
from fedbnn.cli.train import parse
from fedbnn.errors import FedBNNError, RunDirectoryError
from fedbnn.evaluation.oracle import Oracle
from fedbnn.federation.engines import one_thread
from fedbnn.federation.experiment import MAY_DIFFER
from fedbnn.report import figures, leaderboard, page, style
from fedbnn.report.values import Runs
from fedbnn.storage import ledger, run_dir
from fedbnn.storage.run_dir import flat
from fedbnn.tracking import console

FEW = 4
"""A run keeps three rounds by itself: as many are no picture of a run that has more."""


def main(argv: Sequence[str]) -> int:
    """One directory: its own page. Several: a comparison. With --leaderboard: a board of all."""
    parser = Arguments("report", "Write report.html of a run, or of several runs together.")
    add, together = parser.add_argument, Path("runs/comparison")
    add("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="finished runs")
    about = "where a comparison or a board goes; a board also into a Markdown file with two marks"
    add("--out", type=Path, default=together, help=about)
    about = "write leaderboard.md of all runs at and below RUN_DIR, whatever their streams"
    add("--leaderboard", action="store_true", help=about)
    about = "where the forgetting is: the head of a run against an oracle, by kept round"
    add("--oracle", action="store_true", help=about)
    add("--data_dir", help="where data sets are, if not where the run found them (--oracle)")
    options = parser.parse_args(argv)
    if options.oracle:
        for directory in options.run_dirs:
            print(f"oracle  {oracle(directory, options.data_dir)}")
        return 0
    if options.leaderboard:
        found = leaderboard.find(options.run_dirs)
        print(f"leaderboard  {leaderboard.write(found, options.out, command)}")
        return 0
    several = len(options.run_dirs) > 1
    where = (options.out, options.out.name) if several else (options.run_dirs[0], None)
    print(f"report  {page.write(options.run_dirs, *where).page}")
    return 0


def oracle(directory: Path, data_dir: str | None) -> Path:
    """Draw the rounds that a run has kept: figures/oracle.png, and its numbers in oracle.json."""
    elsewhere = ["--stream.data_dir", data_dir] if data_dir else []
    config = run_dir.intact(directory, "config.yaml") / "config.yaml"
    made = compose(parse(["--config", str(config), *elsewhere]), directory)
    numbers = ledger.rounds(directory)
    if not made.method.shares_prototypes:
        what, fix = "its classes stay on the clients: there is no one head to look at", "share them"
        raise RunDirectoryError(what, str(directory), fix)
    if len(numbers) < min(FEW, made.stream.rounds):
        what = f"{len(numbers)} of {made.stream.rounds} rounds are kept: too few to draw"
        fix = f"train it with --ledger.keep_rounds {made.stream.rounds}"
        raise RunDirectoryError(what, str(directory), fix)
    parts = made.stream, made.backbone, made.layout, made.head, made.evaluation
    look = Oracle(*parts, int(made.config["seed"]))
    shown = track(numbers, "rounds", console=Console(stderr=True), disable=not sys.stderr.isatty())
    with one_thread():
        found = [*look.rows((number, ledger.kept(directory, number)) for number in shown)]
    run_dir.write_json(directory / "oracle.json", found)
    picture = style.save({"oracle": figures.oracle(found)}, directory / "figures")[0]
    written = directory / "oracle.json", picture, picture.with_suffix(".pdf")
    run_dir.sealed_again(directory, written)
    console.rows("accuracy in %: head of the run, and oracle", found)
    return picture


def command(method: str, runs: Runs) -> str:
    """How to repeat these runs of a method: the file of their stream, and what they set besides."""
    first, seeds = runs[0], ",".join(str(seed) for seed in sorted(run["seed"] for run in runs))
    file, head = f"conf/{first['scenario']}.yaml", first["config"].get("head.name")
    words = ["--config", file, "--method", method]
    try:
        plain = dict(flat(parse(words).values))
        another = plain["head.name"] != head
        plain = dict(flat(parse([*words, "--head", head]).values)) if another else plain
    except (FedBNNError, OSError):
        return f"fedbnn train --config {first['directory']}/config.yaml"
    skip = tuple(f"{name}." for name in (*MAY_DIFFER, *page.OWN))
    differ = {k: v for k, v in first["config"].items() if plain.get(k) != v}
    said = [f" --set {k}={v}" for k, v in differ.items() if not f"{k}.".startswith(skip)]
    said = [f" --set head={head}"] * another + said
    return f"fedbnn compare --config {file} --methods {method} --seeds {seeds}{''.join(said)}"
