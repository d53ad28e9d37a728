"""Codecs TOP_K_4 and TOP_K_2: the 192 or 256 largest of each chunk of 4096 elements; all others decode to 0.

A chunk of w elements sends n = ceil(w * 192 / 4096) of them (256 with TOP_K_2), in ascending order of position. Each of
these parts fills whole bytes, lowest bit first:

    levels      the lowest and the highest level, bfloat16, little-endian
    low bits    n times 4 bits: each position modulo 16
    high bits   n + ceil(w / 16) bits, n of them 1: for the i-th position p, bit floor(p / 16) + i (Elias-Fano)
    codes       n times 4 bits, or 2

The upper bit of a code is the sign, the rest is j from 0 to m (7 or 1). The magnitude is lowest + (j / m)^2 * (highest
- lowest), with each operation rounded to float32. Levels are the extreme magnitudes (TOP_K_4), or the means of the
smaller and of the larger magnitudes (TOP_K_2); relative errors are 0.03 and 0.09. A level is 0, or from SMALLEST_SCALE
to LARGEST_LEVEL.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from protocol.codecs.blockwise import (
    SMALLEST_SCALE,
    Piece,
    check_encoded,
    check_received,
    inverse_of,
    pieces,
    slice_elements,
    span_elements,
)
from protocol.interfaces.tensor_spec import PLACE_LOW_BITS, SPARSE_CHUNK, SparseChunk
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import Codec

LARGEST_LEVEL: Final = float(np.finfo(np.float32).max) / 4  # So that no value decodes to infinity, also in bfloat16
_LOW_MASK: Final = (1 << PLACE_LOW_BITS) - 1
_GATHER: Final = 0x0102040810204080  # Multiplying an int64 of bytes 0 or 1 by this moves byte k to bit 56 + k

LLOYD_STEPS: Final = 2  # Iterations for the two levels of TOP_K_2 (Lloyd 1982)


@dataclass(frozen=True, slots=True)
class TopK:
    """Codec TOP_K_4 or TOP_K_2: only the largest elements. All tensors of a call are on one device."""

    codec: Codec
    levels_of: Callable[[Tensor], Tensor]  # Magnitudes [chunks, kept] -> levels [chunks, 2]

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Encodes `values` [n]. Raises StateError if a value is not finite or too large; `out` is then undefined."""
        written = 0
        for piece in pieces(len(values), SPARSE_CHUNK, span_elements(values.device)):
            chunk, count = SparseChunk(piece.width, self.codec), piece.end - piece.first
            end = written + count * chunk.byte_length
            x = values[piece.start : piece.stop].view(count, -1).float()
            self._encode_chunks(x, chunk, out[written:end].view(count, -1))
            written = end

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Decodes `data` into `out` [n]. Raises ProtocolViolation if `data` is malformed; `out` is then unchanged."""
        read = 0
        found: list[tuple[Piece, Tensor, Tensor]] = []
        for piece in pieces(len(out), SPARSE_CHUNK, span_elements(out.device)):
            chunk, count = SparseChunk(piece.width, self.codec), piece.end - piece.first
            end = read + count * chunk.byte_length
            levels, low, high, codes = _parts(data[read:end].view(count, -1), chunk)
            found.append((piece, _places(low, high, chunk), self._values(levels, codes, chunk)))
            read = end
        out.zero_()
        for piece, places, values in found:
            chunks = out[piece.start : piece.stop].view(len(places), -1)
            chunks.scatter_(1, places, values.to(out.dtype))

    @property
    def _highest_code(self) -> int:
        """Largest code that an element's magnitude can have."""
        return 7 if self.codec is Codec.TOP_K_4 else 1

    def _encode_chunks(self, x: Tensor, chunk: SparseChunk, out: Tensor) -> None:
        """Encodes `x` [chunks, elements] float32 into `out` [chunks, bytes]."""
        places = _largest(x, chunk.kept)
        kept = x.gather(1, places)
        sizes = kept.abs()
        rounded = self.levels_of(sizes).bfloat16()
        levels = rounded.float()
        rounded.masked_fill_(levels < SMALLEST_SCALE, 0.0)
        levels.masked_fill_(levels < SMALLEST_SCALE, 0.0)
        check_encoded(levels, LARGEST_LEVEL, self.codec.name)
        lowest, highest = levels[:, :1], levels[:, 1:]
        share = (sizes - lowest).mul_(inverse_of(highest - lowest))
        squares = self._squares(x.device)
        half_way = (squares[1:] + squares[:-1]).div_(2)
        codes = torch.bucketize(share, half_way, out_int32=True).to(torch.uint8)
        codes.add_(kept < 0, alpha=self._highest_code + 1)
        levels_out, low, high, codes_out = _parts(out, chunk)
        levels_out.copy_(rounded.view(torch.uint8))
        _write_places(places, low, high)
        codes_out.copy_(_packed(codes, chunk.code_bits))

    def _values(self, levels: Tensor, codes: Tensor, chunk: SparseChunk) -> Tensor:
        """Returns the kept elements [chunks, kept] float32, decoded from levels and codes."""
        both = levels.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
        check_received(both, LARGEST_LEVEL, self.codec.name)
        lowest, highest = both[:, :1], both[:, 1:]
        if bool((lowest < 0).any()) or bool((lowest > highest).any()):
            raise ProtocolViolation(f"a {self.codec.name} encoding has a negative level, or lowest above highest")
        numbers = _unpacked(codes, chunk.code_bits, chunk.kept)
        size = self._squares(levels.device)[numbers.bitwise_and(self._highest_code).long()]
        size.mul_(highest - lowest).add_(lowest)
        return torch.where(numbers > self._highest_code, -size, size)

    def _squares(self, device: torch.device) -> Tensor:
        """Returns each code's position between the lowest and the highest level, from 0 to 1."""
        most = self._highest_code
        return torch.tensor([code**2 / most**2 for code in range(most + 1)], device=device)


def _two_means(sizes: Tensor) -> Tensor:
    """Returns the means [chunks, 2] of the smaller and of the larger magnitudes, by 2-means."""
    border = sizes.mean(1, keepdim=True)
    low = high = border
    for _ in range(LLOYD_STEPS):
        upper = sizes > border
        count = upper.sum(1, keepdim=True)
        above = (sizes * upper).sum(1, keepdim=True)
        rest = sizes.sum(1, keepdim=True) - above
        low = rest / (sizes.shape[1] - count).clamp_(min=1)
        high = torch.where(count > 0, above / count.clamp(min=1), low)
        border = (low + high) / 2
    return torch.cat([low, high], 1)


TOP_K_4: Final = TopK(Codec.TOP_K_4, lambda sizes: torch.stack([sizes.amin(1), sizes.amax(1)], 1))
TOP_K_2: Final = TopK(Codec.TOP_K_2, _two_means)


# ---- positions and bits -------------------------------------------------------------------------------------------


def _parts(rows: Tensor, chunk: SparseChunk) -> tuple[Tensor, ...]:
    """Splits encoded chunks [chunks, bytes] into views of levels, low bits, high bits and codes."""
    return rows.split_with_sizes([4, chunk.low_bytes, chunk.high_bytes, chunk.code_bytes], 1)


def _largest(x: Tensor, count: int) -> Tensor:
    """Returns the positions of the `count` largest magnitudes in each row, ascending."""
    rows = max(1, slice_elements(x.device) // x.shape[1])
    found = [part.abs().topk(count, sorted=False).indices for part in torch.split(x, rows)]
    return torch.cat(found).sort().values


def _write_places(places: Tensor, low: Tensor, high: Tensor) -> None:
    """Writes ascending positions [chunks, kept] int64 of the kept elements as low and high bits."""
    low.copy_(_packed(places.bitwise_and(_LOW_MASK).to(torch.uint8), PLACE_LOW_BITS))
    order = torch.arange(places.shape[1], device=places.device)
    bits = torch.zeros(len(high), 8 * high.shape[1], dtype=torch.uint8, device=high.device)
    bits.scatter_(1, (places >> PLACE_LOW_BITS).add_(order), 1)
    high.copy_(bits.view(torch.int64).mul_(_GATHER).bitwise_right_shift_(56))


def _places(low: Tensor, high: Tensor, chunk: SparseChunk) -> Tensor:
    """Reads positions [chunks, kept] int64 of the kept elements from low and high bits. Raises ProtocolViolation."""
    bits = _spread(high.device)[high.long()].view(torch.uint8)
    if bool((bits.sum(1) != chunk.kept).any()):
        raise ProtocolViolation(f"a sparse chunk does not have {chunk.kept} positions")
    order = torch.arange(chunk.kept, device=high.device)
    places = bits.nonzero()[:, 1].view(-1, chunk.kept).sub_(order).mul_(_LOW_MASK + 1)
    places.add_(_unpacked(low, PLACE_LOW_BITS, chunk.kept))
    if bool((places[:, -1] >= chunk.elements).any()) or bool((places[:, 1:] <= places[:, :-1]).any()):
        raise ProtocolViolation(f"positions of a sparse chunk do not ascend, or exceed its {chunk.elements} elements")
    return places


def _spread(device: torch.device) -> Tensor:
    """Returns, for each byte value, its bits as the bytes of an int64, lowest bit first (the inverse of _GATHER)."""
    each = [sum((number >> bit & 1) << 8 * bit for bit in range(8)) for number in range(256)]
    return torch.tensor(each, dtype=torch.int64, device=device)


def _packed(numbers: Tensor, width: int) -> Tensor:
    """Packs [chunks, n] uint8 below 2^width into bytes, the first number in the lowest bits. `width` is 4 or 2."""
    each = 8 // width
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % each))
    result = numbers[:, ::each].clone()
    for index in range(1, each):
        result.bitwise_or_(numbers[:, index::each] << index * width)
    return result


def _unpacked(data: Tensor, width: int, count: int) -> Tensor:
    """Unpacks [chunks, count] uint8 numbers packed by `_packed`. Ignores further bits."""
    each, mask = 8 // width, (1 << width) - 1
    parts = [(data >> index * width).bitwise_and_(mask) for index in range(each)]
    return torch.stack(parts, -1).flatten(1)[:, :count]
