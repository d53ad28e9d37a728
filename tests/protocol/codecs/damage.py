"""What becomes of a frame that was damaged on its way."""

from __future__ import annotations

from hypothesis import strategies as st

from protocol.frames.frames import decode, encode
from protocol.frames.tensors import Chunk
from swarm.vocabulary.errors import ProtocolViolation


def assert_refused_or_another_valid_frame(octets: bytes, data: st.DataObject) -> None:
    """After a few bytes were changed and some cut off."""
    damaged = bytearray(octets)
    for _ in range(data.draw(st.integers(1, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    try:
        again = decode(bytes(damaged[:cut]))
    except ProtocolViolation:
        return
    if not isinstance(again, Chunk):
        assert decode(encode(again)) == again
