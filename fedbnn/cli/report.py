"""`fedbnn report DIR...`: write the page of a run again, or of several runs together."""

from collections.abc import Sequence
from pathlib import Path

from fedbnn.cli.arguments import Arguments
from fedbnn.report import page as report


def main(argv: Sequence[str]) -> int:
    """One directory: its own page. Several: a comparison."""
    parser = Arguments("report", "Write report.html of a run, or of several runs together.")
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="directories of finished runs"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/comparison"), help="where a comparison goes"
    )
    options = parser.parse_args(argv)
    several = len(options.run_dirs) > 1
    directory, title = (options.out, options.out.name) if several else (options.run_dirs[0], None)
    written = report.write(options.run_dirs, directory, title)
    print(f"report  {written.page}")
    return 0
