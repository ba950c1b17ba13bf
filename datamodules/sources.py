"""Name -> images and labels: data sets as published, read by torchvision, image folders, your own.

To add a data set, write its reading and name it at the end of this file.
"""

import hashlib
import http.client
import io
import pickle
import socket
import sys
import tempfile
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset
from torchvision import datasets
from torchvision.datasets.utils import download_and_extract_archive

from datamodules import cache
from datamodules.cache import Located, Original, Split, Table
from datamodules.scenarios import require
from fedbnn.config.own import imported
from fedbnn.errors import DataError, did_you_mean
from fedbnn.images import Array, as_picture, below
from fedbnn.seeds import settled

FOLDER = "folder:"
SECONDS_OF_SILENCE = 20.0
TINY_IMAGENET_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
TINY_IMAGENET_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
_UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, AssertionError, LookupError)
_UNREADABLE += (pickle.UnpicklingError,)


@dataclass(frozen=True)
class DatasetRegistry:
    """Where data sets are, where decoded images go (or `<data_dir>/.cache`), and how they look."""

    data_dir: str | Path
    cache_dir: str | Path | None = None
    size: int | None = None
    download: bool = False

    @property
    def data(self) -> Path:
        """The folder of the data sets."""
        return Path(self.data_dir).expanduser()

    @property
    def decoded(self) -> Path:
        """The folder of decoded images."""
        return Path(self.cache_dir).expanduser() if self.cache_dir else self.data / ".cache"

    def open(self, source: str, verify: bool = False) -> Table:
        """The data set of this name, decoded and resized, from the cache if it was opened before.

        `verify` reads every cached byte again, whatever the times of its files say.
        """
        check_source(source)
        own, locate = self.data / source.removeprefix(FOLDER), SOURCES.get(source)
        located = locate(self.data, self.download) if locate else image_folder(own)
        located = own_data(source) if is_path(source) else located
        if located is None:
            fix = "it needs train/<class>/ and test/<class>/ (or val/<class>/)"
            raise DataError("no image folder", f"looked in {own}", fix)
        table = cache.cached(short_name(source), located, self.size, self.decoded, verify)
        for which, labels in (("train", table.train_labels), ("test", table.test_labels)):
            if not len(labels):
                fix = "look into the folder, or fetch the data set again"
                raise DataError(f"{table.name} has no {which} images", fix=fix)
        return table


def source_names(sources: Sequence[str] | str) -> tuple[str, ...]:
    """One name or several; every one known, no two the same."""
    names = (sources,) if isinstance(sources, str) else tuple(sources)
    require(bool(names), "sources", "a stream needs a source", "for example sources: [digits]")
    for name in names:
        check_source(name)
    once = len({short_name(name) for name in names}) == len(names)
    what = f"two sources share a name in {', '.join(names)}"
    require(once, "sources", what, "name each source once")
    return names


def short_name(source: str) -> str:
    """What stands before the slash in class names: of `folder:some/flowers` it is `flowers`."""
    return source.rpartition(":")[2] if is_path(source) else Path(source.removeprefix(FOLDER)).name


def is_path(source: str) -> bool:
    """Whether it is an import path, such as `mypkg.data:open_it`."""
    return ":" in source and not source.startswith(FOLDER)


def check_source(source: str) -> None:
    """Refuse a name that nothing answers to."""
    own = is_path(source) or source.startswith(FOLDER)
    if source not in SOURCES and not (own and short_name(source)):
        fix = f"{did_you_mean(source, SOURCES)}; for images of your own write folder:PATH"
        require(False, "sources", f"unknown source {source!r}", fix)


@contextmanager
def network(name: str, data_dir: Path) -> Iterator[None]:
    """Inside, a silent server is given up; a failed download names itself and what helps.

    Progress bars of the downloader belong on a terminal, not into a log.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SECONDS_OF_SILENCE)
    try:
        out, err = (sys.stdout, sys.stderr) if sys.stderr.isatty() else (io.StringIO(),) * 2
        with redirect_stdout(out), redirect_stderr(err):
            data_dir.mkdir(parents=True, exist_ok=True)
            yield
    except (OSError, EOFError, RuntimeError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        fix = "check the network and start again, or put the official files there yourself"
        raise DataError(f"{name} could not be downloaded: {error}", str(data_dir), fix) from error
    finally:
        socket.setdefaulttimeout(before)


@dataclass(frozen=True)
class Official:
    """A published data set: its files, what torchvision calls it, and its options for each part."""

    name: str
    files: tuple[str, ...]
    kind: Callable[..., Any]
    parts: Sequence[Mapping[str, Any]] = ({"train": True}, {"train": False})
    classes: Sequence[str] = ()

    def locate(self, data_dir: Path, download: bool) -> Located:
        """The official files, or else `<data_dir>/<name>/{train,test}/<class>/*.png`."""
        paths = [data_dir / file for file in self.files]
        absent = [path for path in paths if not path.exists()]
        if absent and (folder := image_folder(data_dir / self.name)):
            return folder
        if absent and not download:
            fix = f"fedbnn data {self.name} --download fetches it; data_dir may be another folder"
            raise DataError(f"data set {self.name} is missing", f"looked for {absent[0]}", fix)
        if absent:
            self._fetch(data_dir)
        return Located(cache.fingerprint(paths), lambda: self._checked(data_dir, download))

    def _fetch(self, data_dir: Path) -> Original:
        with network(self.name, data_dir):
            return self._read(data_dir, True)

    def _checked(self, data_dir: Path, download: bool) -> Original:
        """Files that cannot be read are fetched once more if downloads are allowed."""
        try:
            return self._read(data_dir, False)
        except _UNREADABLE as error:
            if download:
                return self._fetch(data_dir)
            what, where = f"{self.name} cannot be read: {error}", str(data_dir / self.files[0])
            fix = f"remove it, then: fedbnn data {self.name} --download"
            raise DataError(what, where, fix) from error

    def _read(self, data_dir: Path, download: bool) -> Original:
        train, test = (self.kind(data_dir, **part, download=download) for part in self.parts)
        return Original(tuple(self.classes or train.classes), _split(train), _split(test))


def _split(data: Any) -> Split:
    """What torchvision read: an image file each, or all images in one array, channels last."""
    if hasattr(data, "_image_files"):
        return Split(data._image_files, np.asarray(data._labels, np.int64))
    images, labels = np.asarray(data.data), getattr(data, "targets", None)
    if isinstance(data, datasets.EMNIST):  # whose files hold every image mirrored on the diagonal
        images = images.transpose(0, 2, 1)
    if isinstance(data, datasets.STL10):
        images, labels = images.transpose(0, 2, 3, 1), data.labels
    origin = f"{data.root}, {type(data).__name__}"
    return Split(images, np.asarray(labels, np.int64), origin)


def image_folder(root: Path) -> Located | None:
    """`<root>/train/<class>/*.png` and `<root>/test/<class>/*.png` (or `val`), if there."""
    train, test = root / "train", root / ("test" if (root / "test").is_dir() else "val")
    if not (train.is_dir() and test.is_dir()):
        return None
    return Located(cache.fingerprint((train, test)), lambda: _read_folder(train, test))


def _read_folder(train: Path, test: Path) -> Original:
    classes = tuple(path.name for path in sorted(train.iterdir()) if path.is_dir())
    for path in sorted(test.iterdir()):
        if path.is_dir() and path.name not in classes:
            what = f"class {path.name!r} has test images only"
            raise DataError(what, str(path), f"add {train / path.name}")
    learnt, tested = (labelled([top / name for name in classes]) for top in (train, test))
    if empty := sorted(set(range(len(classes))).difference(learnt.labels.tolist())):
        what, where = f"class {classes[empty[0]]!r} has no train images", train / classes[empty[0]]
        raise DataError(what, str(where), "put pictures there, or remove the folder")
    return Original(classes, learnt, tested)


def labelled(folders: Sequence[Path]) -> Split:
    """Every picture of every class folder, in the order of names."""
    found = [below(folder) for folder in folders]
    labels = np.repeat(np.arange(len(found)), np.array([*map(len, found)], np.int64))
    return Split([file for files in found for file in files], labels)


class TinyImageNet:
    """train/<wnid>/images/*.JPEG, and val/images/*.JPEG named in val/val_annotations.txt.

    Made like torchvision's data sets. The test is `val`, whose labels are public. The archive is
    unpacked aside and renamed.
    """

    def __init__(self, data_dir: Path, split: str, download: bool) -> None:
        root = data_dir / "tiny-imagenet-200"
        if download and not root.exists():
            with tempfile.TemporaryDirectory(dir=data_dir) as aside:
                download_and_extract_archive(TINY_IMAGENET_URL, aside, md5=TINY_IMAGENET_MD5)
                (Path(aside) / root.name).rename(root)
        wnids = (root / "wnids.txt").read_text().split()
        self.classes = _words(root / "words.txt", wnids)
        folders = [root / "train" / wnid for wnid in wnids]
        found = labelled(folders) if split == "train" else _annotated(root / "val", wnids)
        self._image_files, self._labels = found.images, found.labels


def _annotated(val: Path, wnids: list[str]) -> Split:
    annotations, number = val / "val_annotations.txt", {wnid: i for i, wnid in enumerate(wnids)}
    rows = [line.split("\t") for line in annotations.read_text().splitlines() if line]
    for line, row in enumerate(rows, 1):
        if len(row) < 2 or row[1] not in number:
            what, fix = f"label out of range in line {line}", "fetch the data set again"
            raise DataError(what, str(annotations), fix)
    labels = np.array([number[row[1]] for row in rows], np.int64)
    return Split([val / "images" / row[0] for row in rows], labels)


def _words(file: Path, wnids: list[str]) -> tuple[str, ...]:
    """The first English name of each class; the wnid where the name is missing or not unique."""
    rows = [line.split("\t", 1) for line in file.read_text().splitlines()] if file.is_file() else []
    words = {row[0]: row[1].split(",")[0].strip() for row in rows if len(row) == 2}
    names = [words.get(wnid, wnid) for wnid in wnids]
    pairs = zip(names, wnids, strict=True)
    return tuple(name if names.count(name) == 1 else wnid for name, wnid in pairs)


def own_data(source: str) -> Located:
    """What an import path leads to, or what that returns when it is called.

    A torch Dataset of (image, label), two of them (train, test), or a LightningDataModule; of one
    alone a fixed fifth of each class is the test. They are read at every start, and draw the same:
    only their pixels can tell whether they are those of the cache.
    """
    found = imported(source)
    try:
        with settled():
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
    if len(test) > 1:
        raise ValueError(f"{len(data)} data sets are too many")
    images, labels = items(train)
    known, names = labels_of(train, labels)
    parts = [(images, labels), items(test[0])] if test else _fifth(images, labels)
    return Original(names, *(numbered(*part, known) for part in parts))


def labels_of(data: Any, labels: Sequence[Any]) -> tuple[list[Any], tuple[str, ...]]:
    """The labels of a torch Dataset in the order of their classes, and what these are called."""
    names = _names(data)
    known = list(range(len(names))) if names else sorted(set(labels))
    if strange := set(labels).difference(known):
        raise ValueError(f"label {min(strange)!r} has no name in {names}")
    return known, names or tuple(map(str, known))


def _names(data: Any) -> tuple[str, ...]:
    """The `classes` of a data set, of what it is a part of, or of all that it joins alike."""
    if isinstance(data, Subset):
        return _names(data.dataset)
    if isinstance(data, ConcatDataset):
        each = {_names(one) for one in data.datasets}
        return each.pop() if len(each) == 1 else ()
    names = getattr(data, "classes", None)
    return () if names is None else tuple(map(str, names))


def numbered(images: Sequence[Array], labels: Sequence[Any], known: Sequence[Any]) -> Split:
    """Images with the numbers of their classes."""
    return Split(images, np.array([known.index(label) for label in labels], np.int64), "your data")


def items(data: Any) -> tuple[list[Array], list[Any]]:
    """Images and labels of a torch Dataset; colour if any image is in colour."""
    pairs = [pair_of(data[place], place) for place in range(len(data))]
    pictures = [as_picture(image) for image, _ in pairs]
    mode = "L" if all(picture.mode == "L" for picture in pictures) else "RGB"
    labels = [label if isinstance(label, str) else _whole(label) for _, label in pairs]
    return [np.asarray(picture.convert(mode)) for picture in pictures], labels


def _whole(label: Any) -> int:
    if (number := int(label)) != label:
        raise ValueError(f"label {label} is no whole number")
    return number


def pair_of(item: Any, place: int) -> tuple[Any, Any]:
    """Image and label of one item of a torch Dataset; what else it has is not used."""
    if not isinstance(item, Sequence) or len(item) < 2:
        raise ValueError(f"item {place} has no label: write (image, label)")
    return item[0], item[1]


def _fifth(images: Sequence[Array] | Array, labels: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Train and test of images that nobody has divided; a fixed fifth of each class is the test."""
    from sklearn.model_selection import train_test_split

    fifth = {"test_size": 0.2, "stratify": labels, "random_state": 0}
    train, test, *said = train_test_split(images, labels, **fifth)
    return list(zip((train, test), said, strict=True))


def digits(_data_dir: Path, _download: bool) -> Located:
    """The 1797 grey 8x8 digits inside scikit-learn; a fixed fifth of each class is the test."""
    return Located(f"sklearn{version('scikit-learn')}".ljust(16, "-"), _read_digits)


def _read_digits() -> Original:
    from sklearn.datasets import load_digits

    data = load_digits()
    parts = _fifth(np.round(data.images * (255 / 16)).astype(np.uint8), data.target)
    return Original(_DIGITS, *(Split(*part, "load_digits") for part in parts))


def _idx(folder: str, test: str = "t10k") -> tuple[str, ...]:
    """The four files of the MNIST family; `folder` is where their names begin."""
    kinds = ("images-idx3", "labels-idx1")
    return tuple(f"{folder}{part}-{kind}-ubyte" for part in ("train", test) for kind in kinds)


_DIGITS = tuple("0123456789")
_BALANCED = [{"split": "balanced", "train": train} for train in (True, False)]
_NAMED = [{"split": "train"}, {"split": "test"}]
_SWAPPED = [*reversed(_NAMED)]  # as in the paper: 6,149 images to train on, 1,020 to test
_FLOWERS = tuple(f"flowers-102/{file}" for file in ("setid.mat", "imagelabels.mat", "jpg"))
_TINY = tuple(f"tiny-imagenet-200/{file}" for file in ("wnids.txt", "train", "val"))
_OFFICIAL = (
    Official("mnist", _idx("MNIST/raw/"), datasets.MNIST, classes=_DIGITS),
    Official("fashion_mnist", _idx("FashionMNIST/raw/"), datasets.FashionMNIST),
    Official("emnist", _idx("EMNIST/raw/emnist-balanced-", "test"), datasets.EMNIST, _BALANCED),
    Official("usps", ("usps.bz2", "usps.t.bz2"), datasets.USPS, classes=_DIGITS),
    Official("cifar10", ("cifar-10-batches-py",), datasets.CIFAR10),
    Official("cifar100", ("cifar-100-python",), datasets.CIFAR100),
    Official("stl10", ("stl10_binary",), datasets.STL10, _NAMED),
    Official("flowers102", _FLOWERS, datasets.Flowers102, _SWAPPED),
    Official("food101", ("food-101/meta", "food-101/images"), datasets.Food101, _NAMED),
    Official("tiny_imagenet", _TINY, TinyImageNet, _NAMED),
)
SOURCES: Mapping[str, Callable[[Path, bool], Located]] = {
    "digits": digits,
    **{official.name: official.locate for official in _OFFICIAL},
}
