"""Data of the user's own, by import path: torch Datasets and LightningDataModules."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from datamodules.cache import Located, Original, Split
from fedbnn.config.own import imported
from fedbnn.errors import DataError
from fedbnn.images import Array, as_picture


def own_data(source: str) -> Located:
    """What an import path leads to, or what that returns when it is called.

    A torch Dataset of (image, label), two of them (train, test), or a LightningDataModule; of one
    alone a fixed fifth of each class is the test. They are read at every start: only their pixels
    can tell whether they are those of the cache.
    """
    found = imported(source)
    try:
        original = _own_original(found() if callable(found) else found)
    except Exception as error:  # the border to the user's own code, which may raise anything
        what = f"{source} gives no images: {error or type(error).__name__}"
        fix = "return a torch Dataset of (image, label), or a pair of them, train and test"
        raise DataError(what, "stream.sources", fix) from error
    return in_memory(original)


def in_memory(original: Original) -> Located:
    """A data set whose images are arrays: its fingerprint is the digest of all of them."""
    digest = hashlib.sha256(repr(original.classes).encode())
    for split in (original.train, original.test):
        digest.update(split.labels.tobytes())
        for image in split.images:
            digest.update(repr(image.shape).encode() + image.tobytes())
    return Located(digest.hexdigest(), lambda: original)


def _own_original(data: Any) -> Original:
    if hasattr(data, "train_dataloader"):
        data.prepare_data()
        data.setup("fit")
        data.setup("test")
        data = data.train_dataloader().dataset, data.test_dataloader().dataset
    train, *test = data if isinstance(data, tuple) else (data,)
    images, labels = items(train)
    known, names = labels_of(train, labels)
    parts = [(images, labels), items(test[0])] if test else _fifth(images, labels)
    return Original(names, *(numbered(*part, known) for part in parts))


def labels_of(data: Any, labels: Sequence[Any]) -> tuple[list[Any], tuple[str, ...]]:
    """The labels of a torch Dataset in the order of their classes, and what these are called."""
    names = getattr(data, "classes", None)
    known = sorted(set(labels)) if names is None else list(range(len(names)))
    return known, tuple(map(str, known if names is None else names))


def numbered(images: Sequence[Array], labels: Sequence[Any], known: Sequence[Any]) -> Split:
    """Images with the numbers of their classes."""
    return Split(images, np.array([known.index(label) for label in labels], np.int64), "your data")


def items(data: Any) -> tuple[list[Array], list[Any]]:
    """Images and labels of a torch Dataset; colour if any image is in colour."""
    pairs = [data[place] for place in range(len(data))]
    pictures = [as_picture(image) for image, *_ in pairs]
    mode = "L" if all(picture.mode == "L" for picture in pictures) else "RGB"
    labels = [label if isinstance(label, str) else int(label) for _, label, *_ in pairs]
    return [np.asarray(picture.convert(mode)) for picture in pictures], labels


def _fifth(images: list[Array], labels: list[Any]) -> list[tuple[list[Array], list[Any]]]:
    """Train and test of images that nobody has divided; a fixed fifth of each class is the test."""
    from sklearn.model_selection import train_test_split

    fifth = {"test_size": 0.2, "stratify": labels, "random_state": 0}
    train, test, *said = train_test_split(images, labels, **fifth)
    return list(zip((train, test), said, strict=True))
