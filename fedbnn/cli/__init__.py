"""The subcommands of `fedbnn`. To add one: write a file with `main(argv) -> int`, name it here."""

from collections.abc import Mapping
from types import MappingProxyType

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "train": "train a model; the same as python train.py",
        "compare": "methods x seeds on one stream: tables with deviations, figures, a report",
        "report": "write the page of a run again, or of several runs together",
        "data": "list the data sets and where they belong, fetch and prepare them",
        "predict": "say what a trained model sees in pictures, and how sure it is",
        "bench": "measure what things cost: a step, engines, overhead, memory",
        "explain": "say what an exit code means and what helps",
    }
)
