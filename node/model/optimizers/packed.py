"""Compact storage for float32 matrices: two 16-bit halves, a narrow copy for products, or 8 bits with block scales."""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

PART: Final = 2**20  # Elements unpacked at a time on the CPU, sized for its caches (4 MiB as float32)
DEVICE_PART: Final = 2**22  # Elements unpacked at a time on a GPU, where each part costs about 20 kernel launches


class PackedFloats(ABC):
    """A float32 tensor stored in a compact form on one device."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape = shape
        self._part = PART if device.type == "cpu" else DEVICE_PART

    def numel(self) -> int:
        return math.prod(self.shape)

    @abstractmethod
    def read(self, part: slice) -> Tensor:
        """Unpacks a slice of the flattened tensor into new memory. Slices start at multiples of `PART`."""

    @abstractmethod
    def write(self, part: slice, values: Tensor) -> None:
        """Packs float32 values and stores them as a slice of the flattened tensor."""

    def parts(self, size: int | None = None) -> Iterator[slice]:
        total, size = self.numel(), size or self._part
        return (slice(begin, min(begin + size, total)) for begin in range(0, total, size))

    def store(self, tensor: Tensor) -> None:
        """Packs and stores a whole tensor of this shape, from any device."""
        flat = tensor.detach().reshape(-1)
        for part in self.parts():
            self.write(part, flat[part])

    def unpacked(self) -> Tensor:
        """Returns the whole tensor as float32 on its device."""
        return self.read(slice(0, self.numel())).view(self.shape)

    def copied(self) -> Tensor:
        values = torch.empty(self.numel())
        for part in self.parts():
            values[part].copy_(self.read(part))
        return values.view(self.shape)


Floats = Tensor | PackedFloats


class NarrowCopy:
    """Copy of a float32 matrix in a narrower dtype for products, refreshed in place, which invalidates older graphs."""

    def __init__(self, matrix: nn.Parameter, dtype: torch.dtype) -> None:
        self._matrix = matrix
        self._copy = torch.empty_like(matrix, dtype=dtype).requires_grad_()
        self._version: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self._copy.dtype

    @property
    def storage(self) -> int:
        return self._copy.untyped_storage().data_ptr()

    def fresh(self) -> Tensor:
        version = self._matrix._version
        if self._version != version:
            with torch.no_grad():
                self._copy.copy_(self._matrix)
            self._version = version
        return self._copy

    def changed(self) -> None:
        """Marks the copy as outdated, because torch does not count writes to the matrix by fused optimizers."""
        self._version = None


class SplitWeight(PackedFloats):
    """A float32 matrix in two halves: its nearest bfloat16 matrix, used in products, and the remaining 16 bits."""

    dtype = torch.bfloat16

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(tuple(matrix.shape), matrix.device)
        self._matrix = torch.empty(self.shape, dtype=torch.bfloat16, device=matrix.device).requires_grad_()
        self._upper = self._matrix.detach().view(torch.int16).view(-1)
        self._lower = torch.empty(self.numel(), dtype=torch.int16, device=matrix.device)
        self.store(matrix)

    @property
    def storage(self) -> int:
        return self._matrix.untyped_storage().data_ptr()

    def fresh(self) -> Tensor:
        return self._matrix

    def changed(self) -> None:
        """Does nothing: unlike a NarrowCopy, the bfloat16 half is never outdated."""

    @torch.no_grad()
    def read(self, part: slice) -> Tensor:
        bits = self._upper[part].int().bitwise_left_shift_(16).add_(self._lower[part])
        return bits.view(torch.float32)

    @torch.no_grad()
    def write(self, part: slice, values: Tensor) -> None:
        # Ties round away from zero, so that the remainder always fits in 16 bits.
        bits = values.to(self._lower.device, torch.float32).contiguous().view(torch.int32)
        upper = bits.add(1 << 15).bitwise_right_shift_(16)
        self._upper[part] = upper.to(torch.int16)
        self._lower[part] = (bits - upper.bitwise_left_shift_(16)).to(torch.int16)


Narrow = NarrowCopy | SplitWeight  # Replacement for a float32 matrix in products. `fresh()` returns an autograd leaf.

BLOCK: Final = 256
_DECADES: Final = 7


class EightBit(PackedFloats):
    """A float32 tensor in blockwise 8 bits with a dynamic map (Dettmers et al. 2021, arXiv:2110.02861), initially 0.

    Unlike the paper, scales are signed, so that packing twice changes nothing. Unsigned values above 0 never become 0
    (Li et al. 2023, arXiv:2309.01507, section 4.1).
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device, *, is_signed: bool) -> None:
        super().__init__(shape, device)
        blocks = -(-self.numel() // BLOCK)
        self._codes = torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=device)
        self._scales = torch.zeros(blocks, 1, device=device)
        self._values, self._middles = _map_on(device, is_signed)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    @torch.no_grad()
    def read(self, part: slice) -> Tensor:
        blocks = _blocks_of(part)
        codes = self._codes[blocks]
        values = self._values.index_select(0, codes.view(-1).int()).view_as(codes)
        return values.mul_(self._scales[blocks]).view(-1)[: part.stop - part.start]

    @torch.no_grad()
    def write(self, part: slice, values: Tensor) -> None:
        blocks = _blocks_of(part)
        values = values.to(self._codes.device, torch.float32)
        tiles = F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        # The scale is the signed element of largest magnitude, which then has code 1.0.
        scales = tiles.gather(1, tiles.abs().argmax(1, keepdim=True))
        quotients = tiles / torch.where(scales == 0, 1.0, scales)
        # Bisecting the midpoints of the map finds the nearest value.
        self._codes[blocks] = torch.bucketize(quotients, self._middles, out_int32=True).to(torch.uint8)
        self._scales[blocks] = scales


def eight_bit_bytes(elements: int) -> int:
    return -(-elements // BLOCK) * (BLOCK + 4)  # each block has a float32 scale


def _blocks_of(part: slice) -> slice:
    assert part.start % BLOCK == 0, "parts begin where a block does"
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


@functools.cache
def dynamic_map(*, is_signed: bool) -> tuple[float, ...]:
    """Returns the 256 values of 8-bit codes in ascending order, like bitsandbytes' `create_dynamic_map`."""
    positive: list[float] = []
    for decade in range(_DECADES):
        steps = 2**decade if is_signed else 2 ** (decade + 1)
        size = 10.0 ** (decade - _DECADES + 1)
        positive += [size * (0.1 + 0.9 * (step + 0.5) / steps) for step in range(steps)]
    if not is_signed:
        return (10.0**-_DECADES, *positive, 1.0)
    return (*(-value for value in reversed(positive)), 0.0, *positive, 1.0)


@functools.lru_cache(maxsize=32)
def _map_on(device: torch.device, is_signed: bool) -> tuple[Tensor, Tensor]:
    values = torch.tensor(dynamic_map(is_signed=is_signed), dtype=torch.float64)
    middles = (values[1:] + values[:-1]) / 2
    return values.float().to(device), middles.float().to(device)
