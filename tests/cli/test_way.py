"""How many of our modules a start goes through, and a round: the way through the house is short."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from fedbnn.federation import server
from tests.cli.command import ROOT, fedbnn

OURS = tuple(str(ROOT / name) for name in ("fedbnn/", "datamodules/", "lightning_modules/"))
START, ROUND = 34, 43


class Way:
    """The files of ours whose functions run before the first round, and in each round."""

    def __init__(self) -> None:
        self.start: set[str] = set()
        self.rounds: list[set[str]] = []
        self._now: set[str] = self.start

    def watch(self, frame: FrameType, event: str, _argument: object) -> None:
        """A profile function: takes note of every Python function that is called."""
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(OURS):
            return
        if frame.f_code.co_name == "__getattr__":  # jsonargparse asks the package for every name
            return
        if frame.f_code is server.play.__code__:
            self._now = set()
            if event == "call":
                self.rounds.append(self._now)
        if event == "call":
            self._now.add(str(Path(frame.f_code.co_filename).relative_to(ROOT)))


@contextmanager
def watched() -> Iterator[Way]:
    """Watch this thread."""
    way = Way()
    sys.setprofile(way.watch)
    try:
        yield way
    finally:
        sys.setprofile(None)


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory, finished: Path) -> Way:
    """A tiny run whose modules are all imported already."""
    folder = tmp_path_factory.mktemp("way")
    config = finished.parent / "tiny.yaml"
    words = ("--stream.rounds_per_task", 1, "--report", "false", "--run_dir", folder / "run")
    with watched() as way:
        assert fedbnn("train", "--config", config, *words) == 0
    return way


def test_a_start_goes_through_few_modules(way: Way) -> None:
    assert len(way.start) <= START, sorted(way.start)


def test_a_round_goes_through_few_modules(way: Way) -> None:
    assert len(way.rounds) == 2
    longest = max(way.rounds, key=len)
    assert len(longest) <= ROUND, sorted(longest)
