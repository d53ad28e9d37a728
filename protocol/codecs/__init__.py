"""How a float32 vector becomes bytes and back: one function for each thing that is done with an encoding, whichever it is.

`NONE` is the elements as they are. `INT8` is `protocol.codecs.int8`. Encodings are deterministic, and so is decoding, bit for bit:
whoever decodes the same bytes has the same vector. Sizes are `TensorSpec.byte_length`. The large operations are torch's
and release the interpreter; nothing here checks where a vector came from.
"""

from __future__ import annotations

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
    _check_length(codec, values, out)
    match codec:
        case Codec.NONE:
            plain.encode_into(values, out)
        case Codec.INT8:
            int8.encode_into(values, out)


def decode_into(codec: Codec, data: memoryview, out: Vector) -> None:
    """Writes what `data` encodes into `out` [elements]. With NONE that may be anything; with INT8 it is finite.

    Raises:
        ProtocolViolation: `data` is no encoding; `out` is untouched.
        ValueError: `data` has another length than an encoding of `out` has.
    """
    _check_length(codec, out, data)
    match codec:
        case Codec.NONE:
            plain.decode_into(data, out)
        case Codec.INT8:
            int8.decode_into(data, out)


def add_decoded(codec: Codec, data: memoryview, coefficient: float, total: Vector) -> None:
    """Adds `coefficient` times what `data` encodes to `total` [elements], in float32. Errors as `decode_into`."""
    _check_length(codec, total, data)
    match codec:
        case Codec.NONE:
            plain.add_decoded(data, coefficient, total)
        case Codec.INT8:
            int8.add_decoded(data, coefficient, total)


def _check_length(codec: Codec, vector: Vector, encoding: memoryview) -> None:
    expected = encoded_bytes(codec, len(vector))
    if encoding.nbytes != expected:
        raise ValueError(f"{len(vector)} elements are {expected} bytes as {codec.name}, not {encoding.nbytes}")
