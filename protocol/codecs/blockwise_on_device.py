"""Encoding with a blockwise codec on a device that would have to be waited for: one wait, for the result.

Whether the codec can express the values, and how many channels stand out, is worked out there and comes with the bytes,
in one copy. So what is copied has room for as many channels apart as there may be (an eighth more than INT8 alone, a
quarter more than INT4), and what is too much is cut off here. The encoding is the one that the CPU makes. It stands
alone because on the CPU, where looking costs nothing, all this would only be more work.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from protocol.codecs import outliers
from protocol.codecs.blockwise import Expect
from protocol.codecs.host_memory import to_host
from protocol.interfaces.tensor_spec import TensorSpec
from swarm.vocabulary.errors import StateError

_FIGURES_BYTES: Final = 16
"""Two int64: how many channels stand out, and whether the codec can express the rest."""


class Blockwise(Protocol):
    """A codec of blocks, whose faults may be looked at later."""

    def encode(self, values: Tensor, out: Tensor, expect: Expect = ...) -> None: ...

    def decode(self, data: Tensor, out: Tensor, expect: Expect = ...) -> None: ...


def encode(values: Tensor, spec: TensorSpec, codec: Blockwise) -> tuple[Tensor, int]:
    """Encodes a contiguous tensor.

    Args:
        spec: of it, with no channels apart.

    Returns:
        The encoding on the CPU [bytes], uint8; and the number of channels that are apart in it.

    Raises:
        StateError: the codec cannot express a value.
    """
    most, base = outliers.most_apart(values), spec.byte_length
    room = 2 * most * (1 + spec.rows)
    out = torch.empty(base + room + _FIGURES_BYTES, dtype=torch.uint8, device=values.device)
    rest, count = values, torch.zeros((), dtype=torch.int64, device=values.device)
    found = [torch.ones((), dtype=torch.bool, device=values.device)]
    if most:
        channels, count = outliers.find_without_looking(values)
        rest = outliers.split_without_looking(values, channels, out[base : base + room])
    codec.encode(rest.view(-1), out[:base], lambda holds, _: found.append(holds))
    can_express = torch.stack(found).all().to(torch.int64)
    out[base + room :].copy_(torch.stack([count, can_express]).view(torch.uint8))
    octets = to_host(out)
    apart, is_expressed = octets[base + room :].clone().view(torch.int64).tolist()
    if not is_expressed:
        raise StateError(f"{spec.codec.name} can express finite values only, and none near the largest float32")
    return _cut(octets, base, 2 * most, 2 * apart, spec.rows), apart


def _cut(octets: Tensor, base: int, room: int, numbers: int, rows: int) -> Tensor:
    """Moves the columns behind as many bytes of channels' numbers as there are, of those that there was room for."""
    columns = octets[base + room : base + room + numbers * rows]
    end = base + numbers + len(columns)
    if 0 < numbers < room:
        octets[base + numbers : end] = columns.clone()  # for the two may overlap
    return octets[:end]
