"""Attention of one device over documents whose tokens are split across devices (context parallelism).

Source: per-document sharding, WLB-LLM (arXiv:2503.17924) section 5.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from node.model.document_attention import document_attention

QUERIES_AT_ONCE: Final = 256  # Per attention call. In a square of this width, half of the scores are masked.


class Exchange:
    """All-gather among the threads that compute one microbatch. After `give_up`, it fails in all of these threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        # Tensors of this exchange and of the previous one, which a slow thread may still read
        self._brought: list[list[Tensor | None]] = [[None] * ranks, [None] * ranks]
        self._meetings = [0] * ranks

    def swap(self, rank: int, brought: Tensor) -> list[Tensor]:
        """Gathers the tensors `brought` by all ranks, in order. Raises threading.BrokenBarrierError after `give_up`."""
        # Two tables in turn, so that a fast rank does not overwrite tensors that a slow one still reads.
        table = self._brought[self._meetings[rank] % 2]
        self._meetings[rank] += 1
        table[rank] = brought
        self._barrier.wait()
        return [tensor for tensor in table if tensor is not None]

    def give_up(self) -> None:
        self._barrier.abort()


@dataclass(frozen=True, slots=True, eq=False)
class CutDocuments:
    """One device's tokens of a microbatch: whole documents, then pieces of documents that are cut across devices."""

    rank: int
    whole: tuple[int, ...]
    cut: tuple[int, ...]
    pieces: tuple[tuple[tuple[range, ...], ...], ...]  # Token ranges, indexed by cut document and rank
    exchange: Exchange

    def __len__(self) -> int:
        return len(self.whole) + len(self.cut)

    def positions(self) -> Tensor:
        """Returns the position of each token of this device within its document, int64 [tokens]."""
        own = [range(length) for length in self.whole] + [part for _, part in self._own()]
        return torch.cat([torch.arange(part.start, part.stop) for part in own])

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Computes attention like `document_attention` for this device's tokens. Waits until all devices call it."""
        alone = sum(self.whole)
        mixed: list[Tensor] = []
        if alone:
            own = slice(0, alone)
            mixed.append(document_attention(queries[:, :, own], keys[:, :, own], values[:, :, own], self.whole))
        all_keys, all_values = self._of_all(torch.stack([keys[0, :, alone:], values[0, :, alone:]]))
        starts = [0, *accumulate(self.cut)]
        done = alone
        for document, part in self._own():
            first = starts[document]
            # The keys end at each chunk's last query: less masked work, and a smaller mask.
            for begin in range(part.start, part.stop, QUERIES_AT_ONCE):
                end = min(begin + QUERIES_AT_ONCE, part.stop)
                seen = slice(first, first + end)
                asked = queries[:, :, done : done + end - begin]
                mixed.append(_last_of(asked, all_keys[None, :, seen], all_values[None, :, seen]))
                done += end - begin
        return torch.cat(mixed, dim=2)

    def _own(self) -> Iterator[tuple[int, range]]:
        for document, by_rank in enumerate(self.pieces):
            for part in by_rank[self.rank]:
                yield document, part

    def _of_all(self, own: Tensor) -> Tensor:
        """Gathers keys and values of all cut documents from all devices, [2, kv_heads, tokens, head_size]."""
        ranks = range(len(self.pieces[0]))
        sizes = [sum(len(part) for by_rank in self.pieces for part in by_rank[rank]) for rank in ranks]
        brought: Tensor = _Swapped.apply(own, self.exchange, self.rank, sizes)  # type: ignore[no-untyped-call]
        starts = [0, *accumulate(self.cut)]
        # Ranks deliver their pieces in rank order; sort them back by position.
        places = torch.cat(
            [
                torch.arange(starts[document] + part.start, starts[document] + part.stop)
                for rank in ranks
                for document, by_rank in enumerate(self.pieces)
                for part in by_rank[rank]
            ]
        )
        return brought.index_select(2, torch.argsort(places).to(own.device))


class _Swapped(torch.autograd.Function):
    """Concatenation of all ranks' tensors along dimension 2. Backward sums the ranks' gradients of the own slice."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, exchange: Exchange, rank: int, sizes: Sequence[int]) -> Tensor:
        ctx.exchange, ctx.rank, ctx.sizes = exchange, rank, list(sizes)
        return torch.cat([tensor.to(own.device) for tensor in exchange.swap(rank, own)], dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        first = sum(ctx.sizes[: ctx.rank])
        here = slice(first, first + ctx.sizes[ctx.rank])
        mine = [tensor[:, :, here].to(gradient.device) for tensor in ctx.exchange.swap(ctx.rank, gradient)]
        # Sum in rank order, so that every run gets the same bits.
        total = mine[0].clone()
        for more in mine[1:]:
            total += more
        return total, None, None, None


def _last_of(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Computes causal attention of `queries`, which belong to the last tokens of `keys`, to all tokens of `keys`."""
    asked, seen = queries.shape[2], keys.shape[2]
    shares_heads = queries.shape[1] != keys.shape[1]
    if asked == seen:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=shares_heads)
    mask = torch.ones(asked, seen, dtype=torch.bool, device=queries.device).tril(seen - asked)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=shares_heads)
