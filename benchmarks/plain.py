"""A Llama in plain torch, as anyone would write it. Needs torch alone, so that other systems can train it."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = model.heads, model.kv_heads, model.hidden // model.heads
        self.first, self.second = nn.RMSNorm(model.hidden), nn.RMSNorm(model.hidden)
        self.qkv = nn.Linear(model.hidden, (self.heads + 2 * self.kv_heads) * self.head, bias=False)
        self.out = nn.Linear(model.hidden, model.hidden, bias=False)
        self.gate_up = nn.Linear(model.hidden, 2 * model.feed_forward, bias=False)
        self.down = nn.Linear(model.feed_forward, model.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        qkv = self.qkv(self.first(x)).view(rows, tokens, -1, self.head).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.second(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Decoder(nn.Module):
    """Consecutive blocks of a decoder with the sizes of a manifest's model section; the `first` ones take tokens, the
    `last` ones return logits. `wire` is the type of hidden states between parts."""

    def __init__(
        self, model: Any, blocks: int, first: bool = True, last: bool = True, wire: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocabulary, model.hidden) if first else None
        self.blocks = nn.ModuleList(Block(model) for _ in range(blocks))
        self.norm, self.lm_head, self.wire = None, None, wire
        if last:
            self.norm, self.lm_head = nn.RMSNorm(model.hidden), nn.Linear(model.hidden, model.vocabulary, bias=False)
        if self.embedding is not None and self.lm_head is not None and model.tied_embeddings:
            self.lm_head.weight = self.embedding.weight
        half = model.hidden // model.heads // 2
        angles = torch.outer(torch.arange(model.sequence), 10_000 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x.to(self.wire) if self.lm_head is None else self.lm_head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
