"""The ledger gives back what was committed, keeps the newest, takes no damaged one for whole."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbnn.errors import ConfigError
from fedbnn.protocol.state import State, digest
from fedbnn.storage.ledger import Ledger


def state_of(number: int) -> State:
    return State({"backbone": torch.full((5,), float(number))}, ("a", "b"), {"round": number})


def commit(ledger: Ledger, *rounds: int, privates: dict[int, bytes] | None = None) -> None:
    for number in rounds:
        ledger.commit(
            number, state_of(number), privates or {}, {"round": number, "value": number / 3}
        )


def client_files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "state" / "clients").iterdir())


def test_a_fresh_directory_has_no_round(tmp_path: Path) -> None:
    with Ledger(tmp_path / "new" / "run") as ledger:
        assert ledger.round == 0
        assert ledger.latest() is None
        assert ledger.private(0) is None


def test_what_is_committed_is_what_is_read_after_reopening(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        commit(ledger, 1, 2)
    with Ledger(tmp_path) as ledger:
        latest = ledger.latest()
    assert latest is not None
    assert latest.round == 2
    assert latest.record == {"round": 2, "value": 2 / 3}
    assert latest.state.to_bytes() == state_of(2).to_bytes()
    assert not ledger.warnings


def test_the_same_rounds_give_the_same_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with Ledger(tmp_path / name) as ledger:
            commit(ledger, 1, 2, privates={4: b"four"})
    written = [
        path for path in (tmp_path / "one").rglob("*") if path.is_file() and path.name != "lock"
    ]
    files = {path.relative_to(tmp_path / "one") for path in written}
    assert files
    assert all(
        (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
        for file in files
    )


def test_retention_keeps_the_newest_rounds(tmp_path: Path) -> None:
    with Ledger(tmp_path, keep=2) as ledger:
        commit(ledger, 1, 2, 3, 4)
    assert sorted(path.name for path in (tmp_path / "state").glob("round-*")) == [
        "round-000003",
        "round-000004",
    ]


def test_private_state_is_the_newest_of_each_client_and_written_once_per_change(
    tmp_path: Path,
) -> None:
    with Ledger(tmp_path, keep=2) as ledger:
        commit(ledger, 1, privates={7: b"seven-1", 9: b"nine-1"})
        commit(ledger, 2, privates={7: b"seven-2"})
        assert (ledger.private(7), ledger.private(9), ledger.private(8)) == (
            b"seven-2",
            b"nine-1",
            None,
        )
        assert client_files(tmp_path) == [
            "7-r1.safetensors",
            "7-r2.safetensors",
            "9-r1.safetensors",
        ]
        commit(ledger, 3)
        assert client_files(tmp_path) == ["7-r2.safetensors", "9-r1.safetensors"]
    with Ledger(tmp_path, keep=2) as ledger:
        assert (ledger.private(7), ledger.private(9)) == (b"seven-2", b"nine-1")


HISTORIES = st.lists(
    st.dictionaries(st.integers(0, 5), st.binary(max_size=4), max_size=3), min_size=1, max_size=6
)


@settings(max_examples=20, deadline=None)
@given(history=HISTORIES, keep=st.integers(1, 3))
def test_private_state_equals_a_plain_dictionary(
    tmp_path_factory: pytest.TempPathFactory, history: list[dict[int, bytes]], keep: int
) -> None:
    run_dir, plain = tmp_path_factory.mktemp("run"), dict[int, bytes]()
    with Ledger(run_dir, keep) as ledger:
        for number, privates in enumerate(history, 1):
            ledger.commit(number, state_of(number), privates, {})
            plain |= privates
    with Ledger(run_dir, keep) as ledger:
        assert {client: ledger.private(client) for client in range(6)} == {
            client: plain.get(client) for client in range(6)
        }
    assert len(client_files(run_dir)) <= sum(len(privates) for privates in history[-keep:]) + len(
        plain
    )


def test_a_commit_writes_the_participants_only(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        commit(ledger, 1, privates=dict.fromkeys(range(200), b"x" * 1000))
        before = {
            path.name: path.stat().st_mtime_ns
            for path in (tmp_path / "state" / "clients").iterdir()
        }
        commit(ledger, 2, privates={3: b"new"})
        after = {
            path.name: path.stat().st_mtime_ns
            for path in (tmp_path / "state" / "clients").iterdir()
        }
    assert set(after) - set(before) == {"3-r2.safetensors"}
    assert all(after[name] == before[name] for name in before)


def test_rounds_follow_each_other(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        commit(ledger, 1)
        with pytest.raises(ValueError, match="round 3 cannot follow round 1"):
            commit(ledger, 3)
        with pytest.raises(ValueError, match="round 1 cannot follow round 1"):
            commit(ledger, 1)


def test_it_keeps_at_least_one_round(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Ledger(tmp_path, keep=0)


def test_spools_give_back_in_client_order_and_leave_nothing(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        with ledger.spool(1, "train") as spool:
            for client in (10, 2, 33):
                spool.put(client, b"%d" % client)
            spool.drop(33)
            assert list(spool.items()) == [(2, b"2"), (10, b"10")]
            with pytest.raises(KeyError):
                spool[33]
        with ledger.spool(1, "train") as spool:
            assert len(spool) == 0
        assert not list((tmp_path / "state" / "spool").iterdir())


def test_privates_may_wait_in_a_spool(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger, ledger.spool(1, "private") as spool:
        spool.put(5, b"five")
        ledger.commit(1, state_of(1), spool, {})
        assert ledger.private(5) == b"five"


def test_private_state_damaged_while_running_is_never_handed_out(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        commit(ledger, 1, privates={5: b"five"})
        (tmp_path / "state" / "clients" / "5-r1.safetensors").write_bytes(b"fife")
        assert ledger.private(5) is None
        assert "private state of client 5 is damaged" in ledger.warnings[0]


def test_the_manifest_is_readable_by_people(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        commit(ledger, 1, privates={5: b"five"})
    manifest = json.loads((tmp_path / "state" / "round-000001" / "manifest.json").read_bytes())
    assert manifest["format"] == 2
    record = (tmp_path / "state" / "records" / "000001.json").read_bytes()
    assert manifest["body"]["records"] == [digest(record)]
    assert manifest["body"]["clients"]["5"][0] == "5-r1.safetensors"
