"""Equal content gives equal bytes; any other bytes are malformed."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbnn import state as wire

TENSORS = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.zeros(0), "scalar": torch.tensor(3)}
META = {"text": 'ü|"', "list": [1, {"x": None}], "number": 0.1}


def test_what_is_packed_is_unpacked() -> None:
    tensors, meta = wire.unpack(wire.pack(TENSORS, META))
    assert meta == META
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()} == {
        name: (tensor.dtype, tensor.tolist()) for name, tensor in TENSORS.items()
    }


def test_the_same_content_gives_the_same_bytes() -> None:
    other_order = {name: TENSORS[name] for name in sorted(TENSORS)}
    payloads = {
        wire.pack(tensors, meta)
        for tensors in (TENSORS, other_order)
        for meta in (META, dict(reversed(META.items())))
    }
    payloads |= {wire.pack(TENSORS, META) for _ in range(30)}
    assert len(payloads) == 1


def test_every_flipped_bit_is_found() -> None:
    payload = wire.pack(TENSORS, META)
    for offset in range(len(payload)):
        for bit in range(8):
            spoiled = bytearray(payload)
            spoiled[offset] ^= 1 << bit
            with pytest.raises(wire.Malformed):
                wire.unpack(bytes(spoiled))


def test_every_truncation_is_found() -> None:
    payload = wire.pack(TENSORS, META)
    for length in range(len(payload)):
        with pytest.raises(wire.Malformed):
            wire.unpack(payload[:length])


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_random_bytes_are_malformed(payload: bytes) -> None:
    with pytest.raises(wire.Malformed):
        wire.unpack(payload)


@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_random_headers_are_malformed(header: object) -> None:
    text = json.dumps({"__metadata__": header} if not isinstance(header, dict) else header).encode()
    with pytest.raises(wire.Malformed):
        wire.unpack(len(text).to_bytes(8, "little") + text + b"\0" * 16)
