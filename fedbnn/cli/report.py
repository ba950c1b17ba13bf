"""`fedbnn report RUN_DIR ...`: the page of a run, of several together, or a board of many."""

import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from rich.console import Console
from rich.progress import track

from fedbnn.cli.compose import SCHEMA, compose
from fedbnn.cli.main import Arguments
from fedbnn.cli.train import parse
from fedbnn.config import yaml
from fedbnn.config.own import refuse_code
from fedbnn.config.parse import Parsed, restored
from fedbnn.errors import RunDirectoryError
from fedbnn.evaluation.evaluate import Oracle
from fedbnn.federation.engines import one_thread
from fedbnn.federation.experiment import MAY_DIFFER
from fedbnn.heads import HEADS, ExactHead
from fedbnn.methods import METHODS
from fedbnn.report import figures, leaderboard, page, style
from fedbnn.report.values import Runs
from fedbnn.storage import ledger, run_dir
from fedbnn.storage.run_dir import flat
from fedbnn.tracking import console

TRAINING = ("trainer", "track", "engine", "beside")
"""Settings that an oracle has no need of; some of them name classes to import."""


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
    add("--trust", action="store_true", help="import what the run names, if it does (--oracle)")
    options = parser.parse_args(argv)
    if options.oracle:
        for directory in options.run_dirs:
            print(f"oracle  {oracle(directory, options.data_dir, options.trust)}")
        return 0
    if options.leaderboard:
        found = leaderboard.find(options.run_dirs)
        print(f"leaderboard  {leaderboard.write(found, options.out, command)}")
        return 0
    several = len(options.run_dirs) > 1
    where = (options.out, options.out.name) if several else (options.run_dirs[0], None)
    print(f"report  {page.write(options.run_dirs, *where).page}")
    return 0


def oracle(directory: Path, data_dir: str | None, trust: bool = False) -> Path:
    """Draw the rounds that a run has kept: figures/oracle.png, and its numbers in oracle.json."""
    made = compose(_settings(directory, data_dir, trust), directory)
    numbers = ledger.rounds(directory)
    if not made.method.shares_prototypes:
        what, fix = "its classes stay on the clients: there is no one head to look at", "share them"
        raise RunDirectoryError(what, str(directory), fix)
    if isinstance(made.head, ExactHead):
        what = "its class posteriors are over features that never move: they forget nothing"
        raise RunDirectoryError(what, str(directory), "look at a run with another head")
    parts = made.stream, made.backbone, made.layout, made.head, made.evaluation
    look = Oracle(*parts, int(made.config["seed"]))
    shown = track(numbers, "rounds", console=Console(stderr=True), disable=not sys.stderr.isatty())
    with one_thread():
        found = [*look.rows((number, run_dir.kept(directory, number)) for number in shown)]
    run_dir.write_json(directory / "oracle.json", found)
    picture = style.save({"oracle": figures.oracle(found)}, directory / "figures")[0]
    written = directory / "oracle.json", picture, picture.with_suffix(".pdf")
    run_dir.sealed_again(directory, written)
    console.rows("accuracy in %: head of the run, and oracle", found)
    if len(numbers) < made.stream.rounds:
        kept = f"{len(numbers)} of {made.stream.rounds} rounds are kept"
        print(f"{kept}; --ledger.keep_rounds {made.stream.rounds} keeps all of a run")
    return picture


def _settings(directory: Path, data_dir: str | None, trust: bool) -> Parsed:
    """The settings of a run that an oracle needs: it trains nothing, and tells nobody."""
    config = run_dir.intact(directory, "config.yaml") / "config.yaml"
    values = {key: value for key, value in yaml.read(config).items() if key not in TRAINING}
    if not trust:
        refuse_code(values, directory)
    if data_dir:
        values["stream"] = {**values["stream"], "data_dir": data_dir}
    return restored(values, SCHEMA)


def command(method: str, runs: Runs) -> str:
    """How to repeat these runs of a method: the file of their stream, and what they set besides.

    Runs may be those of a stranger: only names and files of the project are read.
    """
    first, seeds = runs[0], ",".join(str(seed) for seed in sorted(run["seed"] for run in runs))
    file, head = yaml.packaged().get(first["scenario"]), str(first["config"].get("head.name"))
    if file is None or method not in METHODS or head not in HEADS:
        return f"fedbnn train --config {quote(str(first['directory']))}/config.yaml"
    words = ["--config", str(file), "--method", method]
    plain = dict(flat(parse(words).values))
    if another := plain["head.name"] != head:
        plain = dict(flat(parse([*words, "--head", head]).values))
    skip = tuple(f"{name}." for name in (*MAY_DIFFER, *page.OWN) if name != "gate.quorum")
    differ = {k: v for k, v in first["config"].items() if plain.get(k) != v}
    said = [f"{k}={v}" for k, v in differ.items() if not f"{k}.".startswith(skip)]
    told = "".join(f" --set {quote(pair)}" for pair in [f"head={head}"] * another + said)
    known = f"conf/{file.relative_to(yaml.CONF)}"
    return f"fedbnn compare --config {known} --methods {method} --seeds {quote(seeds)}{told}"
