"""Small data sets in official formats, made by the tests themselves."""

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datamodules import FederatedStream
from datamodules.sources import datasets

Write = Callable[[Path], Any]


def random_images(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_folder(root: Path, classes: int, train: int, test: int, side: int) -> None:
    """An image folder in which no two images are the same."""
    for seed, (split, each) in enumerate((("train", train), ("test", test))):
        images = random_images(classes * each, side, side, 3, seed=seed)
        for number, pixels in enumerate(images):
            file = root / split / f"class{number // each:02d}" / f"{number:04d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)


def write_cifar100(root: Path) -> dict[str, np.ndarray]:
    """`cifar-100-python` with pickles as published: five images in train, three in test."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    pixels = {
        name: random_images(count, 3, 32, 32, seed=count)
        for name, count in (("train", 5), ("test", 3))
    }
    for name, images in pixels.items():
        entry = {
            "data": images.reshape(len(images), -1),
            "fine_labels": [number % 3 for number in range(len(images))],
        }
        (folder / name).write_bytes(pickle.dumps(entry))
    (folder / "meta").write_bytes(
        pickle.dumps({"fine_label_names": ["apple", "aquarium_fish", "baby"]})
    )
    return pixels


def md5(file: Path) -> str:
    return hashlib.md5(file.read_bytes()).hexdigest()


@pytest.fixture
def cifar100(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, np.ndarray]]:
    """Writes CIFAR-100 below a folder and makes torchvision expect exactly these files."""

    def write(root: Path) -> dict[str, np.ndarray]:
        pixels = write_cifar100(root)
        folder = root / "cifar-100-python"
        monkeypatch.setattr(datasets.CIFAR100, "train_list", [["train", md5(folder / "train")]])
        monkeypatch.setattr(datasets.CIFAR100, "test_list", [["test", md5(folder / "test")]])
        monkeypatch.setattr(
            datasets.CIFAR100, "meta", {**datasets.CIFAR100.meta, "md5": md5(folder / "meta")}
        )
        return pixels

    return write


@pytest.fixture
def tiny_imagenet() -> Write:
    """Writes Tiny-ImageNet in its official layout: two classes, two train, one val image each."""

    def write(root: Path) -> None:
        top = root / "tiny-imagenet-200"
        wnids = ("n01443537", "n01629819")
        for number, wnid in enumerate(wnids):
            folder = top / "train" / wnid / "images"
            folder.mkdir(parents=True)
            for image in range(2):
                Image.fromarray(random_images(1, 64, 64, 3, seed=number)[0]).save(
                    folder / f"{wnid}_{image}.JPEG"
                )
            (top / "val" / "images").mkdir(parents=True, exist_ok=True)
            Image.fromarray(random_images(1, 64, 64, seed=9)[0]).save(
                top / "val" / "images" / f"val_{number}.JPEG"
            )
        (top / "wnids.txt").write_text("\n".join(wnids) + "\n")
        (top / "words.txt").write_text(
            "n01443537\tgoldfish, Carassius auratus\nn01629819\tEuropean fire salamander\n"
        )
        rows = [f"val_{number}.JPEG\t{wnid}\t0\t0\t62\t62" for number, wnid in enumerate(wnids)]
        (top / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")

    return write


@pytest.fixture(scope="session")
def shapes_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image folder `shapes`: 7 classes, 20 train and 6 test images each, 8x8, all different."""
    root = tmp_path_factory.mktemp("data")
    write_folder(root / "shapes", classes=7, train=20, test=6, side=8)
    return root


@pytest.fixture(scope="session")
def shapes(shapes_dir: Path) -> Callable[..., FederatedStream]:
    """Makes streams over `shapes`, 3 tasks of 4 rounds for 10 clients unless told otherwise."""

    def make(**changes: Any) -> FederatedStream:
        usual = {
            "sources": ["folder:shapes"],
            "clients": 10,
            "clients_per_round": 4,
            "data_dir": str(shapes_dir),
        }
        timing = (
            {} if {"durations", "boundaries"} & set(changes) else {"tasks": 3, "rounds_per_task": 4}
        )
        return FederatedStream(**{**usual, **timing, **changes})

    return make


@pytest.fixture(scope="session")
def picture_folder() -> Callable[..., None]:
    """Writes an image folder: (root, classes, train, test, side)."""
    return write_folder
