"""A run on Flower is a run: same bytes, same ledger, same words at its end; nothing private leaves.

The ServerApp and the ClientApp are those that `flwr run` starts, on a grid in this process.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("flwr", reason='needs Flower: pip install -c constraints.txt ".[flower]"')

from flwr.app import Context, Error, Message, RecordDict

from fedbnn.cli import bench_sites, flower
from fedbnn.cli.main import main
from fedbnn.federation.engines.flower import client, engine, wire
from fedbnn.federation.engines.flower.engine import Ended
from fedbnn.storage import run_dir
from fedbnn.storage.ledger import Ledger
from tests.cli.command import final
from tests.federation.grids import Fault, LocalGrid

Nodes = dict[int, dict[str, Any]]
TRAINS = "fedbnn.cli.compose:client_runner"
REFUSED = ["--method fcil", "--method local", "--method.share backbone_only"]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PULL_SECONDS", 0.005)
    monkeypatch.setattr(engine, "LAUNCH_SECONDS", 1.0)


def sites(home: Path) -> Nodes:
    """Three sites for four clients, each with folders of its own."""
    return {
        number: {
            "clients": served,
            "state-dir": str(home / f"site{number}" / "state"),
            "stream.data_dir": str(home / f"site{number}" / "data"),
        }
        for number, served in {101: "0,1", 102: "2", 103: "3"}.items()
    }


def started(
    home: Path, words: str, fault: Fault | None = None, nodes: Nodes | None = None
) -> LocalGrid:
    """`flwr run` with these words, to its end, on the three sites or on other nodes."""
    client._worker.cache_clear()
    grid = LocalGrid(client.client_app(TRAINS), nodes or sites(home), fault)
    words = words if "--resume" in words else f"--config tiny.yaml {words}"
    context = Context(7, 0, {}, RecordDict(), {"fedbnn": words})
    flower.server(grid, context)
    return grid


@pytest.mark.parametrize("method", ["fedbnn", "scaffold"])
@pytest.mark.usefixtures("undrawn")
def test_a_run_on_three_sites_ends_in_the_bytes_of_serial(home: Path, method: str) -> None:
    assert main(["train", "--config", "tiny.yaml", "--method", method, "--run_dir", "serial"]) == 0
    grid = started(home, f"--method {method} --run_dir sites")
    assert final(home / "sites") == final(home / "serial")
    assert len({order.metadata.dst_node_id for order in grid.orders}) > 1
    assert (home / "sites" / "results.json").exists()


@pytest.mark.usefixtures("undrawn")
def test_what_a_client_keeps_stays_on_its_site(home: Path) -> None:
    grid = started(home, "--method scaffold --run_dir sites")
    with Ledger(home / "sites") as ledger:
        receipts = {client: ledger.private(client) for client in ledger.clients()}
    assert receipts
    for number, receipt in receipts.items():
        assert receipt is not None
        assert receipt.startswith(b"%d-" % number)
        assert len(receipt) < 100
        kept = [*home.glob(f"site*/state/*/{receipt.decode()}")]
        assert len(kept) == 1
        assert kept[0].stat().st_size > 1000
    orders = [wire.read_order(order.content) for order in grid.orders]
    assert {len(order.private) < 100 for order in orders if order.private} == {True}


@pytest.mark.usefixtures("undrawn")
def test_a_site_without_its_memory_is_named_and_the_run_goes_on_when_it_is_back(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", "tiny.yaml", "--method", "scaffold", "--run_dir", "a"]) == 0

    def lost(grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
        """After the second round every site keeps its memory elsewhere."""
        if wire.read_order(order.content).private and not (home / "site101-away").exists():
            for folder in home.glob("site???"):
                folder.rename(f"{folder}-away")
        return [grid._reply(order)]

    with pytest.raises(Ended, match=r"exit code 5 \(federation\)"):
        started(home, "--method scaffold --run_dir b --gate.quorum 1", lost)
    assert "what it kept is not in" in capsys.readouterr().err
    for folder in home.glob("site*-away"):
        folder.rename(str(folder).removesuffix("-away"))
    started(home, "--resume b")
    assert final(home / "b") == final(home / "a")


def unreachable(grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
    """From the third round on nobody can be reached."""
    gone = len(grid.orders) >= 4
    return [Message(Error(2, "unreachable"), reply_to=order)] if gone else [reply]


@pytest.mark.usefixtures("undrawn")
def test_a_run_moves_to_sites_with_what_clients_kept_and_not_away_from_them(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On nodes that serve any client the server keeps it; on sites it has receipts only."""
    words = "--method scaffold --stream.clients 2"
    assert main(["train", "--config", "tiny.yaml", *words.split(), "--run_dir", "serial"]) == 0
    with pytest.raises(Ended):
        started(home, f"{words} --run_dir moved", unreachable, {1: {}})
    started(home, "--resume moved")
    assert final(home / "moved") == final(home / "serial")
    with pytest.raises(Ended):
        started(home, f"{words} --run_dir stays", unreachable)
    capsys.readouterr()
    assert main(["train", "--resume", "stays", "--engine", "serial"]) == 5
    assert "what it keeps is at its site: go on there, with flwr run" in capsys.readouterr().err


@pytest.mark.parametrize("words", REFUSED)
def test_methods_whose_server_reads_what_clients_keep_are_refused(
    home: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Ended, match=r"exit code 2 \(configuration\)"):
        started(home, words)
    assert "lets the server read what its clients keep" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_an_update_cut_short_and_one_sent_twice_are_named(home: Path) -> None:
    def cut(grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
        said = wire.read_answer(reply.content, wire.read_order(order.content).client)
        if len(grid.orders) == 0:
            short = replace(said, update=said.update[:-7])
            return [Message(wire.answer_records(short), reply_to=order)]
        return [reply, reply] if len(grid.orders) == 1 else [reply]

    started(home, "--run_dir sites --gate.quorum 0.5", cut)
    log = (home / "sites" / "log.txt").read_text()
    assert "refused" in log
    assert "answered twice" in log


def painted(folder: Path, seed: int) -> Path:
    """Pictures of four classes in folders, each class with its own grey, and noise of a seed."""
    random = np.random.default_rng(seed)
    for split, count in (("train", 12), ("test", 4)):
        for label in range(4):
            place = folder / "shades" / split / f"shade{label}"
            place.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 100, (8, 8)) + 50 * label
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number:02}.png")
    return folder


@pytest.mark.usefixtures("undrawn")
def test_the_server_never_sees_an_image_that_a_site_trains_on(home: Path) -> None:
    """A server with other pictures than its sites folds the same bytes: it knows labels only."""
    words = "--stream.sources folder:shades --stream.data_dir"
    theirs, other = painted(home / "theirs", 1), painted(home / "other", 2)
    serial = ["train", "--config", "tiny.yaml", *words.split(), str(theirs), "--run_dir", "serial"]
    assert main(serial) == 0
    grid = LocalGrid(client.client_app(TRAINS), sites(home))
    for node in grid.nodes.values():
        node["stream.data_dir"] = str(theirs)
    run = {"fedbnn": f"--config tiny.yaml {words} {other} --run_dir sites"}
    flower.server(grid, Context(7, 0, {}, RecordDict(), run))
    assert final(home / "sites") == final(home / "serial")


@pytest.mark.usefixtures("undrawn")
def test_a_slow_site_of_the_bench_answers_the_same_so_much_later(home: Path) -> None:
    words = "--head linear --stream.rounds_per_task 1"
    assert main(["train", "--config", "tiny.yaml", *words.split(), "--run_dir", "serial"]) == 0
    written: dict[str, Any] = {}
    exec(bench_sites.APP, written)
    grid = LocalGrid(written["app"], {1: {"bench.seconds": 0.2}})
    run = {"fedbnn": f"--config tiny.yaml {words} --run_dir slow"}
    flower.server(grid, Context(7, 0, {}, RecordDict(), run))
    assert final(home / "slow") == final(home / "serial")
    for line in run_dir.records(home / "slow"):
        assert line["seconds"]["train"] > 0.2 * len(line["clients"]) == 0.4
