"""Blockwise encoding of matrices with separate outlier channels (LLM.int8(), Dettmers et al. 2022).

The blocks contain zeros for these channels. After the blocks follow k channel numbers (uint16, little-endian,
ascending), then k columns of bfloat16, one number per row.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from protocol.codecs.blockwise import Blockwise, Expect, or_violates
from protocol.codecs.memory import to_host
from protocol.interfaces.tensor_spec import TensorSpec, most_outliers
from swarm.vocabulary.errors import StateError

TIMES_THE_MEDIAN: Final = 8.0  # An outlier channel's largest element, over the median of all channels' largest elements
# Enough, because the same channels are outliers in all rows. A missed one costs only accuracy.
SAMPLED_ROWS: Final = 64
LARGEST_CHANNEL: Final = 2**16
# Two int64 after the encoding on a device: number of outliers, and whether the codec can express the rest
_FIGURES_BYTES: Final = 16


def encode(values: Tensor, spec: TensorSpec, codec: Blockwise) -> tuple[TensorSpec, Tensor]:
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


def decode(spec: TensorSpec, octets: Tensor, codec: Blockwise, out: Tensor, expect: Expect) -> None:
    """Decodes `octets` into `out`. Raises ProtocolViolation if `octets` are malformed; `out` is then unchanged."""
    base = len(octets) - spec.apart_bytes
    apart = octets[base:]
    channels = _checked_channels(apart, spec.outliers, spec.shape[-1], expect) if spec.outliers else None
    codec.decode(octets[:base], out.view(-1), expect)
    if channels is not None:
        matrix = out.view(-1, out.shape[-1])
        columns = apart[2 * spec.outliers :].clone().view(torch.bfloat16).view(spec.outliers, len(matrix))
        matrix.index_copy_(1, channels, columns.t().to(out.dtype))


def _checked_channels(data: Tensor, count: int, channels: int, expect: Expect = or_violates) -> Tensor:
    """Reads the channel numbers and requires them to ascend within range. The result is a valid index in any case."""
    numbers = data[: 2 * count].clone().view(torch.uint16).to(torch.int64)
    if data.is_cpu:
        read = numbers.tolist()
        if read[-1] < channels and all(one < other for one, other in pairwise(read)):
            return numbers
    fault = f"the outlier channels are not {count} ascending numbers below {channels}"
    expect((numbers[-1] < channels) & (numbers[1:] > numbers[:-1]).all(), fault)
    return numbers.clamp_(max=channels - 1)  # an index out of range would destroy the GPU's context


def most_apart(values: Tensor) -> int:
    """Returns the largest number of outlier channels that may be encoded for `values` [..., channels]."""
    may_be = values.ndim > 1 and values.shape[-1] <= LARGEST_CHANNEL
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
