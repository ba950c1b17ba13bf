"""`fedbnn expel`: a run without a client is the run in which it was never asked, bit for bit."""

import json
from pathlib import Path

import pytest

from fedbnn.storage.run_dir import records
from tests.cli.command import fedbnn, files, final
from tests.faults.command import timeless

LAST = 4


def participants(run_dir: Path) -> dict[int, list[int]]:
    return {record["round"]: record["clients"] for record in records(run_dir)}


def asked_and_not(run_dir: Path) -> tuple[int, int]:
    """A client that took part in the last round, and one that did not."""
    here = participants(run_dir)[LAST]
    return here[0], next(client for client in range(4) if client not in here)


def measured(run_dir: Path) -> list[str]:
    return [json.dumps(timeless(record)) for record in records(run_dir)]


def private(run_dir: Path) -> dict[str, bytes]:
    return files(run_dir / "state" / "clients")


def compare_with_a_run_without_it(home: Path, run: Path, *words: str) -> None:
    client = participants(run)[3][0]
    out = home / "out"
    assert fedbnn("expel", run, "--client", client, "--from_round", 3, "--out", out, *words) == 0
    never = ["--config", run / "config.yaml", "--stream.expelled", f"[[{client}, 3]]"]
    assert fedbnn("train", *never, "--run_dir", home / "never") == 0
    assert final(out) == final(home / "never") != final(run)
    assert measured(out) == measured(home / "never")
    assert private(out) == private(home / "never")
    assert client not in participants(out)[3] + participants(out)[LAST]


def test_it_is_the_run_in_which_the_client_was_never_asked(
    finished: Path, home: Path, undrawn: None
) -> None:
    compare_with_a_run_without_it(home, finished)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fcil", "scaffold", "exact", "fedavg", "ewc"])
def test_so_it_is_where_clients_keep_something(method: str, home: Path, undrawn: None) -> None:
    words = ["--config", "tiny.yaml", "--method", method, "--run_dir", "run"]
    assert fedbnn("train", *words) == 0
    compare_with_a_run_without_it(home, home / "run")


@pytest.mark.slow
def test_playing_all_of_it_again_comes_to_the_same(
    finished: Path, home: Path, undrawn: None
) -> None:
    compare_with_a_run_without_it(home, finished, "--anew")


def test_somebody_who_took_no_part_changes_nothing(
    finished: Path, home: Path, undrawn: None, capsys: pytest.CaptureFixture[str]
) -> None:
    _, absent = asked_and_not(finished)
    assert fedbnn("expel", finished, "--client", absent, "--from_round", LAST) == 0
    assert "there is nothing to take back" in capsys.readouterr().out
    words = ["--config", finished / "config.yaml", "--stream.expelled", f"[[{absent}, {LAST}]]"]
    assert fedbnn("train", *words, "--run_dir", home / "without") == 0
    assert final(home / "without") == final(finished)


def test_a_round_that_is_not_kept_is_said_and_nothing_is_written(
    finished: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, client = files(finished), participants(finished)[2][0]
    words = ("--client", client, "--from_round", 2, "--out", home / "out")
    assert fedbnn("expel", finished, *words) == 4
    said = capsys.readouterr().err
    assert "round 1 is not kept, the oldest is 2: what came since cannot be undone" in said
    assert "--from_round 3" in said
    assert said.count("\n") == 1
    assert not (home / "out").exists()
    assert files(finished) == before


@pytest.mark.parametrize("words", [("--client", "1"), ("--client", "-1", "--from_round", "2")])
def test_words_that_are_missing_or_wrong_are_named(
    finished: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedbnn("expel", finished, *words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_client_that_is_not_registered_cannot_be_left_out(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", "tiny.yaml", "--stream.expelled", "[[4, 2]]", "--dry_run"]
    assert fedbnn("train", *words) == 2
    assert "clients are 0 to 3" in capsys.readouterr().err
