"""A spool gives back what was put, in client order, whether it fits into memory or not."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbnn.storage.files import Spool


@pytest.mark.parametrize(("memory", "on_disk"), [(0, 3), (6, 2), (100, 0)])
def test_what_does_not_fit_into_memory_is_on_disk(
    tmp_path: Path, memory: int, on_disk: int
) -> None:
    spool = Spool(tmp_path, memory)
    for client in (10, 2, 33):
        spool.put(client, b"abcd%d" % client)
    assert list(spool.items()) == [(2, b"abcd2"), (10, b"abcd10"), (33, b"abcd33")]
    assert len(list(tmp_path.glob("*.bin"))) == on_disk


def test_memory_that_is_given_back_is_used_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path, memory=4)
    for payload in (b"abcd", b"efgh"):
        spool.put(1, payload)
    spool.drop(1)
    spool.put(2, b"ijkl")
    assert (dict(spool), list(tmp_path.iterdir())) == ({2: b"ijkl"}, [])


STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.binary(max_size=8)), max_size=20)


@given(steps=STEPS, memory=st.integers(0, 20))
def test_it_is_a_dictionary_in_client_order(
    tmp_path_factory: pytest.TempPathFactory, steps: list, memory: int
) -> None:
    spool, plain = Spool(tmp_path_factory.mktemp("spool"), memory), {}
    for put, client, payload in steps:
        if put:
            spool.put(client, payload)
            plain[client] = payload
        else:
            spool.drop(client)
            plain.pop(client, None)
    assert (list(spool.items()), len(spool)) == (sorted(plain.items()), len(plain))
    with pytest.raises(KeyError):
        spool[99]


@pytest.mark.parametrize("memory", [0, 100])
def test_what_is_kept_can_be_read_when_its_file_is_gone(tmp_path: Path, memory: int) -> None:
    spool, payload = Spool(tmp_path, memory), b"abcd" * 5
    kept = spool.put(3, payload)
    assert (kept is payload) == bool(memory)
    spool.drop(3)
    assert (bytes(kept), list(tmp_path.iterdir())) == (payload, [])
