"""Parts of the model: block stacks, and stage 0's embedding and head, which start and end every path.

Parameters have their names in the whole model (`model.layers.5.mlp.up_proj.weight`).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from node.model.blocks import Block, Documents, Embedding, Linear, RMSNorm, Rotary
from node.model.head_loss import SummedLoss
from node.model.initialization import initialise
from node.model.shapes import EMBEDDING
from protocol.manifest.manifest import Manifest, ModelSection
from swarm.vocabulary.types import ModuleId

LOGITS_AT_ONCE: Final = 2**25
"""Logits in memory at a time, in elements (128 MiB in float32)."""

HIDDEN_TYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtype of hidden states and matrix products by `model.dtype`."""


class BlockStack(nn.Module):
    """Consecutive transformer blocks, from the model's block `first`. Maps [rows, tokens, hidden] to the same shape."""

    def __init__(self, section: ModelSection, first: int, count: int) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": _layers(section, first, count)})
        self.rotary = Rotary(section)

    def forward(self, hidden: Tensor, documents: Documents = ()) -> Tensor:
        return _through(self.model["layers"], hidden, self.rotary, documents)

    def split_weights(self) -> None:
        """Calls `Linear.split` on every linear layer, to store its weight in two 16-bit halves."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.split()


class EmbeddingPart(nn.Module):
    """First part of stage 0, computed at the start of every path: the embedding, and stage 0's blocks if any."""

    def __init__(self, section: ModelSection, blocks: int) -> None:
        super().__init__()
        embedding = Embedding(section.vocabulary, section.hidden)
        self.model = nn.ModuleDict({"embed_tokens": embedding, "layers": _layers(section, 0, blocks)})
        self.rotary = Rotary(section)
        self.hidden_type = HIDDEN_TYPES[section.dtype]

    def forward(self, tokens: Tensor, documents: Documents = ()) -> Tensor:
        """Maps int64 tokens [rows, tokens] to hidden states [rows, tokens, hidden]."""
        hidden = self.model["embed_tokens"](tokens).to(self.hidden_type)
        return _through(self.model["layers"], hidden, self.rotary, documents)


class HeadPart(nn.Module):
    """Second part of stage 0, computed at the end of every path: final norm, LM head and loss."""

    def __init__(self, section: ModelSection, logits_at_once: int = LOGITS_AT_ONCE) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"norm": RMSNorm(section.hidden, section.norm_epsilon)})
        self.lm_head = Linear(section.hidden, section.vocabulary)
        self.logits_at_once = logits_at_once

    @property
    def norm(self) -> RMSNorm:
        norm = self.model["norm"]
        assert isinstance(norm, RMSNorm)
        return norm

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps hidden states [..., hidden] to float32 logits [..., vocabulary]."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits.float()

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean cross entropy in nats per token (float32 scalar).

        `hidden` is [rows, tokens, hidden], `labels` int64 [rows, tokens].
        """
        normed = self.norm(hidden).flatten(0, -2)
        loss: Tensor = SummedLoss.apply(normed, self.lm_head.weight, labels.flatten(), self.logits_at_once)  # type: ignore[no-untyped-call]
        return loss / labels.numel()


def _layers(section: ModelSection, first: int, count: int) -> nn.ModuleDict:
    return nn.ModuleDict({str(index): Block(section) for index in range(first, first + count)})


def _through(layers: nn.Module, hidden: Tensor, rotary: Rotary, documents: Documents) -> Tensor:
    angles = rotary(hidden.shape[1], documents, dtype=hidden.dtype)
    for block in layers.children():  # a ModuleDict keeps insertion order, which is by depth
        hidden = block(hidden, angles, documents)
    return hidden


def build_block_stack(manifest: Manifest, module: ModuleId) -> BlockStack:
    """Builds and initialises a module of any stage but 0. Raises ValueError if the manifest has no such module."""
    if module.stage == 0 or not manifest.has(module):
        raise ValueError(f"module {module} is not a stack of blocks of this run")
    blocks = manifest.stages.blocks
    stack = BlockStack(manifest.model, sum(blocks[: module.stage]), blocks[module.stage])
    _fill(manifest, stack)
    return stack


def build_embedding(manifest: Manifest) -> EmbeddingPart:
    part = EmbeddingPart(manifest.model, manifest.stages.blocks[0])
    _fill(manifest, part)
    return part


def build_head(manifest: Manifest, embedding: EmbeddingPart | None = None) -> HeadPart:
    """Builds and initialises stage 0's head. With tied embeddings, it shares the matrix of `embedding`."""
    part = HeadPart(manifest.model)
    if not manifest.model.tied_embeddings:
        _fill(manifest, part)
        return part
    assert embedding is not None, "tied embeddings are one matrix"
    _fill(manifest, part.model)
    part.lm_head.weight = embedding.get_parameter(EMBEDDING)
    return part.to(part.lm_head.weight.device)


@torch.no_grad()
def _fill(manifest: Manifest, part: nn.Module) -> None:
    """Initialises a part from the run's seed. If the run starts from a model, fills it with zeros, replaced later."""
    if manifest.start is None:
        initialise([part], seed=manifest.seed, total_blocks=sum(manifest.stages.blocks))
    else:
        for parameter in part.parameters():
            parameter.zero_()
