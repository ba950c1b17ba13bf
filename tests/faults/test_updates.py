"""Row: NaN, Inf, 1e38, precision <= 0, wrong shape, missing or extra site, float16, empty, random
bytes, truncated at every offset, header claiming 2^40 bytes, pickle bomb -> refused with the
reason, bounded memory, bomb not run."""

import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedbnn.defense.gate import Candidates, Gate
from fedbnn.protocol.messages import Update, read_update
from fedbnn.protocol.state import pack, unpack
from fedbnn.storage.files import Rejected, Spool
from tests.defense.conftest import CALL, FEATURES, Open, having, honest, reason_of, reply

GOOD = torch.ones(8)


def spoiled(value: float) -> Tensor:
    return torch.where(torch.arange(8) == 5, torch.tensor(value), GOOD)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (spoiled(float("nan")), "backbone is not finite"),
        (spoiled(float("inf")), "backbone is not finite"),
        (spoiled(-float("inf")), "backbone is not finite"),
        (spoiled(1e38), "backbone reaches 1e+38, beyond any weight or precision"),
        (spoiled(-1e38), "backbone reaches 1e+38, beyond any weight or precision"),
        (spoiled(-60.0), "the folded precision is not positive"),
        (torch.ones(7), "backbone has shape (7,), expected (8,)"),
        (torch.ones(1), "backbone has shape (1,), expected (8,)"),
        (torch.ones(()), "backbone has shape (), expected (8,)"),
        (torch.ones(1, 8), "backbone has shape (1, 8), expected (8,)"),
        (torch.ones(0), "backbone has shape (0,), expected (8,)"),
        (GOOD.half(), "backbone has type torch.float16, expected torch.float32"),
        (GOOD.double(), "backbone has type torch.float64, expected torch.float32"),
        (GOOD.int(), "backbone has type torch.int32, expected torch.float32"),
        (GOOD.bool(), "backbone has type torch.bool, expected torch.float32"),
        (GOOD.to(torch.complex64), "backbone has type torch.complex64, expected torch.float32"),
    ],
)
def test_a_wrong_tensor_is_refused(candidates: Open, tensor: Tensor, reason: str) -> None:
    assert reason_of(candidates(), having("backbone", tensor)) == reason


def test_missing_and_extra_sites_and_rows_are_refused(candidates: Open) -> None:
    gate = candidates()
    assert (
        reason_of(gate, honest(0, tensors={"backbone": GOOD}), 0) == "missing tensor 'prototypes'"
    )
    assert reason_of(gate, having("more", GOOD, client=1), 1) == "unexpected tensor 'more'"
    assert (
        reason_of(gate, having("prototypes", torch.ones(3, FEATURES), client=2), 2)
        == "prototypes has shape (3, 3), expected (2, 3)"
    )
    assert (
        reason_of(gate, having("prototypes", torch.ones(1, FEATURES), client=3), 3)
        == "prototypes has shape (1, 3), expected (2, 3)"
    )


def test_truncated_at_every_offset(
    candidates: Open, record_property: Callable[[str, object], None]
) -> None:
    gate, payload = candidates(keep_rejected=0), honest(0).to_bytes()
    record_property("tried", len(payload))
    for length in range(len(payload)):
        assert reason_of(gate, payload[:length]) is not None
    assert reason_of(gate, payload) is None


def test_every_flipped_byte_is_refused(
    candidates: Open, record_property: Callable[[str, object], None]
) -> None:
    gate, payload = candidates(keep_rejected=0), honest(0).to_bytes()
    record_property("tried", len(payload))
    for offset in range(len(payload)):
        assert (
            reason_of(
                gate, payload[:offset] + bytes([payload[offset] ^ 0x5A]) + payload[offset + 1 :]
            )
            is not None
        )
    assert reason_of(gate, payload) is None


def header_claiming(size: int) -> bytes:
    return (
        size.to_bytes(8, "little")
        + b'{"backbone":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}}'
        + b"\0" * 32
    )


def tensor_claiming(shape: list[int], end: int) -> bytes:
    header = json.dumps(
        {
            "__metadata__": {"fedbnn": "{}"},
            "backbone": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]},
        }
    )
    return len(header).to_bytes(8, "little") + header.encode() + b"\0" * 32


def nested(depth: int) -> bytes:
    return depth.to_bytes(8, "little") + b"[" * depth


HOSTILE = {
    "empty": b"",
    "one byte": b"\1",
    "zeros": b"\0" * 1000,
    "header claiming 2^40 bytes": header_claiming(2**40),
    "header claiming 2^64 - 1 bytes": header_claiming(2**64 - 1),
    "tensor claiming 2^40 values": tensor_claiming([2**40], 2**42),
    "tensor claiming 2^63 values": tensor_claiming([2**63], 32),
    "tensor with a shape that overflows": tensor_claiming([2**33, 2**33], 32),
    "tensor with a negative shape": tensor_claiming([-8], 32),
    "header nested a million deep": nested(10**6),
    "header longer than any of ours": (5 * 2**20).to_bytes(8, "little") + b" " * (5 * 2**20),
    "header of many small things": (3 * 2**20).to_bytes(8, "little")
    + (b"[" + b"[]," * 2**20)[: 3 * 2**20],
    "a long number": len(b"9" * 10**5).to_bytes(8, "little") + b"9" * 10**5,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_take_no_memory(candidates: Open, name: str) -> None:
    gate = candidates()
    tracemalloc.start()
    try:
        reason = reason_of(gate, HOSTILE[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reason
    assert peak < 10 * len(HOSTILE[name]) + 80 * 2**20


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_bomb_is_refused_kept_and_never_run(candidates: Open, tmp_path: Path) -> None:
    target = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(target))
    with_torch = tmp_path / "bomb.pt"
    torch.save({"backbone": Bomb(target)}, with_torch)
    gate = candidates()
    for client, payload in enumerate([bomb, with_torch.read_bytes()]):
        assert reason_of(gate, payload, client)
    hidden = honest(2, exchange=bomb.hex())
    assert reason_of(gate, hidden, 2) == "meant for another exchange than train"
    assert len(list((tmp_path / "rejected").glob("*.bin"))) == 3
    assert not target.exists()
    pickle.loads(bomb)
    assert target.exists()


OTHER_TYPES: list[dict[str, Any]] = [
    *({"schema": value} for value in (2, None)),
    *({"round": value} for value in ("7", True, 7.0)),
    {"run": 3},
    {"client": None},
    {"samples": 1.5},
    *(
        {"counts": value}
        for value in ({"cat": 1}, [["cat"]], [["cat", 1], ["cat", 1]], [[1, "cat"]], None)
    ),
]


@pytest.mark.parametrize("changes", OTHER_TYPES)
def test_metadata_of_other_types_is_refused(candidates: Open, changes: dict[str, Any]) -> None:
    tensors, meta = unpack(honest(0).to_bytes())
    reason = reason_of(candidates(), pack(tensors, {**meta, **changes}))
    assert reason is not None
    assert any(word in reason for word in ("schema", "metadata", "counted twice"))


NUMBERS = st.floats(width=32) | st.sampled_from([0.0, 1.0, -1.0, 1e38])
SHAPES = st.sampled_from([(8,), (1,), (8, 1), (0,), (2, 3)])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(SHAPES)
    values = draw(st.lists(NUMBERS, min_size=1, max_size=3))
    return (
        torch.tensor(values, dtype=torch.float64)
        .repeat(8)[: torch.Size(shape).numel()]
        .reshape(shape)
        .to(draw(DTYPES))
    )


TABLES = st.dictionaries(
    st.sampled_from(["backbone", "prototypes", "extra"]), tensors(), max_size=3
)
COUNTS = st.dictionaries(st.sampled_from(["cat", "dog", "cow"]), st.integers(-2, 12), max_size=3)
UPDATES = st.builds(
    Update,
    run=st.sampled_from(["run-1", "run-2"]),
    round=st.sampled_from([6, 7]),
    exchange=st.sampled_from(["train", "x"]),
    client=st.integers(-1, 6),
    prior=st.sampled_from(["digest", ""]),
    samples=st.integers(-1, 12),
    counts=COUNTS,
    tensors=TABLES,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    updates=st.lists(
        UPDATES | st.builds(honest, st.integers(0, 4)) | st.binary(max_size=50), max_size=8
    )
)
def test_whatever_is_folded_is_what_was_asked_for(
    tmp_path_factory: Any, updates: list[Update | bytes]
) -> None:
    directory = tmp_path_factory.mktemp("gate")
    gate = Candidates(
        Gate(quorum=0.01),
        CALL,
        Spool(directory / "spool"),
        Rejected(directory / "rejected", most=0),
    )
    accepted = [
        update
        for update in updates
        if gate.admit(reply(update, update.client if isinstance(update, Update) else 0))
    ]
    assert len(accepted) + len(gate.refused) >= min(1, len(updates))
    for client in gate.spool:
        update = read_update(gate.spool[client])
        assert (update.run, update.round, update.exchange, update.client, update.prior) == (
            "run-1",
            7,
            "train",
            client,
            "digest",
        )
        assert {name: tuple(tensor.shape) for name, tensor in update.tensors.items()} == {
            "backbone": (8,),
            "prototypes": (len(update.counts), FEATURES),
        }
        assert all(
            tensor.dtype == torch.float32 and tensor.isfinite().all()
            for tensor in update.tensors.values()
        )
        assert 0 <= update.samples <= 10
