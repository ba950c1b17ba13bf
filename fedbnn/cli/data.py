"""`fedbnn data [NAME ...]`: list the data sets and where they belong; make those named ready."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from datamodules.sources import SOURCES, DatasetRegistry
from fedbnn.cli.main import Arguments
from fedbnn.errors import DataError


def main(argv: Sequence[str]) -> int:
    """Without names list what is there; with names make each ready for training."""
    options = _options(argv)
    data = Path(options.data_dir).expanduser()
    registry = DatasetRegistry(data, options.cache_dir, options.size, options.download)
    for name in options.names:
        print(_ready(registry, name))
    if not options.names:
        print("\n".join(_state(name, data) for name in SOURCES))
        own = "images of your own: PATH/train/<class>/*.png and PATH/test/<class>/*.png"
        print(f"{'folder:PATH':<15} {own} below {data}")
    return 0


def _options(argv: Sequence[str]) -> Namespace:
    """What the command line says."""
    about = "List the data sets and where they belong; fetch and decode those named."
    parser = Arguments("data", about)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="data sets to make ready, or folder:PATH")
    add("--data_dir", default="data", help="where data sets are (default: data)")
    add("--cache_dir", help="where decoded images go (default: DATA_DIR/.cache)")
    add("--size", type=int, help="height and width to resize to (default: as they are)")
    add("--download", action="store_true", help="fetch what is missing")
    return parser.parse_args(argv)


def _state(name: str, data: Path) -> str:
    """One line: found, or where it was looked for."""
    try:
        SOURCES[name](data, False)
    except DataError as error:
        return f"{name:<15} missing ({error.where})"
    return f"{name:<15} found"


def _ready(registry: DatasetRegistry, name: str) -> str:
    """Decode one data set into the cache, or check every byte there, and say what is in it."""
    table = registry.open(name, verify=True)
    _, channels, height, width = table.train_pixels.shape
    shape = f"{channels} x {height} x {width}"
    counts = f"{len(table.train_labels)} train and {len(table.test_labels)} test images"
    return f"{name:<15} ready: {counts}, {len(table.classes)} classes, {shape}"
