"""metrics.jsonl has each round once, whatever happened; what is not written is said in one line."""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbnn.errors import RunDirectoryError
from fedbnn.protocol.state import State
from fedbnn.storage.files import append_line
from fedbnn.storage.ledger import METRICS, Ledger
from fedbnn.storage.run_dir import environment, reconcile, records, write_json


def rounds(run_dir: Path) -> list[int]:
    return [record["round"] for record in records(run_dir)]


def filled(run_dir: Path, last: int) -> Path:
    for number in range(1, last + 1):
        append_line(run_dir / METRICS, {"round": number, "value": number / 2})
    return run_dir


def test_what_is_appended_is_read_back(tmp_path) -> None:
    assert records(tmp_path) == []
    assert rounds(filled(tmp_path, 3)) == [1, 2, 3]


def test_a_line_is_on_the_disk_before_append_returns(tmp_path, monkeypatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    append_line(tmp_path / METRICS, {"round": 1})
    assert synced == [len('{"round": 1}\n')]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Three committed rounds, each with its line."""
    with Ledger(tmp_path, keep=1) as ledger:
        for number in range(1, 4):
            record = {"round": number, "value": number / 2}
            ledger.commit(number, State({}), {}, record)
            append_line(tmp_path / METRICS, record)
        yield ledger


def test_what_is_as_it_was_is_nothing_to_speak_of(ledger: Ledger) -> None:
    before = records(ledger.run_dir)
    assert reconcile(ledger) == before == records(ledger.run_dir)
    assert not ledger.warnings


def test_a_committed_round_without_its_line_gets_it_back(ledger: Ledger) -> None:
    path = ledger.run_dir / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert reconcile(ledger)[-1] == {"round": 3, "value": 1.5} == records(ledger.run_dir)[-1]
    assert not ledger.warnings


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_line_cut_short_by_a_crash_is_replaced(ledger: Ledger, cut: int) -> None:
    path = ledger.run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    reconcile(ledger)
    append_line(ledger.run_dir / METRICS, {"round": 4})
    assert rounds(ledger.run_dir) == [1, 2, 3, 4]
    assert not ledger.warnings


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


SPOILT = {
    "a digit": (lambda a, b, c: [a, b.replace(b"1.0", b"9.0"), c], "line 2 of .* not what"),
    "a line less": (lambda a, b, c: [a, c], "line 2 of .* is not what"),
    "swapped": (lambda a, b, c: [b, a, c], "line 1 of .* line 2 of"),
    "twice": (lambda a, b, c: [a, b, c, c], "1 lines of no committed round"),
    "a foreign one": (lambda a, b, c: [a, b, c, b'{"round": 4}\n'], "1 lines of no committed"),
    "of another run": (lambda a, b, c: [b'{"round": 1}\n'] * 3, "line 1 .* line 2 .* line 3"),
    "no text": (lambda a, b, c: [a, b"\xff\xfe\n", c], "line 2 of"),
    "types": (lambda a, b, c: [a, b"[[[7]]]\n", c], "line 2 of"),
    "gone": (lambda a, b, c: [], "line 1 of .* is missing.* line 2 of .* is missing"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_was_changed_is_named_and_put_back(ledger: Ledger, how: str) -> None:
    path, (spoil, said) = ledger.run_dir / "metrics.jsonl", SPOILT[how]
    honest = path.read_bytes()
    path.write_bytes(b"".join(spoil(*lines_of(path))))
    reconcile(ledger)
    assert path.read_bytes() == honest
    assert re.search(said, " ".join(ledger.warnings))


def test_a_record_that_the_ledger_lost_is_taken_from_its_line(ledger: Ledger) -> None:
    (ledger.root / "records" / "000002.json").write_text('{"round": 2, "value": 7}')
    assert reconcile(ledger)[1] == {"round": 2, "value": 1.0}


def test_a_record_that_both_lost_is_named(ledger: Ledger) -> None:
    path = ledger.run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b"1.0", b"7.0"))
    (ledger.root / "records" / "000002.json").unlink()
    with pytest.raises(RunDirectoryError, match="the record of round 2 is lost"):
        reconcile(ledger)


@pytest.mark.parametrize("line", [b"\xff\n", b"[]\n", b'{"round": "x"}\n', b"[" * 10**5 + b"\n"])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line + b'{"round": 2}\n')
    with pytest.raises(RunDirectoryError, match=r"line 1 of metrics.jsonl cannot be read"):
        records(tmp_path)


def test_numbers_that_json_does_not_have_become_null(tmp_path) -> None:
    odd = [math.nan, {"a": math.inf}]
    append_line(tmp_path / METRICS, {"round": 1, "nested": odd, "fine": 1.0})
    assert records(tmp_path)[0] == {"round": 1, "nested": [None, {"a": None}], "fine": 1.0}


def test_a_json_file_is_whole_or_not_there(tmp_path, monkeypatch) -> None:
    path = tmp_path / "results.json"
    write_json(path, {"a": 1})

    def cut(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", cut)
    with pytest.raises(RunDirectoryError, match=r"cannot write: No space left .*results\.json"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_directory_that_is_a_file_is_named(tmp_path) -> None:
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(RunDirectoryError, match=r"cannot write: Not a directory .*metrics\.jsonl"):
        append_line(tmp_path / "run" / METRICS, {"round": 1})


def test_the_environment_says_with_what_and_gives_nothing_private(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("SOME_TOKEN", "very secret")
    found = environment()
    assert found["packages"]["torch"]
    assert found["cores"] >= 1
    text = json.dumps(found)
    assert "k" * 40 not in text
    assert "very secret" not in text
    assert str(Path.home()) not in text


def test_the_commit_is_known_only_in_a_source_tree(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment()["commit"] is None
