"""Rows: newest round truncated or one byte flipped; all rounds damaged; newer format; two processes
on one directory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedbnn.errors import Exit, RunDirectoryError
from fedbnn.protocol.state import State, digest
from fedbnn.storage.files import as_json
from fedbnn.storage.ledger import Ledger

FILES = ("round-000003/state.safetensors", "round-000003/manifest.json", "records/000003.json")


def state_of(number: int) -> State:
    return State({"backbone": torch.full((3,), float(number))})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with Ledger(tmp_path, keep=3) as ledger:
        for number in (1, 2, 3):
            ledger.commit(
                number, state_of(number), {number: b"private %d" % number}, {"round": number}
            )
    return tmp_path


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset % len(content)] ^= 1
    path.write_bytes(content)


def assert_falls_back_and_goes_on(run_dir: Path, to: int) -> None:
    with Ledger(run_dir, keep=3) as ledger:
        latest = ledger.latest()
        assert latest is not None
        assert latest.round == to
        assert torch.equal(latest.state["backbone"], state_of(to)["backbone"])
        assert "is damaged" in ledger.warnings[0]
        assert ledger.private(3) is None
        ledger.commit(to + 1, state_of(to + 1), {3: b"again"}, {"round": to + 1})
    with Ledger(run_dir, keep=3) as ledger:
        assert (ledger.round, ledger.private(3), ledger.warnings) == (to + 1, b"again", [])


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("where", [0, 7, 60, -2])
def test_a_flipped_bit_falls_back_one_round(run_dir: Path, file: str, where: int) -> None:
    flip(run_dir / "state" / file, where)
    assert_falls_back_and_goes_on(run_dir, to=2)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_falls_back_one_round(run_dir: Path, file: str, share: float) -> None:
    path = run_dir / "state" / file
    path.write_bytes(path.read_bytes()[: int(len(path.read_bytes()) * share)])
    assert_falls_back_and_goes_on(run_dir, to=2)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_falls_back_one_round(run_dir: Path, file: str) -> None:
    (run_dir / "state" / file).unlink()
    assert_falls_back_and_goes_on(run_dir, to=2)


def test_a_damaged_client_file_falls_back_one_round(run_dir: Path) -> None:
    flip(run_dir / "state" / "clients" / "3-r3.safetensors", 0)
    assert_falls_back_and_goes_on(run_dir, to=2)


def test_two_damaged_rounds_fall_back_two(run_dir: Path) -> None:
    for number in (2, 3):
        flip(run_dir / "state" / f"round-00000{number}" / "state.safetensors", 50)
    assert_falls_back_and_goes_on(run_dir, to=1)


def test_all_damaged_is_an_error_and_nothing_is_restarted(run_dir: Path) -> None:
    for number in (1, 2, 3):
        flip(run_dir / "state" / f"round-00000{number}" / "state.safetensors", 50)
    before = sorted(run_dir.rglob("*"))
    with pytest.raises(RunDirectoryError, match="every kept round is damaged") as caught:
        Ledger(run_dir)
    assert caught.value.code == Exit.RUN_DIRECTORY
    assert sorted(run_dir.rglob("*")) == before


def test_a_round_under_a_wrong_name_is_damaged(run_dir: Path) -> None:
    (run_dir / "state" / "round-000003").rename(run_dir / "state" / "round-000004")
    with Ledger(run_dir) as ledger:
        assert ledger.round == 2
        assert "its manifest is that of round 3" in ledger.warnings[0]


def test_a_newer_format_is_not_guessed_at(run_dir: Path) -> None:
    path = run_dir / "state" / "round-000003" / "manifest.json"
    content = json.loads(path.read_bytes())
    content["format"] = 9
    del content["sha256"]
    path.write_bytes(as_json({**content, "sha256": digest(as_json(content))}))
    for _ in range(2):
        with pytest.raises(RunDirectoryError, match=r"in format 9, this version reads 2"):
            Ledger(run_dir)


def test_two_writers_in_one_process(run_dir: Path) -> None:
    with Ledger(run_dir), pytest.raises(RunDirectoryError, match="in use by pid"):
        Ledger(run_dir)
    with Ledger(run_dir) as ledger:
        assert ledger.round == 3


def test_another_process_is_named_and_a_dead_one_does_not_block(run_dir: Path) -> None:
    opened = "import sys; from fedbnn.storage.ledger import Ledger; _ = Ledger(sys.argv[1])"
    hold = f"{opened}; print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(run_dir)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder.stdin, holder.stdout:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match=f"in use by pid {holder.pid} "):
            Ledger(run_dir)
        holder.kill()
        holder.wait()
    with Ledger(run_dir) as ledger:
        assert ledger.round == 3
