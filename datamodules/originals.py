"""A data set as it was found on disk, before it is cached: class names, and per split the labels and a way to each image."""

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fedbnn.errors import DataError

Array = NDArray[np.uint8]
Labels = NDArray[np.int64]
_BROKEN_IMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
)


@dataclass(frozen=True)
class Split:
    """Labels of one split, `read(i)` for image i and `place(i)` for the file it comes from."""

    labels: Labels
    read: Callable[[int], Image.Image]
    place: Callable[[int], str]


@dataclass(frozen=True)
class Original:
    """Class names, and the two splits whose labels index into them."""

    classes: tuple[str, ...]
    train: Split
    test: Split


@dataclass(frozen=True)
class Located:
    """A data set that is there: a fingerprint of its files that is cheap to take, and how to read them."""

    fingerprint: str
    read: Callable[[], Original]


def fingerprint(paths: Iterable[Path]) -> str:
    """A digest of name, size and time of change of every file below `paths`; no file is opened."""
    digest = hashlib.sha256()
    for path in paths:
        for name, status in _files(path):
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _files(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The files at or below `path` in the order of their names."""
    if path.is_file():
        yield path.name, path.stat()
        return
    with os.scandir(path) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    for entry in inside:
        if entry.is_dir():
            yield from _files(Path(entry.path))
        else:
            yield entry.name, entry.stat()


def checked(name: str, original: Original) -> Original:
    """The same data set, once every label is known to have a class and every split to have images."""
    for which, split in (("train", original.train), ("test", original.test)):
        if not len(split.labels):
            raise DataError(
                f"{name} has no {which} images",
                fix="look into the folder, or fetch the data set again",
            )
        outside = np.flatnonzero((split.labels < 0) | (split.labels >= len(original.classes)))
        if len(outside):
            first = int(outside[0])
            what = f"{name}: label {split.labels[first]} is out of range, there are {len(original.classes)} classes"
            raise DataError(what, split.place(first), "fetch the data set again")
    return original


def pixels(split: Split, index: int, size: int | None) -> Array:
    """Image `index` as (channels, height, width), cropped to a centred square and resized when a `size` is given."""
    try:
        image = split.read(index)
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR) if size else image
        array = np.asarray(image, dtype=np.uint8)
    except _BROKEN_IMAGE as error:
        raise DataError(
            f"image cannot be read: {error}", split.place(index), "replace or remove this file"
        ) from error
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def from_arrays(images: Array, labels: Labels, file: str) -> Split:
    """A split that is one array already: (n, height, width) or (n, height, width, 3)."""
    return Split(
        np.asarray(labels, np.int64),
        lambda i: Image.fromarray(images[i]),
        lambda i: f"{file}, image {i}",
    )


def from_files(files: list[Path], labels: list[int]) -> Split:
    """A split of one image file each, always read in colour."""
    return Split(np.asarray(labels, np.int64), lambda i: _colour(files[i]), lambda i: str(files[i]))


def _colour(file: Path) -> Image.Image:
    with Image.open(file) as image:
        return image.convert("RGB")
