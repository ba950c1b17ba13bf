"""`flwr run` on three sites of real processes: the bytes of one box, whoever is killed."""

import os
import signal

import pytest

from fedbnn.federation.engines.flower.loopback import SERVER
from tests.cli.command import final
from tests.deployment.machines import Machines

pytest.importorskip("flwr", reason='needs Flower: pip install -c constraints.txt ".[flower]"')

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_three_sites_end_in_the_bytes_of_serial(machines: Machines, expected: str) -> None:
    said = machines.run("--config small.yaml --run_dir run")
    assert final(machines.home / "run") == expected, said
    log = machines.log("run")
    for client in range(3):
        assert f"serves [{client}]" in log
        assert [*machines.home.glob(f"site{client}/small-0/{client}-*")]


def test_a_site_killed_in_mid_round_is_waited_for_and_takes_part_again(
    machines: Machines, expected: str
) -> None:
    """What its client keeps is on its disk: the bytes of SCAFFOLD need it in the second round."""
    machines.run("--config small.yaml --run_dir killed", wait=False)
    machines.committed("killed", 1)
    machines.next_order("site1")
    machines.kill("site1")
    machines.site("site1", "1")
    machines.finished("killed")
    assert final(machines.home / "killed") == expected
    assert "the site of client 1 has left" in machines.log("killed")


def test_the_server_killed_in_mid_round_is_resumed_from_its_ledger(
    machines: Machines, expected: str
) -> None:
    machines.run("--config small.yaml --run_dir resumed", wait=False)
    machines.committed("resumed", 1)
    (server,) = machines.pids("link", SERVER)
    os.kill(server, signal.SIGKILL)
    said = machines.run("--resume resumed")
    assert "resumed goes on after round 1" in said
    assert final(machines.home / "resumed") == expected


def test_the_superlink_restarted_finds_its_sites_and_the_run_goes_on(
    machines: Machines, expected: str
) -> None:
    machines.run("--config small.yaml --run_dir relinked", wait=False)
    machines.committed("relinked", 1)
    machines.kill("link")
    machines.superlink()
    said = machines.run("--resume relinked")
    assert final(machines.home / "relinked") == expected, said


def test_a_site_that_freezes_is_named_and_the_others_go_on(machines: Machines) -> None:
    machines.run("--config small.yaml --run_dir frozen --gate.quorum 0.5", wait=False)
    machines.committed("frozen", 1)
    machines.next_order("site1")
    machines.freeze("site1")
    machines.finished("frozen")
    machines.kill("site1")
    machines.site("site1", "1")
    log = machines.log("frozen")
    assert "the site of client 1 has left" in log
    assert "client 1 failed: no site served it for 120 s" in log


def test_two_sites_that_claim_one_client_are_named_and_the_others_go_on(
    machines: Machines,
) -> None:
    machines.site("twin", "2")
    machines.run("--config small.yaml --run_dir claimed --gate.quorum 0.5")
    assert "client 2 failed: claimed by 2 sites" in machines.log("claimed")
    said = machines.run("--config small.yaml --run_dir stopped --gate.quorum 1")
    assert "fedbnn ended with exit code 5 (federation)" in said
    assert "claimed by 2 sites" in machines.log("stopped")
