"""Name -> images and labels: data sets as their authors publish them, read and fetched by torchvision.

To add a data set, write its reading and name it at the end of this file.
"""

import pickle
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torchvision import datasets
from torchvision.datasets.utils import download_and_extract_archive

from datamodules.download import missing, network
from datamodules.originals import Located, Original, Split, fingerprint, from_arrays, from_files
from datamodules.sources_folders import folder_parts, image_folder, tiny_imagenet_folder
from fedbnn.errors import DataError

TINY_IMAGENET_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
TINY_IMAGENET_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
_UNREADABLE = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    AssertionError,
    KeyError,
    IndexError,
    pickle.UnpicklingError,
)
Read = Callable[[Path, bool], Original]


@dataclass(frozen=True)
class Official:
    """One published data set: the files it consists of below the data directory, and torchvision's reading of them."""

    name: str
    files: tuple[str, ...]
    read: Read

    def locate(self, data_dir: Path, download: bool) -> Located:
        """The official files; or, where they are absent, `<data_dir>/<name>/{train,test}/<class>/*.png`."""
        paths = [data_dir / file for file in self.files]
        absent = [path for path in paths if not path.exists()]
        if absent and folder_parts(data_dir / self.name):
            return image_folder(data_dir / self.name)
        if absent and not download:
            raise missing(self.name, absent[0])
        if absent:
            self._fetch(data_dir)
        return Located(fingerprint(paths), lambda: self._read(data_dir, download))

    def _fetch(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        with network(self.name, data_dir):
            self.read(data_dir, True)

    def _read(self, data_dir: Path, download: bool) -> Original:
        """The data set; files that cannot be read are fetched once more if downloads are allowed."""
        try:
            return self.read(data_dir, False)
        except _UNREADABLE as error:
            if download:
                self._fetch(data_dir)
                return self._read(data_dir, False)
            what, fix = (
                f"{self.name} cannot be read: {error}",
                "remove it and set stream.download=true",
            )
            raise DataError(what, str(data_dir / self.files[0]), fix) from error


def tiny_imagenet(data_dir: Path, download: bool) -> Located:
    """`<data_dir>/tiny-imagenet-200`; the archive is unpacked aside and renamed, so it is whole or not there."""
    root = data_dir / "tiny-imagenet-200"
    if not root.exists() and not download:
        raise missing("tiny_imagenet", root)
    if not root.exists():
        data_dir.mkdir(parents=True, exist_ok=True)
        with (
            network("tiny_imagenet", data_dir),
            tempfile.TemporaryDirectory(dir=data_dir, prefix=".unpacking-") as aside,
        ):
            download_and_extract_archive(TINY_IMAGENET_URL, aside, md5=TINY_IMAGENET_MD5)
            (Path(aside) / root.name).rename(root)
    return tiny_imagenet_folder(root)


def _mnist(kind: type[datasets.MNIST], classes: tuple[str, ...]) -> Read:
    def read(root: Path, download: bool) -> Original:
        return Original(
            classes,
            *(_arrays(kind(root, train=train, download=download)) for train in (True, False)),
        )

    return read


def _arrays(data: Any) -> Split:
    """A torchvision data set that holds all its images in one array."""
    return from_arrays(
        np.asarray(data.data), np.asarray(data.targets), f"{data.root}, {type(data).__name__}"
    )


def _emnist(root: Path, download: bool) -> Original:
    """The balanced split: 47 classes. Its files hold every image mirrored along the diagonal."""
    parts = [
        datasets.EMNIST(root, "balanced", train=train, download=download) for train in (True, False)
    ]
    upright = [
        from_arrays(part.data.transpose(1, 2).numpy(), part.targets.numpy(), f"{root}/EMNIST")
        for part in parts
    ]
    return Original(tuple(parts[0].classes), *upright)


def _with_classes(kind: type[datasets.CIFAR10]) -> Read:
    def read(root: Path, download: bool) -> Original:
        train, test = (kind(root, train=train, download=download) for train in (True, False))
        return Original(tuple(train.classes), _arrays(train), _arrays(test))

    return read


def _stl10(root: Path, download: bool) -> Original:
    train, test = (
        datasets.STL10(root, split=split, download=download) for split in ("train", "test")
    )
    parts = (
        from_arrays(part.data.transpose(0, 2, 3, 1), part.labels, f"{root}/stl10_binary")
        for part in (train, test)
    )
    return Original(tuple(train.classes), *parts)


def _flowers102(root: Path, download: bool) -> Original:
    """As in the paper: trained on the official test split (6,149 images), tested on the official train split (1,020)."""
    swapped = [
        datasets.Flowers102(root, split=split, download=download) for split in ("test", "train")
    ]
    return Original(
        tuple(swapped[0].classes),
        *(from_files(part._image_files, part._labels) for part in swapped),
    )


def _food101(root: Path, download: bool) -> Original:
    parts = [datasets.Food101(root, split=split, download=download) for split in ("train", "test")]
    return Original(
        tuple(parts[0].classes), *(from_files(part._image_files, part._labels) for part in parts)
    )


def digits(_data_dir: Path, _download: bool) -> Located:
    """The 1797 grey 8x8 digits that ship inside scikit-learn; a fixed fifth of each class is the test split."""
    import sklearn

    return Located(f"sklearn{sklearn.__version__}".ljust(16, "-"), _read_digits)


def _read_digits() -> Original:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = np.round(data.images * (255 / 16)).astype(np.uint8)
    parts = train_test_split(
        images, data.target, test_size=0.2, stratify=data.target, random_state=0
    )
    train, test, train_labels, test_labels = parts
    return Original(
        _DIGITS,
        from_arrays(train, train_labels, "load_digits"),
        from_arrays(test, test_labels, "load_digits"),
    )


_DIGITS = tuple(str(digit) for digit in range(10))
_FASHION = tuple(datasets.FashionMNIST.classes)
_IDX = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)
_EMNIST = tuple(f"EMNIST/raw/emnist-balanced-{file.replace('t10k', 'test')}" for file in _IDX)

OFFICIAL = (
    Official("mnist", tuple(f"MNIST/raw/{file}" for file in _IDX), _mnist(datasets.MNIST, _DIGITS)),
    Official(
        "fashion_mnist",
        tuple(f"FashionMNIST/raw/{file}" for file in _IDX),
        _mnist(datasets.FashionMNIST, _FASHION),
    ),
    Official("emnist", _EMNIST, _emnist),
    Official("usps", ("usps.bz2", "usps.t.bz2"), _mnist(datasets.USPS, _DIGITS)),
    Official("cifar10", ("cifar-10-batches-py",), _with_classes(datasets.CIFAR10)),
    Official("cifar100", ("cifar-100-python",), _with_classes(datasets.CIFAR100)),
    Official("stl10", ("stl10_binary",), _stl10),
    Official(
        "flowers102",
        ("flowers-102/setid.mat", "flowers-102/imagelabels.mat", "flowers-102/jpg"),
        _flowers102,
    ),
    Official("food101", ("food-101/meta", "food-101/images"), _food101),
)

SOURCES: Mapping[str, Callable[[Path, bool], Located]] = {
    "digits": digits,
    **{official.name: official.locate for official in OFFICIAL},
    "tiny_imagenet": tiny_imagenet,
}
