"""INT8 and INT4 as torch.compile makes them, to know what a compiler would bring. The format is that of
`protocol.codecs`, for whole blocks and without channels sent apart; where a value lies halfway between two codes,
compiled code may take the other one.

Inductor writes C++ and has it compiled, which takes seconds and a compiler on the machine: the node does without.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from benchmarks.codecs_contenders import Sent
from protocol.codecs import Encoded
from protocol.codecs.views import DTYPES, octets_of, octets_of_tensor
from protocol.interfaces.tensor_spec import BLOCK, INT4_BLOCK, TensorSpec
from swarm.vocabulary.types import Codec

Kernel = Callable[[Tensor, Tensor, Tensor], None]
"""Elements, codes, scales."""


def compiler() -> str | None:
    """Path of the C++ compiler that inductor would use."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def int8_encode(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """`x` [blocks, 128], `codes` alike int8, `scales` [blocks, 1] float32."""
    scale = x.abs().amax(1, keepdim=True) / 127
    scales.copy_(scale)
    codes.copy_(torch.round(x * torch.where(scale > 0, 1 / scale, 0.0)))


def int8_decode(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    x.copy_(codes * scales)


def int4_encode(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """`x` [blocks, 64], `codes` [blocks, 32] uint8, `scales` [blocks, 1] bfloat16."""
    high, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    scale = (torch.where(high < -low, low, high) / -8).bfloat16()
    scales.copy_(scale)
    wide = scale.float()
    code = (torch.round(x * torch.where(wide != 0, 1 / wide, 0.0)) + 8).clamp(0, 15).to(torch.uint8)
    codes.copy_(code[:, :32] + code[:, 32:] * 16)


def int4_decode(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    wide = scales.float()
    x[:, :32].copy_(((codes & 15).float() - 8) * wide)
    x[:, 32:].copy_(((codes >> 4).float() - 8) * wide)


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A contender whose kernels are compiled at their first use."""

    codec: Codec
    encoder: Kernel
    decoder: Kernel
    block: int
    codes_dtype: torch.dtype
    scales_dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"compiled.{self.codec.name}"

    def encode(self, values: Tensor) -> Encoded:
        spec = TensorSpec(tuple(values.shape), DTYPES[values.dtype], self.codec)
        out = torch.empty(spec.byte_length, dtype=torch.uint8)
        codes, scales = self._parts(out, values.numel() // self.block)
        own = torch.empty_like(scales)  # compiled code writes to no two views of one memory
        self.encoder(values.view(-1, self.block), codes, own)
        scales.copy_(own)
        return Encoded(spec, octets_of_tensor(out))

    def serialize(self, encoded: Encoded) -> Sent:
        return Sent(bytes(encoded.data), encoded.spec)

    def received(self, sent: Sent) -> Sent:
        return Sent(bytearray(sent.data), sent.spec)

    def decode(self, sent: Sent, out: Tensor) -> Tensor:
        self.decoder(
            out.view(-1, self.block), *self._parts(octets_of(memoryview(sent.data)), out.numel() // self.block)
        )
        return out

    def _parts(self, octets: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        end = len(octets) - blocks * self.scales_dtype.itemsize
        return octets[:end].view(self.codes_dtype).view(blocks, -1), octets[end:].view(self.scales_dtype).view(
            blocks, 1
        )


def compiled_contenders() -> list[Compiled]:
    """Ready to be measured; the first call compiles."""
    make: Final = torch.compile
    return [
        Compiled(Codec.INT8, make(int8_encode), make(int8_decode), BLOCK, torch.int8, torch.float32),
        Compiled(Codec.INT4, make(int4_encode), make(int4_decode), INT4_BLOCK, torch.uint8, torch.bfloat16),
    ]
