"""Encoding and decoding of tensors with any codec, bit for bit; a wider codec if one cannot express the tensor."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from protocol.codecs import blockwise as blocks
from protocol.codecs.memory import DTYPES, Vector, octets_of, octets_of_tensor, tensor_of, to_device, to_host
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import Codec


class Unchanged:
    """Codec NONE: the bytes of the elements. All tensors of a call are on one device."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        out.copy_(values.view(torch.uint8))

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.view(torch.uint8).copy_(data)


class HalfPrecision:
    """Codec BF16: float32 or bfloat16 elements as bfloat16. All tensors of a call are on one device."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        for half, value in blocks.in_slices(out.view(torch.bfloat16).view(-1, 1), values.view(-1, 1)):
            half.copy_(value)

    def decode(self, data: Tensor, out: Tensor) -> None:
        for value, half in blocks.in_slices(out.view(-1, 1), data.view(torch.bfloat16).view(-1, 1)):
            value.copy_(half)


_BLOCKWISE: Final[dict[Codec, blocks.Blockwise]] = {Codec.INT8: blocks.INT8, Codec.INT4: blocks.INT4}
# Codecs whose encoded length depends only on the number of elements
_SIMPLE: Final[dict[Codec, Unchanged | HalfPrecision | blocks.Blockwise | blocks.TwoBits]] = {
    Codec.NONE: Unchanged(),
    Codec.BF16: HalfPrecision(),
    Codec.INT2: blocks.TwoBits(),
    **_BLOCKWISE,
}


@dataclass(frozen=True, slots=True)
class Encoded:
    spec: TensorSpec
    data: memoryview


def encode(values: Tensor, codec: Codec) -> Encoded:
    """Encodes a contiguous tensor. With NONE on the CPU, the result shares the tensor's memory."""
    shape, dtype = tuple(values.shape), DTYPES[values.dtype]
    if codec is Codec.NONE:
        return Encoded(TensorSpec(shape, dtype), octets_of_tensor(to_host(values.detach().view(-1).view(torch.uint8))))
    try:
        return _encode(values.detach(), TensorSpec(shape, dtype, codec))
    except StateError:
        return encode(values, Codec.NONE if dtype is DType.BFLOAT16 else Codec.BF16)


def _encode(values: Tensor, spec: TensorSpec) -> Encoded:
    """Encodes with the spec's codec. Raises StateError if the codec cannot express a value."""
    blockwise = _BLOCKWISE.get(spec.codec)
    if blockwise is not None:
        spec, octets = blocks.encode_matrix(values, spec, blockwise)
        return Encoded(spec, octets_of_tensor(octets))
    out = torch.empty(spec.byte_length, dtype=torch.uint8, device=values.device)
    _SIMPLE[spec.codec].encode(values.view(-1), out)
    return Encoded(spec, octets_of_tensor(to_host(out)))


def decode(spec: TensorSpec, data: memoryview, out: Tensor, expect: blocks.Expect = blocks.or_fails) -> None:
    """Decodes `data` into `out`, a contiguous tensor of the spec's shape and type.

    Raises:
        ProtocolViolation: `data` is malformed; `out` is unchanged.
        ValueError: `data` or `out` do not match the spec.
    """
    if data.nbytes != spec.byte_length or tuple(out.shape) != spec.shape or DTYPES.get(out.dtype) is not spec.dtype:
        raise ValueError(f"{data.nbytes} bytes and a tensor {out.dtype} {tuple(out.shape)} do not match {spec}")
    octets = octets_of(data) if out.is_cpu else to_device(octets_of(data), out.device)
    blockwise = _BLOCKWISE.get(spec.codec)
    if blockwise is not None:
        blocks.decode_matrix(spec, octets, blockwise, out, expect)
    else:
        _SIMPLE[spec.codec].decode(octets, out.view(-1))


def with_numbers(encoded: Encoded, numbers: Tensor) -> Encoded:
    """Appends the bytes of token numbers, [..., bytes], to an encoded tensor."""
    octets = to_host(numbers.to(torch.uint8).flatten())
    spec = replace(encoded.spec, token_bytes=numbers.shape[-1])
    return Encoded(spec, octets_of_tensor(torch.cat((octets_of(encoded.data), octets))))


def without_numbers(encoded: Encoded) -> tuple[Encoded, Tensor]:
    """Splits an encoded tensor from the bytes of its token numbers, uint8 [..., bytes], without a copy."""
    spec = encoded.spec
    numbers = octets_of(encoded.data[spec.encoded_bytes :]).view(*spec.shape[:-1], spec.token_bytes)
    return Encoded(replace(spec, token_bytes=0), encoded.data[: spec.encoded_bytes]), numbers


def encoded_bytes(codec: Codec, elements: int) -> int:
    return TensorSpec((elements,), DType.FLOAT32, codec).byte_length


def encode_into(codec: Codec, values: Vector, out: memoryview) -> None:
    """Encodes a vector into `out`. Raises StateError (`out` is then undefined), or ValueError for a wrong length."""
    _check(codec, values, out)
    if len(values):
        _SIMPLE[codec].encode(tensor_of(values), octets_of(out.cast("B")))


def decode_into(codec: Codec, data: memoryview, out: Vector) -> None:
    """Decodes `data` into `out`. Raises ProtocolViolation (`out` is unchanged), or ValueError for a wrong length."""
    _check(codec, out, data)
    if len(out):
        _SIMPLE[codec].decode(octets_of(data.cast("B")), tensor_of(out))


def _check(codec: Codec, vector: Vector, encoding: memoryview) -> None:
    """Raises ValueError unless `vector` is contiguous float32 and `encoding` has the size that `codec` needs for it."""
    if vector.ndim != 1 or vector.dtype != np.float32 or not vector.flags.c_contiguous:
        raise ValueError(f"codecs take contiguous float32 vectors, not {vector.dtype} {vector.shape}")
    expected = encoded_bytes(codec, len(vector))
    if encoding.nbytes != expected:
        raise ValueError(f"{len(vector)} elements are {expected} bytes as {codec.name}, not {encoding.nbytes}")
