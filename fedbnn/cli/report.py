"""`fedbnn report RUN_DIR ...`: the page of a run, of several together, or a board of many."""

from collections.abc import Sequence
from pathlib import Path

from fedbnn.cli.main import Arguments
from fedbnn.cli.train import parse
from fedbnn.errors import FedBNNError
from fedbnn.federation.experiment import MAY_DIFFER
from fedbnn.report import leaderboard, page
from fedbnn.report.values import Runs
from fedbnn.storage.run_dir import flat


def main(argv: Sequence[str]) -> int:
    """One directory: its own page. Several: a comparison. With --leaderboard: a board of all."""
    parser = Arguments("report", "Write report.html of a run, or of several runs together.")
    add, together = parser.add_argument, Path("runs/comparison")
    add("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="finished runs")
    add("--out", type=Path, default=together, help="where a comparison or a board goes")
    about = "write leaderboard.md of all runs at and below RUN_DIR, whatever their streams"
    add("--leaderboard", action="store_true", help=about)
    options = parser.parse_args(argv)
    if options.leaderboard:
        found = leaderboard.find(options.run_dirs)
        print(f"leaderboard  {leaderboard.write(found, options.out, command)}")
        return 0
    several = len(options.run_dirs) > 1
    where = (options.out, options.out.name) if several else (options.run_dirs[0], None)
    print(f"report  {page.write(options.run_dirs, *where).page}")
    return 0


def command(method: str, runs: Runs) -> str:
    """How to repeat these runs of a method: the file of their stream, and what they set besides."""
    first, seeds = runs[0], ",".join(str(seed) for seed in sorted(run["seed"] for run in runs))
    file = f"conf/{first['scenario']}.yaml"
    words = ["--config", file, "--method", method]
    try:
        plain = dict(flat(parse(words).values))
    except (FedBNNError, OSError):
        return f"python train.py --config {first['run_dir'].name}/config.yaml"
    skip = tuple(f"{name}." for name in (*MAY_DIFFER, *page.OWN))
    differ = {k: v for k, v in first["config"].items() if plain.get(k) != v}
    said = [f" --set {k}={v}" for k, v in differ.items() if not f"{k}.".startswith(skip)]
    return f"fedbnn compare --config {file} --methods {method} --seeds {seeds}{''.join(said)}"
