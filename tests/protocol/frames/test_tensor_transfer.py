"""Cutting tensors up and putting them together again, without any network."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.frames.frames import (
    MIN_CHUNK_BYTES,
    Arrival,
    Assembly,
    Chunk,
    OutgoingTransfer,
    TensorFrame,
    chunk_bytes_for,
    chunk_count_of,
    decode_chunk,
)
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import PeerId
from tests.protocol.transport.link_peers import forward

MESSAGE = forward(PeerId("a"), PeerId("b"))


def header(elements: int, chunk_bytes: int) -> TensorFrame:
    spec = TensorSpec((elements,), DType.FLOAT16)
    return TensorFrame(MESSAGE, spec, 3, chunk_count_of(spec.byte_length, chunk_bytes))


def chunks_of(data: bytes, chunk_bytes: int) -> list[Chunk]:
    transfer = OutgoingTransfer(3, b"header", memoryview(data), chunk_bytes)
    frames = []
    while not transfer.finished:
        frames.append(transfer.next_frame())
    assert frames[0] == b"header"
    return [decode_chunk(frame) for frame in frames[1:]]


def assembly(frame: TensorFrame) -> Assembly:
    return Assembly(frame, memoryview(bytearray(frame.tensor.byte_length)), 1.0)


@given(st.integers(1, 20_000), st.integers(MIN_CHUNK_BYTES, 3 * MIN_CHUNK_BYTES), st.randoms())
def test_what_is_cut_up_comes_together_again(elements: int, chunk_bytes: int, random: object) -> None:
    data = random.randbytes(2 * elements)  # type: ignore[attr-defined]
    whole = assembly(header(elements, chunk_bytes))
    for chunk in chunks_of(data, chunk_bytes):
        assert not whole.complete
        whole.add(chunk)
    assert whole.complete
    assert bytes(whole.buffer) == data


@given(st.lists(st.integers(0, 4), max_size=8), st.booleans())
def test_only_the_right_order_is_taken(order: list[int], keeps_data: bool) -> None:
    data = bytes(5 * MIN_CHUNK_BYTES - 10)
    chunks = chunks_of(data, MIN_CHUNK_BYTES)
    frame = header(len(data) // 2, MIN_CHUNK_BYTES)
    arrival = assembly(frame) if keeps_data else Arrival(frame)
    taken = 0
    for index in order:
        if index == taken:
            arrival.add(chunks[index])
            taken += 1
        else:
            with pytest.raises(ProtocolViolation, match="came instead of"):
                arrival.add(chunks[index])
            return
    assert arrival.complete == (taken == 5)


@pytest.mark.parametrize(
    ("goodput", "most", "size"),
    [
        (0.0, 2**20, 2**16),
        (1e9, 2**20, 2**20),
        (12.5e6, 2**20, 2**17),
        (2.5e6, 2**20, 2**16),
        (100.0, 2**20, 2**16),
        (1e9, 4096, 4096),
        (float("inf"), 2**20, 2**20),
    ],
)
def test_chunks_are_as_large_as_the_link_carries_in_a_moment(goodput: float, most: int, size: int) -> None:
    assert chunk_bytes_for(goodput, most) == size


def test_a_wrong_checksum_or_count_is_refused() -> None:
    first = chunks_of(bytes(10_000), MIN_CHUNK_BYTES)[0]
    with pytest.raises(ProtocolViolation, match="checksum"):
        assembly(header(5000, MIN_CHUNK_BYTES)).add(replace(first, checksum=first.checksum ^ 1))
    first = chunks_of(bytes(10_000), 5000)[0]
    with pytest.raises(ProtocolViolation, match="a different number"):
        assembly(header(5000, MIN_CHUNK_BYTES)).add(first)


@pytest.mark.parametrize("size", [1, MIN_CHUNK_BYTES - 1, MIN_CHUNK_BYTES + 1, 10_000])
def test_a_later_chunk_of_another_size_is_refused(size: int) -> None:
    chunks = chunks_of(bytes(10_000), MIN_CHUNK_BYTES)
    whole = assembly(header(5000, MIN_CHUNK_BYTES))
    whole.add(chunks[0])
    with pytest.raises(ProtocolViolation, match="instead of"):
        whole.add(replace(chunks[1], data=memoryview(bytes(size))))


def test_a_refused_transfer_can_be_swallowed_from_the_middle() -> None:
    chunks = chunks_of(bytes(10_000), MIN_CHUNK_BYTES)
    whole = assembly(header(5000, MIN_CHUNK_BYTES))
    whole.add(chunks[0])
    rest = whole.swallowing_the_rest()
    rest.add(chunks[1])
    rest.add(chunks[2])
    assert rest.complete
