"""The key-value cache: keys and values of the tokens read so far, so that the next token costs one position and not the
whole row again.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Past:
    """The key-value cache of one block, for one row. Room for `capacity` tokens is taken with the first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds [rows, kv_heads, tokens, head_size] and returns all there is, the oldest first.

        Raises:
            ValueError: there is no room, or several tokens follow others: attention without a mask would let the first
                of them see the last.
        """
        added = keys.shape[-2]
        end = self.length + added
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit into a past of {self.capacity}")
        if self.length and added != 1:
            raise ValueError(
                f"{added} tokens were added to a past of {self.length}; after the first read only one at a time"
            )
        self._keys = self._written(self._keys, keys, end)
        self._values = self._written(self._values, values, end)
        self.length = end
        return self._keys[..., :end, :], self._values[..., :end, :]

    def _written(self, room: Tensor | None, new: Tensor, end: int) -> Tensor:
        if room is None:
            rows, heads, _, size = new.shape
            room = torch.empty(rows, heads, self.capacity, size, dtype=new.dtype, device=new.device)
        room[..., self.length : end, :] = new
        return room
