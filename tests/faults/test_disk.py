"""Row: disk full, read-only directory -> exit 4, last round intact.

Root ignores chmod: a file in its place, RLIMIT_FSIZE.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fedbnn.cli.train import EXHAUSTED, traceback_to
from fedbnn.errors import Exit, RunDirectoryError
from fedbnn.protocol.state import State
from fedbnn.storage import run_dir
from fedbnn.storage.files import Rejected, Spool, write_atomic
from fedbnn.storage.ledger import Ledger

SMALL, LARGE = State({"backbone": torch.zeros(10)}), State({"backbone": torch.zeros(100_000)})


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """A disk that takes no file of more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("size", [0, 100, 4096, 65536])
def test_a_full_disk_costs_the_round_and_nothing_else(tmp_path: Path, size: int) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.commit(1, SMALL, {3: b"three"}, {"round": 1})
        with (
            no_file_above(size),
            pytest.raises(RunDirectoryError, match="cannot write: File too large") as caught,
        ):
            ledger.commit(2, LARGE, {3: b"four" * 20_000}, {"round": 2})
        assert caught.value.code == Exit.RUN_DIRECTORY
        assert (ledger.round, ledger.private(3)) == (1, b"three")
        assert not [name for name in names(tmp_path / "state") if name.startswith(".aside")]
        ledger.commit(2, LARGE, {}, {"round": 2})
    with Ledger(tmp_path) as ledger:
        assert (ledger.round, ledger.warnings) == (2, [])


def test_the_spool_and_small_files_report_a_full_disk_too(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger, no_file_above(100):
        with pytest.raises(RunDirectoryError, match="File too large"):
            Spool(tmp_path / "spool", memory=100).put(1, b"x" * 1000)
        with pytest.raises(RunDirectoryError, match="File too large"):
            run_dir.start(ledger, {"key": "x" * 1000})
        with pytest.raises(RunDirectoryError, match="File too large"):
            Rejected(tmp_path / "rejected").keep(1, "train", 2, b"x" * 1000, "reason")
    assert not (tmp_path / "state" / "config.json").exists()


def test_an_atomic_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with no_file_above(10), pytest.raises(RunDirectoryError):
        write_atomic(path, b"new" * 100)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {"file"}


@pytest.mark.parametrize("place", ["run", "run/state", "run/state/clients"])
def test_a_file_in_the_place_of_a_directory(tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("in the way")
    with pytest.raises(RunDirectoryError, match="cannot write") as caught:
        Ledger(tmp_path / "run")
    assert str(tmp_path / "run") in str(caught.value)
    assert (tmp_path / place).read_text() == "in the way"


def test_a_directory_that_goes_away_under_the_run(tmp_path: Path) -> None:
    with Ledger(tmp_path / "run") as ledger:
        ledger.commit(1, SMALL, {}, {"round": 1})
        (tmp_path / "run" / "state").rename(tmp_path / "moved")
        (tmp_path / "run" / "state").write_text("in the way")
        with pytest.raises(RunDirectoryError, match="cannot write"):
            ledger.commit(2, SMALL, {4: b"four"}, {"round": 2})
    (tmp_path / "run" / "state").unlink()
    (tmp_path / "moved").rename(tmp_path / "run" / "state")
    with Ledger(tmp_path / "run") as ledger:
        assert (ledger.round, ledger.warnings) == (1, [])


@pytest.mark.parametrize("number", EXHAUSTED)
def test_no_more_room_or_open_files_is_one_line_wherever_it_happens(
    tmp_path: Path, number: int
) -> None:
    with (
        pytest.raises(RunDirectoryError, match=r"cannot write: .* what was committed is intact"),
        traceback_to(tmp_path / "log.txt"),
    ):
        raise OSError(number, os.strerror(number))
    assert "Traceback" in (tmp_path / "log.txt").read_text()
