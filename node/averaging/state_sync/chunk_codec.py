"""The encoding of a state's chunks: as they are, or in byte planes where it is the link that holds the download up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

from protocol.codecs import Encoded, decode, encode
from protocol.codecs.views import octets_of_tensor, tensor_of
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.types import Codec

STATE_CODECS: Final[Mapping[str, frozenset[Codec]]] = {
    "none": frozenset({Codec.NONE}),
    "planes": frozenset({Codec.NONE, Codec.PLANES}),
}
"""Of `codecs.state`: how a chunk may come."""

PLANES_BELOW_BYTES_PER_S: Final = 80e6
"""Of the link's goodput. A donor encodes a chunk before it sends it, so planes save time while (1 - 1 / ratio) /
goodput is more than 1 / speed of encoding: with 1.2 and 1 GB/s on one core, up to 160 MB/s. There nothing is gained and
a core is kept busy; at less than half of it, more than half of what the ratio promises is gained."""


def codec_for(allowed: frozenset[Codec], goodput_bytes_per_s: float) -> Codec:
    """The codec of chunks over a link of this goodput; 0 is unknown, and what is sent as it is then becomes the
    measurement.
    """
    slow = 0 < goodput_bytes_per_s < PLANES_BELOW_BYTES_PER_S
    return Codec.PLANES if slow and Codec.PLANES in allowed else Codec.NONE


def as_it_is(data: memoryview) -> Encoded:
    """A chunk's bytes, float32, without a copy."""
    return Encoded(TensorSpec((data.nbytes // DType.FLOAT32.size_bytes,), DType.FLOAT32), data)


def in_planes(data: memoryview) -> Encoded:
    """A chunk's bytes, float32, shortened; as they are where that gains nothing. Takes milliseconds."""
    return encode(tensor_of(np.frombuffer(data, np.float32)), Codec.PLANES)


def may_come_as(tensor: TensorSpec, elements: int, allowed: frozenset[Codec]) -> bool:
    """Whether a chunk of so many elements may come in this encoding: encoded only when that makes it shorter."""
    return (
        (tensor.shape, tensor.dtype) == ((elements,), DType.FLOAT32)
        and tensor.codec in allowed
        and (tensor.codec is Codec.NONE or tensor.byte_length < tensor.raw_bytes)
    )


class ChunkDecoder:
    """Decodes chunks, with room for one. Used on one thread."""

    def __init__(self, chunk_elements: int) -> None:
        self._chunk_elements = chunk_elements
        self._room: torch.Tensor | None = None

    def bytes_of(self, tensor: TensorSpec, data: memoryview) -> memoryview:
        """The chunk's float32 elements as bytes, until the next call.

        Raises:
            ProtocolViolation: `data` is no encoding.
        """
        if tensor.codec is Codec.NONE:
            return data
        if self._room is None:
            self._room = torch.empty(self._chunk_elements)
        out = self._room[: tensor.elements]
        decode(tensor, data, out)
        return octets_of_tensor(out)
