"""Sites that hold nothing but their own images: bytes of one box, and no image on the server."""

from collections.abc import Iterable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='needs Flower: pip install -c constraints.txt ".[flower]"')

from flwr.app import Context, Error, Message, RecordDict

from fedbnn.cli import flower
from fedbnn.cli.main import main
from fedbnn.federation import server
from fedbnn.federation.engines.flower import client, engine, wire
from fedbnn.federation.engines.flower.engine import Ended
from fedbnn.methods.aggregation import TRAIN
from fedbnn.protocol.messages import ANNOUNCE, FitInstruction, FitResult, read_update
from fedbnn.report import figures
from fedbnn.storage import run_dir
from fedbnn.storage.ledger import Ledger
from tests.cli.command import TINY, final
from tests.cli.held import HOLDS, WORDS, hold, hold_tests, painted
from tests.federation.grids import Fault, LocalGrid, crossed

pytestmark = pytest.mark.usefixtures("undrawn")
TRAINS = "fedbnn.cli.compose:client_runner"
ONE = "--stream.rounds_per_task 1 --stream.clients_per_round 4 --stream.samples_per_round 80"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PULL_SECONDS", 0.005)
    monkeypatch.setattr(engine, "LAUNCH_SECONDS", 1.0)


@pytest.fixture
def places(home: Path) -> Path:
    """One box with all folders, three sites with those of their clients, a server with tests."""
    boxed(home)
    for one in HOLDS:
        hold(home / "site0" if one < 2 else home / f"site{one}", one)
    hold_tests(home / "server")
    return home


def boxed(home: Path) -> None:
    for one in HOLDS:
        hold(home / "box", one)
    hold_tests(home / "box")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final bytes of one box with all folders."""
    home = tmp_path_factory.mktemp("box")
    (home / "tiny.yaml").write_text(TINY, encoding="utf-8")
    boxed(home)
    with pytest.MonkeyPatch.context() as patched, chdir(home):
        patched.setattr(figures, "every", lambda *_: {})
        assert serial() == 0
    return final(home / "serial")


def serial(run: str = "serial", more: str = "") -> int:
    words = f"--config tiny.yaml {WORDS} --stream.data_dir box --run_dir {run} {more}"
    return main(["train", *words.split()])


def on_sites(home: Path, more: str = "", fault: Fault | None = None, data: str = "server") -> None:
    """`flwr run` on three sites, each with nothing but the folders of its clients."""
    client._worker.cache_clear()
    nodes = {
        number: {
            "clients": served,
            "state-dir": str(home / folder / "state"),
            "stream.data_dir": str(home / folder),
        }
        for number, folder, served in [(7, "site0", "0,1"), (8, "site2", "2"), (9, "site3", "3")]
    }
    words = f"--config tiny.yaml {WORDS} --stream.data_dir {data} --run_dir sites {more}"
    words = more if "--resume" in more else words
    grid = LocalGrid(client.client_app(TRAINS), nodes, fault)
    flower.server(grid, Context(7, 0, {}, RecordDict(), {"fedbnn": words}))


def instruction(order: Message) -> FitInstruction:
    return FitInstruction.from_bytes(wire.read_order(order.content).payload)


def test_sites_with_only_their_own_images_end_in_the_bytes_of_one_box(
    places: Path, expected: str
) -> None:
    on_sites(places)
    assert final(places / "sites") == expected
    [*_, last] = run_dir.records(places / "sites")
    assert last["tasks"][0]["class_agnostic"]["accuracy"] > 0.25


def test_a_server_without_an_image_ends_in_the_same_bytes_and_evaluates_nothing(
    places: Path, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    on_sites(places, data="nowhere")
    assert final(places / "sites") == expected
    assert "nothing is evaluated" in capsys.readouterr().out
    lines = run_dir.records(places / "sites")
    assert not any(line["fon"] or line["tasks"] != [None] for line in lines)
    assert (places / "sites" / "report.html").exists()
    assert (places / "sites" / "model.safetensors").exists()


def test_new_images_and_classes_count_from_the_next_round_on(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that nobody had comes to client 2 before round 2, wherever it is."""
    play = server.play

    def drifting(federation: Any, state: Any, number: int) -> Any:
        if number == 2:
            for data in (places / "box", places / "site2"):
                painted(data / "shades" / "2", 4, 9, seed=1)
        return play(federation, state, number)

    with monkeypatch.context() as patched:
        patched.setattr(server, "play", drifting)
        words = "--stream.clients_per_round 4 --stream.samples_per_round 80"
        assert serial("serial", words) == 0
        for picture in places.glob("*/shades/2/shade4/*"):
            picture.unlink()
        on_sites(places, words)
    assert final(places / "sites") == final(places / "serial")
    seen = [record["seen_classes"] for record in run_dir.records(places / "sites")]
    assert seen == [4, 5, 5]


def test_a_resumed_run_shows_what_was_announced_whatever_came_since(
    places: Path, expected: str
) -> None:
    def gone(grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
        """In the last round everybody announces, and nobody trains."""
        asked = instruction(order)
        trains = asked.round == 3 and asked.exchange != ANNOUNCE
        return [Message(Error(2, "unreachable"), reply_to=order)] if trains else [reply]

    with pytest.raises(Ended, match="exit code 5"):
        on_sites(places, fault=gone)
    for one in HOLDS:
        painted(places / ("site0" if one < 2 else f"site{one}") / "shades" / str(one), 5, 9, seed=3)
    on_sites(places, "--resume sites")
    assert final(places / "sites") == expected


def test_a_client_is_held_to_what_it_announced(places: Path) -> None:
    def more(grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
        """Client 2 announces one image less than it shows."""
        who, asked = wire.read_order(order.content).client, instruction(order)
        said = wire.read_answer(reply.content, who)
        if who != 2 or asked.exchange != ANNOUNCE:
            return [reply]
        assert isinstance(said, FitResult)
        honest = read_update(said.update)
        counts = {**honest.counts, "shades/shade2": honest.counts["shades/shade2"] - 1}
        lie = replace(honest, counts=counts, samples=honest.samples - 1)
        told = replace(said, update=lie.to_bytes())
        return [Message(wire.answer_records(told), reply_to=order)]

    on_sites(places, f"{ONE} --gate.quorum 0.5", more)
    (record,) = run_dir.records(places / "sites")
    assert "the announcement said" in record["refused"]["2"]


LATE = "--federation.late fold --federation.max_staleness 60 --gate.deadline_seconds 1 "
LATE += "--gate.influence_cap null --gate.quorum 0.5 --head linear --stream.clients_per_round 4 "
LATE += "--stream.samples_per_round 80"
"""An order is good for a minute, however busy the machine: 60 rounds of a second each."""


class Held:
    """Client 2's answer to an exchange of round 1 comes in one of round 2."""

    def __init__(self, held: str, comes: str, stop: int = 0) -> None:
        self.held, self.comes, self.stop = (1, held), (2, comes), stop
        self.waits: Message | None = None

    def __call__(self, grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
        asked, who = instruction(order), wire.read_order(order.content).client
        now = asked.round, asked.exchange
        if now == self.held and who == 2:
            self.waits = reply
            return []
        if now == self.comes and self.waits:
            grid.replies[self.waits.metadata.reply_to_message_id] = [crossed(self.waits)]
            self.waits = None
        gone = asked.round == self.stop and asked.exchange == TRAIN
        return [Message(Error(2, "unreachable"), reply_to=order)] if gone else [reply]


def test_a_late_factor_is_held_to_what_its_client_announced_in_its_own_round(places: Path) -> None:
    """Whenever in the next round it comes, and if the round that folds it is played again."""
    on_sites(places, LATE, Held(TRAIN, TRAIN))
    unbroken = final((places / "sites").rename(places / "unbroken"))
    with pytest.raises(Ended, match="exit code 5"):
        on_sites(places, LATE, Held(TRAIN, ANNOUNCE, stop=3))
    painted(places / "site2" / "shades" / "2", 5, 9, seed=3)
    on_sites(places, "--resume sites")
    assert final(places / "sites") == unbroken
    first, second, third = run_dir.records(places / "sites")
    assert first["failed"] == {"2": "no answer in time"}
    assert second["failed"] == {"2": "is still busy with an earlier round"}
    assert third["late"] == {"2": 2}
    assert not first["refused"] | second["refused"] | third["refused"]


def test_a_late_announcement_is_refused_by_name_and_its_client_takes_part_again(
    places: Path,
) -> None:
    on_sites(places, LATE, Held(ANNOUNCE, ANNOUNCE))
    first, second, third = run_dir.records(places / "sites")
    assert first["failed"] == {"2": "no answer in time"}
    assert second["refused"] == {"2": "late, and not an answer to train"}
    assert not third["failed"] | third["refused"] | third["late"]


LIES: dict[tuple[int, int], tuple[dict[str, Any], str]] = {
    (1, 0): ({"counts": {"shades/a": 900}, "samples": 900}, "announces 900 images, the most is 20"),
    (1, 1): ({"counts": {"shades/a": -1, "shades/b": 2}, "samples": 1}, "a class without images"),
    (1, 2): ({"counts": {"shades/\n": 1}, "samples": 1}, "a class that has no name"),
    (2, 0): ({"round": 9}, "meant for round 9"),
    (2, 1): ({"prior": "0" * 64}, "started from another prior"),
    (2, 2): ({"samples": 3}, "claims 3 images, but 14 by class"),
}
"""By round and client: what is changed in an announcement, and why it is refused."""


def test_announcements_that_cannot_be_are_refused_by_name(places: Path) -> None:
    def lies(grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
        who, asked = wire.read_order(order.content).client, instruction(order)
        if asked.exchange != ANNOUNCE or (asked.round, who) not in LIES:
            return [reply]
        said, (lie, _) = wire.read_answer(reply.content, who), LIES[asked.round, who]
        assert isinstance(said, FitResult)
        told = replace(said, update=replace(read_update(said.update), **lie).to_bytes())
        return [Message(wire.answer_records(told), reply_to=order)]

    on_sites(places, f"{ONE} --stream.rounds_per_task 2 --gate.quorum 0.2", lies)
    log = (places / "sites" / "log.txt").read_text()
    for number, record in enumerate(run_dir.records(places / "sites"), 1):
        for who in range(3):
            assert LIES[number, who][1] in record["refused"][str(who)]
            assert f"client {who} was refused: {record['refused'][str(who)]}" in log


def test_a_picture_that_cannot_be_read_fails_its_client_and_its_name_stays(places: Path) -> None:
    (places / "site2" / "shades" / "2" / "shade2" / "somebody.png").write_text("no picture")
    on_sites(places, f"{ONE} --gate.quorum 0.5")
    (record,) = run_dir.records(places / "sites")
    assert record["failed"] == {"2": "its images cannot be read; the log of its site says why"}
    with Ledger(places / "sites") as ledger:
        roll = ledger.roll(1)
    assert roll is not None
    assert set(roll["counts"]) == {0, 1, 3}


def test_private_clients_announce_nothing_and_settle_what_they_show(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--privacy.clip 1 --gate.influence_cap null --head linear --stream.rounds_per_task 1"
    assert serial(more=words) == 0
    with Ledger(places / "serial") as ledger:
        roll = ledger.roll(1)
    assert roll is not None
    assert all(said == {"": 0} for said in roll["counts"].values())
    assert len([*places.glob("box/.cache/held-*/*-1.safetensors")]) == 3
    assert serial("unknown", f"{words} --stream.sources folder:other") == 2
    assert "no test images name the classes" in capsys.readouterr().err


def test_what_clients_hold_cannot_be_pooled(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serial(more="--method joint") == 2
    assert "clients hold their images" in capsys.readouterr().err


def test_nobody_with_images_ends_the_run_by_name(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for picture in (places / "box").glob("shades/[0-3]/*/*.png"):
        picture.unlink()
    assert serial() == 5
    assert "nobody has images in round 1" in capsys.readouterr().err
