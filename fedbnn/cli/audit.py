"""`fedbnn audit RUN_DIR`: by round and client what was sent, trusted, refused, what it moved."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from jsonargparse.typing import NonNegativeInt, PositiveInt

from fedbnn.cli.main import Arguments
from fedbnn.errors import RunDirectoryError
from fedbnn.report import audit, style
from fedbnn.report.audit import Entry
from fedbnn.report.page import UNFIT
from fedbnn.storage import run_dir
from fedbnn.storage.files import writing
from fedbnn.storage.ledger import METRICS
from fedbnn.tracking import console


def main(argv: Sequence[str]) -> int:
    """Print tables, or JSON, and draw the picture."""
    options = _options(argv)
    everything = _entries(run_dir.intact(options.run_dir, METRICS))
    found = [one for one in everything if _wanted(one, options)]
    if options.json:
        print(json.dumps([one.as_json() for one in found], indent=2))
        return 0
    if found:
        console.rows("By round and client", audit.rows(found))
        console.rows("By client", audit.by_client(found))
    print(audit.EXPLAINED if found else "nobody took part in such a round")
    print(f"picture  {_draw(everything, options.run_dir)}")
    return 0


def _options(argv: Sequence[str]) -> Namespace:
    about = "Show by round and client what was sent, trusted, refused, and what it moved."
    parser = Arguments("audit", about)
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="directory of a run, finished or not")
    add("--client", type=NonNegativeInt, help="this client alone")
    add("--round", type=PositiveInt, help="this round alone")
    add("--json", action="store_true", help="print JSON instead of tables, and draw nothing")
    return parser.parse_args(argv)


def _entries(directory: Path) -> list[Entry]:
    """What the records say; those of strangers, or from before there were audits, say nothing."""
    try:
        found = audit.entries(run_dir.records(directory))
    except UNFIT as error:
        what = f"the records have no audit: {type(error).__name__}"
        raise RunDirectoryError(what, str(directory / METRICS), "resume the run first") from error
    if not found:
        fix = "give the directory of a run"
        raise RunDirectoryError("no round is on record", str(directory), fix)
    return found


def _wanted(entry: Entry, options: Namespace) -> bool:
    return options.client in (None, entry.client) and options.round in (None, entry.round)


def _draw(found: Sequence[Entry], directory: Path) -> Path:
    """figures/audit.png and .pdf of the run, which then belong to what it left."""
    with writing(directory):
        [picture] = style.save({"audit": audit.figure(found)}, directory / "figures")
    run_dir.sealed_again(directory, [picture, picture.with_suffix(".pdf")])
    return picture
