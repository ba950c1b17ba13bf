"""Memory that the C library keeps, and gives back when it is asked to."""

import sys
from pathlib import Path

import pytest
import torch

from fedbnn import memory

glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")


def resident() -> float:
    """Megabytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@glibc
def test_glibc_takes_both_settings_and_still_serves_memory() -> None:
    assert memory.keep()
    assert torch.ones(5_000_000).sum() == 5_000_000


@glibc
def test_what_is_kept_is_given_back_also_from_between_what_is_in_use() -> None:
    assert memory.keep()
    memory.trim()
    before = resident()
    blocks = [torch.ones(2**20) for _ in range(100)]
    used = blocks[::10]
    del blocks
    assert memory.trim()
    assert resident() - before < 80
    assert sum(map(torch.sum, used)) == 10 * 2**20


def test_elsewhere_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not memory.keep()
    assert not memory.trim()
