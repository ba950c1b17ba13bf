"""Row: kill -9 while a run directory is opened -> it can be resumed, or one line says to start it
again, and that works."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Never

import pytest

from fedbnn.cli.compose import compose
from fedbnn.cli.train import parse
from fedbnn.config import yaml
from fedbnn.errors import RunDirectoryError
from fedbnn.federation.experiment import Experiment, run
from fedbnn.protocol.state import State
from fedbnn.storage import run_dir as runs
from fedbnn.storage.ledger import Ledger
from tests.faults.command import TINY
from tests.faults.steps import ending_after

FILES = ("config.yaml", "env.json", "state/config.json")


class Killed(BaseException):
    """Nothing in the program catches it, as nothing catches SIGKILL."""


def die() -> Never:
    raise Killed


class Opened(Exception):
    """In the place of the rounds: the directory is open."""


@pytest.fixture(scope="module")
def plan() -> Experiment:
    """A small run, to be opened in many directories."""
    return compose(parse(TINY), Path("nowhere"))


@pytest.fixture(autouse=True)
def without_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object) -> Never:
        raise Opened

    monkeypatch.setattr("fedbnn.federation.experiment._play", opened)
    monkeypatch.setattr("fedbnn.storage.run_dir.environment", dict)


def killed(plan: Experiment, count: int) -> bool:
    """Open a run that ends after its `count`-th call that changes the disk; whether it did."""
    with pytest.MonkeyPatch.context() as patch:
        for name, call in ending_after(count, die).items():
            patch.setattr(os, name, call)
        try:
            run(plan)
        except Killed:
            return True
        except Opened:
            return False


def kept(plan: Experiment) -> str:
    """The configuration file of a run."""
    return yaml.dump({**plan.config, "run_dir": None})


def opened_again(plan: Experiment, before: Experiment | None) -> str:
    """Resume, from the file `--resume` reads, the new run or the one before it; or do as told."""
    message = refusal(plan.run_dir)
    stored = "" if message else (plan.run_dir / "config.yaml").read_text()
    wanted = (
        plan
        if message
        else {kept(one): replace(one, resumed=True) for one in (before, plan) if one}[stored]
    )
    with pytest.raises(Opened):
        run(wanted)
    assert all((plan.run_dir / name).is_file() for name in FILES)
    return "started" if message else "resumed"


def refusal(run_dir: Path) -> str:
    """What `--resume` says when there is nothing to resume; clearly, if there is anything."""
    try:
        runs.find(str(run_dir), run_dir)
    except RunDirectoryError as error:
        clear = "stopped before it began" if (run_dir / "state").exists() else "no run to resume"
        return str(error) if clear in str(error) else ""
    return ""


def ways_out(directory: Path, plan: Experiment, before: Experiment | None = None) -> list[str]:
    """How a run was opened again that had been killed after its first step, its second, ..."""
    ways: list[str] = []
    while True:
        place = directory / str(len(ways))
        first, second = before and replace(before, run_dir=place), replace(plan, run_dir=place)
        assert first is None or not killed(first, 10**6)
        if not killed(second, len(ways) + 1):
            return ways
        ways.append(opened_again(second, first))


def test_killed_after_every_step_of_opening(tmp_path: Path, plan: Experiment) -> None:
    ways = ways_out(tmp_path, plan)
    assert ways == sorted(ways, reverse=True)
    assert (len(ways) > 12, set(ways)) == (True, {"started", "resumed"})


def test_killed_while_another_configuration_takes_the_place_of_a_run_without_rounds(
    tmp_path: Path, plan: Experiment
) -> None:
    other = replace(plan, config={**plan.config, "seed": 1})
    ways = ways_out(tmp_path, other, before=plan)
    assert (len(ways) > 8, ways[0], ways[-1], set(ways)) == (
        True,
        "resumed",
        "resumed",
        {"started", "resumed"},
    )


def test_a_refused_start_leaves_every_file_of_the_run_as_it_was(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        runs.start(ledger, {"name": "first"}, {"config.yaml": b"first"})
        ledger.commit(1, State({}), {}, {})
        with pytest.raises(RunDirectoryError, match="holds a run already"):
            runs.start(ledger, {"name": "second"}, {"config.yaml": b"second"})
        assert (tmp_path / "config.yaml").read_bytes() == b"first"
        assert runs.resume(ledger, {"name": "first"}) is None
