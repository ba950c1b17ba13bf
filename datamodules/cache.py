"""Every image is decoded once, into uint8 arrays on disk that later starts map into memory.

One data set is one directory: two arrays a split, and `meta.json` with class names, channel
statistics, and of each array its sha256 and its stamp (size and time of change) when written.
It is written aside and renamed, so it is whole or not there. An array whose stamp holds is not read
again; one whose stamp differs must match its digest, or the data set is built again.
"""

import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import Tensor

from fedbnn.errors import DataError, RunDirectoryError
from fedbnn.images import Array, decode, fitted
from fedbnn.storage import files
from fedbnn.storage.files import Damaged

log = logging.getLogger(__name__)
Histogram = NDArray[np.float64]
Labels = NDArray[np.int64]
Side = int | None
Shape = tuple[int, ...]
FORMAT, META = 3, "meta.json"
AT_ONCE = 512
_ARRAYS = ("train_pixels", "train_labels", "test_pixels", "test_labels")


@dataclass(frozen=True)
class Split:
    """One split as found: files, or pixels (n, height, width[, 3]) from `origin`, with labels."""

    images: Sequence[Path] | Sequence[Array] | Array
    labels: Labels
    origin: str = ""

    def read(self, index: int, size: Side, shape: Shape | None = None) -> Array:
        """One image; a file is always read in colour. All must have the shape of the first one."""
        image, wanted = self.images[index], size and (size, size)
        is_file = isinstance(image, Path)
        found = decode(image, 3, wanted) if is_file else fitted(Image.fromarray(image), wanted)
        if found.shape != (shape or found.shape):
            what = f"image has shape {found.shape}, the first one {shape}"
            raise DataError(what, self.place(index), "set stream.size, so that all are resized")
        return found

    def place(self, index: int) -> str:
        """Where one image is."""
        return f"{self.origin}, image {index}" if self.origin else str(self.images[index])


@dataclass(frozen=True)
class Original:
    """A data set as it was found: class names, and the two splits whose labels index into them."""

    classes: tuple[str, ...]
    train: Split
    test: Split


@dataclass(frozen=True)
class Located:
    """A data set that is there: a fingerprint of its files, cheap to take, and how to read them."""

    fingerprint: str
    read: Callable[[], Original]


def fingerprint(paths: Iterable[Path]) -> str:
    """A digest of name, size and time of change of every file below `paths`; no file is opened.

    Folders below are classes, so their names belong to it.
    """
    digest = hashlib.sha256()
    for path in paths:
        alone = [(str(path.parent), [], [path.name])]
        for folder, folders, names in os.walk(path) if path.is_dir() else alone:
            folders.sort()
            if (inside := os.path.relpath(folder, path)).strip("."):
                digest.update(f"{inside}/\n".encode())
            for name in sorted(names):
                status = os.stat(os.path.join(folder, name))
                digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Table:
    """One data set in memory-mapped arrays; channel statistics are of train pixels in 0..1."""

    name: str
    classes: tuple[str, ...]
    train_pixels: Tensor
    train_labels: Tensor
    test_pixels: Tensor
    test_labels: Tensor
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


def cached(name: str, located: Located, size: Side, folder: Path, verify: bool = False) -> Table:
    """The data set from the cache in `folder`; built first if it is missing, changed or damaged."""
    place = folder / f"{name}-{size or 'original'}-{located.fingerprint[:16]}-{FORMAT}"
    with suppress(Damaged):
        return _opened(name, place, verify)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(place.parent / f".{place.name}.lock", wait=True):
            try:
                return _opened(name, place, verify)
            except Damaged as damage:
                if place.exists():
                    log.warning("cache %s is damaged (%s): building it again", place, damage)
            _build(name, located, size, place)
            return _opened(name, place)
    except OSError as error:
        fix = "free some space or set stream.cache_dir"
        raise DataError(f"cache cannot be written: {error}", str(place), fix) from error


def _build(name: str, located: Located, size: Side, place: Path) -> None:
    """Decode into a directory aside, then rename; what stood in the place before is removed."""
    original = _read(name, located)
    with files.whole_directory(place) as fresh:
        first = original.train if len(original.train.labels) else original.test
        shape = first.read(0, size).shape
        histogram = _decode(name, original.train, size, fresh / "train", shape)
        tested = _decode(name, original.test, size, fresh / "test", shape)
        mean, deviation = _statistics(histogram if histogram.any() else tested)
        digests = {array: files.digest(fresh / f"{array}.npy") for array in _ARRAYS}
        meta = {"classes": original.classes, "mean": mean, "deviation": deviation}
        meta |= {"sha256": digests, "stamps": _stamps(fresh)}
        (fresh / META).write_bytes(files.sealed(FORMAT, meta))


def _read(name: str, located: Located) -> Original:
    """The data set, once it is known to have images, and every label to have a class."""
    try:
        original = located.read()
    except OSError as error:
        fix = "look at the files there, or fetch the data set again"
        raise DataError(f"{name} cannot be read: {error}", fix=fix) from error
    known, splits = len(original.classes), (original.train, original.test)
    if not any(len(split.labels) for split in splits):
        fix = "look into the folder, or fetch the data set again"
        raise DataError(f"{name} has no images", fix=fix)
    for split in splits:
        for wrong in np.flatnonzero((split.labels < 0) | (split.labels >= known))[:1]:
            what = f"label {split.labels[wrong]} is out of range, there are {known} classes"
            raise DataError(f"{name}: {what}", split.place(int(wrong)), "fetch the data set again")
    return original


def _decode(name: str, split: Split, size: Side, stem: Path, shape: Shape) -> Histogram:
    """Write `<stem>_labels.npy` and, batch by batch, `<stem>_pixels.npy`: memory does not grow.

    The answer is the histogram of the 256 values in each channel.
    """
    count, histogram = len(split.labels), np.zeros((shape[0], 256))
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, *shape)}
    console, title = Console(file=sys.stderr), f"decoding {name} {stem.name}"
    np.save(f"{stem}_labels.npy", split.labels)
    with open(f"{stem}_pixels.npy", "wb") as file, ThreadPoolExecutor() as pool:
        np.lib.format.write_array_header_1_0(file, header)
        steps = range(0, count, AT_ONCE)
        for start in track(steps, title, console=console, disable=not sys.stderr.isatty()):
            numbers = range(start, min(start + AT_ONCE, count))
            batch = np.stack(list(pool.map(lambda i: split.read(i, size, shape), numbers)))
            file.write(batch.tobytes())
            for row, channel in zip(histogram, batch.swapaxes(0, 1), strict=True):
                row += np.bincount(channel.ravel(), minlength=256)
    return histogram


def _statistics(histogram: Histogram) -> tuple[list[float], list[float]]:
    """Mean and deviation of x / 255 in each channel, from its histogram h: sum h_v v / sum h_v."""
    value, share = np.arange(256) / 255, histogram / histogram.sum(1, keepdims=True)
    mean = share @ value
    variance = (share * (value - mean[:, None]) ** 2).sum(1)
    return mean.tolist(), np.sqrt(np.maximum(variance, 1e-8)).tolist()


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Of each array what changes whenever it is written, and costs nothing to look at."""
    found = {array: (folder / f"{array}.npy").stat() for array in _ARRAYS}
    return {array: [status.st_size, status.st_mtime_ns] for array, status in found.items()}


def _opened(name: str, place: Path, verify: bool = False) -> Table:
    """Map arrays that each have their stamp, or else (and to `verify`) their digest."""
    _, meta = files.unsealed(place / META)
    try:
        stamps = _stamps(place)
        moved = [array for array in _ARRAYS if stamps[array] != meta["stamps"][array]]
        for array in _ARRAYS if verify else moved:
            if files.digest(place / f"{array}.npy") != meta["sha256"][array]:
                raise Damaged(f"{array}.npy does not match its digest")
    except OSError as error:
        raise Damaged(f"{Path(error.filename).name} cannot be read") from error
    if moved:
        with suppress(RunDirectoryError):
            files.write_atomic(place / META, files.sealed(FORMAT, {**meta, "stamps": stamps}))
    mapped = (np.load(place / f"{array}.npy", mmap_mode="c") for array in _ARRAYS)
    classes, mean, deviation = (tuple(meta[key]) for key in ("classes", "mean", "deviation"))
    return Table(name, classes, *map(torch.from_numpy, mapped), mean, deviation)
