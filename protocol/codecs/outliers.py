"""Outlier channels: those far larger than the rest, sent apart in bfloat16 so that the rest can be blocked with small
scales.

In trained models a few places of the hidden states have magnitudes tens to thousands of times those of the others, the
same ones for nearly all tokens (Dettmers et al. 2022, LLM.int8()). A block with one of them in it has a scale that
leaves a few codes for all others.

They follow a blockwise encoding: k numbers of channels (unsigned 16 bits, little-endian, rising), then k columns of as
many bfloat16 as the matrix has rows. In the blocks these channels are sent as zeros.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from protocol.interfaces.tensor_spec import most_outliers
from swarm.vocabulary.errors import ProtocolViolation

TIMES_THE_MEDIAN: Final = 8.0
"""How much larger than the median channel's largest element a channel's must be."""
SAMPLED_ROWS: Final = 64
"""That are looked at: the same channels stand out in all rows. One that is missed costs accuracy in its own blocks
only."""
LARGEST_CHANNEL: Final = 2**16


def find(values: Tensor) -> Tensor:
    """The indices of the outlier channels of `values` [..., channels], rising; none where nothing can be sent apart."""
    channels = values.shape[-1]
    most = most_outliers(tuple(values.shape)) if values.ndim > 1 and channels <= LARGEST_CHANNEL else 0
    if not most:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    matrix = values.view(-1, channels)
    sample = matrix[:: max(1, len(matrix) // SAMPLED_ROWS)][:SAMPLED_ROWS]
    largest = sample.abs().amax(0).float()
    found = (largest > TIMES_THE_MEDIAN * largest.median()).nonzero().flatten()
    if len(found) > most:
        found = found[largest[found].topk(most).indices].sort().values
    return found


def split(values: Tensor, channels: Tensor, out: Tensor) -> Tensor:
    """Writes the channels' numbers and columns into `out` [2 * k * (1 + rows)] bytes, and gives a copy of `values` with
    zeros in their place."""
    matrix = values.view(-1, values.shape[-1])
    numbers = channels.to(torch.uint16).view(torch.uint8)
    columns = matrix.index_select(1, channels).to(torch.bfloat16).t().contiguous()
    out[: len(numbers)].copy_(numbers)
    out[len(numbers) :].copy_(columns.view(-1).view(torch.uint8))
    return matrix.clone().index_fill_(1, channels, 0.0)


def checked_channels(data: Tensor, count: int, channels: int) -> Tensor:
    """Reads the channel indices at the beginning of `data`.

    Raises:
        ProtocolViolation: they do not rise, or there is no such channel.
    """
    numbers = data[: 2 * count].clone().view(torch.uint16).to(torch.int64)
    if bool((numbers >= channels).any()) or bool((numbers[1:] <= numbers[:-1]).any()):
        raise ProtocolViolation(f"the channels sent apart are not {count} different ones of {channels} in rising order")
    return numbers


def put_back(data: Tensor, channels: Tensor, out: Tensor) -> None:
    """Writes the columns of `data` [2 * k * (1 + rows)] bytes over those of `out` [..., channels]."""
    matrix = out.view(-1, out.shape[-1])
    columns = data[2 * len(channels) :].clone().view(torch.bfloat16).view(len(channels), len(matrix))
    matrix.index_copy_(1, channels, columns.t().to(out.dtype))
