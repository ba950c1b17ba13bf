"""metrics.jsonl has each round once, whatever happened; what is not written is said in one line."""

import json
import math
import os
from pathlib import Path

import pytest

from fedbnn.errors import RunDirectoryError
from fedbnn.storage.run_dir import append_record, environment, reconcile, records, write_json


def rounds(run_dir: Path) -> list[int]:
    return [record["round"] for record in records(run_dir)]


def filled(run_dir: Path, last: int) -> Path:
    for number in range(1, last + 1):
        append_record(run_dir, {"round": number, "value": number / 2})
    return run_dir


def test_what_is_appended_is_read_back(tmp_path) -> None:
    assert records(tmp_path) == []
    assert rounds(filled(tmp_path, 3)) == [1, 2, 3]


def test_a_line_is_on_the_disk_before_append_returns(tmp_path, monkeypatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    append_record(tmp_path, {"round": 1})
    assert synced == [len('{"round": 1}\n')]


def test_lines_after_the_last_committed_round_go_away(tmp_path) -> None:
    kept = reconcile(filled(tmp_path, 5), 3, {"round": 3, "value": 1.5})
    assert rounds(tmp_path) == [1, 2, 3]
    assert kept == records(tmp_path)


def test_a_committed_round_without_its_line_gets_it_back(tmp_path) -> None:
    reconcile(filled(tmp_path, 2), 3, {"round": 3, "value": 1.5})
    assert records(tmp_path)[-1] == {"round": 3, "value": 1.5}


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_line_cut_short_by_a_crash_is_replaced(tmp_path, cut) -> None:
    path = filled(tmp_path, 3) / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    reconcile(tmp_path, 3, {"round": 3, "value": 1.5})
    append_record(tmp_path, {"round": 4})
    assert rounds(tmp_path) == [1, 2, 3, 4]


def test_a_round_written_twice_is_kept_once(tmp_path) -> None:
    filled(tmp_path, 2)
    append_record(tmp_path, {"round": 2, "value": 7.0})
    reconcile(tmp_path, 2, None)
    assert rounds(tmp_path) == [1, 2]


def test_before_the_first_round_nothing_is_kept(tmp_path) -> None:
    reconcile(filled(tmp_path, 2), 0, None)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_numbers_that_json_does_not_have_become_null(tmp_path) -> None:
    append_record(tmp_path, {"round": 1, "nested": [math.nan, {"a": math.inf}], "fine": 1.0})
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
        append_record(tmp_path / "run", {"round": 1})


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
