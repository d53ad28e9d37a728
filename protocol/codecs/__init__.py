"""Encoding of tensors to bytes and back, with any of the codecs.

`encode` and `decode` are for tensors of any shape on any device, as hidden states are: encoded where they are, and only
the small encoding is copied. What a codec cannot express (NaN, infinity, what does not shrink) goes as a wider one, and
the spec that comes with the bytes says so. `encode_into` and `decode_into` are for float32 vectors in memory that the
caller has, as pseudo-gradients are: there a value that cannot be expressed is an error. Encodings are deterministic,
and so is decoding, bit for bit: whoever decodes the same bytes has the same elements. Sizes are
`TensorSpec.byte_length`. The large operations are torch's and release the interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from protocol.codecs import bf16, blockwise_on_device, fp8, int4, int8, outliers, plain
from protocol.codecs import byte_planes as planes
from protocol.codecs.blockwise import Expect, or_violates
from protocol.codecs.blockwise_on_device import Blockwise
from protocol.codecs.host_memory import to_device, to_host
from protocol.codecs.top_k import TOP_K_2, TOP_K_4
from protocol.codecs.views import DTYPES, ELEMENT_TYPES, Vector, octets_of, octets_of_tensor, tensor_of
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import Codec


class _Simple(Protocol):
    """A codec whose length follows from the number of elements alone."""

    def encode(self, values: Tensor, out: Tensor) -> None: ...

    def decode(self, data: Tensor, out: Tensor) -> None: ...


_BLOCKWISE: Final[dict[Codec, Blockwise]] = {Codec.INT8: int8, Codec.FP8: fp8, Codec.INT4: int4}
_SIMPLE: Final[dict[Codec, _Simple]] = {
    Codec.NONE: plain,
    Codec.BF16: bf16,
    **_BLOCKWISE,
    Codec.TOP_K_4: TOP_K_4,
    Codec.TOP_K_2: TOP_K_2,
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor's encoding: the bytes that travel."""

    spec: TensorSpec
    data: memoryview
    """`spec.byte_length` bytes."""


def encode(values: Tensor, codec: Codec) -> Encoded:
    """Encodes a contiguous tensor; blockwise codecs send outlier channels apart.

    On the CPU, with NONE, the result is the tensor's own memory, which must not be written any more.
    """
    shape, dtype = tuple(values.shape), DTYPES[values.dtype]
    if codec is Codec.NONE:
        return Encoded(TensorSpec(shape, dtype), octets_of_tensor(to_host(values.detach().view(-1).view(torch.uint8))))
    if codec is Codec.PLANES:
        return _encode_planes(values.detach().cpu())
    try:
        return _encode(values.detach(), TensorSpec(shape, dtype, codec))
    except StateError:
        return encode(values, Codec.NONE if dtype is DType.BFLOAT16 else Codec.BF16)


def _encode(values: Tensor, spec: TensorSpec) -> Encoded:
    """Raises StateError for what the codec cannot express."""
    codec, base = _SIMPLE[spec.codec], spec.byte_length
    blockwise = _BLOCKWISE.get(spec.codec)
    if blockwise is not None and not values.is_cpu:
        octets, count = blockwise_on_device.encode(values, spec, blockwise)
        return Encoded(TensorSpec(spec.shape, spec.dtype, spec.codec, count), octets_of_tensor(octets))
    apart = outliers.find(values) if blockwise is not None else None
    if apart is None or not len(apart):
        out = torch.empty(base, dtype=torch.uint8, device=values.device)
        codec.encode(values.view(-1), out)
        return Encoded(spec, octets_of_tensor(to_host(out)))
    spec = TensorSpec(spec.shape, spec.dtype, spec.codec, len(apart))
    out = torch.empty(spec.byte_length, dtype=torch.uint8)
    codec.encode(outliers.split(values, apart, out[base:]).view(-1), out[:base])
    return Encoded(spec, octets_of_tensor(out))


def _encode_planes(values: Tensor) -> Encoded:
    """On the CPU."""
    data = planes.encode(values.view(-1))
    if data is None:
        return encode(values, Codec.NONE)
    spec = TensorSpec(tuple(values.shape), DTYPES[values.dtype], Codec.PLANES, compressed_bytes=len(data))
    return Encoded(spec, octets_of_tensor(data))


def decode(spec: TensorSpec, data: memoryview, out: Tensor, expect: Expect = or_violates) -> None:
    """Writes the elements into `out`, a contiguous tensor of `spec`'s shape and element type.

    With NONE, BF16 and PLANES they may be anything; what the other codecs give is finite, but for channels sent apart.

    Args:
        expect: takes what is to be found out about `data` on the device, for INT8, FP8 and INT4. One that does not look
            at it at once lets `out` be written with anything.

    Raises:
        ProtocolViolation: `data` is no encoding; `out` is untouched, but with PLANES may be written in part.
        ValueError: `data` has another length, or `out` another form, than `spec` says.
    """
    if data.nbytes != spec.byte_length or tuple(out.shape) != spec.shape or out.dtype is not ELEMENT_TYPES[spec.dtype]:
        raise ValueError(f"{data.nbytes} bytes and a tensor {out.dtype} {tuple(out.shape)} do not go with {spec}")
    if spec.codec is Codec.PLANES:
        _decode_planes(octets_of(data), out)
        return
    octets = octets_of(data) if out.is_cpu else to_device(octets_of(data), out.device)
    base = TensorSpec(spec.shape, spec.dtype, spec.codec).byte_length
    blockwise = _BLOCKWISE.get(spec.codec)
    if blockwise is None:
        _SIMPLE[spec.codec].decode(octets, out.view(-1))
        return
    apart = outliers.checked_channels(octets[base:], spec.outliers, spec.shape[-1], expect) if spec.outliers else None
    blockwise.decode(octets[:base], out.view(-1), expect)
    if apart is not None:
        outliers.put_back(octets[base:], apart, out)


def _decode_planes(octets: Tensor, out: Tensor) -> None:
    """On the CPU; to another device the whole is copied."""
    target = out.view(-1)
    elements = target if out.device.type == "cpu" else torch.empty_like(target, device="cpu")
    planes.decode(octets, elements)
    if elements is not target:
        target.copy_(elements)


# ---- vectors ---------------------------------------------------------------------------------------------------------


def encoded_bytes(codec: Codec, elements: int) -> int:
    """The length in bytes of the encoding of so many float32 elements."""
    return TensorSpec((elements,), DType.FLOAT32, codec).byte_length


def encode_into(codec: Codec, values: Vector, out: memoryview) -> None:
    """Writes the encoding of `values` [elements] into `out`, which has exactly `encoded_bytes` bytes.

    Raises:
        StateError: the codec cannot express a value (not finite, or near the largest float32); `out` is then undefined.
        ValueError: `out` has another length.
    """
    _check(codec, values, out)
    if len(values):
        _SIMPLE[codec].encode(tensor_of(values), octets_of(out.cast("B")))


def decode_into(codec: Codec, data: memoryview, out: Vector) -> None:
    """Writes what `data` encodes into `out` [elements]. With NONE and BF16 that may be anything, else it is finite.

    Raises:
        ProtocolViolation: `data` is no encoding; `out` is untouched.
        ValueError: `data` has another length than an encoding of `out` has.
    """
    _check(codec, out, data)
    if len(out):
        _SIMPLE[codec].decode(octets_of(data.cast("B")), tensor_of(out))


def _check(codec: Codec, vector: Vector, encoding: memoryview) -> None:
    """Raises ValueError when the encoding and the vector do not go together, or the latter is none."""
    if vector.ndim != 1 or vector.dtype != np.float32 or not vector.flags.c_contiguous:
        raise ValueError(f"codecs take contiguous float32 vectors, not {vector.dtype} {vector.shape}")
    expected = encoded_bytes(codec, len(vector))
    if encoding.nbytes != expected:
        raise ValueError(f"{len(vector)} elements are {expected} bytes as {codec.name}, not {encoding.nbytes}")
