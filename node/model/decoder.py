"""Inference with the whole model on one device: loss, logits and text generation.

Sources: top-k sampling, Fan et al. 2018 (arXiv:1805.04833); top-p sampling, Holtzman et al. 2020 (arXiv:1904.09751).
"""

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
from node.model.passes import EmbeddingPart, HeadPart
from node.model.shapes import EMBEDDING, HEAD
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError, StateError


class Decoder:
    """The model for inference on one device. Shares memory with `parameters` on this device, which may lack stages."""

    def __init__(self, manifest: Manifest, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        self.sequence = manifest.model.sequence
        self.vocabulary = manifest.model.vocabulary
        self.device = device
        with torch.device("meta"):  # the weights exist already
            self._body = EmbeddingPart(manifest.model, sum(manifest.stages.blocks), manifest.seed)
            self._head = HeadPart(manifest.model, manifest.seed)
        if manifest.model.tied_embeddings:
            parameters = {**parameters, HEAD: parameters[EMBEDDING]}
        for part in (self._body, self._head):
            own = {name: parameters[name] for name, _ in part.named_parameters() if name in parameters}
            part.load_state_dict(own, strict=False, assign=True)
            part.requires_grad_(False)
        for constants in (self._body.rotary, self._body.residual, self._head.residual):
            constants.to(device)
        self._every_block = [block for block in self._body.model["layers"].children() if isinstance(block, Block)]
        self._ends = list(accumulate(manifest.stages.blocks))
        self._blocks = self._every_block
        self.stages = tuple(range(1, len(self._ends)))

    def through(self, stages: Sequence[int]) -> "Decoder":
        """Returns a decoder over the same weights that visits stage 0 and only the given later stages."""
        other = copy.copy(self)
        of_stages = [range(self._ends[stage - 1], self._ends[stage]) for stage in stages]
        kept = chain(range(self._ends[0]), *of_stages)
        other.stages = tuple(stages)
        other._blocks = [self._every_block[index] for index in kept]
        return other

    @torch.inference_mode()
    def loss(self, microbatch: Microbatch) -> float:
        """Returns the microbatch's mean loss in nats per label."""
        tokens = microbatch.tokens.to(self.device)
        hidden = self._hidden(tokens, documents=microbatch.documents)
        return microbatch.per_label(float(self._head(hidden, microbatch.labels.to(self.device), tokens).item()))

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits of every position: int64 [rows, tokens] to float32 [rows, tokens, vocabulary]."""
        tokens = tokens.to(self.device)
        return self._head.logits(self._hidden(tokens), tokens)

    def no_past(self, capacity: int) -> list[Past]:
        return [Past(capacity) for _ in self._blocks]

    @torch.inference_mode()
    def next_logits(self, tokens: Sequence[int], past: Sequence[Past]) -> Tensor:
        """Appends tokens to `past` (raises as `Past.extend`). Returns the next token's logits, float32 on the CPU."""
        given = torch.tensor([list(tokens)], dtype=torch.int64, device=self.device)
        return self._head.logits(self._hidden(given, past)[0, -1], given[0, -1]).cpu()

    def _hidden(self, tokens: Tensor, past: Sequence[Past] | None = None, documents: tuple[int, ...] = ()) -> Tensor:
        """Returns the last block's output, [rows, tokens, channels]."""
        hidden = self._body.embed(tokens)
        pasts: Sequence[Past | None] = [None] * len(self._blocks) if past is None else past
        angles = self._body.rotary(tokens.shape[1], documents, past[0].length if past else 0, hidden.dtype)
        stream = self._body.residual.stream(hidden, tokens)
        for block, own in zip(self._blocks, pasts, strict=True):
            hidden = block(hidden, angles, documents, own, stream)
        return hidden


def decoder_bytes(manifest: Manifest) -> int:
    """Returns the bytes of memory that a Decoder needs, excluding its parameters."""
    # Rotary angles and both tables in float64 while they are built, then both tables in float32.
    return manifest.model.sequence * manifest.model.head_size * (3 * 8 + 2 * 4)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings, applied in the order temperature, `top_k`, `top_p`. Raises ConfigError on an invalid value."""

    temperature: float = 0.8  # 0: greedy decoding
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature {self.temperature} is invalid: it must be 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top-k {self.top_k} is invalid: it must be at least 1")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p {self.top_p} is invalid: it must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed {self.seed} is invalid: it must be from 0 to 2^63 - 1")


def prompt_tokens(words: Tokenizer, prompt: bytes) -> list[int]:
    """Returns a prompt's tokens, with the token that begins each document if the tokenizer has one."""
    tokens: list[int] = words.encode(prompt).tolist()
    if words.beginning is not None and tokens[:1] != [words.beginning]:
        tokens.insert(0, words.beginning)
    return tokens


class Continuation:
    """A text in generation. `go_on_with` changes the decoder midway."""

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, prompt: Sequence[int], limit: int, sampling: Sampling
    ) -> None:
        self.tokens = list(prompt) or [tokenizer.end_of_document]  # Prompt, never empty, and generated tokens
        self._left, self._sampling, self._tokenizer = limit, sampling, tokenizer
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self.go_on_with(decoder)

    @property
    def has_ended(self) -> bool:
        return self._left == 0

    def take(self, count: int) -> Iterator[int]:
        """Generates up to `count` tokens, fewer if the text ends. Raises StateError if logits are not finite."""
        for _ in range(count):
            if self.has_ended:
                return
            logits = self._next_logits()
            token = choose(logits[: self._tokenizer.size], self._sampling, self._generator)  # padding ids have no text
            self.tokens.append(token)
            self._left = 0 if token in self._tokenizer.ends else self._left - 1
            yield token

    def stop(self) -> None:
        self._left = 0

    def go_on_with(self, decoder: Decoder) -> None:
        self._decoder = decoder
        # At least one token, and no more than the rotary tables have positions.
        self._room = min(decoder.sequence, max(1, len(self.tokens) + self._left))
        self._past: list[Past] = []
        self._read = 0  # Latest tokens in the cache

    def _next_logits(self) -> Tensor:
        window = self._decoder.sequence
        if 0 < self._read < window:
            self._read += 1
            return self._decoder.next_logits(self.tokens[-1:], self._past)
        # When the window is full, drop its older half. On average a token then costs about one position.
        start = self.tokens[-(window // 2 + 1) if self._read else -window :]
        self._past, self._read = self._decoder.no_past(self._room), len(start)
        return self._decoder.next_logits(start, self._past)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Samples a token from float32 logits [tokens] on the CPU. Raises StateError if a logit is not finite."""
    if not bool(torch.isfinite(logits).all()):
        raise StateError("the model computes logits that are not finite, because its training diverged")
    if sampling.temperature == 0:
        return int(logits.argmax().item())
    scaled = logits.double()
    likely, tokens = torch.sort((scaled - scaled.max()) / sampling.temperature, descending=True, stable=True)
    chances = torch.softmax(likely[: sampling.top_k], dim=0)
    before = chances.cumsum(0) - chances  # Top-p keeps a token if the likelier ones together have less than `top_p`
    chances = torch.where(before < sampling.top_p, chances, 0.0)  # always keeps the likeliest token
    return int(tokens[torch.multinomial(chances, 1, generator=generator)].item())
