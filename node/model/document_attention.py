"""Causal attention within each packed document, without computing masked scores.

Sources: document masking, WLB-LLM (arXiv:2503.17924) section 2.2; FlashAttention-2, Dao 2023 (arXiv:2307.08691);
FlexAttention, Dong et al. 2024 (arXiv:2412.05496).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
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


# ---- one call per document length ------------------------------------------------------------------------------------


def _each(queries: Tensor, keys: Tensor, values: Tensor, documents: tuple[int, ...]) -> Tensor:
    shares_heads = queries.shape[1] != keys.shape[1]
    pieces = [torch.split(tensor, list(documents), dim=2) for tensor in (queries, keys, values)]
    # Documents of equal length share one batched call.
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for place, length in enumerate(documents):
        alike[length].append(place)
    found: dict[int, Tensor] = {}
    for places in alike.values():
        q, k, v = (torch.cat([of[place] for place in places]) for of in pieces)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shares_heads)
        found |= zip(places, torch.split(mixed, 1), strict=True)
    return torch.cat([found[place] for place in range(len(documents))], dim=2)


# ---- one kernel for all documents ------------------------------------------------------------------------------------


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

    # The options differ between torch 2.10 and 2.13.
    known = signature(varlen_attn).parameters
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
    # Document number of each token.
    of = torch.repeat_interleave(torch.arange(len(documents), device=device), lengths)

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
