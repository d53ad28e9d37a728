"""Streaming detokenisation: text from tokens that come one by one; a character is held back until all its tokens are
there.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Final, Protocol

REPLACEMENT: Final = "\ufffd"
MOST_HELD_BACK: Final = 8
"""Tokens. A character of UTF-8 is at most 4 bytes, so what makes no character after 8 tokens never will."""


class TextStream(Protocol):
    """A stream of text pieces which, one after the other, are the text of all tokens."""

    def push(self, token: int) -> str:
        """The text that can be shown now that this token is known; often empty."""
        ...

    def finish(self) -> str:
        """The text that was held back, once no token will follow."""
        ...


class ByteTextStream:
    """The text stream of the byte tokenizer: tokens up to 255 are bytes of UTF-8, others have no text; bytes that are
    no UTF-8 become U+FFFD.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowTextStream:
    """The text stream of tokenizers whose decoding of a token depends on its neighbours (spaces between words, bytes of
    one character).

    Each time the last tokens are decoded together with those shown before them, and the difference is new.

    Args:
        decode: the text of some consecutive tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._shown: list[int] = []
        self._held_back: list[int] = []

    def push(self, token: int) -> str:
        self._held_back.append(token)
        piece = self._new_text()
        if piece.endswith(REPLACEMENT) and len(self._held_back) < MOST_HELD_BACK:
            return ""
        if piece:
            self._shown, self._held_back = self._held_back, []
        elif len(self._held_back) >= MOST_HELD_BACK:
            self._held_back = []  # they have no text
        return piece

    def finish(self) -> str:
        piece = self._new_text() if self._held_back else ""
        self._shown, self._held_back = [], []
        return piece

    def _new_text(self) -> str:
        before = self._decode(self._shown)
        return self._decode([*self._shown, *self._held_back])[len(before) :]
