"""`fedbnn train`: the same as `python train.py`."""

from collections.abc import Sequence

import train


def main(argv: Sequence[str]) -> int:
    """Train, and give the exit code."""
    return train.main(argv)
