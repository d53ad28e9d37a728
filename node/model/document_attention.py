"""Causal attention within each packed document, without computing masked scores.

Sources: document masking, WLB-LLM (arXiv:2503.17924) section 2.2; FlashAttention-2, Dao 2023 (arXiv:2307.08691);
FlexAttention, Dong et al. 2024 (arXiv:2412.05496). Documents whose tokens are split across devices: WLB-LLM section 5.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from inspect import signature
from itertools import accumulate
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from swarm.vocabulary.types import Reasoned

Kernel = Literal["each", "variable-length", "block-sparse"]

PACKINGS: Final = 8  # Packings whose block masks are cached. All blocks of a stage share one mask.
_FLASH_HEAD_SIZES: Final = range(8, 257, 8)


def document_attention(queries: Tensor, keys: Tensor, values: Tensor, documents: Sequence[int]) -> Tensor:
    """Computes causal attention within each document.

    Args:
        queries: [1, heads, tokens, head_size].
        keys, values: [1, kv_heads, tokens, head_size]; `heads` is a multiple of `kv_heads`.
        documents: token count of each document, in order. Raises ValueError if they do not fill the row.
    """
    if queries.shape[0] != 1 or sum(documents) != queries.shape[2] or min(documents, default=0) < 1:
        raise ValueError(f"{len(documents)} documents of {sum(documents)} tokens do not fill {tuple(queries.shape)}")
    kernel = kernel_for(queries.device.type, queries.dtype, queries.shape[-1]).value
    return _KERNELS[kernel](queries, keys, values, tuple(documents))


def kernel_for(device: str, dtype: torch.dtype, head_size: int) -> Reasoned[Kernel]:
    """Chooses the kernel of document attention, a key of `_KERNELS`, for a device type, dtype and head size."""
    if device != "cuda":
        return Reasoned("each", f"torch has no fused kernel with gradients on {device}")
    if dtype in (torch.float16, torch.bfloat16) and head_size in _FLASH_HEAD_SIZES:
        return Reasoned("variable-length", "one flash kernel for all documents")
    return Reasoned("block-sparse", f"flash kernels do not support {dtype} with heads of {head_size}")


def _each(queries: Tensor, keys: Tensor, values: Tensor, documents: tuple[int, ...]) -> Tensor:
    shares_heads = queries.shape[1] != keys.shape[1]
    pieces = [torch.split(tensor, list(documents), dim=2) for tensor in (queries, keys, values)]
    alike: defaultdict[int, list[int]] = defaultdict(list)  # documents of equal length share one batched call
    for place, length in enumerate(documents):
        alike[length].append(place)
    found: dict[int, Tensor] = {}
    for places in alike.values():
        q, k, v = (torch.cat([of[place] for place in places]) for of in pieces)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shares_heads)
        found |= zip(places, torch.split(mixed, 1), strict=True)
    return torch.cat([found[place] for place in range(len(documents))], dim=2)


def _variable_length(queries: Tensor, keys: Tensor, values: Tensor, documents: tuple[int, ...]) -> Tensor:
    attention, options = _varlen()
    ends, longest = _ends(documents, queries.device), max(documents)
    mixed = attention(
        queries[0].transpose(0, 1),
        keys[0].transpose(0, 1),
        values[0].transpose(0, 1),
        ends,
        ends,
        longest,
        longest,
        **options(queries.shape[1] != keys.shape[1]),
    )
    assert isinstance(mixed, Tensor)
    return mixed.transpose(0, 1).unsqueeze(0)


@cache
def _varlen() -> tuple[Callable[..., Any], Callable[[bool], dict[str, Any]]]:
    """Returns torch's variable-length attention, and a function that makes its options for this torch version."""
    from torch.nn.attention.varlen import varlen_attn

    known = signature(varlen_attn).parameters  # the options differ between torch 2.10 and 2.13
    fixed: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "num_splits" in known:
        fixed["num_splits"] = 1  # results must not depend on the other documents

    def options(shares_keys: bool) -> dict[str, Any]:
        # Without this option the kernel infers the number of key-value heads from the tensors.
        return fixed | ({"enable_gqa": shares_keys} if "enable_gqa" in known else {})

    return varlen_attn, options


def _block_sparse(queries: Tensor, keys: Tensor, values: Tensor, documents: tuple[int, ...]) -> Tensor:
    mask = _mask(documents, queries.device)
    mixed: Tensor = _flex()(queries, keys, values, block_mask=mask, enable_gqa=queries.shape[1] != keys.shape[1])
    return mixed


@lru_cache(maxsize=PACKINGS)
def _ends(documents: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the cumulative sums of document lengths, starting with 0, int32 [documents + 1]."""
    return torch.tensor([0, *accumulate(documents)], dtype=torch.int32, device=device)


@lru_cache(maxsize=PACKINGS)
def _mask(documents: tuple[int, ...], device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    tokens, lengths = sum(documents), torch.tensor(documents, device=device)
    of = torch.repeat_interleave(torch.arange(len(documents), device=device), lengths)  # document number of each token

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (of[query] == of[key]) & (query >= key)

    return create_block_mask(sees, None, None, tokens, tokens, device=str(device))


@cache
def _flex() -> Callable[..., Any]:
    """Returns compiled flex attention, because without compilation it computes all token pairs."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


_KERNELS: Final[dict[Kernel, Callable[[Tensor, Tensor, Tensor, tuple[int, ...]], Tensor]]] = {
    "each": _each,
    "variable-length": _variable_length,
    "block-sparse": _block_sparse,
}


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
        total = mine[0].clone()  # sum in rank order, so that every run gets the same bits
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
