"""Messages on a pipe: two lengths, a JSON head, raw bytes. Nothing is unpickled, nothing longer than the limit is read."""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

_LENGTHS = struct.Struct(">IQ")
MAX_HEAD = 64 * 2**20
MAX_BLOB = 2**33


class BadFrame(ValueError):
    """The pipe does not speak this language, or claims too much."""


@dataclass(frozen=True)
class Frame:
    """One message: what it is, and the bytes that belong to it."""

    head: Mapping[str, Any]
    blob: bytes = b""

    def parts(self) -> tuple[bytes, bytes]:
        """The frame as it is sent; the blob is not copied."""
        head = json.dumps(dict(self.head)).encode()
        return _LENGTHS.pack(len(head), len(self.blob)) + head, self.blob


class Decoder:
    """Bytes in as they come, whole frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete with this data."""
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            head, blob = _lengths(self._buffer)
            body, end = _LENGTHS.size + head, _LENGTHS.size + head + blob
            if len(self._buffer) < end:
                return
            frame = Frame(
                _head(bytes(self._buffer[_LENGTHS.size : body])),
                bytes(memoryview(self._buffer)[body:end]),
            )
            del self._buffer[:end]
            yield frame


def read(stream: BinaryIO) -> Frame | None:
    """The next frame of a blocking stream; None at its end."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    head, blob = _lengths(lengths)
    body = stream.read(head + blob)
    return Frame(_head(body[:head]), body[head:]) if len(body) == head + blob else None


def _lengths(data: bytes | bytearray) -> tuple[int, int]:
    head, blob = _LENGTHS.unpack_from(data)
    if head > MAX_HEAD or blob > MAX_BLOB:
        raise BadFrame(f"a frame of {head} + {blob} bytes")
    return head, blob


def _head(text: bytes) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFrame("the head is not JSON") from error
    if not isinstance(head, dict):
        raise BadFrame("the head is not a table")
    return head
