"""Memory that the C library keeps."""

import sys

import pytest
import torch

from fedbnn import memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_glibc_takes_both_settings_and_still_serves_memory() -> None:
    assert memory.keep()
    assert torch.ones(5_000_000).sum() == 5_000_000


def test_elsewhere_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not memory.keep()
