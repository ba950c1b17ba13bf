"""Flower gives the same bytes as `serial`; what happens to one site costs its clients only."""

from collections.abc import Iterable
from time import monotonic
from typing import Any

import pytest

pytest.importorskip("flwr", reason='needs Flower: pip install -c constraints.txt ".[flower]"')

from flwr.app import ConfigRecord, Error, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbnn.federation.engines import SerialEngine
from fedbnn.federation.engines.flower import engine as flower
from fedbnn.federation.engines.flower import wire
from fedbnn.federation.engines.flower.client import client_app, clients_of
from fedbnn.federation.engines.flower.engine import FlowerEngine
from fedbnn.federation.engines.flower.wire import Order
from fedbnn.protocol.messages import Failure, FitResult
from tests.federation import clients
from tests.federation.grids import LEFT, Fault, LocalGrid, crossed
from tests.federation.test_engines import ENTRY, RAISED, TROUBLE, by_client, nothing, reasons

ANY = {1: {}, 2: {}}
SITES = {11: {"clients": "0,1"}, 12: {"clients": 2}, 13: {"clients": "3"}}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "PULL_SECONDS", 0.005)
    monkeypatch.setattr(flower, "LOOK_SECONDS", 0.01)


def federation(
    nodes: dict[int, dict[str, Any]], fault: Fault | None = None, **limits: Any
) -> tuple[LocalGrid, FlowerEngine]:
    grid = LocalGrid(client_app(f"{ENTRY}trouble"), nodes, fault)
    return grid, FlowerEngine(grid, TROUBLE, **{"patience": 0.2, **limits})


small = st.binary(max_size=300)
numbers = st.floats(0, 1e6)
measures = st.dictionaries(st.sampled_from(["loss", "kl"]), numbers)
results = st.builds(
    FitResult, st.integers(0, 9), small, st.none() | small, numbers, numbers, measures
)
failures = st.builds(Failure, st.integers(0, 9), st.text(max_size=400))
orders = st.builds(Order, st.integers(0, 9), st.text(), small, st.none() | small, numbers)


def over(records: RecordDict) -> RecordDict:
    """Records that have crossed to another process."""
    grid = LocalGrid(client_app(""), {})
    assert not grid.nodes
    return crossed(Message(records, 1, "train")).content


@given(results | failures)
@settings(max_examples=50)
def test_an_answer_arrives_as_it_was_sent(answer: FitResult | Failure) -> None:
    assert wire.read_answer(over(wire.answer_records(answer)), answer.client) == answer


@given(orders)
@settings(max_examples=50)
def test_an_order_arrives_as_it_was_sent(order: Order) -> None:
    assert wire.read_order(over(wire.order_records(order))) == order


def test_an_update_larger_than_a_piece_of_flower_arrives_whole() -> None:
    answer = FitResult(3, bytes(range(256)) * 2**16, b"own", 1.0, 0.5)
    assert wire.read_answer(over(wire.answer_records(answer)), 3) == answer


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"client": 0},
        {"client": 1, "seconds": 1.0, "inner": 0.5},
        {"client": 0, "seconds": "1", "inner": 0.5},
        {"client": 0, "seconds": float("nan"), "inner": 0.5},
        {"client": 0, "seconds": 1.0, "inner": 0.5},
        {"client": 1, "failure": "of another"},
        {"client": 0, "failure": 3},
    ],
)
def test_whatever_has_another_form_is_babble(head: dict[str, Any]) -> None:
    with pytest.raises(wire.Babble):
        wire.read_answer(RecordDict({"head": ConfigRecord(head)} if head else {}), 0)


def test_flower_answers_as_serial_does() -> None:
    private = {2: b"two", 3: b""}.get
    serial = SerialEngine(clients.trouble(TROUBLE))
    grid, engine = federation(ANY)
    for payload in (b"first", b"second" * 100_000):
        assert by_client(engine.gather(payload, range(4), private)) == by_client(
            serial.gather(payload, range(4), private)
        )
    assert {order.metadata.dst_node_id for order in grid.orders} == {1, 2}


def test_trained_weights_are_the_same_bytes() -> None:
    (serial,) = SerialEngine(clients.trouble(TROUBLE)).gather(b"", [9], nothing)
    assert list(federation(ANY)[1].gather(b"", [9], nothing)) == [serial]


def test_a_client_that_raises_costs_itself() -> None:
    assert reasons(federation(ANY)[1], [0, 1, 2, 3]) == RAISED


def test_a_client_that_never_answers_is_ended_by_its_site() -> None:
    found = reasons(federation(ANY, deadline=0.3)[1], [0, 11, 3])
    assert found == {0: None, 11: "no answer within 0.3 s", 3: None}


@pytest.mark.parametrize(("said", "meant"), [("0,3", {0, 3}), (2, {2}), (" 4 , 5", {4, 5})])
def test_a_site_names_its_clients(said: object, meant: set[int]) -> None:
    assert clients_of({"clients": said}) == meant
    assert clients_of({"partition-id": 0}) is None


def test_a_client_goes_to_the_site_that_serves_it(tmp_path: Any) -> None:
    sites = {node: {**one, "state-dir": str(tmp_path)} for node, one in SITES.items()}
    grid, engine = federation(sites)
    assert reasons(engine, [0, 3]) == {0: None, 3: None}
    assert [order.metadata.dst_node_id for order in grid.orders] == [11, 13]


def test_a_client_without_a_site_is_named() -> None:
    assert reasons(federation({12: {"clients": "2"}})[1], [0]) == {0: "no site served it for 0.2 s"}


def test_a_site_that_is_slow_to_say_whom_it_serves_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine its app takes minutes to start, longer than one waits for nobody."""
    grid, engine = federation({12: {}})
    pull, end = grid.pull_messages, monotonic() + 0.6
    monkeypatch.setattr(
        grid, "pull_messages", lambda numbers: pull(numbers) if monotonic() > end else []
    )
    assert reasons(engine, [0]) == {0: None}


def test_a_client_that_two_sites_claim_is_asked_of_neither() -> None:
    grid, engine = federation({5: {"clients": "1"}, 6: {"clients": "1,2"}})
    assert reasons(engine, [1]) == {1: "claimed by 2 sites: 5, 6"}
    assert grid.orders == []


def hangs(grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
    return []


def twice(grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
    return [reply, reply]


def babbles(grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
    return [Message(RecordDict(), reply_to=order)]


def dies(grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
    return [Message(Error(8, "ClientApp crashed"), reply_to=order)]


def leaves(grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
    """The site goes down with its order, and is back under another number."""
    grid.fault, node = None, order.metadata.dst_node_id
    grid.nodes[node + 100] = grid.nodes.pop(node)
    return [Message(Error(LEFT, "Node Unavailable"), reply_to=order)]


def stranger(grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
    return [reply, Message(reply.content, reply_to=Message(RecordDict(), 1, "train"))]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (hangs, "no answer in time"),
        (babbles, "there is no head"),
        (dies, "its app failed: ClientApp crashed"),
        (stranger, None),
        (leaves, None),
    ],
)
def test_what_happens_to_an_order_costs_its_client_only(
    fault: Fault, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower, "LAUNCH_SECONDS", 0.1)
    _, engine = federation({1: {}}, fault, deadline=0.5)
    assert reasons(engine, [0]) == {0: reason}


def test_an_answer_that_comes_twice_is_passed_on_to_the_gate() -> None:
    first, second = federation(ANY, twice)[1].gather(b"order", [0], nothing)
    assert first == second


def test_a_reply_that_a_supernode_holds_back_comes_with_the_next_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a SuperNode does after its app has replied twice: it is always one reply behind."""
    grid, engine = federation({1: {}})
    assert reasons(engine, [0]) == {0: None}
    push, behind = grid.push_messages, list[tuple[str, list[Message]]]()

    def one_behind(messages: Iterable[Message]) -> list[str]:
        numbers = list(push(messages))
        grid.replies |= dict(behind)
        behind[:] = [(number, grid.replies.pop(number)) for number in numbers]
        return numbers

    monkeypatch.setattr(grid, "push_messages", one_behind)
    monkeypatch.setattr(flower, "NUDGE_SECONDS", 0.2)
    assert reasons(engine, [0, 3]) == {0: None, 3: None}
    assert reasons(engine, [0]) == {0: None}


def test_a_site_that_left_for_good_costs_its_client() -> None:
    def left(grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
        grid.nodes.clear()
        return [Message(Error(LEFT, "Node Unavailable"), reply_to=order)]

    assert reasons(federation({1: {}}, left)[1], [0]) == {0: "no site served it for 0.2 s"}


def test_an_order_that_flower_does_not_take_costs_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid, engine = federation(ANY)
    assert reasons(engine, [0]) == {0: None}
    monkeypatch.setattr(grid, "push_messages", lambda messages: [])
    assert reasons(engine, [0]) == {0: "Flower did not take its order"}


def test_a_site_whose_app_cannot_start_serves_nobody() -> None:
    grid, engine = federation({1: {"clients": "zero"}})
    assert reasons(engine, [0]) == {0: "no site served it for 0.2 s"}
    grid.nodes[2] = {}
    assert reasons(engine, [0]) == {0: None}


def test_an_order_of_an_earlier_round_is_answered_late_and_its_client_not_asked_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[Message] = []

    def holds(grid: LocalGrid, order: Message, reply: Message) -> Iterable[Message]:
        if wire.read_order(order.content).client == 0 and not held:
            held.append(reply)
            return []
        return [reply]

    monkeypatch.setattr(flower, "LAUNCH_SECONDS", 0.0)
    grid, engine = federation(ANY, holds, deadline=0.3, late=5)
    assert reasons(engine, [0, 3]) == {0: "no answer in time", 3: None}
    assert reasons(engine, [0, 3]) == {0: "is still busy with an earlier round", 3: None}
    grid.replies[held[0].metadata.reply_to_message_id] = [crossed(held[0])]
    answers = by_client(engine.gather(b"third", [3], nothing))
    assert isinstance(answers[0], FitResult)
    assert answers[0].late
    assert answers[0].update.startswith(b"order|0|")
    assert reasons(engine, [0, 3]) == {0: None, 3: None}
