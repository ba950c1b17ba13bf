"""Downloads from a server on this machine: official archives, a wrong checksum, silence, nobody."""

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from datamodules import sources
from datamodules.sources import DatasetRegistry, datasets
from fedbnn.errors import DataError


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which its files are served."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def registry(data_dir: Path) -> DatasetRegistry:
    return DatasetRegistry(data_dir, data_dir / ".cache", None, download=True)


def zipped_tiny(folder: Path, made: Path, write: Callable[[Path], None]) -> str:
    """`tiny-imagenet-200.zip` as published, and its MD5 sum."""
    write(made)
    shutil.make_archive(str(folder / "tiny-imagenet-200"), "zip", made, "tiny-imagenet-200")
    return sources.download_and_extract_archive.__globals__["calculate_md5"](
        folder / "tiny-imagenet-200.zip"
    )


def test_cifar100_is_fetched_unpacked_and_read(
    served, cifar100, monkeypatch, tmp_path, capfd
) -> None:
    folder, address = served
    pixels = cifar100(tmp_path / "made")
    archive = shutil.make_archive(
        str(folder / "cifar-100-python"), "gztar", tmp_path / "made", "cifar-100-python"
    )
    monkeypatch.setattr(datasets.CIFAR100, "url", f"{address}/{Path(archive).name}")
    monkeypatch.setattr(datasets.CIFAR100, "tgz_md5", None)
    table = registry(tmp_path / "data").open("cifar100")
    assert np.array_equal(table.train_pixels.numpy(), pixels["train"])
    assert capfd.readouterr() == ("", "")


def test_damaged_files_are_fetched_again_when_downloads_are_allowed(
    served, cifar100, monkeypatch, tmp_path
) -> None:
    folder, address = served
    pixels = cifar100(tmp_path / "made")
    archive = shutil.make_archive(
        str(folder / "cifar-100-python"), "gztar", tmp_path / "made", "cifar-100-python"
    )
    monkeypatch.setattr(datasets.CIFAR100, "url", f"{address}/{Path(archive).name}")
    monkeypatch.setattr(datasets.CIFAR100, "tgz_md5", None)
    shutil.copytree(tmp_path / "made", tmp_path / "data")
    (tmp_path / "data" / "cifar-100-python" / "test").write_bytes(b"damaged")
    table = registry(tmp_path / "data").open("cifar100")
    assert np.array_equal(table.test_pixels.numpy(), pixels["test"])


def test_tiny_imagenet_is_fetched_and_unpacked(
    served, tiny_imagenet, monkeypatch, tmp_path
) -> None:
    folder, address = served
    monkeypatch.setattr(
        sources, "TINY_IMAGENET_MD5", zipped_tiny(folder, tmp_path / "made", tiny_imagenet)
    )
    monkeypatch.setattr(sources, "TINY_IMAGENET_URL", f"{address}/tiny-imagenet-200.zip")
    table = registry(tmp_path / "data").open("tiny_imagenet")
    assert table.train_pixels.shape == (4, 3, 64, 64)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        ".cache",
        "tiny-imagenet-200",
    ]


def test_a_wrong_checksum_leaves_nothing_behind(
    served, tiny_imagenet, monkeypatch, tmp_path
) -> None:
    folder, address = served
    zipped_tiny(folder, tmp_path / "made", tiny_imagenet)
    monkeypatch.setattr(sources, "TINY_IMAGENET_URL", f"{address}/tiny-imagenet-200.zip")
    with pytest.raises(DataError, match=r"tiny_imagenet could not be downloaded: .*corrupted"):
        registry(tmp_path / "data").open("tiny_imagenet")
    assert list((tmp_path / "data").iterdir()) == []


def test_a_silent_server_is_given_up(silent, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sources, "SECONDS_OF_SILENCE", 0.3)
    monkeypatch.setattr(sources, "TINY_IMAGENET_URL", f"{silent}/tiny-imagenet-200.zip")
    started = time.monotonic()
    with pytest.raises(DataError, match=r"could not be downloaded.*timed out.*check the network"):
        registry(tmp_path / "data").open("tiny_imagenet")
    assert time.monotonic() - started < 5
    assert socket.getdefaulttimeout() is None


def test_nobody_there_ends_at_once(monkeypatch, tmp_path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setattr(datasets.CIFAR10, "url", f"{address}/cifar-10-python.tar.gz")
    with pytest.raises(DataError, match=rf"cifar10 could not be downloaded: .*refused.*{tmp_path}"):
        registry(tmp_path).open("cifar10")


def test_a_page_that_is_not_there_is_said(served, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sources, "TINY_IMAGENET_URL", f"{served[1]}/moved.zip")
    with pytest.raises(DataError, match=r"tiny_imagenet could not be downloaded: .*404"):
        registry(tmp_path / "data").open("tiny_imagenet")
