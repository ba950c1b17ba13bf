"""Sites that hang, cut, repeat and echo, as real processes: each costs itself, by name."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbnn.storage import run_dir
from tests.cli.command import ROOT
from tests.deployment.machines import Machines

pytest.importorskip("flwr", reason='needs Flower: pip install -c constraints.txt ".[flower]"')

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
FAULTS = ["", "cut", "echo", "twice", "hang", "deaf"]
HONEST, CUT, ECHO, TWICE, HANG, DEAF = map(str, range(6))
HOSTILE = Path(__file__).parent / "hostile"
SECONDS = 180
WORDS = "--config small.yaml --gate.influence_cap null --stream.partition iid "
WORDS += "--stream.clients {0} --stream.clients_per_round {0} "


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Six sites of one client each: an honest one, and one for each fault."""
    made = Machines(tmp_path_factory.mktemp("hostile"))
    path = os.pathsep.join([str(HOSTILE), str(ROOT)])
    with made:
        made.superlink()
        for client, fault in enumerate(FAULTS):
            bad = {"FAULT": fault, "FAULT_MEMORY": str(made.home / "memory"), "PYTHONPATH": path}
            made.site(f"site{client}", str(client), variables=bad if fault else None)
        yield made


@pytest.fixture(scope="module")
def run(machines: Machines) -> Path:
    """A run of two rounds with all of them."""
    some = f"--run_dir run --gate.quorum 0.3 --gate.deadline_seconds {SECONDS}"
    said = machines.run(WORDS.format(6) + some, seconds=1500.0)
    assert (machines.home / "run" / "results.json").exists(), said
    return machines.home / "run"


def test_a_client_that_hangs_is_ended_by_its_site(run: Path) -> None:
    first, _ = run_dir.records(run)
    assert first["failed"][HANG] == f"no answer within {SECONDS} s"


def test_a_site_that_never_answers_is_given_up(run: Path) -> None:
    assert all(line["failed"][DEAF] == "no answer in time" for line in run_dir.records(run))


def test_an_update_cut_short_is_refused_and_its_site_takes_part_again(run: Path) -> None:
    first, second = run_dir.records(run)
    assert first["refused"][CUT].startswith("truncated")
    assert CUT not in second["refused"] | second["failed"]
    assert [*(run / "rejected").glob("*")]


def test_a_second_reply_to_an_order_is_dropped_by_the_superlink(
    machines: Machines, run: Path
) -> None:
    """The first one counts, in every round: what its SuperNode then holds back is called for."""
    for line in run_dir.records(run):
        assert TWICE not in line["refused"] | line["failed"]
    assert "duplicate reply" in (machines.home / "link.log").read_text(encoding="utf-8")


def test_an_update_that_comes_again_in_a_later_round_is_refused(run: Path) -> None:
    first, second = run_dir.records(run)
    assert ECHO not in first["refused"] | first["failed"]
    assert second["refused"][ECHO] == "meant for round 1, this is round 2"


def test_the_log_names_everyone(machines: Machines, run: Path) -> None:
    log = machines.log(run.name)
    for line in run_dir.records(run):
        for client, reason in line["failed"].items():
            assert f"client {client} failed: {reason}" in log
        for client, reason in line["refused"].items():
            assert f"client {client} was refused: {reason}" in log
        assert HONEST not in line["refused"] | line["failed"]


def test_without_a_quorum_the_run_ends_with_the_code_of_the_page(machines: Machines) -> None:
    said = machines.run(WORDS.format(3) + "--run_dir few --gate.quorum 1", seconds=1500.0)
    assert "fedbnn ended with exit code 5 (federation)" in said
    assert "2 of 3 clients count, the quorum is 3" in machines.log("few")
