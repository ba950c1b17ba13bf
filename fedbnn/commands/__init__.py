"""The subcommands of `fedbnn`, one file each with `main(argv) -> int`. To add one: write the file, name it here."""

from collections.abc import Mapping
from types import MappingProxyType

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "train": "train a model; the same as python train.py",
        "data": "list the data sets and where they belong, fetch and prepare them",
        "explain": "say what an exit code means and what helps",
    }
)
