"""Three sites of real processes, each with nothing but its own images; a server without any."""

import os
import signal
from collections.abc import Iterator

import pytest

from fedbnn.federation.engines.flower.loopback import SERVER, until
from tests.cli.command import final, process
from tests.cli.held import hold, painted
from tests.deployment.machines import SMALL, Machines

pytest.importorskip("flwr", reason='needs Flower: pip install -c constraints.txt ".[flower]"')

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
WORDS = "--config small.yaml --stream.partition held --stream.sources folder:shades --stream.size 8"
WORDS += " --stream.tasks 1 --stream.rounds_per_task 2 --stream.samples_per_round 36"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final bytes of one box with the folders of all."""
    home = tmp_path_factory.mktemp("box")
    (home / "small.yaml").write_text(SMALL, encoding="utf-8")
    for client in range(3):
        hold(home / "data", client)
    assert process(home, *WORDS.split(), "--run_dir", "run").returncode == 0
    return final(home / "run")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A SuperLink, and three sites with the folder of one client each."""
    with Machines(tmp_path_factory.mktemp("own")) as made:
        made.superlink()
        for client in range(3):
            hold(made.home / f"site{client}", client)
            made.site(f"site{client}", str(client))
        yield made


def test_sites_with_their_own_images_end_in_the_bytes_of_one_box(
    machines: Machines, expected: str
) -> None:
    said = machines.run(f"{WORDS} --run_dir run --stream.data_dir nowhere")
    assert final(machines.home / "run") == expected, said
    assert "nothing is evaluated" in said
    assert not [*machines.home.glob("**/nowhere/**/*.png")]


def test_a_server_killed_after_the_roll_call_goes_on_with_what_was_announced(
    machines: Machines, expected: str
) -> None:
    """New images come to every site before the run is resumed: they are for a round that is not."""
    machines.run(f"{WORDS} --run_dir killed --stream.data_dir nowhere", wait=False)
    roll = machines.home / "killed" / "state" / "rolls" / "000002.json"
    until("the roll call of round 2", roll.exists)
    (server,) = machines.pids("link", SERVER)
    os.kill(server, signal.SIGKILL)
    for client in range(3):
        painted(machines.home / f"site{client}" / "shades" / str(client), 7, 5, seed=1)
    said = machines.run("--resume killed")
    assert final(machines.home / "killed") == expected, said
