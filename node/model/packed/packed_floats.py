"""Float32 numbers that are kept in fewer bytes and unpacked a part at a time, so that never more than a part of them is
there as float32.

It stands alone because the inner optimizer, rounds and checkpoints read them, and each kind packs in a way of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

PART: Final = 2**20
"""Elements (4 MiB as float32) unpacked at a time on the CPU, to fit its caches."""
DEVICE_PART: Final = 2**22
"""Elements unpacked at a time on a GPU, where each part costs about 20 launches."""


class PackedFloats(ABC):
    """A packed float32 tensor on a device."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape = shape
        self._part = PART if device.type == "cpu" else DEVICE_PART

    def numel(self) -> int:
        return math.prod(self.shape)

    @abstractmethod
    def read(self, part: slice) -> Tensor:
        """Unpacks a part of the flattened tensor into new memory on the device. Parts begin at multiples of `PART`."""

    @abstractmethod
    def write(self, part: slice, values: Tensor) -> None:
        """Packs float32 numbers into a part, as `read`."""

    def parts(self, size: int | None = None) -> Iterator[slice]:
        """Cuts the flattened tensor into parts, of `size` elements if it is given."""
        total, size = self.numel(), size or self._part
        return (slice(begin, min(begin + size, total)) for begin in range(0, total, size))

    def store(self, tensor: Tensor) -> None:
        """Packs a whole tensor of this shape, from any device."""
        flat = tensor.detach().reshape(-1)
        for part in self.parts():
            self.write(part, flat[part])

    def unpacked(self) -> Tensor:
        """The whole tensor as float32, on its device."""
        return self.read(slice(0, self.numel())).view(self.shape)

    def copied(self) -> Tensor:
        """A float32 copy on the CPU."""
        values = torch.empty(self.numel())
        for part in self.parts():
            values[part].copy_(self.read(part))
        return values.view(self.shape)


Floats = Tensor | PackedFloats
