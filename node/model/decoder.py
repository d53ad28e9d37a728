"""The whole model on one device, without gradients: losses, next tokens and generated text.

Sources: top-k sampling, Fan et al. 2018 (arXiv:1805.04833); top-p sampling, Holtzman et al. 2020 (arXiv:1904.09751).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from node.data.packing import Microbatch
from node.data.tokenizers import Tokenizer
from node.model.blocks import Block, Past
from node.model.parts import EmbeddingPart, HeadPart
from node.model.shapes import EMBEDDING, HEAD
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError, StateError


class Decoder:
    """The blocks between embedding and head, all or `through` some stages. On the CPU parameters are used in place."""

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


# ---- generated text --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """The rule by which a token is chosen: temperature, `top_k`, then `top_p`. Raises ConfigError on a bad value."""

    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"the temperature must be 0 or more, but is {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top-k must be at least 1, but is {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p must be above 0 and at most 1, but is {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"the seed must be from 0 to 2^63 - 1, but is {self.seed}")


class Continuation:
    """A text while it is generated. It may continue with another decoder."""

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, prompt: Sequence[int], limit: int, sampling: Sampling
    ) -> None:
        self.tokens = list(prompt) or [tokenizer.end_of_document]
        """The tokens of the prompt, or the end of a document, and what follows."""
        self._left, self._sampling, self._tokenizer = limit, sampling, tokenizer
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._reader = _Reader(decoder, room=len(prompt) + limit)
        self._is_read = False

    @property
    def has_ended(self) -> bool:
        return self._left == 0

    def take(self, count: int) -> Iterator[int]:
        """Yields the next `count` tokens, or fewer if the text ends. Raises StateError if logits are not finite."""
        for _ in range(count):
            if self.has_ended:
                return
            logits = self._reader.follow(self.tokens[-1]) if self._is_read else self._reader.start(self.tokens)
            self._is_read = True
            token = choose(logits[: self._tokenizer.size], self._sampling, self._generator)  # ids above have no text
            self.tokens.append(token)
            self._left = 0 if token == self._tokenizer.end_of_document else self._left - 1
            yield token

    def go_on_with(self, decoder: Decoder) -> None:
        self._reader, self._is_read = _Reader(decoder, room=len(self.tokens) + self._left), False


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Samples one token for float32 logits [tokens] on the CPU. Raises StateError if one is not finite."""
    if not bool(torch.isfinite(logits).all()):
        raise StateError("the model gives logits that are not finite: its training has diverged")
    if sampling.temperature == 0:
        return int(logits.argmax().item())
    scaled = logits.double()
    likely, tokens = torch.sort((scaled - scaled.max()) / sampling.temperature, descending=True, stable=True)
    chances = torch.softmax(likely[: sampling.top_k], dim=0)
    before = chances.cumsum(0) - chances
    chances = torch.where(before < sampling.top_p, chances, 0.0)  # the likeliest stays: nothing is before it
    return int(tokens[torch.multinomial(chances, 1, generator=generator)].item())


class _Reader:
    """What the model sees, and its past."""

    def __init__(self, decoder: Decoder, room: int) -> None:
        self._decoder = decoder
        self._room = min(decoder.sequence, max(1, room))
        self._seen: list[int] = []
        self._past = decoder.no_past(self._room)

    def start(self, tokens: Sequence[int]) -> Tensor:
        """Reads from position 0, forgetting all else; returns the next token's logits."""
        self._seen = list(tokens[-self._decoder.sequence :])
        self._past = self._decoder.no_past(self._room)
        return self._decoder.next_logits(self._seen, self._past)

    def follow(self, token: int) -> Tensor:
        if len(self._seen) == self._decoder.sequence:
            # The older half is forgotten, so that a token costs about one position.
            return self.start([*self._seen[-(self._decoder.sequence // 2) :], token])
        self._seen.append(token)
        return self._decoder.next_logits([token], self._past)
