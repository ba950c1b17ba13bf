"""What the server knows, and how tensors become bytes and back.

Tensors of a state, by name (P backbone weights, B buffer values, C classes known, d features):

    backbone, backbone.scale      (P,)      weights, or mean and scale of their posterior
    prototypes, prototypes.scale  (C, d+1)  weights and bias of each class, likewise
    prototypes.samples            (C,)      images folded into the row so far; 0: the row is fresh
    buffers                       (B,)      running means of batch norm, then its variances

and what a method keeps beside them: one number a weight under `backbone.` and `prototypes.`, as
`backbone.importance`, and whole models of the past under a name of its own.

`pack` is the only encoder and `unpack` the only decoder of all that crosses a process, a network or
a disk: instructions, updates, client state, committed rounds. The bytes are safetensors, in the one
way we write it: a header with the place of every tensor, our metadata and a sha256 of all of it,
then the tensors as they lie in memory. Nothing in them could execute. Packing hashes each byte once
and copies it once; unpacking hashes it once and copies nothing: the tensors are views of the bytes,
and like every value here never changed in place.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

TYPES = {"BOOL": torch.bool, "C64": torch.complex64, "U8": torch.uint8}
TYPES |= {f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)}
TYPES |= {f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)}
NAMES = {dtype: name for name, dtype in TYPES.items()}
LENGTH_BYTES, MAX_HEADER = 8, 4 * 2**20
MAX_DIMENSIONS, MAX_VALUES = 16, 2**40
METADATA, ENVELOPE = "__metadata__", "fedbnn"

Payload = bytes | memoryview
Spec = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class State:
    """Named tensors plus the class of each library row. A value: never changed in place."""

    tensors: Mapping[str, Tensor]
    classes: tuple[str, ...] = ()
    notes: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    @property
    def bayesian(self) -> bool:
        """Whether the weights have a posterior yet, or are points."""
        return "backbone.scale" in self.tensors

    def having(self, tensors: Mapping[str, Tensor], **notes: object) -> "State":
        """The same state with some tensors (and notes) replaced or added."""
        return replace(self, tensors={**self.tensors, **tensors}, notes={**self.notes, **notes})

    def only(self, *names: str) -> "State":
        """The same state with these tensors alone (those it has)."""
        return replace(self, tensors={name: self[name] for name in names if name in self})

    def index(self, classes: tuple[str, ...]) -> Tensor:
        """Row numbers of these classes."""
        place = {name: row for row, name in enumerate(self.classes)}
        return torch.tensor([place[name] for name in classes], dtype=torch.long)

    def to_bytes(self) -> bytes:
        """The state as bytes; equal states give equal bytes."""
        return pack(self.tensors, {"classes": list(self.classes), "notes": dict(self.notes)})

    @classmethod
    def from_bytes(cls, payload: Payload) -> "State":
        """The state that `to_bytes` wrote; raises `Malformed` otherwise."""
        tensors, meta = unpack(payload)
        classes, notes = meta.get("classes"), meta.get("notes")
        if not isinstance(classes, list) or not isinstance(notes, dict):
            raise Malformed("not a state: classes or notes are missing")
        return cls(tensors, tuple(map(str, classes)), notes)


class Malformed(ValueError):
    """These bytes are not a message of ours; the text says why."""


def digest(payload: Payload) -> str:
    """sha256 of any bytes, in hex."""
    return hashlib.sha256(payload).hexdigest()


def content_digest(payload: Payload) -> str:
    """The sha256 of its content that a message names in its header, and that `unpack` checks."""
    return _opened(payload)[2]


def pack(tensors: Mapping[str, Tensor], meta: Mapping[str, object]) -> bytes:
    """Encode tensors and JSON-able `meta`; the same content gives the same bytes."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    specs = _ordered({name: (NAMES[one.dtype], tuple(one.shape)) for name, one in plain.items()})
    values = [plain[name].reshape(-1).view(torch.uint8).numpy().data for name in specs]
    text = json.dumps(meta, sort_keys=True)
    return b"".join([_header(specs, text, _checksum(specs, text, values)), *values])


def unpack(payload: Payload) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Decode what `pack` made; raises `Malformed` for anything else, a flipped bit included."""
    specs, meta, checksum = _opened(payload)
    start = len(payload) - sum(map(_size, specs.values()))
    if checksum != _checksum(specs, meta, [memoryview(payload)[start:]]):
        raise Malformed("the digest does not match the content")
    return _views(payload, specs, start), _json_table(meta, "metadata")


def _ordered(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Wide types before narrow ones, so that every value is aligned; then by name."""
    return dict(sorted(specs.items(), key=lambda item: (-TYPES[item[1][0]].itemsize, item[0])))


def _size(spec: Spec) -> int:
    """Bytes of a tensor."""
    return TYPES[spec[0]].itemsize * math.prod(spec[1])


def _checksum(specs: Mapping[str, Spec], meta: str, values: Iterable[memoryview]) -> str:
    """One sha256 over names, types, shapes, metadata and all values in their order."""
    total = hashlib.sha256(json.dumps([list(specs.items()), meta]).encode())
    for part in values:
        total.update(part)
    return total.hexdigest()


def _header(specs: Mapping[str, Spec], meta: str, checksum: str) -> bytes:
    """The length, and the JSON that safetensors wants, padded to whole words.

    All strings stand in one entry: safetensors itself writes several entries in random order.
    """
    envelope = json.dumps({"meta": meta, "sha256": checksum})
    table, end = dict[str, object]({METADATA: {ENVELOPE: envelope}}), 0
    for name, spec in specs.items():
        start, end = end, end + _size(spec)
        table[name] = {"dtype": spec[0], "shape": spec[1], "data_offsets": [start, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _opened(payload: Payload) -> tuple[dict[str, Spec], str, str]:
    """Specs, metadata and digest; the header must be, to the byte, the one we would write."""
    size = int.from_bytes(payload[:LENGTH_BYTES], "little")
    end = LENGTH_BYTES + size
    if len(payload) < LENGTH_BYTES or size > len(payload) - LENGTH_BYTES:
        raise Malformed("truncated, or a header that claims more bytes than there are")
    if size > MAX_HEADER:
        raise Malformed(f"a header of {size} bytes, the cap is {MAX_HEADER}")
    head = bytes(payload[:end])
    table = _json_table(head[LENGTH_BYTES:], "header")
    meta, checksum = _envelope(table.pop(METADATA, None))
    specs = {name: _spec(entry) for name, entry in table.items()}
    if head != _header(_ordered(specs), meta, checksum):
        raise Malformed("not the header of a message of ours")
    if len(payload) - end != sum(map(_size, specs.values())):
        raise Malformed("truncated, or longer than its header says")
    return specs, meta, checksum


def _envelope(strings: object) -> tuple[str, str]:
    """Our metadata and digest among the strings of a header."""
    match strings:
        case {"fedbnn": str(text)}:
            match _json_table(text, "envelope"):
                case {"meta": str(meta), "sha256": str(checksum)}:
                    return meta, checksum
    raise Malformed("the header has no metadata of ours")


def _spec(entry: object) -> Spec:
    """Type and shape of a tensor that can be."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape)} if dtype in TYPES:
            lengths = [max(1, one) for one in shape if type(one) is int and 0 <= one <= MAX_VALUES]
            if len(lengths) == len(shape) <= MAX_DIMENSIONS and math.prod(lengths) <= MAX_VALUES:
                return dtype, tuple(shape)
    raise Malformed("a tensor of a type or a shape that cannot be")


def _views(payload: Payload, specs: Mapping[str, Spec], start: int) -> dict[str, Tensor]:
    """Every tensor where it lies in the bytes; torch warns that these must not be written to."""
    tensors = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        for name, (kind, shape) in specs.items():
            values = torch.empty(0, dtype=TYPES[kind])
            if count := math.prod(shape):
                values = torch.frombuffer(payload, dtype=TYPES[kind], count=count, offset=start)
            tensors[name] = values.reshape(shape)
            start += count * values.itemsize
    return tensors


def _json_table(text: str | bytes, what: str) -> dict[str, Any]:
    """A JSON object; anything else is malformed."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the {what} is not JSON") from error
    if not isinstance(table, dict):
        raise Malformed(f"the {what} is not a table")
    return table
