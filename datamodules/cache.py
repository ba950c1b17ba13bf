"""Every image is decoded once, into uint8 arrays on disk that later starts map into memory and processes share.

One data set is one directory: two arrays a split and `meta.json` with class names, channel statistics and the
sha256 of each array. It is written aside and renamed, so it is whole or not there; one that fails its digest is
built again.
"""

import fcntl
import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from datamodules.originals import Array, Located, Original, Split, checked, pixels
from fedbnn.errors import DataError

log = logging.getLogger(__name__)
Histogram = NDArray[np.float64]
FORMAT = 1
AT_ONCE = 512
_ARRAYS = ("train_pixels", "train_labels", "test_pixels", "test_labels")


class Damaged(Exception):
    """A cached data set is not what was written."""


@dataclass(frozen=True)
class Table:
    """One data set in memory-mapped arrays, with the channel statistics of its train split (of pixels in 0..1)."""

    name: str
    classes: tuple[str, ...]
    train_pixels: Tensor
    train_labels: Tensor
    test_pixels: Tensor
    test_labels: Tensor
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


def cached(name: str, located: Located, size: int | None, folder: Path) -> Table:
    """The data set from the cache in `folder`; it is built first when it is missing, changed or damaged."""
    place = folder / f"{name}-{size or 'original'}-{located.fingerprint[:16]}"
    with suppress(Damaged):
        return _opened(name, place)
    try:
        with _alone(place):
            return _opened_or_built(name, located, size, place)
    except OSError as error:
        raise DataError(
            f"cache cannot be written: {error}",
            str(place),
            "free some space or set stream.cache_dir",
        ) from error


def _opened_or_built(name: str, located: Located, size: int | None, place: Path) -> Table:
    try:
        return _opened(name, place)
    except Damaged as damage:
        if place.exists():
            log.warning("cache %s is damaged (%s): building it again", place, damage)
    _build(name, located, size, place)
    return _opened(name, place)


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """One process builds while others that need the same wait for it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / f".{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(name: str, located: Located, size: int | None, place: Path) -> None:
    """Decode into a directory aside, then rename; what stood in the place before is removed."""
    original = _read(name, located)
    with tempfile.TemporaryDirectory(
        dir=place.parent, prefix=".building-", ignore_cleanup_errors=True
    ) as aside:
        fresh = Path(aside) / "new"
        fresh.mkdir()
        shape = pixels(original.train, 0, size).shape
        histogram = _decode(name, original.train, size, fresh / "train", shape)
        _decode(name, original.test, size, fresh / "test", shape)
        _write_meta(original.classes, histogram, fresh)
        if place.exists():
            place.rename(Path(aside) / "old")
        fresh.rename(place)


def _read(name: str, located: Located) -> Original:
    try:
        return checked(name, located.read())
    except OSError as error:
        raise DataError(
            f"{name} cannot be read: {error}",
            fix="look at the files there, or fetch the data set again",
        ) from error


def _decode(
    name: str, split: Split, size: int | None, stem: Path, shape: tuple[int, ...]
) -> Histogram:
    """Write `<stem>_pixels.npy` batch by batch, so memory does not grow with the data, and `<stem>_labels.npy`.

    The answer is the histogram of the 256 values in each channel.
    """
    count, histogram = len(split.labels), np.zeros((shape[0], 256))
    console = Console(file=sys.stderr)
    bar = Progress(console=console, disable=not console.is_terminal)
    with open(f"{stem}_pixels.npy", "wb") as file, ThreadPoolExecutor() as pool, bar:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": False, "shape": (count, *shape)}
        )
        task = bar.add_task(f"decoding {name} {stem.name}", total=count)
        for start in range(0, count, AT_ONCE):
            stop = min(start + AT_ONCE, count)
            batch = _stacked(
                list(pool.map(lambda i: pixels(split, i, size), range(start, stop))),
                shape,
                split,
                start,
            )
            file.write(batch.tobytes())
            histogram += [
                np.bincount(batch[:, channel].ravel(), minlength=256) for channel in range(shape[0])
            ]
            bar.update(task, completed=stop)
    np.save(f"{stem}_labels.npy", split.labels)
    return histogram


def _stacked(batch: list[Array], shape: tuple[int, ...], split: Split, start: int) -> Array:
    """The batch as one array; every image must have the shape of the first image of the data set."""
    for offset, image in enumerate(batch):
        if image.shape != shape:
            what = f"image has shape {image.shape}, the first one {shape}"
            raise DataError(
                what, split.place(start + offset), "set stream.size, so that all images are resized"
            )
    return np.stack(batch)


def _write_meta(classes: tuple[str, ...], histogram: Histogram, folder: Path) -> None:
    """`meta.json`: what the arrays mean, and a digest of each; then everything is forced to the disk."""
    mean, deviation = _statistics(histogram)
    digests = {array: _digest(folder / f"{array}.npy") for array in _ARRAYS}
    text = json.dumps(
        {
            "format": FORMAT,
            "classes": classes,
            "mean": mean,
            "deviation": deviation,
            "sha256": digests,
        }
    )
    (folder / "meta.json").write_text(
        json.dumps({"body": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    )
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def _statistics(histogram: Histogram) -> tuple[list[float], list[float]]:
    """Mean and deviation of x / 255 for each channel, from its histogram h: mean = sum_v h_v v / sum_v h_v."""
    value, share = np.arange(256) / 255, histogram / histogram.sum(1, keepdims=True)
    mean = share @ value
    variance = (share * (value - mean[:, None]) ** 2).sum(1)
    return mean.tolist(), np.sqrt(np.maximum(variance, 1e-8)).tolist()


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _opened(name: str, place: Path) -> Table:
    """Map the arrays of a cached data set after checking every digest."""
    meta = _read_meta(place / "meta.json")
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(_try_digest, [place / f"{array}.npy" for array in _ARRAYS]))
    for array, digest in zip(_ARRAYS, found, strict=True):
        if digest != meta["sha256"][array]:
            raise Damaged(f"{array}.npy does not match its digest")
    arrays = {
        array: torch.from_numpy(np.load(place / f"{array}.npy", mmap_mode="c")) for array in _ARRAYS
    }
    return Table(
        name,
        tuple(meta["classes"]),
        mean=tuple(meta["mean"]),
        deviation=tuple(meta["deviation"]),
        **arrays,
    )


def _try_digest(file: Path) -> str:
    try:
        return _digest(file)
    except OSError as error:
        raise Damaged(f"{file.name} cannot be read: {error}") from error


def _read_meta(file: Path) -> dict[str, Any]:
    try:
        envelope = json.loads(file.read_text())
        body = json.loads(envelope["body"])
        whole = (
            hashlib.sha256(envelope["body"].encode()).hexdigest() == envelope["sha256"]
            and body["format"] == FORMAT
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"meta.json cannot be read: {error}") from error
    if not whole:
        raise Damaged("meta.json does not match its digest")
    return dict(body)
