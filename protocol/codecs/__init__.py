"""How a float32 vector becomes bytes and back: one function for each thing that is done with an encoding, whichever it is.

`NONE` is the elements as they are. `INT8` is `protocol.codecs.int8`. Encodings are deterministic, and so is decoding, bit for bit:
whoever decodes the same bytes has the same vector. Sizes are `TensorSpec.byte_length`. The large operations are torch's
and release the interpreter; nothing here checks where a vector came from.
"""

from __future__ import annotations

import numpy as np

from protocol.codecs import int8, plain
from protocol.codecs.memory import Vector
from protocol.seams import Codec, DType, TensorSpec


def encoded_bytes(codec: Codec, elements: int) -> int:
    """Length of the encoding of so many float32 elements."""
    return TensorSpec((elements,), DType.FLOAT32, codec).byte_length


def encode_into(codec: Codec, values: Vector, out: memoryview) -> None:
    """Writes the encoding of `values` [elements] into `out`, which has exactly `encoded_bytes` bytes.

    Raises:
        StateError: the codec cannot express a value (INT8: not finite, or beyond `int8.LARGEST_VALUE`); `out` is then undefined.
        ValueError: `out` has another length.
    """
    octets = _octets(codec, values, out)
    match codec:
        case Codec.NONE:
            plain.encode_into(values, octets)
        case Codec.INT8:
            int8.encode_into(values, octets)


def decode_into(codec: Codec, data: memoryview, out: Vector) -> None:
    """Writes what `data` encodes into `out` [elements]. With NONE that may be anything; with INT8 it is finite.

    Raises:
        ProtocolViolation: `data` is no encoding; `out` is untouched.
        ValueError: `data` has another length than an encoding of `out` has.
    """
    octets = _octets(codec, out, data)
    match codec:
        case Codec.NONE:
            plain.decode_into(octets, out)
        case Codec.INT8:
            int8.decode_into(octets, out)


def add_decoded(codec: Codec, data: memoryview, coefficient: float, total: Vector) -> None:
    """Adds `coefficient` times what `data` encodes to `total` [elements], in float32. Errors as `decode_into`.

    How often it rounds on the way is not fixed (the processor may fuse steps): two machines may differ in the last bit.
    """
    octets = _octets(codec, total, data)
    match codec:
        case Codec.NONE:
            plain.add_decoded(octets, coefficient, total)
        case Codec.INT8:
            int8.add_decoded(octets, coefficient, total)


def _octets(codec: Codec, vector: Vector, encoding: memoryview) -> memoryview:
    """The encoding byte by byte. Raises ValueError when it and the vector do not go together, or the latter is none."""
    if vector.ndim != 1 or vector.dtype != np.float32 or not vector.flags.c_contiguous:
        raise ValueError(f"codecs take contiguous float32 vectors, not {vector.dtype} {vector.shape}")
    expected = encoded_bytes(codec, len(vector))
    if encoding.nbytes != expected:
        raise ValueError(f"{len(vector)} elements are {expected} bytes as {codec.name}, not {encoding.nbytes}")
    return encoding.cast("B")
