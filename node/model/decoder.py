"""The whole model on one device, for reading it out: losses and next tokens, never gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from node.data.packing import Microbatch
from node.model.blocks import Block
from node.model.parts import EmbeddingPart, HeadPart
from node.model.past import Past
from protocol.manifest import Manifest


class Decoder:
    """All blocks in order of depth between embedding and head: a full path, no stage skipped.

    Args:
        manifest: whose model and stages it has.
        parameters: float32, by the names and of the shapes of `node.model.shapes`. On the CPU they are used as they are.
        device: where it computes.
    """

    def __init__(self, manifest: Manifest, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        self.sequence = manifest.model.sequence
        self.vocabulary = manifest.model.vocabulary
        self.device = device
        with torch.device("meta"):  # weights are given, so none are made
            self._body = EmbeddingPart(manifest.model, sum(manifest.stages.blocks))
            self._head = HeadPart(manifest.model)
        for part in (self._body, self._head):
            part.load_state_dict({name: parameters[name] for name, _ in part.named_parameters()}, assign=True)
            part.requires_grad_(False).to(device)
        self._blocks = [block for block in self._body.model["layers"].children() if isinstance(block, Block)]

    @torch.inference_mode()
    def loss(self, microbatch: Microbatch) -> float:
        """Mean nats per token."""
        hidden = self._body(microbatch.tokens.to(self.device))
        return float(self._head(hidden, microbatch.labels.to(self.device)).item())

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """Of every position: tokens [rows, tokens] int64 to float32 [rows, tokens, vocabulary]."""
        return self._head.logits(self._body(tokens.to(self.device)))

    def no_past(self, capacity: int) -> list[Past]:
        """A past for each block, with room for `capacity` tokens."""
        return [Past(capacity) for _ in self._blocks]

    @torch.inference_mode()
    def next_logits(self, tokens: Sequence[int], past: Sequence[Past]) -> Tensor:
        """Of the token that follows, float32 [vocabulary] on the CPU. The tokens follow those of the past and are added to it.

        Raises:
            ValueError: they do not fit, or are several after others (`node.model.past`).
        """
        row = torch.tensor([list(tokens)], dtype=torch.int64, device=self.device)
        hidden = self._body.model["embed_tokens"](row).to(self._body.hidden_type)
        for block, own in zip(self._blocks, past, strict=True):
            hidden = block(hidden, self._body.rotary, own)
        return self._head.logits(hidden[0, -1]).cpu()


def decoder_bytes(manifest: Manifest) -> int:
    """Least memory that a decoder of this run needs besides its parameters: the rotary tables while they are computed.

    Angles, cosines and sines in float64, and the latter two once more in float32.
    """
    return manifest.model.sequence * manifest.model.head_size * (3 * 8 + 2 * 4)
