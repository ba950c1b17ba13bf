"""Every source, read from files in its official format that the test makes."""

import bz2
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from datamodules.cache import Table
from datamodules.sources import SOURCES, DatasetRegistry, datasets, short_name
from fedbnn.errors import ConfigError, DataError


def noise(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def opened(source: str, data_dir: Path, size: int | None = None) -> Table:
    return DatasetRegistry(data_dir, data_dir / ".cache", size).open(source)


def write_idx(
    folder: Path, prefixes: tuple[str, str], side: int = 28
) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels in the IDX format: magic number, sizes, bytes."""
    folder.mkdir(parents=True)
    for prefix, count in zip(prefixes, (6, 4), strict=True):
        images, labels = noise(count, side, side, seed=count), np.arange(count, dtype=np.uint8)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(
            struct.pack(">iiii", 2051, count, side, side) + images.tobytes()
        )
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
            struct.pack(">ii", 2049, count) + labels.tobytes()
        )
    return noise(6, side, side, seed=6), noise(4, side, side, seed=4)


def test_digits_ship_with_scikit_learn_and_split_each_class_alike(tmp_path: Path) -> None:
    table = opened("digits", tmp_path)
    assert table.classes == tuple("0123456789")
    assert (len(table.train_labels), len(table.test_labels)) == (1437, 360)
    assert table.train_pixels.shape[1:] == (1, 8, 8)
    assert (int(table.train_pixels.min()), int(table.train_pixels.max())) == (0, 255)
    assert all(35 <= int((table.test_labels == digit).sum()) <= 37 for digit in range(10))


@pytest.mark.parametrize(
    ("source", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")]
)
def test_mnist_family(source: str, folder: str, tmp_path: Path) -> None:
    train, test = write_idx(tmp_path / folder / "raw", ("train", "t10k"))
    table = opened(source, tmp_path)
    assert np.array_equal(table.train_pixels[:, 0].numpy(), train)
    assert np.array_equal(table.test_pixels[:, 0].numpy(), test)
    assert table.train_labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(table.classes) == 10


def test_emnist_letters_stand_upright(tmp_path: Path) -> None:
    train, _ = write_idx(
        tmp_path / "EMNIST" / "raw", ("emnist-balanced-train", "emnist-balanced-test")
    )
    table = opened("emnist", tmp_path)
    assert np.array_equal(table.train_pixels[:, 0].numpy(), train.transpose(0, 2, 1))
    assert len(table.classes) == 47


def test_usps_text_becomes_bytes(tmp_path: Path) -> None:
    for name, count in (("usps.bz2", 3), ("usps.t.bz2", 2)):
        lines = [
            f"{label + 1} "
            + " ".join(f"{pixel + 1}:{1.0 if pixel == label else -1.0}" for pixel in range(256))
            for label in range(count)
        ]
        (tmp_path / name).write_bytes(bz2.compress("\n".join(lines).encode()))
    table = opened("usps", tmp_path)
    assert table.train_pixels.shape == (3, 1, 16, 16)
    assert table.train_labels.tolist() == [0, 1, 2]
    assert [table.train_pixels[label].flatten().nonzero().tolist() for label in range(3)] == [
        [[0]],
        [[1]],
        [[2]],
    ]
    assert int(table.train_pixels.max()) == 255


def test_cifar100_pickles(
    cifar100: Callable[[Path], dict[str, np.ndarray]], tmp_path: Path
) -> None:
    pixels = cifar100(tmp_path)
    table = opened("cifar100", tmp_path)
    assert np.array_equal(table.train_pixels.numpy(), pixels["train"])
    assert np.array_equal(table.test_pixels.numpy(), pixels["test"])
    assert table.classes == ("apple", "aquarium_fish", "baby")
    assert table.train_labels.tolist() == [0, 1, 2, 0, 1]


def test_a_bad_checksum_names_the_folder(
    cifar100: Callable[[Path], object], tmp_path: Path
) -> None:
    cifar100(tmp_path)
    with (tmp_path / "cifar-100-python" / "train").open("ab") as file:
        file.write(b"!")
    with pytest.raises(
        DataError,
        match=r"cifar100 cannot be read: .*corrupted.*cifar-100-python.*data cifar100 --download",
    ):
        opened("cifar100", tmp_path)


def test_cifar_kept_as_png_is_found_where_the_archive_is_absent(
    picture_folder: Callable[..., None], tmp_path: Path
) -> None:
    picture_folder(tmp_path / "cifar100", classes=2, train=3, test=1, side=32)
    table = opened("cifar100", tmp_path)
    assert table.name == "cifar100"
    assert table.classes == ("class00", "class01")
    assert table.train_pixels.shape == (6, 3, 32, 32)


def test_stl10_binary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    images = noise(3, 3, 96, 96)
    for part in ("train", "test"):
        (folder / f"{part}_X.bin").write_bytes(images.transpose(0, 1, 3, 2).tobytes())
        (folder / f"{part}_y.bin").write_bytes(bytes([1, 10, 3]))
    (folder / "class_names.txt").write_text("\n".join(f"thing{number}" for number in range(10)))
    for lists in ("train_list", "test_list"):
        files = [
            [name, None]
            for name, _ in getattr(datasets.STL10, lists)
            if not name.startswith("unlabeled")
        ]
        monkeypatch.setattr(datasets.STL10, lists, files)
    table = opened("stl10", tmp_path)
    assert np.array_equal(table.train_pixels.numpy(), images)
    assert table.train_labels.tolist() == [0, 9, 2]


def test_flowers_train_on_the_official_test_split(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "flowers-102"
    (folder / "jpg").mkdir(parents=True)
    for number in range(1, 7):
        Image.fromarray(noise(1, 20, 30, 3)[0]).save(folder / "jpg" / f"image_{number:05d}.jpg")
    savemat(folder / "imagelabels.mat", {"labels": np.array([[1, 2, 102, 1, 2, 102]])})
    savemat(
        folder / "setid.mat",
        {"trnid": np.array([[1, 2]]), "valid": np.array([[3]]), "tstid": np.array([[4, 5, 6]])},
    )
    monkeypatch.setattr(
        datasets.Flowers102,
        "_file_dict",
        {key: (name, None) for key, (name, _) in datasets.Flowers102._file_dict.items()},
    )
    table = opened("flowers102", tmp_path, size=16)
    assert table.train_labels.tolist() == [0, 1, 101]
    assert table.test_labels.tolist() == [0, 1]
    assert table.train_pixels.shape == (3, 3, 16, 16)


def test_food101(tmp_path: Path) -> None:
    folder = tmp_path / "food-101"
    (folder / "meta").mkdir(parents=True)
    for split, stem in (("train", "1"), ("test", "2")):
        (folder / "meta" / f"{split}.json").write_text(
            json.dumps({name: [f"{name}/{stem}"] for name in ("apple_pie", "waffles")})
        )
        for name in ("apple_pie", "waffles"):
            (folder / "images" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise(1, 40, 24, 3)[0]).save(folder / "images" / name / f"{stem}.jpg")
    table = opened("food101", tmp_path, size=12)
    assert (table.classes, table.train_labels.tolist()) == (("apple_pie", "waffles"), [0, 1])


def test_tiny_imagenet_layout(tiny_imagenet: Callable[[Path], None], tmp_path: Path) -> None:
    tiny_imagenet(tmp_path)
    table = opened("tiny_imagenet", tmp_path, size=32)
    assert table.classes == ("goldfish", "European fire salamander")
    assert table.train_pixels.shape == (4, 3, 32, 32)
    assert (table.train_labels.tolist(), table.test_labels.tolist()) == ([0, 0, 1, 1], [0, 1])


def test_tiny_imagenet_with_an_unknown_label_names_the_file(
    tiny_imagenet: Callable[[Path], None], tmp_path: Path
) -> None:
    tiny_imagenet(tmp_path)
    file = tmp_path / "tiny-imagenet-200" / "val" / "val_annotations.txt"
    file.write_text(file.read_text() + "val_9.JPEG\tn00000000\t0\t0\t62\t62\n")
    with pytest.raises(DataError, match=r"label out of range in line 3 .*val_annotations.txt"):
        opened("tiny_imagenet", tmp_path)


def test_a_folder_of_ones_own_with_val_instead_of_test(
    picture_folder: Callable[..., None], tmp_path: Path
) -> None:
    picture_folder(tmp_path / "my" / "birds", classes=3, train=2, test=1, side=9)
    (tmp_path / "my" / "birds" / "test").rename(tmp_path / "my" / "birds" / "val")
    table = opened("folder:my/birds", tmp_path)
    assert table.name == short_name("folder:my/birds") == "birds"
    assert table.train_labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_class_without_images_is_named(
    picture_folder: Callable[..., None], tmp_path: Path
) -> None:
    picture_folder(tmp_path / "birds", classes=2, train=2, test=1, side=9)
    (tmp_path / "birds" / "train" / "stray").mkdir()
    with pytest.raises(DataError, match=r"class 'stray' has no train images .*remove the folder"):
        opened("folder:birds", tmp_path)


def test_a_corrupt_image_is_named(picture_folder: Callable[..., None], tmp_path: Path) -> None:
    picture_folder(tmp_path / "birds", classes=2, train=2, test=1, side=9)
    file = tmp_path / "birds" / "train" / "class01" / "0002.png"
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(DataError, match=r"cannot be read.*class01/0002.png.*replace or remove"):
        opened("folder:birds", tmp_path)


def test_images_of_different_shapes_ask_for_a_size(
    picture_folder: Callable[..., None], tmp_path: Path
) -> None:
    picture_folder(tmp_path / "birds", classes=2, train=2, test=1, side=9)
    Image.fromarray(noise(1, 9, 12, 3)[0]).save(
        tmp_path / "birds" / "train" / "class01" / "0002.png"
    )
    with pytest.raises(DataError, match=r"class01/0002.png.*stream.size"):
        opened("folder:birds", tmp_path)
    assert opened("folder:birds", tmp_path, size=8).train_pixels.shape == (4, 3, 8, 8)


def test_a_class_with_test_images_only_is_named(
    picture_folder: Callable[..., None], tmp_path: Path
) -> None:
    picture_folder(tmp_path / "birds", classes=2, train=2, test=1, side=9)
    (tmp_path / "birds" / "test" / "class00").rename(tmp_path / "birds" / "test" / "owl")
    with pytest.raises(DataError, match=r"class 'owl' has test images only"):
        opened("folder:birds", tmp_path)


@pytest.mark.parametrize("source", sorted(set(SOURCES) - {"digits"}))
def test_a_missing_data_set_says_where_it_looked_and_what_helps(
    source: str, tmp_path: Path
) -> None:
    with pytest.raises(
        DataError,
        match=rf"data set {source} is missing \(looked for {tmp_path}/.+\); "
        f"fedbnn data {source} --download",
    ):
        opened(source, tmp_path)


def test_a_missing_folder_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"looked in {tmp_path}/nowhere"):
        opened("folder:nowhere", tmp_path)


@pytest.mark.parametrize(
    ("wrong", "help_"),
    [
        ("cifar1000", "did you mean 'cifar100'"),
        ("xyzzy", "known: cifar10, "),
        ("folder:", "folder:PATH"),
    ],
)
def test_an_unknown_source_is_refused_with_help(wrong: str, help_: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=help_):
        opened(wrong, tmp_path)
