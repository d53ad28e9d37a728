"""Text generation, token by token.

Sources: top-k sampling, Fan et al. 2018 (arXiv:1805.04833); top-p sampling, Holtzman et al. 2020 (arXiv:1904.09751).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from node.data.tokenizers import Tokenizer
from node.model.decoder import Decoder
from swarm.vocabulary.errors import ConfigError, StateError


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


def generate(
    decoder: Decoder, tokenizer: Tokenizer, prompt: Sequence[int], limit: int, sampling: Sampling
) -> Iterator[int]:
    """Yields up to `limit` tokens, the last the end of a document if it comes. Raises StateError on bad logits."""
    yield from Continuation(decoder, tokenizer, prompt, limit, sampling).take(limit)


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
        """Whether nothing follows: as many tokens as may be, or the document is over."""
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
        """Takes another decoder, which reads the text anew."""
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
    chances = torch.where(
        before < sampling.top_p, chances, 0.0
    )  # the likeliest always stays: there is nothing before it
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
        """Reads one more."""
        if len(self._seen) == self._decoder.sequence:
            return self.start([*self._seen[-(self._decoder.sequence // 2) :], token])
        self._seen.append(token)
        return self._decoder.next_logits([token], self._past)
