"""Transformer block of the Llama family (Llama, Mistral, Qwen2, Qwen3), numerically like Hugging Face transformers.

Parameters are float32. Every matrix product casts them to the dtype of its input.
Sources: Touvron et al. 2023 (arXiv:2302.13971); rotary embedding, Su et al. 2021 (arXiv:2104.09864); SwiGLU, Shazeer
2020 (arXiv:2002.05202); grouped-query attention, Ainslie et al. 2023 (arXiv:2305.13245).
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor, nn

from node.model.document_attention import CutDocuments, document_attention
from node.model.optimizers.packed import Narrow, SplitWeight
from node.model.residual import WIDE, Stream
from protocol.manifest.manifest import ModelSection

# Lengths of the packed documents in a single row (empty: plain rows), or one device's part of cut documents
Documents = tuple[int, ...] | CutDocuments


class Linear(nn.Module):
    """A linear layer. The weight [outputs, inputs] and the bias [outputs], if any, are not initialised."""

    def __init__(self, inputs: int, outputs: int, *, biased: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if biased else None
        self.narrow: Narrow | None = None  # Weight in the dtype of the products. Gets the gradients if it is set.

    def forward(self, values: Tensor) -> Tensor:
        product = F.linear(values, self.matrix(values.dtype))
        return product if self.bias is None else product + self.bias.to(values.dtype)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        if self.narrow is not None and self.narrow.dtype is dtype:
            return self.narrow.fresh()
        return self.weight.to(dtype)

    def split(self) -> None:
        """Stores the weight as bfloat16 parts (SplitWeight). `weight` keeps its shape only: one NaN without memory."""
        matrix = self.weight.detach()
        self.narrow = SplitWeight(matrix)  # of the same shape, because names, shapes and optimizers refer to it
        self.weight = nn.Parameter(torch.full((), math.nan, device=matrix.device).expand(matrix.shape))


def packed_weights(part: nn.Module) -> dict[nn.Parameter, SplitWeight]:
    """Maps each parameter on which `Linear.split` was called to the SplitWeight that replaces it."""
    linears = [module for module in part.modules() if isinstance(module, Linear)]
    return {linear.weight: linear.narrow for linear in linears if isinstance(linear.narrow, SplitWeight)}


class RMSNorm(nn.RMSNorm):
    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values.float()).to(values.dtype)  # squares lose too much precision in bfloat16


class Angles(NamedTuple):
    """Cosines and sines of a rotary embedding, [tokens, head_size], in the dtype of queries and keys."""

    cosines: Tensor
    sines: Tensor

    def rotate(self, vectors: Tensor) -> Tensor:
        """Rotates queries or keys [rows, heads, tokens, head_size], pairing components i and i + head_size / 2."""
        front, back = vectors.chunk(2, dim=-1)
        rotated = torch.cat((-back, front), dim=-1)
        return vectors * self.cosines + rotated * self.sines


class Rotary(nn.Module):
    """Rotary position embedding with precomputed tables [sequence, head_size]."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        frequencies = rotary_frequencies(section)
        # Float64, rounded once: every machine gets the same tables.
        angles = np.outer(np.arange(section.sequence, dtype=np.float64), np.concatenate([frequencies, frequencies]))
        self.register_buffer("cosines", torch.from_numpy(np.cos(angles).astype(np.float32)), persistent=False)
        self.register_buffer("sines", torch.from_numpy(np.sin(angles).astype(np.float32)), persistent=False)
        self._latest: tuple[object, Angles] | None = None

    def forward(
        self, tokens: int, documents: Documents = (), first: int = 0, dtype: torch.dtype = torch.float32
    ) -> Angles:
        """Returns the rotary angles of `tokens` tokens. Positions start at `first`, or at 0 in each document."""
        if isinstance(documents, CutDocuments):
            return self._angles(documents.positions().to(self.cosines.device), dtype)
        # Blocks computed one at a time ask for the same angles again: a third of all kernel launches without the cache.
        asked = (tokens, documents, first, dtype, self.cosines.device)
        latest = self._latest
        if latest is not None and latest[0] == asked:
            return latest[1]
        if documents:
            positions: Tensor | slice = torch.cat([torch.arange(n, device=self.cosines.device) for n in documents])
        else:
            positions = slice(first, first + tokens)
        angles = self._angles(positions, dtype)
        self._latest = (asked, angles)
        return angles

    def _angles(self, positions: Tensor | slice, dtype: torch.dtype) -> Angles:
        return Angles(self.cosines[positions].to(dtype), self.sines[positions].to(dtype))


def rotary_frequencies(section: ModelSection) -> npt.NDArray[np.float64]:
    """Returns the rotary embedding's radians per position of each component pair, float64 [head_size / 2]."""
    halves = np.arange(0, section.head_size, 2, dtype=np.float64) / section.head_size
    frequencies: npt.NDArray[np.float64] = section.rope_theta**-halves
    scaling = section.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3 scaling: blends by wavelength between unscaled (high) and fully scaled (low) frequencies.
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_positions * frequencies / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class Past:
    """Key-value cache of one block, for a single row of at most `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values [rows, kv_heads, tokens, head_size] and returns the whole cache, oldest first.

        Raises ValueError if the cache is full, or if several tokens follow others, which needs an attention mask.
        """
        added = keys.shape[-2]
        end = self.length + added
        if end > self.capacity:
            raise ValueError(f"{end} tokens exceed the cache of {self.capacity}")
        if self.length and added != 1:
            raise ValueError(f"{added} tokens cannot follow {self.length} cached ones; append one token at a time")
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


class Attention(nn.Module):
    """Causal grouped-query attention with `heads / kv_heads` query heads per key-value head."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.head_size = section.head_size
        self.shares_heads = section.kv_heads != section.heads
        kv_size = section.kv_heads * section.head_size

        def projection(name: str, inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, biased=name in section.biased)

        self.q_proj = projection("q_proj", section.hidden, section.query_size)
        self.k_proj = projection("k_proj", section.hidden, kv_size)
        self.v_proj = projection("v_proj", section.hidden, kv_size)
        self.o_proj = projection("o_proj", section.query_size, section.stream)
        self.q_norm = self.k_norm = None
        if section.has_head_norms:
            self.q_norm = RMSNorm(section.head_size, section.norm_epsilon)
            self.k_norm = RMSNorm(section.head_size, section.norm_epsilon)

    def forward(self, hidden: Tensor, angles: Angles, documents: Documents = (), past: Past | None = None) -> Tensor:
        """Maps [rows, tokens, hidden] to [rows, tokens, stream]. The cache `past` has the tokens before these."""
        is_first = past is None or past.length == 0
        queries, keys = self._by_head(self.q_proj(hidden)), self._by_head(self.k_proj(hidden))
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = angles.rotate(queries), angles.rotate(keys)
        values = self._by_head(self.v_proj(hidden))
        if past is not None:
            keys, values = past.extend(keys, values)
        if isinstance(documents, CutDocuments):
            mixed = documents.attend(queries, keys, values)
        elif documents:
            mixed = document_attention(queries, keys, values, documents)
        else:
            mixed = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                is_causal=is_first,  # a token after the cache attends to the whole cache
                enable_gqa=self.shares_heads,
            )
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _by_head(self, projected: Tensor) -> Tensor:
        rows, tokens, _ = projected.shape
        return projected.view(rows, tokens, -1, self.head_size).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.gate_proj = Linear(section.hidden, section.feed_forward)
        self.up_proj = Linear(section.hidden, section.feed_forward)
        self.down_proj = Linear(section.feed_forward, section.stream)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class TokenRows(nn.Module):
    """Trained low-rank table. One block, or the head, adds the row of each token to its input."""

    # The residual stream has room for only K numbers of a token. Gemma 3n has embeddings per layer, too.
    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        size = section.vocabulary, section.token_rank
        self.embed_tokens = nn.Embedding(*size, _weight=torch.empty(size))  # not initialised
        self.spread = Linear(section.token_rank, section.hidden)

    def forward(self, stream: Stream, dtype: torch.dtype) -> Stream:
        own: Tensor = self.spread(self.embed_tokens(stream.tokens).to(dtype))
        return stream._replace(rows=own if stream.rows is None else stream.rows + own)


class Block(nn.Module):
    """A pre-norm transformer block. Maps hidden states [rows, tokens, channels] to the same shape."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(section.hidden, section.norm_epsilon)
        self.self_attn = Attention(section)
        self.post_attention_layernorm = RMSNorm(section.hidden, section.norm_epsilon)
        self.mlp = FeedForward(section)
        self.token_rows = TokenRows(section) if section.token_rank else None

    def forward(
        self, hidden: Tensor, angles: Angles, documents: Documents = (), past: Past | None = None, stream: Stream = WIDE
    ) -> Tensor:
        if self.token_rows is not None:
            stream = self.token_rows(stream, hidden.dtype)
        attended = self.self_attn(self.input_layernorm(stream.read(hidden)), angles, documents, past)
        hidden = stream.add(hidden, attended)
        return stream.add(hidden, self.mlp(self.post_attention_layernorm(stream.read(hidden))))
