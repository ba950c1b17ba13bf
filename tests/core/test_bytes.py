"""Equal content gives equal bytes; any other bytes are malformed."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from fedbnn.protocol.state import LENGTH_BYTES, Malformed, content_digest, pack, unpack

TENSORS = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.zeros(0), "scalar": torch.tensor(3)}
META = {"text": 'ü|"', "list": [1, {"x": None}], "number": 0.1}


def test_what_is_packed_is_unpacked() -> None:
    tensors, meta = unpack(pack(TENSORS, META))
    assert meta == META
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()} == {
        name: (tensor.dtype, tensor.tolist()) for name, tensor in TENSORS.items()
    }


def test_the_same_content_gives_the_same_bytes() -> None:
    other_order = {name: TENSORS[name] for name in sorted(TENSORS)}
    payloads = {
        pack(tensors, meta)
        for tensors in (TENSORS, other_order)
        for meta in (META, dict(reversed(META.items())))
    }
    payloads |= {pack(TENSORS, META) for _ in range(30)}
    assert len(payloads) == 1


def test_every_flipped_bit_is_found() -> None:
    payload = pack(TENSORS, META)
    for offset in range(len(payload)):
        for bit in range(8):
            spoiled = bytearray(payload)
            spoiled[offset] ^= 1 << bit
            with pytest.raises(Malformed):
                unpack(bytes(spoiled))


def test_every_truncation_is_found() -> None:
    payload = pack(TENSORS, META)
    for length in range(len(payload)):
        with pytest.raises(Malformed):
            unpack(payload[:length])


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_random_bytes_are_malformed(payload: bytes) -> None:
    with pytest.raises(Malformed):
        unpack(payload)


@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_random_headers_are_malformed(header: object) -> None:
    text = json.dumps({"__metadata__": header} if not isinstance(header, dict) else header).encode()
    with pytest.raises(Malformed):
        unpack(len(text).to_bytes(8, "little") + text + b"\0" * 16)


def test_the_safetensors_library_reads_what_is_packed() -> None:
    every = {str(one): torch.ones(3, dtype=one) for one in (torch.float16, torch.bool, torch.int8)}
    tensors = TENSORS | every | {"c": torch.ones(2, dtype=torch.complex64)}
    found = load(pack(tensors, META))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_unpacking_copies_nothing_and_every_value_is_aligned() -> None:
    payload = pack(
        TENSORS | {"odd": torch.ones(3, dtype=torch.bool), "d": torch.ones(1).double()}, META
    )
    start = np.frombuffer(payload, np.uint8).ctypes.data
    for tensor in unpack(payload)[0].values():
        if tensor.numel():
            assert start < tensor.data_ptr() < start + len(payload)
            assert tensor.data_ptr() % tensor.itemsize == 0


def test_the_digest_of_the_content_names_all_of_it() -> None:
    first = content_digest(pack(TENSORS, META))
    assert first == content_digest(pack(dict(reversed(TENSORS.items())), META))
    for tensors, meta in (
        (TENSORS, {**META, "number": 0.2}),
        ({**TENSORS, "a": torch.zeros(0, 1)}, META),
        ({**TENSORS, "b": TENSORS["b"] + 1}, META),
        ({**TENSORS, "b": TENSORS["b"].int()}, META),
        ({"c" if name == "b" else name: one for name, one in TENSORS.items()}, META),
    ):
        assert content_digest(pack(tensors, meta)) != first


def rewritten(change: dict[str, object] | bytes) -> bytes:
    """A message whose header says something else about tensor `b`, or has other bytes."""
    payload = pack({"b": torch.zeros(2)}, META)
    end = LENGTH_BYTES + int.from_bytes(payload[:LENGTH_BYTES], "little")
    table = json.loads(payload[LENGTH_BYTES:end])
    if isinstance(change, dict):
        table["b"] |= change
        text = json.dumps(table).encode()
    else:
        text = payload[LENGTH_BYTES:end].rstrip().replace(b"}}", change, 1)
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + payload[end:]


@pytest.mark.parametrize(
    "change",
    [
        *({"shape": shape} for shape in ([2**63], [0, 2**62], [-2], [2.0], [True, 2], [2, "1"])),
        *({"shape": shape} for shape in ([1] * 99 + [2], "2", None, [2**40] * 9, [9**3000])),
        *({"dtype": dtype} for dtype in ("F8", "F64", 3, None)),
        *({"data_offsets": offsets} for offsets in ([0, 4], [4, 8], [0, 2**60], [8, 0], [])),
        b'}, "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        b"} }",
        b"}}\n",
    ],
)
def test_a_header_that_is_not_ours_to_the_byte_is_malformed(
    change: dict[str, object] | bytes,
) -> None:
    with pytest.raises(Malformed):
        unpack(rewritten(change))


def test_a_file_of_the_library_itself_is_not_a_message() -> None:
    with pytest.raises(Malformed):
        unpack(save(TENSORS, {"fedbnn": json.dumps({"meta": "{}", "sha256": ""})}))
