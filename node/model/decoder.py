"""The whole model on one device, for reading it out: losses and next tokens, never gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from node.data.packing import Microbatch
from node.model.blocks import Block, Past
from node.model.parts import EmbeddingPart, HeadPart
from node.model.shapes import EMBEDDING, HEAD
from protocol.manifest.manifest import Manifest


class Decoder:
    """The blocks between embedding and head: all of them, or those of some stages (`through`).

    Args:
        parameters: float32, as in `node.model.shapes`. On the CPU they are used in place.
    """

    def __init__(self, manifest: Manifest, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        self.sequence = manifest.model.sequence
        self.vocabulary = manifest.model.vocabulary
        self.device = device
        with torch.device("meta"):  # weights are given, so none are made
            self._body = EmbeddingPart(manifest.model, sum(manifest.stages.blocks))
            self._head = HeadPart(manifest.model)
        if manifest.model.tied_embeddings:
            parameters = {**parameters, HEAD: parameters[EMBEDDING]}
        for part in (self._body, self._head):
            part.load_state_dict({name: parameters[name] for name, _ in part.named_parameters()}, assign=True)
            part.requires_grad_(False).to(device)
        self._every_block = [block for block in self._body.model["layers"].children() if isinstance(block, Block)]
        self._ends = list(accumulate(manifest.stages.blocks))
        self._blocks = self._every_block
        self.stages = tuple(range(1, len(self._ends)))
        """Stages on its path, without stage 0."""

    def through(self, stages: Sequence[int]) -> Decoder:
        """The decoder over the same weights with only these of the stages after stage 0 on the path."""
        other = copy.copy(self)
        of_stages = [range(self._ends[stage - 1], self._ends[stage]) for stage in stages]
        kept = chain(range(self._ends[0]), *of_stages)
        other.stages = tuple(stages)
        other._blocks = [self._every_block[index] for index in kept]
        return other

    @torch.inference_mode()
    def loss(self, microbatch: Microbatch) -> float:
        """The mean loss, nats per token that is predicted."""
        hidden = self._hidden(microbatch.tokens, documents=microbatch.documents)
        return microbatch.per_label(float(self._head(hidden, microbatch.labels.to(self.device)).item()))

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """The logits of every position: tokens [rows, tokens] int64 to float32 [rows, tokens, vocabulary]."""
        return self._head.logits(self._hidden(tokens))

    def no_past(self, capacity: int) -> list[Past]:
        """An empty past for each block, with room for `capacity` tokens."""
        return [Past(capacity) for _ in self._blocks]

    @torch.inference_mode()
    def next_logits(self, tokens: Sequence[int], past: Sequence[Past]) -> Tensor:
        """Adds tokens to the past and returns the next logits, float32 [vocabulary] on the CPU.

        Raises:
            ValueError: they do not fit, or are several after others (`node.model.blocks.Past`).
        """
        hidden = self._hidden(torch.tensor([list(tokens)], dtype=torch.int64), past)
        return self._head.logits(hidden[0, -1]).cpu()

    def _hidden(self, tokens: Tensor, past: Sequence[Past] | None = None, documents: tuple[int, ...] = ()) -> Tensor:
        """What the head reads, [rows, tokens, hidden]."""
        hidden: Tensor = self._body.model["embed_tokens"](tokens.to(self.device)).to(self._body.hidden_type)
        pasts: Sequence[Past | None] = [None] * len(self._blocks) if past is None else past
        angles = self._body.rotary(tokens.shape[1], documents, past[0].length if past else 0, hidden.dtype)
        for block, own in zip(self._blocks, pasts, strict=True):
            hidden = block(hidden, angles, documents, own)
        return hidden


def decoder_bytes(manifest: Manifest) -> int:
    """The memory of a decoder besides its parameters: rotary angles and tables in float64, and tables in float32."""
    return manifest.model.sequence * manifest.model.head_size * (3 * 8 + 2 * 4)
