"""Byte planes against bytes worked out by hand, every float there is, and encodings that nobody should send."""

import struct
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protocol.codecs import byte_planes as planes
from protocol.codecs import decode, encode
from protocol.codecs.byte_planes import SLICE_BYTES
from protocol.codecs.memory import octets_of
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import Codec

WIDTHS = {torch.float32: 4, torch.bfloat16: 2}
DTYPES = st.sampled_from(list(WIDTHS))


def normal(elements: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)).mul_(0.02).to(dtype)


def of_bytes(data: bytes, dtype: torch.dtype) -> Tensor:
    return octets_of(memoryview(bytearray(data))).view(dtype)


def bytes_of(values: Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()


def decoded(data: bytes, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((elements,), 7.0, dtype=dtype)
    planes.decode(octets_of(memoryview(bytearray(data))), out)
    return out


def encoded(values: Tensor) -> bytes:
    data = planes.encode(values)
    assert data is not None
    return data.numpy().tobytes()


def put_together(bodies: Sequence[bytes], lengths: Sequence[int] | None = None) -> bytes:
    """An encoding as the module's docstring describes it."""
    lengths = [len(body) for body in bodies] if lengths is None else lengths
    return struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(bodies)


def frame(content: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(level=3, **options).compress(content)


class TestFormat:
    def test_encodings_put_together_by_hand_and_written_out_byte_by_byte(self) -> None:
        """Stored planes: 1.0 is 3f800000, -2.0 is c0000000, and the smallest subnormal is 00000001."""
        body = [b"\0\0\1", b"\0\0\0", b"\x80\0\0", b"\x3f\xc0\0"]
        assert decoded(put_together(body), 3).tolist() == [1.0, -2.0, 2.0**-149]
        halves = [b"\x80\0\1", b"\x3f\xc0\0"]
        assert decoded(put_together(halves), 3, torch.bfloat16).tolist() == [1.0, -2.0, 2.0**-133]
        # RFC 8878: magic number; single segment, content size in one byte; 100; the last block, of 100 times 3f.
        run = bytes.fromhex("28b52ffd 20 64") + ((100 << 3) | (1 << 1) | 1).to_bytes(3, "little") + b"\x3f"
        mantissa = bytes(range(100))
        expected = [struct.unpack("<f", bytes([0, 0, low, 0x3F]))[0] for low in mantissa]
        zeros = run[:-1] + b"\0"
        assert decoded(put_together([zeros, zeros, mantissa, run]), 100).tolist() == expected

    @given(DTYPES, st.sampled_from([-1, 0, 1]), st.sampled_from([1, 2]), st.integers(0, 2**32))
    def test_what_is_encoded_is_as_described(self, dtype: torch.dtype, more: int, slices: int, seed: int) -> None:
        values = normal(slices * SLICE_BYTES // WIDTHS[dtype] + more, dtype, seed)
        encoding, width, at = encoded(values), WIDTHS[dtype], 0
        rows = np.frombuffer(bytes_of(values), np.uint8).reshape(-1, width)
        expected = [
            rows[first : first + SLICE_BYTES // width, byte].tobytes()
            for first in range(0, len(rows), SLICE_BYTES // width)
            for byte in range(width)
        ]
        lengths = struct.unpack_from(f"<{len(expected)}I", encoding)
        at = 4 * len(lengths)
        for length, plane in zip(lengths, expected, strict=True):
            body = encoding[at : at + length]
            assert plane == (body if length == len(plane) else zstandard.decompress(body))
            at += length
        assert at == len(encoding) < len(values) * width


class TestRoundTrip:
    @given(DTYPES, st.binary(max_size=600), st.integers(1, 40))
    def test_every_bit_comes_back(self, dtype: torch.dtype, pattern: bytes, times: int) -> None:
        """Any bits at all: NaN with a payload, infinities, subnormals, zeros of both signs."""
        width = WIDTHS[dtype]
        values = of_bytes(pattern[: len(pattern) // width * width] * times, dtype)
        data = planes.encode(values)
        if data is None:
            return
        assert data.dtype is torch.uint8
        assert data.numel() < values.numel() * width
        out = torch.zeros_like(values)
        planes.decode(data, out)
        assert bytes_of(out) == bytes_of(values)

    def test_it_does_not_matter_where_in_memory_an_encoding_stands(self) -> None:
        values = normal(10_000)
        memory = octets_of(memoryview(bytearray(b"x" + encoded(values))))
        out = torch.empty_like(values)
        planes.decode(memory[1:], out)
        assert torch.equal(out, values)


class TestShorter:
    @pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 1.15), (torch.bfloat16, 1.4)])
    def test_weights_shrink(self, dtype: torch.dtype, ratio: float) -> None:
        values = normal(2**20, dtype)
        assert values.numel() * WIDTHS[dtype] / len(encoded(values)) >= ratio

    @pytest.mark.parametrize("dtype", WIDTHS)
    @pytest.mark.parametrize("elements", [0, 1, 2, 100, 300_000])
    def test_noise_is_not_encoded(self, dtype: torch.dtype, elements: int) -> None:
        noise = np.random.default_rng(0).bytes(elements * WIDTHS[dtype])
        assert planes.encode(of_bytes(noise, dtype)) is None


class TestAsACodec:
    @pytest.mark.parametrize("dtype", WIDTHS)
    def test_through_the_common_entrance(self, dtype: torch.dtype) -> None:
        values = normal(60_000, dtype).view(3, 4, 5000)
        sent = encode(values, Codec.PLANES)
        assert sent.spec.codec is Codec.PLANES
        assert sent.spec.fault() is None
        assert sent.spec.compressed_bytes == sent.data.nbytes < sent.spec.raw_bytes
        out = torch.zeros_like(values)
        decode(sent.spec, sent.data, out)
        assert torch.equal(out, values)

    def test_what_does_not_shrink_goes_as_it_is(self) -> None:
        noise = of_bytes(np.random.default_rng(1).bytes(4000), torch.float32)
        sent = encode(noise, Codec.PLANES)
        assert sent.spec == TensorSpec((1000,), DType.FLOAT32)
        assert bytes(sent.data) == bytes_of(noise)


ELEMENTS = 2000
ZEROS = bytes(ELEMENTS)
SKIPPABLE = struct.pack("<II", 0x184D2A50, 12) + b"nothing here"
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(ZEROS)
WORDS = b"some words that occur" * 100
DICTIONARY = zstandard.ZstdCompressionDict(WORDS[:420], dict_type=zstandard.DICT_TYPE_RAWCONTENT)

FORGED: dict[str, bytes] = {
    "a bomb": frame(bytes(10**9 // 50)),
    "a bomb of which the header lies": frame(bytes(2**20)).replace(
        frame(bytes(2**20))[:9], frame(ZEROS)[:4] + b"\x60" + struct.pack("<H", ELEMENTS - 256), 1
    ),
    "a frame of less": frame(ZEROS[1:]),
    "a frame of more": frame(ZEROS + b"\0"),
    "a frame that declares no size": UNSIZED,
    "a frame and more": frame(ZEROS) + b"\0",
    "a frame cut off": frame(ZEROS)[:-1],
    "a skippable frame": SKIPPABLE,
    "no frame": b"no frame",
    "a frame that needs a dictionary": zstandard.ZstdCompressor(dict_data=DICTIONARY).compress(WORDS[:ELEMENTS]),
}


class TestRefusals:
    @pytest.mark.parametrize("body", FORGED.values(), ids=FORGED.keys())
    @pytest.mark.parametrize("place", [0, 3])
    def test_forged_bodies(self, body: bytes, place: int) -> None:
        bodies = [frame(ZEROS)] * 4
        assert not decoded(put_together(bodies), ELEMENTS).any()
        bodies[place] = body
        with pytest.raises(ProtocolViolation):
            decoded(put_together(bodies), ELEMENTS)

    @pytest.mark.parametrize(
        "lengths",
        [
            (0, 0, 0, 0),
            (2000, 2000, 2000, 1999),
            (2000, 2000, 2000, 2001),
            (2**32 - 1, 1, 6000, 2000),
            (4000, 0, 2000, 2000),
        ],
    )
    def test_lengths_that_do_not_add_up_or_exceed_a_plane(self, lengths: tuple[int, ...]) -> None:
        with pytest.raises(ProtocolViolation, match="length"):
            decoded(put_together([bytes(8000)], lengths), ELEMENTS)

    @pytest.mark.parametrize("dtype", WIDTHS)
    def test_every_truncation_and_every_addition(self, dtype: torch.dtype) -> None:
        data = encoded(normal(500, dtype))
        for size in range(len(data)):
            with pytest.raises(ProtocolViolation):
                decoded(data[:size], 500, dtype)
        with pytest.raises(ProtocolViolation):
            decoded(data + b"\0", 500, dtype)


class TestBounds:
    def test_a_bomb_is_refused_before_memory_is_taken(self) -> None:
        bomb = put_together([frame(bytes(64 * 2**20))] * 4)
        out = torch.empty(len(bomb))
        assert peak_bytes(bomb, out, refused=True) < 2**16

    @pytest.mark.parametrize("dtype", WIDTHS)
    def test_decoding_takes_the_memory_of_one_slice_however_many_there_are(self, dtype: torch.dtype) -> None:
        values = normal(8 * SLICE_BYTES // WIDTHS[dtype], dtype)
        assert peak_bytes(encoded(values), torch.empty_like(values), refused=False) < 2.5 * SLICE_BYTES


def peak_bytes(encoding: bytes, out: Tensor, *, refused: bool) -> int:
    """The most that the interpreter and numpy held while decoding."""
    data = octets_of(memoryview(bytearray(encoding)))
    tracemalloc.start()
    try:
        planes.decode(data, out)
        assert not refused
    except ProtocolViolation:
        assert refused
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak
