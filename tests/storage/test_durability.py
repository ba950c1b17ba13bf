"""A power cut loses nothing: files and directories are flushed before and after they are renamed.

`kill -9` cannot show this, so the calls themselves are recorded, in their order.
"""

import os
from pathlib import Path

import pytest

from fedbnn.protocol.state import State
from fedbnn.storage.files import write_atomic
from fedbnn.storage.ledger import Ledger

Calls = list[tuple[str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What is flushed and renamed, by name."""
    seen: Calls = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def flushed(descriptor: int) -> None:
        seen.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def renamed(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        seen.append(("rename", Path(target).name))
        rename(source, target)

    def replaced(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        seen.append(("rename", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", replaced)
    return seen


def between(calls: Calls, name: str) -> tuple[Calls, Calls]:
    """What happened before and after something got this name."""
    place = calls.index(("rename", name))
    return calls[:place], calls[place + 1 :]


def test_a_file_is_flushed_before_it_gets_its_name_and_the_name_after(
    tmp_path: Path, calls: Calls
) -> None:
    write_atomic(tmp_path / "results.json", b"{}")
    before, after = between(calls, "results.json")
    assert [what for what, name in before if name.endswith("results.json")] == ["flush"]
    assert ("flush", tmp_path.name) in after


def test_a_round_is_flushed_file_by_file_before_its_rename_and_its_name_after(
    tmp_path: Path, calls: Calls
) -> None:
    with Ledger(tmp_path) as ledger:
        calls.clear()
        ledger.commit(1, State({}), {3: b"kept"}, {"round": 1})
    before, after = between(calls, "round-000001")
    for name in ("manifest.json", "state.safetensors", "000001.json", "records"):
        assert ("flush", name) in before
    assert any(what == "flush" and name.endswith("round-000001") for what, name in before)
    assert ("flush", "state") in after


def test_what_a_client_keeps_is_on_the_disk_before_the_round_that_names_it(
    tmp_path: Path, calls: Calls
) -> None:
    with Ledger(tmp_path) as ledger:
        calls.clear()
        ledger.commit(1, State({}), {3: b"kept"}, {"round": 1})
    before, _ = between(calls, "round-000001")
    flushed = [name for what, name in before if what == "flush"]
    kept = next(place for place, name in enumerate(flushed) if name.endswith("3-r1.safetensors"))
    assert "clients" in flushed[kept:]
