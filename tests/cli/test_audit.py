"""`fedbnn audit`: by round and client what was sent, trusted, refused, and how far it moved."""

import json
from pathlib import Path
from shutil import copytree

import pytest

from fedbnn.report import audit
from fedbnn.storage.ledger import METRICS
from fedbnn.storage.run_dir import changed, records
from tests.cli.command import fedbnn

RECORD = {
    "round": 1,
    "clients": [1, 2, 3],
    "refused": {"2": "class means [/] \x1b[31m far out"},
    "failed": {"3": "hung"},
    "audit": {
        "train": {"move": 2.0, "clients": {"1": [100, 7, 0.5, 1.0], "2": [90, 5, 0.0, 0.0]}},
        "statistics": {"move": 0.0, "clients": {"1": [40, 7, 1.0, 0.0]}},
    },
}


def test_every_byte_of_every_client_is_there(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedbnn("audit", finished, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    for record in records(finished):
        mine = [one for one in found if one["round"] == record["round"]]
        assert {one["client"] for one in mine} == set(record["clients"])
        for exchange, sent in record["bytes_up"].items():
            assert sum(one["bytes"] for one in mine if one["exchange"] == exchange) == sent
        assert sum(one["images"] for one in mine if one["exchange"] == "train") == record["samples"]
    assert all(one["moved"] > 0 and one["trust"] == 1 for one in found)


def test_a_person_sees_tables_and_a_picture_that_belongs_to_the_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copytree(finished, tmp_path / "run")
    assert fedbnn("audit", run, "--round", "2") == 0
    said = capsys.readouterr().out
    assert "By round and client" in said
    assert "statistics" in said
    assert {path.suffix for path in (run / "figures").glob("audit.*")} == {".png", ".pdf"}
    assert changed(run) == []
    (run / "figures" / "audit.png").write_bytes(b"")
    assert changed(run) == ["figures/audit.png"]


def test_refused_down_weighted_and_missing_are_told_apart() -> None:
    first, less, refused, missing = sorted(
        audit.entries([RECORD]), key=lambda one: (one.client, one.exchange)
    )
    assert (first.exchange, first.trust, first.moved, first.lost) == ("statistics", 1.0, 0.0, "")
    assert (less.bytes, less.images, less.trust, less.moved) == (100, 7, 0.5, 0.5)
    assert (refused.client, refused.lost) == (2, "refused")
    assert (missing.client, missing.lost, missing.reason) == (3, "no answer", "hung")
    drawn = audit.figure(audit.entries([RECORD]))
    marks = [one.get_label() for one in drawn.axes[0].collections]
    assert marks == ["refused", "no answer", "down-weighted"]


def test_a_picture_of_any_number_of_clients_and_rounds_is_as_large_as_can_be_seen() -> None:
    """Those of a stranger, too, who may name as many as a file holds."""
    many = [audit.Entry(number, number, "train", trust=1.0, moved=1.0) for number in range(1, 5001)]
    axes = audit.figure(many).axes[0]
    [shown] = axes.images
    cells = shown.get_array()
    assert cells is not None
    assert cells.shape == (audit.FINEST, audit.FINEST)
    assert cells.diagonal().all()
    assert (*axes.get_xlim(), *axes.get_ylim()) == (0.5, 5000.5, 4999.5, -0.5)


STRANGE = {
    "no audit": {"round": 1, "clients": [1]},
    "another round": {**RECORD, "round": 10**12},
    "words for numbers": {**RECORD, "audit": {"train": {"move": "far", "clients": {}}}},
    "a list": {**RECORD, "audit": []},
    "few numbers": {**RECORD, "audit": {"train": {"move": 1, "clients": {"1": [1]}}}},
    "infinite": {**RECORD, "audit": {"train": {"move": 1, "clients": {"1": [1e999, 1, 1, 1]}}}},
    "no client": {**RECORD, "audit": {"train": {"move": 1, "clients": {"x": [1, 1, 1, 1]}}}},
}


@pytest.mark.parametrize("kind", STRANGE)
def test_records_of_a_stranger_are_refused_in_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / METRICS).write_text(json.dumps(STRANGE[kind]) + "\n{}\n")
    assert fedbnn("audit", tmp_path) == 4
    (tmp_path / METRICS).write_text(json.dumps(STRANGE[kind]) + "\n")
    assert fedbnn("audit", tmp_path) == 4
    said = capsys.readouterr().err
    assert said.count("\n") == 2
    assert "Traceback" not in said


def test_words_of_a_stranger_are_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / METRICS).write_text(json.dumps(RECORD) + "\n")
    assert fedbnn("audit", tmp_path) == 0
    said = capsys.readouterr().out
    assert "\x1b[31m" not in said
    assert "[/]" in said
