"""Rounds and records belong to one run: what comes from another, or was changed, is found."""

import os
import shutil
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from fedbnn.errors import RunDirectoryError
from fedbnn.protocol.state import State, digest
from fedbnn.storage import run_dir as runs
from fedbnn.storage.files import append_line, sealed, unsealed
from fedbnn.storage.ledger import METRICS, Ledger


def played(run_dir: Path, seed: int, rounds: int = 4, seconds: float = 1.0) -> Path:
    """A run whose states depend on its seed, and whose records on the day."""
    with Ledger(run_dir) as ledger:
        runs.start(ledger, {"seed": seed})
        for number in range(1, rounds + 1):
            state = State({"backbone": torch.full((3,), float(10 * seed + number))})
            record = {"round": number, "seconds": seconds}
            ledger.commit(number, state, {number % 2: b"kept"}, record)
            append_line(run_dir / METRICS, record)
    return run_dir


def newest(run_dir: Path) -> tuple[int, float, str]:
    """Which round is taken, its state, and what is said."""
    with Ledger(run_dir) as ledger:
        latest = ledger.latest()
        assert latest is not None
        return latest.round, float(latest.state["backbone"][0]), " ".join(ledger.warnings)


def transplant(source: Path, target: Path, *rounds: int) -> None:
    """Rounds of one run in the place of those of another, with all they need."""
    for number in rounds:
        whole = f"round-{number:06d}"
        shutil.copytree(source / "state" / whole, target / "state" / whole, dirs_exist_ok=True)
        for own in (f"records/{number:06d}.json", f"clients/{number % 2}-r{number}.safetensors"):
            shutil.copy(source / "state" / own, target / "state" / own)


def test_a_round_of_another_run_is_not_taken(tmp_path: Path) -> None:
    ours, theirs = played(tmp_path / "ours", 0), played(tmp_path / "theirs", 1)
    transplant(theirs, ours, 4)
    round, value, said = newest(ours)
    assert (round, value) == (3, 3.0)
    assert "round 4 is damaged (it is a round of another run)" in said


def test_a_round_of_a_run_with_the_same_settings_does_not_follow(tmp_path: Path) -> None:
    ours, theirs = played(tmp_path / "ours", 0), played(tmp_path / "theirs", 0, seconds=2.0)
    transplant(theirs, ours, 4)
    round, _, said = newest(ours)
    assert (round, "round 4 is damaged (it does not follow the round before" in said) == (3, True)


def test_all_rounds_of_another_run_are_refused(tmp_path: Path) -> None:
    ours, theirs = played(tmp_path / "ours", 0), played(tmp_path / "theirs", 1)
    transplant(theirs, ours, 2, 3, 4)
    with pytest.raises(RunDirectoryError, match=r"every kept round .* a round of another run"):
        Ledger(ours)


def test_another_configuration_in_its_place_is_found(tmp_path: Path) -> None:
    ours, theirs = played(tmp_path / "ours", 0), played(tmp_path / "theirs", 1)
    shutil.copy(theirs / "state" / "config.json", ours / "state" / "config.json")
    with pytest.raises(RunDirectoryError, match="a round of another run"):
        Ledger(ours)


@pytest.mark.parametrize("name", ["manifest.json", "state.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"{}"])
def test_a_kept_round_that_is_looked_at_is_whole_or_damaged(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    """`report --oracle` looks at all of them."""
    run = played(tmp_path / "run", 0)
    assert runs.kept(run, 3).tensors
    path = run / "state" / "round-000003" / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(RunDirectoryError, match="round 3 is damaged"):
        runs.kept(run, 3)


def test_a_damaged_manifest_does_not_cost_the_round_after_it(tmp_path: Path) -> None:
    ours = played(tmp_path / "ours", 0)
    (ours / "state" / "round-000003" / "manifest.json").write_text("{}")
    assert newest(ours) == (4, 4.0, "")


def test_deleted_rounds_are_not_begun_again_without_a_word(tmp_path: Path) -> None:
    ours = played(tmp_path / "ours", 0)
    for path in (ours / "state").glob("round-*"):
        shutil.rmtree(path)
    with pytest.raises(RunDirectoryError, match=r"rounds of this run are gone.*metrics\.jsonl"):
        Ledger(ours)


def test_a_file_of_one_client_costs_that_client_alone(tmp_path: Path) -> None:
    ours = played(tmp_path / "ours", 0)
    for path in (ours / "state" / "clients").glob("1-*"):
        path.write_bytes(b"damaged")
    with Ledger(ours) as ledger:
        assert ledger.round == 4
        assert (ledger.private(0), ledger.private(1)) == (b"kept", None)
        assert "private state of client 1 is damaged" in ledger.warnings[-1]


def left(run_dir: Path) -> Path:
    """A complete run with a few files."""
    played(run_dir, 0)
    (run_dir / "figures").mkdir()
    for name in ("results.json", "model.safetensors", "figures/curve.png", "log.txt"):
        (run_dir / name).write_text(name)
    with Ledger(run_dir) as ledger:
        runs.finish(ledger)
    return run_dir


CHANGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: path.write_bytes(b"R" + path.read_bytes()[1:]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("name", ["results.json", "figures/curve.png", "metrics.jsonl"])
def test_every_file_a_run_left_has_its_digest(tmp_path: Path, name: str, how: str) -> None:
    run_dir = left(tmp_path)
    assert runs.changed(run_dir) == []
    CHANGES[how](run_dir / name)
    assert runs.changed(run_dir) == [name]
    with pytest.raises(RunDirectoryError, match=f"{name} is not as the run left it"):
        runs.intact(run_dir, name)
    assert runs.intact(run_dir, "model.safetensors") == run_dir


def test_what_is_written_again_is_noted_and_the_log_may_grow(tmp_path: Path) -> None:
    run_dir = left(tmp_path)
    for name in ("figures/curve.png", "log.txt"):
        (run_dir / name).write_text("new")
    runs.sealed_again(run_dir, [run_dir / "figures/curve.png"])
    assert runs.changed(run_dir) == []


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", sealed(1, {"round": 3, "files": {}})])
def test_a_run_whose_end_is_damaged_is_not_complete(tmp_path: Path, content: bytes) -> None:
    run_dir = left(tmp_path)
    (run_dir / "state" / "finished.json").write_bytes(content)
    with Ledger(run_dir) as ledger:
        assert not runs.finished(ledger)


def test_last_is_the_run_begun_last_whatever_the_clock_says(tmp_path: Path) -> None:
    for name in ("first", "second"):
        played(tmp_path / name, 0)
        runs.note_last(tmp_path / name, tmp_path)
    os.utime(tmp_path / "second" / "state", (0, 0))
    assert runs.find("last", tmp_path) == tmp_path / "second"
    shutil.rmtree(tmp_path / "second")
    assert runs.find("last", tmp_path) == tmp_path / "first"


def _note_often(run_dir: Path, root: Path) -> None:
    for _ in range(200):
        runs.note_last(run_dir, root)


def test_runs_that_begin_at_the_same_moment_do_not_disturb_each_other(tmp_path: Path) -> None:
    """As those of a comparison do: each run is a process, and all write which was the last."""
    names = [tmp_path / f"run-{number}" for number in range(3)]
    begun = [
        get_context("fork").Process(target=_note_often, args=(name, tmp_path)) for name in names
    ]
    for process in begun:
        process.start()
    for process in begun:
        process.join()
    assert [process.exitcode for process in begun] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == [".last"]
    assert (tmp_path / ".last").read_text() in map(str, names)


def test_a_run_elsewhere_is_not_the_last_here(tmp_path: Path) -> None:
    played(tmp_path / "runs" / "here", 0)
    runs.note_last(played(tmp_path / "there", 0), tmp_path / "runs")
    assert runs.find("last", tmp_path / "runs") == tmp_path / "runs" / "here"


BODIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda body: [],
    "nothing": lambda body: {},
    "another key": lambda body: {**body, "x": 1},
    "clients that are none": lambda body: {**body, "clients": {"x": ["1-r1.safetensors", ""]}},
    "clients in a list": lambda body: {**body, "clients": [1]},
    "a client with one word": lambda body: {**body, "clients": {"1": ["1-r1.safetensors"]}},
    "a file elsewhere": lambda body: {**body, "clients": {"1": ["../../../etc/passwd", "0" * 64]}},
    "a number for a digest": lambda body: {**body, "state": 7},
    "no records": lambda body: {**body, "records": []},
    "records that are numbers": lambda body: {**body, "records": [1, 2, 3, 4]},
    "a round in words": lambda body: {**body, "round": "4"},
}


@pytest.mark.parametrize("how", BODIES)
def test_a_manifest_with_a_right_digest_and_strange_contents_is_damaged(
    tmp_path: Path, how: str
) -> None:
    run = played(tmp_path / "run", 0)
    path = run / "state" / "round-000004" / "manifest.json"
    format, body = unsealed(path)
    path.write_bytes(sealed(format, BODIES[how](body)))
    round, _, said = newest(run)
    assert (round, "round 4 is damaged" in said) == (3, True)


def resealed(run: Path, state: bytes | None = None, record: bytes | None = None) -> None:
    """The newest round with other files, and every digest as it should be."""
    place = run / "state" / "round-000004"
    format, body = unsealed(place / "manifest.json")
    if state is not None:
        (place / "state.safetensors").write_bytes(state)
        body["state"] = digest(state)
    if record is not None:
        (run / "state" / "records" / "000004.json").write_bytes(record)
        body["records"][-1] = digest(record)
    (place / "manifest.json").write_bytes(sealed(format, body))


@pytest.mark.parametrize("state", [b"", b"x" * 100, b"\xff" * 8 + b"{}"])
def test_a_state_that_is_none_is_one_line_whatever_its_digest(tmp_path: Path, state: bytes) -> None:
    run = played(tmp_path / "run", 0)
    resealed(run, state=state)
    with pytest.raises(RunDirectoryError, match="no round of ours"):
        newest(run)


@pytest.mark.parametrize("record", [b"\xff\n", b"7\n", b"[" * 10**5 + b"\n", b"{\n"])
def test_a_record_that_is_none_is_one_line_whatever_its_digest(
    tmp_path: Path, record: bytes
) -> None:
    run = played(tmp_path / "run", 0)
    resealed(run, record=record)
    with Ledger(run) as ledger, pytest.raises(RunDirectoryError, match="no record of ours"):
        runs.reconcile(ledger)
    with pytest.raises(RunDirectoryError, match="no round of ours"):
        newest(run)


@pytest.mark.parametrize("name", ["x-y", "1-", "-1", "4-2-1", "99999999999999999999-3", "é-1"])
def test_a_late_answer_of_another_name_is_none(tmp_path: Path, name: str) -> None:
    run = played(tmp_path / "run", 0)
    (run / "state" / "late").mkdir()
    (run / "state" / "late" / f"{name}.safetensors").write_bytes(b"x")
    with Ledger(run) as ledger:
        assert ledger.late(5) == {}


@pytest.mark.parametrize("body", [{}, [], {"round": 4, "files": []}, {"round": "4", "files": {}}])
def test_an_end_of_other_types_is_none(tmp_path: Path, body: Any) -> None:
    run = played(tmp_path / "run", 0)
    (run / "state" / "finished.json").write_bytes(sealed(1, body))
    with Ledger(run) as ledger:
        assert not runs.finished(ledger)
    assert runs.changed(run) == []


def test_what_was_begun_is_counted_in_the_chain_until_it_is_committed(tmp_path: Path) -> None:
    ours = played(tmp_path / "ours", 0)
    for times in (1, 2):
        with Ledger(ours) as ledger:
            ledger.begin()
            assert ledger.begun == times
    with Ledger(ours) as ledger, Ledger(tmp_path / "other") as other:
        runs.start(other, {"seed": 0})
        other.branch(ledger, 4)
        assert (ledger.begun, other.begun) == (2, 0)
        ledger.commit(5, State({"backbone": torch.zeros(3)}), {}, {"round": 5})
        assert ledger.begun == 0
    assert newest(ours) == (5, 0.0, "")


def test_before_the_first_round_there_is_no_chain(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.begin()
        assert (ledger.begun, ledger.latest()) == (0, None)
