"""Tokenizers (bytes, or a file of the `tokenizers` library) and streaming detokenization."""

from __future__ import annotations

import codecs
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from node.data.files import open_regular, resolved
from node.data.tokenizer_trial import fault_of
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError, ManifestError

Tokens = npt.NDArray[np.int64]

MAX_TOKENIZER_BYTES: Final = 128 * 2**20
MOST_GROWTH: Final = 16.0
"""Factor by which all replacements of a tokenizer together may lengthen text; a few in a row could fill the memory."""
END_OF_DOCUMENT_NAMES: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Candidates for the end-of-document token in tokenizer files, most specific first."""


class ByteTokenizer:
    """Tokenizer with one token per byte, and 256 for the end of a document. Accepts text in any encoding."""

    size = 257
    end_of_document = 256

    def encode(self, text: bytes) -> Tokens:
        """Returns the document's tokens, without an end-of-document token."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def text_stream(self) -> TextStream:
        return ByteTextStream()


class FileTokenizer:
    """Tokenizer from a file, checked against the manifest's SHA-256 so that all data nodes agree."""

    def __init__(self, path: Path, sha256: str) -> None:
        self._tokenizer = _parse(path, tokenizer_bytes(path, sha256).decode(errors="replace"))
        self.size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        found = ((name, self._tokenizer.token_to_id(name)) for name in END_OF_DOCUMENT_NAMES)
        end = next(((name, identifier) for name, identifier in found if identifier is not None), None)
        if end is None:
            names = ", ".join(END_OF_DOCUMENT_NAMES)
            raise ManifestError(
                f"data.tokenizer: {path} has no end-of-document token (one of {names})",
                hint="Add one to the tokenizer file and write its new SHA-256 to the manifest.",
            )
        self.end_of_document_name: str = end[0]
        self.end_of_document: int = end[1]

    def encode(self, text: bytes) -> Tokens:
        """Returns the document's tokens. Invalid UTF-8 becomes U+FFFD. Raises ConfigError if the tokenizer fails."""
        with _panics_raised():
            # Unlike `encode`, a batch of one releases the GIL, so that the node answers pings meanwhile.
            [encoding] = self._tokenizer.encode_batch([text.decode(errors="replace")], add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int64)

    def text_stream(self) -> TextStream:
        return WindowTextStream(self._decode)

    def _decode(self, tokens: Sequence[int]) -> str:
        with _panics_raised():
            text: str = self._tokenizer.decode(tokens)
        return text


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(manifest: Manifest, file: Path | None) -> Tokenizer:
    """Opens the run's tokenizer: the byte tokenizer, or `file`. Raises ConfigError or ManifestError."""
    data = manifest.data
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    assert data.tokenizer_sha256 is not None, "the manifest's schema asks for it"
    if file is None:
        raise ConfigError(
            "the manifest names a tokenizer file, which is unknown on this machine",
            hint="Give the file with --tokenizer FILE; ask the run's author for it.",
        )
    tokenizer = FileTokenizer(file, data.tokenizer_sha256)
    if tokenizer.size > manifest.model.vocabulary:
        raise ManifestError(
            f"model.vocabulary ({manifest.model.vocabulary}) is smaller than the {tokenizer.size} tokens of {file}"
        )
    return tokenizer


def tokenizer_bytes(path: Path, sha256: str) -> bytes:
    """Reads the tokenizer file with this hash. Raises ConfigError if it is missing, too large or different."""
    content = _content(path)
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ConfigError(
            f"data.tokenizer: {path} has SHA-256 {found}, but the manifest requires {sha256}",
            hint="Give the run's own tokenizer file with --tokenizer; ask the run's author for it.",
        )
    return content


def tokenizer_keys(path: Path) -> dict[str, str]:
    """Returns the manifest's `[data]` keys for a tokenizer file. Raises ConfigError if it is missing or too large."""
    return {"tokenizer": f"file:{path}", "tokenizer_sha256": hashlib.sha256(_content(path)).hexdigest()}


def _content(path: Path) -> bytes:
    try:
        with open_regular(resolved(path)) as file:  # the user named the link, so follow it
            content = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer: {path} cannot be read: {error.strerror or error}",
            hint="Give the run's tokenizer file with --tokenizer; ask the run's author for it.",
        ) from None
    if len(content) > MAX_TOKENIZER_BYTES:
        raise ConfigError(f"data.tokenizer: {path} is larger than {MAX_TOKENIZER_BYTES} bytes")
    return content


@contextmanager
def _panics_raised() -> Iterator[None]:
    """Converts errors of the `tokenizers` library to ConfigError. Its Rust panics are not an `Exception`."""
    try:
        yield
    except BaseException as error:
        # A panic derives from BaseException, and its class cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ConfigError(
                (
                    f"data.tokenizer: the run's tokenizer failed on this text: {type(error).__name__}: "
                    f"{str(error)[:200]}"
                ),
                hint="Tell the run's author: a pattern in the tokenizer file may be faulty.",
            ) from None
        raise


def _parse(path: Path, text: str) -> Any:
    try:
        import tokenizers  # an optional dependency
    except ImportError:
        raise ConfigError(
            "data.tokenizer names a file, but the `tokenizers` library is not installed",
            hint="Install it with `pip install 'skipstone[tokenizers]'`.",
        ) from None
    try:
        table = json.loads(text)
        growth = math.prod(_growth(table.get(key)) for key in ("normalizer", "pre_tokenizer", "decoder"))
        if growth > MOST_GROWTH:
            raise ConfigError(f"it makes text up to {growth:.3g} times as long; the limit is {MOST_GROWTH:g}")
        fault = fault_of(text.encode())
        if fault is not None:
            raise ConfigError(fault)
        return tokenizers.Tokenizer.from_str(text)
    except (ConfigError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"data.tokenizer: {path} cannot be used as a tokenizer file: {error}") from None


def _growth(part: Any) -> float:
    """Returns the factor by which the replacements of a normalizer or decoder lengthen text at most."""
    if part is None:
        return 1.0
    parts = [each for key in ("normalizers", "pretokenizers", "decoders") for each in part.get(key, ())]
    growth = math.prod(map(_growth, parts))
    if part.get("type") == "Replace":
        least = len(part["pattern"].get("String", "").encode())  # a regular expression may match one byte
        growth *= max(1.0, len(part["content"].encode()) / max(1, least))
    return growth


# ---- streaming detokenization ----------------------------------------------------------------------------------------


REPLACEMENT: Final = "\ufffd"
MOST_HELD_BACK: Final = 8
"""Tokens held back at most before incomplete text is shown. A UTF-8 character has at most 4 bytes."""


class ByteTextStream:
    """Incremental decoder from byte tokens to text. Malformed UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is now complete, often empty."""
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def finish(self) -> str:
        """Returns the text that `push` has held back. Call it after the last token."""
        return self._decoder.decode(b"", final=True)


class WindowTextStream:
    """Incremental decoder from tokens to text, if the text of a token depends on its neighbours."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._shown: list[int] = []
        self._held_back: list[int] = []

    def push(self, token: int) -> str:
        self._held_back.append(token)
        piece = self._new_text()
        # A trailing U+FFFD may be an incomplete character.
        if piece.endswith(REPLACEMENT) and len(self._held_back) < MOST_HELD_BACK:
            return ""
        if piece:
            self._shown, self._held_back = self._held_back, []
        elif len(self._held_back) >= MOST_HELD_BACK:
            self._held_back = []  # these tokens have no text
        return piece

    def finish(self) -> str:
        piece = self._new_text() if self._held_back else ""
        self._shown, self._held_back = [], []
        return piece

    def _new_text(self) -> str:
        before = self._decode(self._shown)
        return self._decode([*self._shown, *self._held_back])[len(before) :]


TextStream = ByteTextStream | WindowTextStream
