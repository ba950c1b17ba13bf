"""Where data sets stand: a name is looked up, found on disk or fetched, and opened through the cache."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from datamodules.cache import Table, cached
from datamodules.originals import Located
from datamodules.sources import SOURCES
from datamodules.sources_folders import image_folder
from fedbnn.errors import ConfigError

FOLDER = "folder:"


@dataclass(frozen=True)
class DatasetRegistry:
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
    raise ConfigError(
        f"unknown source {source!r}",
        "stream.sources",
        f"{guess} For images of your own write folder:PATH",
    )
