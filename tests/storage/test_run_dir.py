"""A run directory belongs to one configuration, knows when it is complete, can be found again."""

import os
from pathlib import Path
from typing import Any

import pytest

from fedbnn.errors import RunDirectoryError
from fedbnn.protocol.state import State
from fedbnn.storage import run_dir as runs
from fedbnn.storage.ledger import Ledger

CONFIG = {
    "name": "x",
    "client": {"lr": 0.01, "betas": (0.9, 0.99)},
    "engine": {"name": "serial"},
    "run_dir": Path("runs/x"),
}


def test_the_same_configuration_goes_on(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        runs.start(ledger, CONFIG)
        assert runs.resume(ledger, CONFIG) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {**CONFIG, "client": {"lr": 0.1, "betas": (0.9, 0.99)}},
            "client.lr was 0.01, now it is 0.1",
        ),
        ({**CONFIG, "client": {"lr": 0.01}}, r"client.betas was \[0.9, 0.99\], now it is absent"),
        ({**CONFIG, "seed": 3}, "seed was absent, now it is 3"),
    ],
)
def test_another_configuration_is_refused_by_the_name_of_its_key(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with Ledger(tmp_path) as ledger:
        runs.start(ledger, CONFIG)
        with pytest.raises(RunDirectoryError, match=message):
            runs.resume(ledger, changed)


def test_keys_that_do_not_change_the_result_may_differ(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        runs.start(ledger, CONFIG)
        changed = {**CONFIG, "engine": {"name": "processes", "workers": 2}, "run_dir": "elsewhere"}
        assert runs.resume(ledger, changed, may_differ=("engine", "run_dir")) is None
        with pytest.raises(RunDirectoryError, match=r"engine.name"):
            runs.resume(ledger, changed, may_differ=("engin", "run_dir"))


def test_a_directory_with_rounds_is_not_started_again(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        runs.start(ledger, CONFIG)
        runs.start(ledger, CONFIG)
        ledger.commit(1, State({}), {}, {})
        with pytest.raises(RunDirectoryError, match=r"holds a run already.*--resume"):
            runs.start(ledger, CONFIG)


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger, pytest.raises(RunDirectoryError, match="before it began"):
        runs.resume(ledger, CONFIG)


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        runs.start(ledger, CONFIG)
        (tmp_path / "state" / "config.json").write_bytes(b'{"half')
        with pytest.raises(RunDirectoryError, match="configuration is damaged"):
            runs.resume(ledger, CONFIG)


def test_complete_means_complete_with_the_newest_round(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.commit(1, State({}), {}, {})
        assert not runs.finished(ledger)
        runs.finish(ledger)
        assert runs.finished(ledger)
        ledger.commit(2, State({}), {}, {})
        assert not runs.finished(ledger)


def test_last_is_the_run_that_was_written_last(tmp_path: Path) -> None:
    for age, name in enumerate(["old", "new", "older"]):
        with Ledger(tmp_path / name) as ledger:
            runs.start(ledger, CONFIG)
        when = 1_000_000_000 - age if name != "new" else 1_000_000_001
        os.utime(tmp_path / name / "state", (when, when))
    assert runs.find("last", tmp_path) == tmp_path / "new"
    assert runs.find(str(tmp_path / "old"), tmp_path) == tmp_path / "old"


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"no run to resume.*nowhere"):
        runs.find(str(tmp_path / "nowhere"), tmp_path)
    with pytest.raises(RunDirectoryError, match="no run to resume"):
        runs.find("last", tmp_path)
