"""Name -> images and labels. To add a data set, write one function from a data directory to `Located` and name it here."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datamodules.cache import Table, cached
from datamodules.originals import Located, Original, from_arrays
from datamodules.sources_folders import image_folder
from datamodules.sources_official import OFFICIAL, tiny_imagenet
from fedbnn.errors import ConfigError

FOLDER = "folder:"


@dataclass(frozen=True)
class Shelf:
    """Where data sets are kept, and how they are brought in."""

    data_dir: Path
    cache_dir: Path
    size: int | None = None
    download: bool = False

    def open(self, source: str) -> Table:
        """The data set of this name, decoded and resized, from the cache if it was opened before."""
        check_source(source)
        return cached(short_name(source), self._locate(source), self.size, self.cache_dir)

    def _locate(self, source: str) -> Located:
        if source.startswith(FOLDER):
            return image_folder(self.data_dir / source.removeprefix(FOLDER))
        return SOURCES[source](self.data_dir, self.download)


def short_name(source: str) -> str:
    """The name that stands before the slash in class names: of `folder:some/flowers` it is `flowers`."""
    return Path(source.removeprefix(FOLDER)).name


def check_source(source: str) -> None:
    """Refuse a name that nothing answers to."""
    if source in SOURCES or (source.startswith(FOLDER) and short_name(source)):
        return
    close = difflib.get_close_matches(source, SOURCES, n=1)
    guess = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(SOURCES)}"
    raise ConfigError(f"unknown source {source!r}", "stream.sources", f"{guess} For images of your own write folder:PATH")


def digits(_data_dir: Path, _download: bool) -> Located:
    """The 1797 grey 8x8 digits that ship inside scikit-learn; a fixed fifth of each class is the test split."""
    import sklearn

    return Located(f"sklearn{sklearn.__version__}".ljust(16, "-"), _read_digits)


def _read_digits() -> Original:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = np.round(data.images * (255 / 16)).astype(np.uint8)
    parts = train_test_split(images, data.target, test_size=0.2, stratify=data.target, random_state=0)
    train, test, train_labels, test_labels = parts
    names = tuple(str(digit) for digit in range(10))
    return Original(names, from_arrays(train, train_labels, "load_digits"), from_arrays(test, test_labels, "load_digits"))


SOURCES: Mapping[str, Callable[[Path, bool], Located]] = {
    "digits": digits,
    **{official.name: official.locate for official in OFFICIAL},
    "tiny_imagenet": tiny_imagenet,
}
