"""Packing of one stream of text into microbatches of rows (`attention = "causal"`), with no token lost or repeated.

The documents are one long stream, each followed by an end-of-document token. A row is the next `sequence` tokens of it,
and its labels are the same tokens one further on; what is left of a document goes on in the next row. So every token is
an input once and, but for the very first, a label once, if it is one at all (`node.data.labels`).

Rows are shuffled within a block of about a million tokens. Without that, one long document fills whole inner steps, and
their gradients and losses are that document's rather than the text's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from node.data.documents import Fragment, Place, permutation
from node.data.packing import BLOCK_TOKENS, Cursor, Microbatch
from node.data.tokenizers import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Rows that are shuffled together: arrays [rows, sequence], and the order in which rows are given out."""

    tokens: Tokens
    labels: Tokens
    order: npt.NDArray[np.int64]


class RowPacker:
    """Cuts a stream of fragments into microbatches of one shape. Holds at most one block and one document."""

    def __init__(
        self,
        fragments: Iterator[Fragment],
        *,
        rows: int,
        sequence: int,
        seed: int,
        start: Cursor,
        cost: float,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        """`fragments` begin at `start.block`; `cost` is one microbatch's."""
        self.cursor = start
        """Of the next microbatch: a packer started there gives the same ones from there on."""
        self._fragments = fragments
        self._rows = rows
        self._sequence = sequence
        self._seed = seed
        self._cost = cost
        self._block_rows = max(1, block_tokens // (rows * sequence)) * rows
        self._pending: deque[Fragment] = deque()
        self._block: _Block | None = None

    def next(self) -> Microbatch | None:
        """The next microbatch, or None when the fragments end before one is full."""
        if self._block is None:
            self._block = self._next_block()
        if self._block is None:
            return None
        block, start, taken = self._block, self.cursor, self.cursor.taken
        chosen = block.order[taken : taken + self._rows]
        self._advance(block, taken + self._rows)
        return Microbatch(
            torch.from_numpy(block.tokens[chosen]),
            torch.from_numpy(block.labels[chosen]),
            self._cost,
            start,
            self.cursor,
        )

    def _advance(self, block: _Block, taken: int) -> None:
        if taken < len(block.order):
            self.cursor = Cursor(self.cursor.block, taken)
        else:
            self.cursor = Cursor(self._pending[0].start)  # the last label: it is the next block's first token
            self._block = None

    def _next_block(self) -> _Block | None:
        """As many whole microbatches as a block may have, or as the fragments still give."""
        available = self._fill(self._block_rows * self._sequence + 1)
        microbatches = (available - 1) // (self._rows * self._sequence)
        if microbatches < 1:
            return None
        rows = min(self._block_rows, microbatches * self._rows)
        size = rows * self._sequence
        stream = np.concatenate([fragment.tokens for fragment in self._pending])
        labels = np.concatenate([fragment.labels for fragment in self._pending])
        self._drop(size)
        place = self.cursor.block
        return _Block(
            stream[:size].reshape(rows, self._sequence),
            labels[1 : size + 1].reshape(rows, self._sequence),
            permutation(f"rows:{self._seed}:{place.epoch}:{place.position}:{place.offset}", rows),
        )

    def _fill(self, wanted: int) -> int:
        """Reads on until so many tokens are pending, or there are no more; returns how many there are."""
        available = sum(fragment.tokens.size for fragment in self._pending)
        while available < wanted:
            fragment = next(self._fragments, None)
            if fragment is None:
                break
            self._pending.append(fragment)
            available += fragment.tokens.size
        return available

    def _drop(self, count: int) -> None:
        """Forgets the first pending tokens; at least one remains."""
        while count >= self._pending[0].tokens.size:
            count -= self._pending.popleft().tokens.size
        self._pending[0] = _from(self._pending[0], count)


def _from(fragment: Fragment, count: int) -> Fragment:
    """The fragment without its first tokens, copied, so that what is gone can be freed."""
    start = fragment.start
    tokens: Tokens = fragment.tokens[count:].copy()
    wanted = None if fragment.wanted is None else fragment.wanted[count:].copy()
    return Fragment(Place(start.epoch, start.position, start.offset + count), tokens, wanted=wanted)
