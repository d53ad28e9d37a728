"""Outlier channels: those far larger than the rest, sent apart in bfloat16 so that the rest can be blocked with small
scales.

In trained models a few places of the hidden states have magnitudes tens to thousands of times those of the others, the
same ones for nearly all tokens (Dettmers et al. 2022, LLM.int8()). A block with one of them in it has a scale that
leaves a few codes for all others.

They follow a blockwise encoding: k numbers of channels (unsigned 16 bits, little-endian, rising), then k columns of as
many bfloat16 as the matrix has rows. In the blocks these channels are sent as zeros.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from protocol.codecs.blockwise import Expect, or_violates
from protocol.interfaces.tensor_spec import most_outliers

TIMES_THE_MEDIAN: Final = 8.0
"""How much larger than the median channel's largest element a channel's must be."""
SAMPLED_ROWS: Final = 64
"""That are looked at: the same channels stand out in all rows. One that is missed costs accuracy in its own blocks
only."""
LARGEST_CHANNEL: Final = 2**16


def find(values: Tensor) -> Tensor:
    """The indices of the outlier channels of `values` [..., channels], rising; none where nothing can be sent apart."""
    most = most_apart(values)
    if not most:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    largest, stand_out = _standing_out(values)
    found = stand_out.nonzero().flatten()
    if len(found) > most:
        found = found[largest[found].topk(most).indices].sort().values
    return found


def find_without_looking(values: Tensor) -> tuple[Tensor, Tensor]:
    """The same channels for a device that would have to be waited for: as many as there may be at most, those that
    stand out in rising order and after them the number of channels, which is none; and how many stand out, an int64.

    Of several that are equally large where there are too many, the first ones are taken, as by `find` maybe others.
    """
    most, channels = most_apart(values), values.shape[-1]
    largest, stand_out = _standing_out(values)
    sizes = torch.where(stand_out, largest, -1.0)
    order = sizes.sort(descending=True, stable=True)
    chosen = torch.where(order.values[:most] < 0, channels, order.indices[:most])
    return chosen.sort().values, stand_out.sum().clamp(max=most)


def most_apart(values: Tensor) -> int:
    """The largest number of channels of `values` [..., channels] that can be sent apart."""
    may_be = values.ndim > 1 and values.shape[-1] <= LARGEST_CHANNEL
    return most_outliers(tuple(values.shape)) if may_be else 0


def _standing_out(values: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel the largest magnitude that was looked at, and whether it stands out."""
    matrix = values.view(-1, values.shape[-1])
    sample = matrix[:: max(1, len(matrix) // SAMPLED_ROWS)][:SAMPLED_ROWS]
    largest = sample.abs().amax(0).float()
    return largest, largest > TIMES_THE_MEDIAN * largest.median()


def split(values: Tensor, channels: Tensor, out: Tensor) -> Tensor:
    """Writes the channels' numbers and columns into `out` [2 * k * (1 + rows)] bytes, and gives a copy of `values` with
    zeros in their place."""
    matrix = values.view(-1, values.shape[-1])
    _write(matrix, channels, out)
    return matrix.clone().index_fill_(1, channels, 0.0)


def split_without_looking(values: Tensor, channels: Tensor, out: Tensor) -> Tensor:
    """As `split`, of channels that `find_without_looking` gave: what is written of those that are none means
    nothing."""
    matrix, count = values.view(-1, values.shape[-1]), values.shape[-1]
    _write(matrix, channels.clamp(max=count - 1), out)
    are_apart = torch.zeros(count + 1, dtype=torch.bool, device=values.device).index_fill_(0, channels, True)
    return matrix.masked_fill(are_apart[:count], 0.0)


def _write(matrix: Tensor, channels: Tensor, out: Tensor) -> None:
    numbers = channels.to(torch.uint16).view(torch.uint8)
    columns = matrix.index_select(1, channels).to(torch.bfloat16).t().contiguous()
    out[: len(numbers)].copy_(numbers)
    out[len(numbers) :].copy_(columns.view(-1).view(torch.uint8))


def checked_channels(data: Tensor, count: int, channels: int, expect: Expect = or_violates) -> Tensor:
    """Reads the channel indices at the beginning of `data`, and expects that they rise and that there are such
    channels. Whatever they are, the result can be used as indices.
    """
    numbers = data[: 2 * count].clone().view(torch.uint16).to(torch.int64)
    if data.is_cpu:
        read = numbers.tolist()
        if read[-1] < channels and all(one < other for one, other in pairwise(read)):
            return numbers
    fault = f"the channels sent apart are not {count} different ones of {channels} in rising order"
    expect((numbers[-1] < channels) & (numbers[1:] > numbers[:-1]).all(), fault)
    return numbers.clamp_(max=channels - 1)  # an index outside ends a GPU's context for good


def put_back(data: Tensor, channels: Tensor, out: Tensor) -> None:
    """Writes the columns of `data` [2 * k * (1 + rows)] bytes over those of `out` [..., channels]."""
    matrix = out.view(-1, out.shape[-1])
    columns = data[2 * len(channels) :].clone().view(torch.bfloat16).view(len(channels), len(matrix))
    matrix.index_copy_(1, channels, columns.t().to(out.dtype))
