"""Honest updates come through unchanged, in client order; each fault has its reason, in the
documented order."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentError, ArgumentParser

from fedbnn.defense.gate import Candidates, Gate
from fedbnn.errors import Exit, FederationError
from fedbnn.federation import server
from fedbnn.protocol.messages import ANNOUNCE, Failure, FitResult, Update, read_update
from fedbnn.storage.files import Rejected, Spool
from tests.defense.conftest import CALL, FEATURES, Open, having, honest, reason_of, reply


def test_an_update_is_read_as_it_was_written() -> None:
    update = honest(3)
    assert read_update(update.to_bytes()).to_bytes() == update.to_bytes()


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1)])
def test_honest_updates_come_out_in_client_order_with_full_trust(
    candidates: Open, order: tuple[int, ...]
) -> None:
    gate = candidates()
    assert all(gate.admit(reply(honest(client), client)) for client in order)
    gate.close()
    assert [(update.client, trust) for update, trust in gate] == [
        (client, 1.0) for client in range(5)
    ]
    assert all(
        torch.equal(update.tensors["backbone"], honest(update.client).tensors["backbone"])
        for update, _ in gate
    )
    assert gate.bytes_up == sum(len(honest(client).to_bytes()) for client in range(5))


FAULTS_IN_ORDER: tuple[tuple[str, dict[str, object]], ...] = (
    ("meant for another run", {"run": "run-2"}),
    ("meant for round 6", {"round": 6}),
    ("meant for another exchange", {"exchange": "statistics"}),
    ("client 77 was not asked", {"client": 77}),
    ("started from another prior", {"prior": "other"}),
    ("answers for a class it does not hold: 'cow'", {"counts": {"cow": 10}}),
    ("missing tensor 'prototypes'", {"tensors": {"backbone": torch.full((8,), torch.nan)}}),
    (
        "backbone is not finite",
        {"tensors": {"backbone": torch.full((8,), torch.nan), "prototypes": torch.ones(2, 3)}},
    ),
    ("claims 11 images", {"samples": 11}),
    (
        "the folded precision is not positive",
        {"tensors": {"backbone": torch.full((8,), -60.0), "prototypes": torch.ones(2, 3)}},
    ),
)


@pytest.mark.parametrize("first", range(len(FAULTS_IN_ORDER)))
def test_the_first_fault_in_the_documented_order_is_the_reason(
    candidates: Open, first: int
) -> None:
    reason, _ = FAULTS_IN_ORDER[first]
    changes = {
        key: value for _, fault in reversed(FAULTS_IN_ORDER[first:]) for key, value in fault.items()
    }
    found = reason_of(candidates(), honest(0, **changes))
    assert found is not None
    assert found.startswith(reason)


@pytest.mark.parametrize(("reason", "changes"), FAULTS_IN_ORDER)
def test_each_fault_alone_is_refused_with_its_reason(
    candidates: Open, reason: str, changes: dict[str, object]
) -> None:
    found = reason_of(candidates(), honest(0, **changes))
    assert found is not None
    assert found.startswith(reason)


def test_size_comes_before_all_reading(candidates: Open) -> None:
    assert (
        reason_of(candidates(max_megabytes=0.001), b"\xff" * 2000)
        == "too large: 0.0 MB, the cap is 0.001 MB"
    )


def test_a_client_speaks_for_itself_and_once(candidates: Open) -> None:
    gate = candidates()
    assert reason_of(gate, honest(1), client=0) == "claims to be client 1"
    assert gate.admit(reply(honest(1), 1))
    assert (
        reason_of(gate, honest(1, samples=9, counts={"cat": 5, "dog": 4}), client=1)
        == "answered twice"
    )
    gate.admit(Failure(2, "no answer within 5 s"))
    assert reason_of(gate, honest(2), client=2) == "answered late, after it had been given up"
    for client in (3, 4):
        gate.admit(reply(honest(client), client))
    gate.close()
    assert {update.client: update.samples for update, _ in gate} == {1: 10, 3: 10, 4: 10}
    assert gate.failed == {2: "no answer within 5 s"}


def test_a_stray_answer_does_not_cost_the_client_its_own(candidates: Open) -> None:
    gate = candidates()
    assert reason_of(gate, honest(1, round=6), client=1) == "meant for round 6, this is round 7"
    assert gate.admit(reply(honest(1), 1))


@pytest.mark.parametrize(
    ("samples", "counts", "reason"),
    [
        (-1, {}, "claims -1 images"),
        (11, {}, "claims 11 images, the announcement said 10"),
        (7, {"cat": 7}, "claims 7 images of cat, the announcement said 6"),
        (9, {"cat": 6, "dog": 4}, "claims 9 images, but 10 by class"),
        (0, {"cat": -2, "dog": 2}, "claims -2 images of cat"),
    ],
)
def test_images_are_counted_against_the_roll_call(
    candidates: Open, samples: int, counts: dict[str, int], reason: str
) -> None:
    tensors = {"backbone": torch.ones(8), "prototypes": torch.ones(len(counts), 3)}
    found = reason_of(candidates(), honest(0, samples=samples, counts=counts, tensors=tensors))
    assert found is not None
    assert found.startswith(reason)


def test_fewer_images_than_the_roll_call_said_are_fine_only_where_memories_change(
    candidates: Open,
) -> None:
    fewer = honest(0, samples=5, counts={"cat": 3, "dog": 2})
    assert reason_of(candidates(), fewer) == "claims 3 images of cat, the announcement said 6"
    row = having("prototypes", torch.ones(1, FEATURES)).tensors
    one = honest(0, samples=6, counts={"cat": 6}, tensors=row)
    assert reason_of(candidates(), one) == "claims 6 images, the announcement said 10"
    assert candidates(replace(CALL, forgets=True)).admit(reply(fewer))


@pytest.mark.parametrize("name", ["", "a\nb", "left\u202eright", "\udc80", "a\x9b31m", "b" * 201])
def test_a_class_that_no_page_can_print_is_announced_by_nobody(candidates: Open, name: str) -> None:
    said = Update("run-1", 7, ANNOUNCE, 0, "digest", 6, {name: 6}, {})
    federation: Any = SimpleNamespace(stream=SimpleNamespace(held=20))
    opened = candidates(server._announcement(federation, ("run-1", 7, ANNOUNCE, "digest"), [0]))
    assert reason_of(opened, said) == f"announces a class that has no name: {name[:60]!r}"
    usual = candidates(server._announcement(federation, ("run-1", 7, ANNOUNCE, "digest"), [0]))
    assert reason_of(usual, replace(said, counts={"Käfer 1": 6})) is None


def test_a_client_without_rows_says_only_how_many_images(candidates: Open) -> None:
    assert candidates().admit(
        reply(
            honest(
                0, counts={}, tensors={"backbone": torch.ones(8), "prototypes": torch.ones(0, 3)}
            )
        )
    )


def test_refused_updates_are_kept_with_the_reason(candidates: Open, tmp_path: Path) -> None:
    update = honest(0, run="run-2")
    reason_of(candidates(), update)
    (payload,) = (tmp_path / "rejected").glob("*.bin")
    assert payload.read_bytes() == update.to_bytes()
    facts = json.loads(payload.with_suffix(".json").read_bytes())
    size = len(update.to_bytes())
    assert facts == {
        "round": 7,
        "exchange": "train",
        "client": 0,
        "bytes": size,
        "reason": "meant for another run",
    }


def test_only_the_newest_refused_updates_stay(tmp_path: Path) -> None:
    rejected = Rejected(tmp_path, most=2)
    for number in range(1, 6):
        rejected.keep(number, "train", 0, b"payload %d" % number, "reason")
    assert sorted(path.name[:7] for path in tmp_path.iterdir()) == [
        "r000004",
        "r000004",
        "r000005",
        "r000005",
    ]
    Rejected(tmp_path / "none", most=0).keep(1, "train", 0, b"payload", "reason")
    assert not (tmp_path / "none").exists()


@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12))
def test_what_is_refused_never_takes_more_than_its_room(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("rejected")
    rejected = Rejected(folder, most=20, megabytes=400 / 2**20)
    for number, size in enumerate(sizes, 1):
        rejected.keep(number, "train", 0, bytes(size), "reason")
        kept = sorted(folder.glob("*.bin"))
        assert sum(path.stat().st_size for path in kept) <= 400
        assert kept[-1].name.startswith(f"r{number:06d}")
        assert len(list(folder.iterdir())) == 2 * len(kept)


def test_a_payload_beyond_all_room_is_cut(tmp_path: Path) -> None:
    Rejected(tmp_path, megabytes=3 / 2**20).keep(1, "train", 0, b"payload", "reason")
    [kept] = tmp_path.glob("*.bin")
    assert kept.read_bytes() == b"pay"


@pytest.mark.parametrize("client", [-1, 5, 10**12])
def test_who_was_not_asked_costs_nobody(candidates: Open, client: int) -> None:
    gate = candidates()
    assert not gate.admit(Failure(client, "gone"))
    assert not gate.admit(FitResult(client, honest(client).to_bytes()))
    assert not gate.admit(FitResult(client, honest(1).to_bytes()))
    assert all(gate.admit(reply(honest(one), one)) for one in range(5))
    gate.close()
    assert [*gate.trust] == [0, 1, 2, 3, 4]
    assert not gate.failed


def test_who_has_answered_cannot_be_given_up(candidates: Open) -> None:
    gate = candidates()
    assert all(gate.admit(reply(honest(client), client)) for client in range(5))
    assert not gate.admit(Failure(2, "somebody else says it is gone"))
    gate.close()
    assert (len(gate.trust), gate.failed) == (5, {})


@pytest.mark.parametrize(
    ("quorum", "asked", "needed"),
    [(0.5, 5, 3), (0.5, 4, 2), (1.0, 7, 7), (0.01, 5, 1), (3.0, 10, 3), (0.3, 10, 3), (5, 4, 5)],
)
def test_the_quorum_is_a_fraction_up_to_one_and_a_number_above(
    quorum: float, asked: int, needed: int
) -> None:
    assert Gate(quorum=quorum).needed(asked) == needed


def test_a_lost_quorum_names_the_clients(candidates: Open) -> None:
    gate = candidates()
    gate.admit(reply(honest(0), 0))
    gate.admit(reply(honest(1, run="x"), 1))
    for client in (2, 3, 4):
        gate.admit(Failure(client, "no answer within 5 s"))
    with pytest.raises(
        FederationError, match="round 7: 1 of 5 clients count, the quorum is 3"
    ) as caught:
        gate.close()
    assert caught.value.code == Exit.FEDERATION
    assert "client 1: meant for another run; client 2: no answer within 5 s" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_megabytes", 0),
        ("influence_cap", 0.5),
        ("quorum", 0),
        ("quorum", math.nan),
        ("quorum", math.inf),
        ("deadline_seconds", -1),
        ("keep_rejected", -1),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: float) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Gate, "gate")
    with pytest.raises(ArgumentError, match=name):
        parser.parse_object({"gate": {name: value}})


def test_without_a_cap_everybody_is_trusted(candidates: Open) -> None:
    gate = candidates(influence_cap=None)
    for client in range(4):
        gate.admit(reply(honest(client), client))
    gate.admit(reply(having("backbone", torch.full((8,), 1e6), client=4), 4))
    gate.close()
    assert gate.trust == dict.fromkeys(range(5), 1.0)


def test_a_forger_is_refused_by_the_cap_and_counts_against_the_quorum(candidates: Open) -> None:
    gate = candidates(quorum=1.0)
    for client in range(4):
        gate.admit(reply(honest(client), client))
    gate.admit(reply(having("backbone", torch.full((8,), 1e6), client=4), 4))
    with pytest.raises(
        FederationError,
        match=r"client 4: influence .* times the error of the others, the cap is 1\.7",
    ):
        gate.close()


@pytest.mark.parametrize("memory", [0, 1500, 2**24])
def test_what_does_not_fit_into_memory_waits_on_disk_and_comes_out_the_same(
    tmp_path: Path, memory: int
) -> None:
    gate = Candidates(
        Gate(),
        CALL,
        Spool(tmp_path / "spool", memory),
        Rejected(tmp_path / "rejected"),
    )
    for client in (3, 0, 4, 1, 2):
        assert gate.admit(reply(honest(client), client))
    gate.close()
    assert [update.to_bytes() for update, _ in gate] == [
        honest(client).to_bytes() for client in range(5)
    ]
    assert gate.trust == dict.fromkeys(range(5), 1.0)
    assert (
        len(list((tmp_path / "spool").glob("*.bin")))
        == {0: 5, 1500: 5 - 1500 // len(honest(0).to_bytes()), 2**24: 0}[memory]
    )


def test_rows_of_another_exchange_are_not_judged(candidates: Open) -> None:
    gate = candidates(replace(CALL, exchange="importance"))
    for client in range(5):
        update = having(
            "prototypes", torch.full((2, FEATURES), 1e6 if client == 4 else 1.0), client
        )
        assert gate.admit(reply(replace(update, exchange="importance"), client))
    gate.close()
    assert gate.trust == dict.fromkeys(range(5), 1.0)


def test_rows_alone_can_be_forged_and_are_refused(candidates: Open) -> None:
    gate = candidates()
    for client in range(5):
        gate.admit(
            reply(
                having(
                    "prototypes", torch.full((2, FEATURES), 1e6 if client == 4 else 1.0), client
                ),
                client,
            )
        )
    gate.close()
    assert gate.trust == dict.fromkeys(range(4), 1.0)
    assert gate.refused == {4: "its prototypes are 1e+06 times as long as usual"}


def test_an_infinite_influence_is_refused(candidates: Open) -> None:
    def influence(update: Update) -> Iterator[torch.Tensor]:
        yield torch.tensor([torch.inf if update.client == 2 else update.client])

    gate = candidates(replace(CALL, influence=influence))
    assert all(gate.admit(reply(honest(client), client)) for client in range(5))
    gate.close()
    assert gate.refused == {2: "its influence is not finite"}
    assert sorted(gate.trust) == sorted(gate.pulls) == [0, 1, 3, 4]


def test_updates_carry_no_types_of_their_own() -> None:
    assert type(read_update(honest(0).to_bytes())) is Update
