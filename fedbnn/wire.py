"""Tensors and a few strings as bytes and back: safetensors with a digest, nothing that could execute.

`pack` is the only encoder and `unpack` the only decoder of everything that crosses a process, a network or a
disk: orders, updates, client state, committed rounds.
"""

import hashlib
import json
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

LENGTH_BYTES = 8
MAX_HEADER = 4 * 2**20
ENVELOPE = "fedbnn"


class Malformed(ValueError):
    """These bytes are not a message of ours; the text says why."""


def digest(payload: bytes) -> str:
    """sha256 of the bytes, in hex."""
    return hashlib.sha256(payload).hexdigest()


def _checksum(tensors: Mapping[str, Tensor], meta: str) -> str:
    """One sha256 over the metadata and over names, types, shapes and values, in the order of the names."""
    total = hashlib.sha256(meta.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def pack(tensors: Mapping[str, Tensor], meta: Mapping[str, object]) -> bytes:
    """Encode tensors and JSON-able `meta`; the same content gives the same bytes.

    All strings stand in one entry of the header: safetensors writes several entries in random order.
    """
    plain = _apart({name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)})
    text = json.dumps(meta, sort_keys=True)
    return save(
        plain, metadata={ENVELOPE: json.dumps({"meta": text, "sha256": _checksum(plain, text)})}
    )


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, none in the memory of another: safetensors refuses two names for one memory."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return apart


def unpack(payload: bytes) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Decode what `pack` made; raises `Malformed` for anything else, a flipped bit included."""
    text, checksum = _envelope(payload)
    try:
        tensors = load(payload)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise Malformed(f"not safetensors: {error}") from error
    if checksum != _checksum(tensors, text):
        raise Malformed("the digest does not match the content")
    meta = _json_table(text.encode(), "metadata")
    return tensors, meta


def _envelope(payload: bytes) -> tuple[str, str]:
    """Metadata and digest from a safetensors header, read without touching the tensors."""
    size = int.from_bytes(payload[:LENGTH_BYTES], "little")
    if len(payload) < LENGTH_BYTES or size > len(payload) - LENGTH_BYTES:
        raise Malformed("truncated, or a header that claims more bytes than there are")
    if size > MAX_HEADER:
        raise Malformed(f"a header of {size} bytes, the cap is {MAX_HEADER}")
    header = _json_table(payload[LENGTH_BYTES : LENGTH_BYTES + size], "header")
    strings = header.get("__metadata__")
    text = strings.get(ENVELOPE) if isinstance(strings, dict) else None
    envelope = _json_table(text.encode(), "envelope") if isinstance(text, str) else {}
    meta, checksum = envelope.get("meta"), envelope.get("sha256")
    if not isinstance(meta, str) or not isinstance(checksum, str):
        raise Malformed("the header has no metadata of ours")
    return meta, checksum


def _json_table(text: bytes, what: str) -> dict[str, object]:
    """A JSON object; anything else is malformed."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the {what} is not JSON") from error
    if not isinstance(table, dict):
        raise Malformed(f"the {what} is not a table")
    return table
