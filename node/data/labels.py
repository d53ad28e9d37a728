"""Documents as tokens, and which of these tokens are labels: all of them, or what an assistant says in a conversation.

A conversation is a JSON object whose `messages` have a `role` and a `content`. Each is written in ChatML:

    <|im_start|>ROLE\\nCONTENT<|im_end|>\\n

The labels are the assistant's contents, each with its <|im_end|>. A tokenizer's own template is a Jinja program, which
is not run here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from node.data.token_shards import READ_AS
from node.data.tokenizers import Tokenizer, Tokens
from protocol.manifest.manifest import DataSection
from swarm.vocabulary.errors import ConfigError

UNSCORED: Final = -100
"""As `torch.nn.functional.cross_entropy` ignores by default."""
ASSISTANT: Final = "assistant"


@dataclass(frozen=True, slots=True, eq=False)
class Marked:
    """A document's tokens, its end included; none of a document that is empty."""

    tokens: Tokens
    wanted: Tokens | None = None
    """The tokens as labels, UNSCORED where one is none; None where all are labels."""

    @property
    def is_of_use(self) -> bool:
        """Whether anything of it is a label."""
        return bool(self.tokens.size) if self.wanted is None else bool((self.wanted >= 0).any())


Marking = Callable[[bytes], Marked]
"""From a document's bytes to its tokens. Raises MalformedDocumentError."""


class MalformedDocumentError(Exception):
    """A document is not what the run's documents are; it is left out."""


class _Message(NamedTuple):
    role: str
    content: str


def marking(data: DataSection, tokenizer: Tokenizer) -> Marking:
    """The way from the bytes of the run's documents to tokens and labels."""
    if data.kind == "tokens":
        return lambda document: made_before(document, tokenizer)
    if data.labels == "assistant":
        return lambda document: conversation(document, tokenizer)
    return lambda document: whole_text(document, tokenizer)


def whole_text(document: bytes, tokenizer: Tokenizer) -> Marked:
    """A text, all of whose tokens are labels."""
    tokens = tokenizer.encode(document)
    return Marked(np.append(tokens, tokenizer.end_of_document) if tokens.size else tokens)


def made_before(document: bytes, tokenizer: Tokenizer) -> Marked:
    """Tokens made before, as READ_AS, with their end or not. Raises ConfigError if another tokenizer made them."""
    tokens = np.frombuffer(document, dtype=READ_AS).astype(np.int64)
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.size:
        raise ConfigError(
            f"data.source has tokens from {tokens.min()} to {tokens.max()}, the run's tokenizer {tokenizer.size}",
            hint="Make the shards with the run's own tokenizer.",
        )
    ends = not tokens.size or tokens[-1] == tokenizer.end_of_document
    return Marked(tokens if ends else np.append(tokens, tokenizer.end_of_document))


def conversation(document: bytes, tokenizer: Tokenizer) -> Marked:
    """A conversation, of whose tokens only the assistant's are labels. Raises MalformedDocumentError."""
    tokens, wanted = list[Tokens](), list[Tokens]()
    for text, is_said in _parts(_messages(document)):
        found = tokenizer.encode(text.encode(errors="replace"))
        tokens.append(found)
        wanted.append(found if is_said else np.full(found.size, UNSCORED))
    tokens.append(np.array([tokenizer.end_of_document]))
    wanted.append(np.array([UNSCORED]))
    return Marked(np.concatenate(tokens), np.concatenate(wanted))


def _parts(messages: list[_Message]) -> Iterator[tuple[str, bool]]:
    """The conversation in pieces, each with whether the assistant says it."""
    before = ""
    for role, content in messages:
        before += f"<|im_start|>{role}\n"
        said = f"{content}<|im_end|>"
        if role == ASSISTANT:
            yield before, False
            yield said, True
            before = "\n"
        else:
            before += f"{said}\n"
    yield before, False


def _messages(document: bytes) -> list[_Message]:
    try:
        read: Any = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise MalformedDocumentError(f"it is no JSON: {str(error)[:100]}") from None
    messages = read.get("messages") if isinstance(read, dict) else None
    if not isinstance(messages, list) or not messages:
        raise MalformedDocumentError("it has no list of `messages`")
    return [_message(each) for each in messages]


def _message(each: Any) -> _Message:
    role, content = (each.get("role"), each.get("content")) if isinstance(each, dict) else (None, None)
    if not (isinstance(role, str) and isinstance(content, str)):
        raise MalformedDocumentError("a message has no `role` or no `content` that is text")
    return _Message(role, content)
