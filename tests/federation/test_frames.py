"""Frames survive any cutting of the stream; claims beyond the limit are not believed."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbnn.federation.engines import frames
from fedbnn.federation.engines.frames import BadFrame, Decoder, Frame

FRAMES = st.lists(
    st.builds(Frame, st.dictionaries(st.text(max_size=3), st.integers()), st.binary(max_size=20)),
    max_size=4,
)


@given(sent=FRAMES, cut=st.integers(1, 9))
def test_what_is_sent_arrives_however_it_is_cut(sent: list[Frame], cut: int) -> None:
    stream = b"".join(b"".join(frame.parts()) for frame in sent)
    decoder = Decoder()
    assert [
        frame
        for start in range(0, len(stream), cut)
        for frame in decoder.feed(stream[start : start + cut])
    ] == sent
    reader = io.BytesIO(stream)
    assert [frames.read(reader) for _ in sent] == sent
    assert frames.read(reader) is None


def test_a_stream_that_ends_in_a_frame_ends() -> None:
    whole = b"".join(Frame({"kind": "x"}, b"blob").parts())
    assert all(frames.read(io.BytesIO(whole[:length])) is None for length in range(len(whole)))


NO_BLOB = b"\0" * 8


@pytest.mark.parametrize(
    "start",
    [
        b"\xff" * 12,
        b"\0\0\0\2" + NO_BLOB + b"[]",
        b"\0\0\0\1" + NO_BLOB + b"{",
        b"\0\0\0\0\0\xff" + b"\0" * 6,
    ],
)
def test_another_language_is_refused_before_it_takes_memory(start: bytes) -> None:
    with pytest.raises(BadFrame):
        list(Decoder().feed(start))
    with pytest.raises(BadFrame):
        frames.read(io.BytesIO(start))
