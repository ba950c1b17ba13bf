"""`python train.py --config FILE` is `fedbnn train --config FILE`."""

import sys
from collections.abc import Sequence

from fedbnn.cli.main import main as fedbnn


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python train.py ARGV`."""
    return fedbnn(["train", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
