"""The codecs TOP_K_4 and TOP_K_2: of each chunk of 4096 elements the 192 of largest magnitude, or the 256; all others
decode to 0.

252 and 260 bytes for 4096 elements: 65 and 63 times less than float32. What is left out has to be sent another time by
who encodes (`node.averaging.exchange.reduction`), or the sum of many encodings is not that of what was encoded.

The encoding is that of each chunk, one after the other; the last chunk may be shorter. A chunk of w elements sends n =
ceil(w * 192 / 4096) of them (256 with TOP_K_2), in the order of their places in the chunk, in these parts, each in
whole bytes whose lowest bit comes first and whose unused bits are 0:

    levels      the lowest and the highest one, bfloat16, little-endian low bits    n times 4 bits: each place modulo 16
    high bits   n + ceil(w / 16) bits, of which n are 1: for the i-th place p (i from 0) the bit of number floor(p / 16)
    + i codes       n times 4 bits, or 2

So a place takes 6.3 or 6 bits instead of 12, whichever places they are (the code of Elias 1974 and Fano 1971 for rising
numbers). A code's upper bit is the sign (1 is negative), the rest a whole number j from 0 to m, which is 7 or 1. It
stands for

    lowest + (j / m)^2 * (highest - lowest)

with the square rounded to float32 and so every operation after it. TOP_K_4 sends the smallest and the largest magnitude
as its levels, and has more of the others where there are more magnitudes, near the smallest one: on normal data the
kept elements have a relative error of 0.03. TOP_K_2 sends the means of the smaller and of the larger magnitudes: 0.09.
A level is 0, or from SMALLEST_SCALE to LARGEST_LEVEL.

With the same length, TOP_K_2 leaves less out (0.82 of the length of normal data; TOP_K_4 0.86), but where a few
elements are far larger than the rest, two levels are too few (Student's t with 3 degrees of freedom: 0.69 and 0.66).
"""

from __future__ import annotations

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

LARGEST_LEVEL: Final = float(np.finfo(np.float32).max) / 4
"""So that nothing decodes to infinity, in bfloat16 neither."""
_LOW_MASK: Final = (1 << PLACE_LOW_BITS) - 1
_GATHER: Final = 0x0102040810204080
"""Times the bytes of an int64 that are 0 or 1, has the k-th of them as bit 56 + k, and nothing else there."""

LLOYD_STEPS: Final = 2
"""To find two levels (Lloyd 1982, "Least squares quantization in PCM"); more make no difference that can be seen."""


@dataclass(frozen=True, slots=True)
class TopK:
    """One of the two codecs. All tensors of a call are on one device."""

    codec: Codec
    levels_of: Callable[[Tensor], Tensor]
    """From the magnitudes [chunks, kept] of what is sent to the levels [chunks, 2]."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Writes the encoding of `values` [n], float32 or bfloat16, into `out`, which has as many bytes.

        Raises:
            StateError: a value is not finite, or near the largest float32; `out` is then undefined.
        """
        written = 0
        for piece in pieces(len(values), SPARSE_CHUNK, span_elements(values.device)):
            chunk, count = SparseChunk(piece.width, self.codec), piece.end - piece.first
            end = written + count * chunk.byte_length
            x = values[piece.start : piece.stop].view(count, -1).float()
            self._encode_chunks(x, chunk, out[written:end].view(count, -1))
            written = end

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Writes what `data` encodes into `out` [n], float32 or bfloat16; most of it are zeros.

        Raises:
            ProtocolViolation: a level cannot be, or the places of a chunk are too many, too few, beyond its end or do
                not rise; `out` is untouched.
        """
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
        """Of a magnitude."""
        return 7 if self.codec is Codec.TOP_K_4 else 1

    def _encode_chunks(self, x: Tensor, chunk: SparseChunk, out: Tensor) -> None:
        """`x` [chunks, elements] float32, `out` [chunks, bytes]."""
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
        codes = torch.bucketize(share, self._borders(x.device), out_int32=True).to(torch.uint8)
        codes.add_(kept < 0, alpha=self._highest_code + 1)
        levels_out, low, high, codes_out = _parts(out, chunk)
        levels_out.copy_(rounded.view(torch.uint8))
        _write_places(places, low, high)
        codes_out.copy_(_packed(codes, chunk.code_bits))

    def _values(self, levels: Tensor, codes: Tensor, chunk: SparseChunk) -> Tensor:
        """[chunks, kept] float32 from the encoding's parts."""
        both = levels.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
        check_received(both, LARGEST_LEVEL, self.codec.name)
        lowest, highest = both[:, :1], both[:, 1:]
        if bool((lowest < 0).any()) or bool((lowest > highest).any()):
            raise ProtocolViolation(
                f"a {self.codec.name} encoding has a level that is negative, or a lowest one above the highest"
            )
        numbers = _unpacked(codes, chunk.code_bits, chunk.kept)
        size = self._squares(levels.device)[numbers.bitwise_and(self._highest_code).long()]
        size.mul_(highest - lowest).add_(lowest)
        return torch.where(numbers > self._highest_code, -size, size)

    def _squares(self, device: torch.device) -> Tensor:
        """Of each code of a magnitude: how far its level is from the lowest to the highest."""
        most = self._highest_code
        return torch.tensor([code**2 / most**2 for code in range(most + 1)], device=device)

    def _borders(self, device: torch.device) -> Tensor:
        """Half-way between the levels."""
        squares = self._squares(device)
        return (squares[1:] + squares[:-1]).div_(2)


def _extremes(sizes: Tensor) -> Tensor:
    return torch.stack([sizes.amin(1), sizes.amax(1)], 1)


def _two_means(sizes: Tensor) -> Tensor:
    """Of the smaller and of the larger ones: the two numbers nearest to all of them, or nearly."""
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


TOP_K_4: Final = TopK(Codec.TOP_K_4, _extremes)
TOP_K_2: Final = TopK(Codec.TOP_K_2, _two_means)


# ---- places and bits ----------------------------------------------------------------------------------------------


def _parts(rows: Tensor, chunk: SparseChunk) -> tuple[Tensor, ...]:
    """Levels, low bits, high bits, codes of [chunks, bytes]: views."""
    return rows.split_with_sizes([4, chunk.low_bytes, chunk.high_bytes, chunk.code_bytes], 1)


def _largest(x: Tensor, count: int) -> Tensor:
    """Places of the `count` elements of largest magnitude in each row, rising; slice by slice."""
    rows = max(1, slice_elements(x.device) // x.shape[1])
    found = [part.abs().topk(count, sorted=False).indices for part in torch.split(x, rows)]
    return torch.cat(found).sort().values


def _write_places(places: Tensor, low: Tensor, high: Tensor) -> None:
    """`places` [chunks, kept] int64, rising."""
    low.copy_(_packed(places.bitwise_and(_LOW_MASK).to(torch.uint8), PLACE_LOW_BITS))
    order = torch.arange(places.shape[1], device=places.device)
    bits = torch.zeros(len(high), 8 * high.shape[1], dtype=torch.uint8, device=high.device)
    bits.scatter_(1, (places >> PLACE_LOW_BITS).add_(order), 1)
    high.copy_(bits.view(torch.int64).mul_(_GATHER).bitwise_right_shift_(56))


def _places(low: Tensor, high: Tensor, chunk: SparseChunk) -> Tensor:
    """[chunks, kept] int64. Raises ProtocolViolation."""
    bits = _spread(high.device)[high.long()].view(torch.uint8)
    if bool((bits.sum(1) != chunk.kept).any()):
        raise ProtocolViolation(f"a sparse chunk does not have {chunk.kept} places")
    order = torch.arange(chunk.kept, device=high.device)
    places = bits.nonzero()[:, 1].view(-1, chunk.kept).sub_(order).mul_(_LOW_MASK + 1)
    places.add_(_unpacked(low, PLACE_LOW_BITS, chunk.kept))
    if bool((places[:, -1] >= chunk.elements).any()) or bool((places[:, 1:] <= places[:, :-1]).any()):
        raise ProtocolViolation(f"the places of a sparse chunk do not rise, or leave its {chunk.elements} elements")
    return places


def _spread(device: torch.device) -> Tensor:
    """Of each byte its bits, the lowest first, as the bytes of an int64: what _GATHER puts together."""
    each = [sum((number >> bit & 1) << 8 * bit for bit in range(8)) for number in range(256)]
    return torch.tensor(each, dtype=torch.int64, device=device)


def _packed(numbers: Tensor, width: int) -> Tensor:
    """[chunks, n] uint8 below 2^width, as bytes with the first number in the lowest bits. `width` is 4 or 2."""
    each = 8 // width
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % each))
    result = numbers[:, ::each].clone()
    for index in range(1, each):
        result.bitwise_or_(numbers[:, index::each] << index * width)
    return result


def _unpacked(data: Tensor, width: int, count: int) -> Tensor:
    """What `_packed` put together: [chunks, count] uint8. Bits after these are not looked at."""
    each, mask = 8 // width, (1 << width) - 1
    parts = [(data >> index * width).bitwise_and_(mask) for index in range(each)]
    return torch.stack(parts, -1).flatten(1)[:, :count]
