"""The cache: decoded once, whole or not there, checked at every start, rebuilt when damaged."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datamodules.cache import Located, Original, Split, cached, fingerprint
from fedbnn.errors import DataError
from fedbnn.storage import files

TRAIN = np.random.default_rng(0).integers(0, 256, (700, 6, 5, 3), dtype=np.uint8)
TEST = np.random.default_rng(1).integers(0, 256, (9, 6, 5, 3), dtype=np.uint8)
FILES = ["train_pixels.npy", "train_labels.npy", "test_pixels.npy", "test_labels.npy", "meta.json"]


class Counted:
    """A data set that counts how often it is read."""

    def __init__(self, print_: str = "a" * 16, labels: int = 3) -> None:
        self.reads = 0
        self.located = Located(print_, self.read)
        self.labels = labels

    def read(self) -> Original:
        self.reads += 1
        parts = [
            Split(images, np.arange(len(images)) % self.labels, "made up")
            for images in (TRAIN, TEST)
        ]
        return Original(("a", "b", "c"), *parts)


def test_the_cache_holds_the_pixels_and_the_labels(tmp_path: Path) -> None:
    table = cached("toy", Counted().located, None, tmp_path)
    assert np.array_equal(table.train_pixels.numpy(), TRAIN.transpose(0, 3, 1, 2))
    assert np.array_equal(table.test_pixels.numpy(), TEST.transpose(0, 3, 1, 2))
    assert table.train_labels.tolist() == [number % 3 for number in range(700)]
    assert table.classes == ("a", "b", "c")


def test_statistics_are_those_of_the_train_pixels(tmp_path: Path) -> None:
    table = cached("toy", Counted().located, None, tmp_path)
    assert table.mean == pytest.approx((TRAIN / 255).mean((0, 1, 2)))
    assert table.deviation == pytest.approx((TRAIN / 255).std((0, 1, 2)))


def test_a_second_start_reads_the_cache_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Counted()
    first, second = (cached("toy", data.located, None, tmp_path) for _ in range(2))
    assert data.reads == 1
    assert torch.equal(first.train_pixels, second.train_pixels)
    assert not caplog.records


def test_size_and_fingerprint_are_part_of_the_key(tmp_path: Path) -> None:
    data = Counted()
    cached("toy", data.located, None, tmp_path)
    assert cached("toy", data.located, 4, tmp_path).train_pixels.shape == (700, 3, 4, 4)
    cached("toy", Counted("b" * 16).located, None, tmp_path)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 3


def rewrite(file: Path, content: bytes) -> None:
    """Other bytes, and a time of change that a clock of any grain would show."""
    later = file.stat().st_mtime_ns + 10**9
    file.write_bytes(content)
    os.utime(file, ns=(later, later))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone"])
def test_damage_is_found_said_and_repaired(
    name: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Counted()
    cached("toy", data.located, None, tmp_path)
    file = next(tmp_path.rglob(name))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.unlink() if damage == "gone" else rewrite(
        file, content if damage == "flipped" else content[:-3]
    )
    with caplog.at_level(logging.WARNING):
        table = cached("toy", data.located, None, tmp_path)
    assert np.array_equal(table.train_pixels.numpy(), TRAIN.transpose(0, 3, 1, 2))
    assert data.reads == 2
    assert [name.split(".")[0] in record.getMessage() for record in caplog.records] == [True]
    cached("toy", data.located, None, tmp_path)
    assert data.reads == 2


def test_opening_hashes_nothing_that_is_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached("toy", Counted().located, None, tmp_path)
    monkeypatch.setattr(files, "digest", None)
    assert len(cached("toy", Counted().located, None, tmp_path).train_labels) == 700


def test_a_copied_cache_is_hashed_once_and_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, hashed = Counted(), []
    cached("toy", data.located, None, tmp_path)
    for file in tmp_path.rglob("*.npy"):
        rewrite(file, file.read_bytes())
    digest = files.digest
    monkeypatch.setattr(files, "digest", lambda file: hashed.append(file.name) or digest(file))
    for _ in range(2):
        cached("toy", data.located, None, tmp_path)
    assert sorted(hashed) == sorted(name for name in FILES if name.endswith(".npy"))
    assert data.reads == 1


def test_a_flipped_bit_that_left_no_trace_is_found_by_verifying(tmp_path: Path) -> None:
    data = Counted()
    cached("toy", data.located, None, tmp_path)
    file = next(tmp_path.rglob("test_pixels.npy"))
    stamp, content = file.stat(), bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    cached("toy", data.located, None, tmp_path)
    assert data.reads == 1
    table = cached("toy", data.located, None, tmp_path, verify=True)
    assert data.reads == 2
    assert np.array_equal(table.test_pixels.numpy(), TEST.transpose(0, 3, 1, 2))


def test_an_interrupted_build_leaves_nothing_behind(tmp_path: Path) -> None:
    class Interrupted(Split):
        def read(self, index: int, *how: Any) -> np.ndarray:
            if index == 600:
                raise KeyboardInterrupt
            return super().read(index, *how)

    original = Counted().read()
    broken = replace(original, train=Interrupted(TRAIN, original.train.labels, "made up"))
    with pytest.raises(KeyboardInterrupt):
        cached("toy", Located("a" * 16, lambda: broken), None, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_writing_into_the_mapped_images_never_reaches_the_disk(tmp_path: Path) -> None:
    data = Counted()
    cached("toy", data.located, None, tmp_path).train_pixels.zero_()
    assert cached("toy", data.located, None, tmp_path).train_pixels.any()
    assert data.reads == 1


def test_a_label_out_of_range_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"label 3 is out of range, there are 3 classes \(made up, image 3\)"
    ):
        cached("toy", Counted(labels=4).located, None, tmp_path)


def test_a_cache_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    occupied = tmp_path / "cache"
    occupied.write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"cannot be written.*stream.cache_dir"):
        cached("toy", Counted().located, None, occupied)


def test_a_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    before = fingerprint([tmp_path / "a"])
    assert before == fingerprint([tmp_path / "a"])
    (tmp_path / "a" / "y").write_text("2")
    assert fingerprint([tmp_path / "a"]) != before


def test_a_fingerprint_changes_with_the_names_of_classes_and_with_who_is_in_them(
    tmp_path: Path,
) -> None:
    top = tmp_path / "a"
    (top / "cat").mkdir(parents=True)
    (top / "dog").mkdir()
    (top / "cat" / "1").write_text("1")
    (top / "cat" / "2").write_text("2")
    before = fingerprint([top])
    (top / "cat" / "2").rename(top / "dog" / "2")
    moved = fingerprint([top])
    (top / "dog").rename(top / "fox")
    assert len({before, moved, fingerprint([top])}) == 3
