"""Codecs INT8, INT4 and INT2: blocks of elements with one scale per block.

INT8: n codes (int8), then ceil(n / 128) scales (float32). scale = largest magnitude / 127; element = code * scale.
INT4: ceil(n / 2) bytes of codes, then ceil(n / 64) scales (bfloat16). Byte i of a block of w elements has the code of
element i in the lower half and the code of element ceil(w / 2) + i in the upper half. scale = element of largest
magnitude / -8; element = (code - 8) * scale.
INT2: ceil(n / 4) bytes of codes, then ceil(n / 64) scales (bfloat16). Byte i of a block of w elements has the codes of
elements i, q + i, 2 q + i and 3 q + i, q = ceil(w / 4), from the lowest bits. element = (2 * code - 3) * scale.

Numbers are little-endian and rounded to nearest, ties to even. A scale is 0, or its magnitude is at least
SMALLEST_SCALE. Relative errors on normally distributed data are 6.5e-3, 0.1 and 0.34.
Outlier channels of matrices are separate (LLM.int8(), Dettmers et al. 2022): the blocks contain zeros for them. After
the blocks follow k channel numbers (uint16, ascending), then k columns of bfloat16, one number per row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from protocol.codecs.memory import to_host
from protocol.interfaces.tensor_spec import BLOCK, INT4_BLOCK, TensorSpec, blocks_of, most_outliers
from swarm.vocabulary.errors import ProtocolViolation, StateError
from swarm.vocabulary.types import Codec

# Smallest normal float32. Processors treat smaller numbers differently, and their reciprocal overflows.
SMALLEST_SCALE: Final = float(np.finfo(np.float32).tiny)

# 128 KiB of float32: just too small for torch to use several threads, which is far slower on a busy machine
SLICE_ELEMENTS: Final = 255 * 128
SLICES_OF_ONE_THREAD: Final = 4  # Slices per operation if torch has one thread
SPAN_ELEMENTS: Final = 24 * SLICE_ELEMENTS  # 3 MiB of float32, with scales computed together
EVERYTHING: Final = 2**62

# Adding this to a float32 of magnitude below 2^22 rounds it, ties to even, into the lowest bits (two's complement)
_ROUNDING: Final = 1.5 * 2.0**23
_ROUNDED_ZERO: Final = 0x4B400000
_EIGHT: Final = torch.int64  # Eight INT4 codes are processed as one number; no step carries into the next code
_LOWER_HALVES: Final = 0x0F0F0F0F0F0F0F0F
_SIGNS: Final = -0x7F7F7F7F7F7F7F80  # 0x80 in each byte: adding 0x78 to a code and flipping its sign subtracts 8
_SIGNS_LESS_8: Final = 0x7878787878787878


# Takes a bool tensor that must be true, and the error message otherwise. Reading the tensor waits for its device.
Expect = Callable[[Tensor, str], None]


def or_cannot_express(holds: Tensor, fault: str) -> None:
    if not bool(holds):
        raise StateError(fault)


def or_fails(holds: Tensor, fault: str) -> None:
    if not bool(holds):
        raise ProtocolViolation(fault)


@dataclass(frozen=True, slots=True)
class Blockwise:
    """Codec INT8 or INT4, with one scale per block of elements. All tensors of a call are on one device."""

    codec: Codec
    block: int
    scale_type: torch.dtype
    largest_scale: float

    @property
    def _is_packed(self) -> bool:
        return self.codec is Codec.INT4

    def encode(self, values: Tensor, out: Tensor, expect: Expect = or_cannot_express) -> None:
        """Encodes `values` [n]. Raises StateError if a value is not finite or too large; `out` is then undefined."""
        elements, device, packed = len(values), values.device, self._is_packed
        code_bytes = self._code_bytes(elements)
        scales = torch.empty(blocks_of(elements, self.block), 1, device=device)
        span = min(elements, span_elements(device))
        floats = _Scratch(0 if values.dtype is torch.float32 else span, torch.float32, device)
        unpacked = _Scratch(span if packed else 0, torch.uint8, device)
        rounded = _Rounding(min(elements, slice_elements(device)), self.block, device, 8.0 if packed else 0.0)
        for piece in pieces(elements, self.block, span):
            x = _in_float32(values[piece.start : piece.stop].view(-1, piece.width), floats)
            scale, coded = scales[piece.first : piece.end], self._codes(out, piece)
            codes = unpacked.like(x) if packed else coded.view(torch.int8)
            self._write_scales(x, scale)
            for part, factor, code in in_slices(x, inverse_of(scale), codes):
                numbers = rounded(part, factor)
                code.copy_(numbers.clamp_(max=_ROUNDED_ZERO + 15) if packed else numbers)
            if packed:
                _pack(codes, coded)
        check_encoded(scales, self.largest_scale, self.codec.name, expect)
        out[code_bytes:].copy_(scales.to(self.scale_type).view(-1).view(torch.uint8))

    def decode(self, data: Tensor, out: Tensor, expect: Expect = or_fails) -> None:
        """Decodes `data` into `out` [n]. Raises ProtocolViolation for an impossible scale; `out` is then unchanged."""
        elements, device, packed = len(out), out.device, self._is_packed
        scales = data[self._code_bytes(elements) :].clone().view(self.scale_type).float().view(-1, 1)
        check_received(scales.abs() if packed else scales, self.largest_scale, self.codec.name, expect)
        span = min(elements, span_elements(device)) if packed else elements
        unpacked = _Scratch(span if packed else 0, torch.int8, device)
        floats = _Scratch(min(span, slice_elements(device)), torch.float32, device)
        for piece in pieces(elements, self.block, span):
            target, coded = out[piece.start : piece.stop].view(-1, piece.width), self._codes(data, piece)
            codes = unpacked.like(target) if packed else coded.view(torch.int8)
            if packed:
                _unpack(coded, codes)
            for part, code, scale in in_slices(target, codes, scales[piece.first : piece.end]):
                if part.dtype is torch.float32:
                    part.copy_(code).mul_(scale)
                else:
                    part.copy_(floats.like(code).copy_(code).mul_(scale))

    def _code_bytes(self, elements: int) -> int:
        return -(-elements // 2) if self._is_packed else elements

    def _codes(self, encoding: Tensor, piece: "Piece") -> Tensor:
        """Returns the codes of a piece, [blocks, bytes] uint8, as a view of `encoding`."""
        first, end = self._code_bytes(piece.start), self._code_bytes(piece.stop)
        return encoding[first:end].view(piece.end - piece.first, -1)

    def _write_scales(self, x: Tensor, scale: Tensor) -> None:
        """Writes the scale of each row of `x` [blocks, width]; NaN if the row contains NaN."""
        lowest = torch.empty_like(scale)
        # Two reductions take half the time of abs().amax(), and a third of `torch.aminmax`.
        for part, high, low in in_slices(x, scale, lowest):
            torch.amax(part, 1, keepdim=True, out=high)
            torch.amin(part, 1, keepdim=True, out=low)
        if self._is_packed:
            torch.where(scale < -lowest, lowest, scale, out=scale)
            scale.div_(-8).copy_(scale.to(self.scale_type))
        else:
            # Divide by a tensor: by a Python number a GPU multiplies with its reciprocal, which may differ in one bit.
            torch.maximum(scale, lowest.neg_(), out=scale).div_(torch.full((), 127.0, device=scale.device))


INT8: Final = Blockwise(Codec.INT8, BLOCK, torch.float32, torch.finfo(torch.bfloat16).max / 128)
INT4: Final = Blockwise(Codec.INT4, INT4_BLOCK, torch.bfloat16, float(np.finfo(np.float32).max) / 16)


def _pack(codes: Tensor, out: Tensor) -> None:
    """Packs 4-bit codes [blocks, width] uint8 into bytes [blocks, ceil(width / 2)]."""
    if codes.shape[1] == INT4_BLOCK:
        for code, target in in_slices(codes.view(_EIGHT), out.view(_EIGHT)):
            lower, upper = code.chunk(2, 1)
            torch.bitwise_left_shift(upper, 4, out=target).bitwise_or_(lower)
        return
    lower, upper = codes[:, : out.shape[1]], codes[:, out.shape[1] :]
    out.copy_(lower)
    out[:, : upper.shape[1]].add_(upper, alpha=16)


def _unpack(packed: Tensor, out: Tensor) -> None:
    """Unpacks bytes [blocks, ceil(width / 2)] into 4-bit codes minus 8, [blocks, width] int8."""
    if out.shape[1] == INT4_BLOCK:
        for target, code in in_slices(out.view(_EIGHT), packed.view(_EIGHT)):
            lower, upper = target.chunk(2, 1)
            lower.copy_(code)
            torch.bitwise_right_shift(code, 4, out=upper)
            target.bitwise_and_(_LOWER_HALVES).add_(_SIGNS_LESS_8).bitwise_xor_(_SIGNS)
        return
    halves = torch.cat((packed.bitwise_and(15), packed.bitwise_right_shift(4)), 1)
    out.copy_(halves[:, : out.shape[1]]).sub_(8)


class TwoBits:
    """Codec INT2. The levels are evenly spaced, with the least squared error for normally distributed elements."""

    def encode(self, values: Tensor, out: Tensor, expect: Expect = or_cannot_express) -> None:
        """Encodes `values` [n]. Raises StateError if a value is not finite or too large; `out` is then undefined."""
        elements, device = len(values), values.device
        scales = torch.empty(blocks_of(elements, INT4_BLOCK), 1, device=device)
        for piece in pieces(elements, INT4_BLOCK, slice_elements(device)):
            x = values[piece.start : piece.stop].view(-1, piece.width).float()
            spacing = x.abs().mean(1, keepdim=True).mul_(_SPACING)
            level = (x * inverse_of(spacing)).floor_().clamp_(-2, 1).mul_(2).add_(1)
            # By least squares, so that no encoding is longer than its vector: rounds limit norms.
            scale = scales[piece.first : piece.end]
            torch.sum(x * level, 1, keepdim=True, out=scale).div_(level.square().sum(1, keepdim=True))
            scale.copy_(scale.bfloat16()).masked_fill_(scale < SMALLEST_SCALE, 0.0)
            codes = pad(level.add_(3).div_(2).to(torch.uint8), (0, -piece.width % 4)).view(len(x), 4, -1)
            packed = codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6
            out[-(-piece.start // 4) : -(-piece.stop // 4)].copy_(packed.view(-1))
        check_encoded(scales, _LARGEST_OF_TWO_BITS, "INT2", expect)
        out[-(-elements // 4) :].copy_(scales.bfloat16().view(-1).view(torch.uint8))

    def decode(self, data: Tensor, out: Tensor, expect: Expect = or_fails) -> None:
        """Decodes `data` into `out` [n]. Raises ProtocolViolation for an impossible scale; `out` is then unchanged."""
        elements = len(out)
        scales = data[-(-elements // 4) :].clone().view(torch.bfloat16).float().view(-1, 1)
        check_received(scales, _LARGEST_OF_TWO_BITS, "INT2", expect)
        for piece in pieces(elements, INT4_BLOCK, slice_elements(out.device)):
            packed = data[-(-piece.start // 4) : -(-piece.stop // 4)].view(piece.end - piece.first, -1)
            codes = torch.cat([packed >> shift & 3 for shift in (0, 2, 4, 6)], 1)[:, : piece.width]
            levels = codes.float().mul_(2).sub_(3).mul_(scales[piece.first : piece.end])
            out[piece.start : piece.stop].copy_(levels.view(-1))


_SPACING: Final = 1.248  # Of two levels, over the mean magnitude
_LARGEST_OF_TWO_BITS: Final = float(np.finfo(np.float32).max) / 512


def inverse_of(scale: Tensor) -> Tensor:
    """Returns 1 / scale. Sets scales below SMALLEST_SCALE to 0 in place, and returns 0 for them."""
    sizes = scale.abs()
    # A shortcut for the usual case, in a third of the time. Not on a GPU, because reading the result waits for it.
    if scale.is_cpu and float(sizes.amin()) >= SMALLEST_SCALE:
        return scale.reciprocal()
    vanishing = sizes < SMALLEST_SCALE
    scale.masked_fill_(vanishing, 0.0)
    return scale.reciprocal().masked_fill_(vanishing, 0.0)


def check_encoded(scales: Tensor, largest: float, codec: str, expect: Expect = or_cannot_express) -> None:
    """Raises StateError, unless `expect` differs, if a computed scale is not finite or larger than `largest`."""
    fault = f"{codec} can express only finite values well below the largest float32; this tensor has others"
    expect((scales.abs() <= largest).all(), fault)


def check_received(scales: Tensor, largest: float, codec: str, expect: Expect = or_fails) -> None:
    """Raises ProtocolViolation, unless `expect` differs, if a scale is not 0 or from SMALLEST_SCALE to `largest`."""
    sizes = scales.masked_fill(scales == 0, SMALLEST_SCALE)
    allowed = sizes.clamp(SMALLEST_SCALE, largest)  # NaN compares unequal
    if scales.is_cpu and torch.equal(sizes, allowed):
        return
    fault = f"an {codec} encoding has a scale that is not a number, negative, too large or too small"
    expect((sizes == allowed).all(), fault)


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a vector's blocks, and the range of their elements. The last piece may be a single shorter block."""

    first: int
    end: int
    start: int
    stop: int

    @property
    def width(self) -> int:
        return (self.stop - self.start) // (self.end - self.first)


def pieces(elements: int, width: int, at_once: int) -> Iterator[Piece]:
    """Splits a vector into pieces of whole blocks of `width` elements, and a piece for a shorter last block."""
    whole, rest = divmod(elements, width)
    step = max(1, at_once // width)
    for first in range(0, whole, step):
        end = min(first + step, whole)
        yield Piece(first, end, first * width, end * width)
    if rest:
        yield Piece(whole, whole + 1, whole * width, elements)


def slice_elements(device: torch.device) -> int:
    if device.type != "cpu":
        return EVERYTHING
    return SLICE_ELEMENTS * (1 if torch.get_num_threads() > 1 else SLICES_OF_ONE_THREAD)


def span_elements(device: torch.device) -> int:
    return SPAN_ELEMENTS if device.type == "cpu" else EVERYTHING


def in_slices(*matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Splits matrices with the same number of rows into slices; a slice of the first matrix fits a core's cache."""
    count, width = matrices[0].shape
    rows = max(1, slice_elements(matrices[0].device) // width)
    sizes = [min(rows, count - first) for first in range(0, count, rows)]
    # One split call per matrix: a call per slice takes as long as the arithmetic on 10 KiB.
    return zip(*(matrix.split_with_sizes(sizes) for matrix in matrices), strict=True)


class _Scratch:
    """Reusable memory for intermediate results, allocated once per vector."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.empty(elements, dtype=dtype, device=device)
        self._last = self._flat

    def like(self, x: Tensor) -> Tensor:
        if self._last.shape != x.shape:
            self._last = self._flat[: x.numel()].view(x.shape)
        return self._last


class _Rounding:
    """Rounds `x * factor + offset` to integers of magnitude below 2^22, ties to even."""

    def __init__(self, elements: int, width: int, device: torch.device, offset: float) -> None:
        self._constant = torch.full((1, width), _ROUNDING + offset, device=device)
        self._scratch = _Scratch(elements, torch.float32, device)
        self._row = self._sums = self._bits = torch.empty(0)

    def __call__(self, x: Tensor, factor: Tensor) -> Tensor:
        """Rounds `x` [blocks, width]. Returns int32: _ROUNDED_ZERO plus each integer, valid until the next call."""
        if self._sums.shape != x.shape:
            self._row, self._sums = self._constant[:, : x.shape[1]], self._scratch.like(x)
            self._bits = self._sums.view(torch.int32)
        torch.addcmul(self._row, x, factor, out=self._sums)
        return self._bits


def _in_float32(x: Tensor, scratch: _Scratch) -> Tensor:
    if x.dtype is torch.float32:
        return x
    result = scratch.like(x)
    for target, part in in_slices(result, x):
        target.copy_(part)
    return result


TIMES_THE_MEDIAN: Final = 8.0  # An outlier channel's largest element, over the median of all channels' largest elements
SAMPLED_ROWS: Final = 64  # Enough, because the same channels are outliers in all rows. A missed one costs only accuracy
_FIGURES_BYTES: Final = 16  # Two int64 on a device: number of outliers, and whether the codec can express the rest


def encode_matrix(values: Tensor, spec: TensorSpec, codec: Blockwise) -> tuple[TensorSpec, Tensor]:
    """Encodes a tensor. Returns its spec with the number of outliers, and the bytes on the CPU. Raises StateError."""
    if not values.is_cpu:
        return encode_without_waiting(values, spec, codec)
    channels = _found(values)
    spec = replace(spec, outliers=len(channels))
    out = torch.empty(spec.byte_length, dtype=torch.uint8)
    base = len(out) - spec.apart_bytes
    rest = split(values, channels, out[base:]) if len(channels) else values
    codec.encode(rest.view(-1), out[:base])
    return spec, out


def encode_without_waiting(values: Tensor, spec: TensorSpec, codec: Blockwise) -> tuple[TensorSpec, Tensor]:
    """Encodes with one wait for the device: copies space for all possible outliers, then cuts off the unused part."""
    most, base = most_apart(values), spec.byte_length
    space = 2 * most * (1 + spec.rows)
    out = torch.empty(base + space + _FIGURES_BYTES, dtype=torch.uint8, device=values.device)
    rest, count = values, torch.zeros((), dtype=torch.int64, device=values.device)
    found = [torch.ones((), dtype=torch.bool, device=values.device)]
    if most:
        channels, count = find_without_looking(values)
        rest = split(values, channels, out[base : base + space])
    codec.encode(rest.view(-1), out[:base], lambda holds, _: found.append(holds))
    can_express = torch.stack(found).all().to(torch.int64)
    out[base + space :].copy_(torch.stack([count, can_express]).view(torch.uint8))
    octets = to_host(out)
    apart, is_expressed = octets[base + space :].clone().view(torch.int64).tolist()
    if not is_expressed:
        raise StateError(f"{spec.codec.name} can express only finite values well below the largest float32")
    return replace(spec, outliers=apart), _cut(octets, base, 2 * most, 2 * apart, spec.rows)


def _cut(octets: Tensor, base: int, space: int, used: int, rows: int) -> Tensor:
    """Cuts off unused outliers: keeps `used` of `space` bytes of channel numbers, and moves the columns up to them."""
    columns = octets[base + space : base + space + used * rows]
    end = base + used + len(columns)
    if 0 < used < space:
        octets[base + used : end] = columns.clone()  # clone, because source and target may overlap
    return octets[:end]


def decode_matrix(spec: TensorSpec, octets: Tensor, codec: Blockwise, out: Tensor, expect: Expect) -> None:
    """Decodes `octets` into `out`. Raises ProtocolViolation if `octets` are malformed; `out` is then unchanged."""
    base = len(octets) - spec.apart_bytes
    apart = octets[base:]
    channels = _checked_channels(apart, spec.outliers, spec.shape[-1], expect) if spec.outliers else None
    codec.decode(octets[:base], out.view(-1), expect)
    if channels is not None:
        matrix = out.view(-1, out.shape[-1])
        columns = apart[2 * spec.outliers :].clone().view(torch.bfloat16).view(spec.outliers, len(matrix))
        matrix.index_copy_(1, channels, columns.t().to(out.dtype))


def _checked_channels(data: Tensor, count: int, channels: int, expect: Expect = or_fails) -> Tensor:
    """Reads the channel numbers and requires them to ascend within range. The result is a valid index in any case."""
    numbers = data[: 2 * count].clone().view(torch.uint16).to(torch.int64)
    fault = f"the outlier channels are not {count} ascending numbers below {channels}"
    expect((numbers[-1] < channels) & (numbers[1:] > numbers[:-1]).all(), fault)
    return numbers.clamp_(max=channels - 1)  # an index out of range would destroy the GPU's context


def most_apart(values: Tensor) -> int:
    """Returns the largest number of outlier channels that may be encoded for `values` [..., channels]."""
    may_be = values.ndim > 1 and values.shape[-1] <= 2**16  # the numbers of channels have 16 bits
    return most_outliers(tuple(values.shape)) if may_be else 0


def _found(values: Tensor) -> Tensor:
    """Finds the outlier channels of `values` [..., channels] on the CPU, ascending."""
    most = most_apart(values)
    if not most:
        return torch.empty(0, dtype=torch.int64)
    found = _standing_out(values)[1].nonzero().flatten()
    return found if len(found) <= most else find_without_looking(values)[0]


def find_without_looking(values: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the largest outlier channels, ascending, padded with the number of channels; and their count (int64)."""
    # Without a wait for the device.
    most, channels = most_apart(values), values.shape[-1]
    largest, stand_out = _standing_out(values)
    sizes = torch.where(stand_out, largest, -1.0)
    order = sizes.sort(descending=True, stable=True)
    chosen = torch.where(order.values[:most] < 0, channels, order.indices[:most])
    return chosen.sort().values, stand_out.sum().clamp(max=most)


def _standing_out(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each channel's largest magnitude in the sampled rows, and whether the channel is an outlier."""
    matrix = values.view(-1, values.shape[-1])
    sample = matrix[:: max(1, len(matrix) // SAMPLED_ROWS)][:SAMPLED_ROWS]
    largest = sample.abs().amax(0).float()
    return largest, largest > TIMES_THE_MEDIAN * largest.median()


def split(values: Tensor, channels: Tensor, out: Tensor) -> Tensor:
    """Writes the numbers and columns of `channels` into `out`. Returns a copy of `values` with zeros in the columns."""
    matrix, count = values.view(-1, values.shape[-1]), values.shape[-1]
    real = channels.clamp(max=count - 1)  # the columns of padding are cut off later
    out[: 2 * len(real)].copy_(real.to(torch.uint16).view(torch.uint8))
    columns = matrix.index_select(1, real).to(torch.bfloat16).t().contiguous()
    out[2 * len(real) :].copy_(columns.view(-1).view(torch.uint8))
    if values.is_cpu:  # takes half the time of the mask below
        return matrix.clone().index_fill_(1, channels[channels < count], 0.0)
    are_apart = torch.zeros(count + 1, dtype=torch.bool, device=values.device).index_fill_(0, channels, True)
    return matrix.masked_fill(are_apart[:count], 0.0)
