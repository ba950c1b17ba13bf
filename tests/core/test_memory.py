"""Memory that the C library keeps, and gives back when it is asked to."""

import subprocess
import sys

import pytest
import torch

from fedbnn import machine

glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
MB = 2**20


@glibc
def test_glibc_takes_both_settings_and_still_serves_memory() -> None:
    assert machine.keep_memory()
    assert torch.ones(5_000_000).sum() == 5_000_000


def kept_between_blocks() -> list[torch.Tensor]:
    """Some blocks, between which ten times as much is free."""
    blocks = [torch.ones(2**20) for _ in range(110)]
    return blocks[::11]


@glibc
def test_what_is_kept_is_given_back_also_from_between_what_is_in_use() -> None:
    assert machine.keep_memory()
    machine.trim_memory()
    before = machine.resident()
    used = kept_between_blocks()
    assert machine.resident() - before > 350 * MB
    machine.trim_memory()
    assert machine.resident() - before < 100 * MB
    assert sum(map(torch.sum, used)) == 10 * 2**20


def test_elsewhere_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not machine.keep_memory()
    used = torch.ones(5_000_000)
    machine.trim_memory()
    assert used.sum() == 5_000_000


def test_at_the_end_of_a_command_nobody_looks_for_garbage() -> None:
    """A circle that would be found there is not; the process ends without the search."""
    said = (
        "class Circle:\n"
        "    def __init__(self): self.me = self\n"
        "    def __del__(self): print('searched')\n"
        "Circle()"
    )
    command = [sys.executable, "-c"]
    plain = subprocess.run([*command, said], capture_output=True, text=True)
    assert plain.stdout == "searched\n"
    with_it = "from fedbnn.machine import kept\nwith kept(): pass\n"
    ours = subprocess.run([*command, with_it + said], capture_output=True, text=True)
    assert (ours.stdout, ours.stderr, ours.returncode) == ("", "", 0)
