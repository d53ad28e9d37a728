"""Tokenizers: bytes as they are, or a file of the `tokenizers` library; and their streaming detokenization."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from node.data.files import open_regular, resolved
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError, ManifestError

Tokens = npt.NDArray[np.int64]

MAX_TOKENIZER_BYTES: Final = 128 * 2**20
END_OF_DOCUMENT_NAMES: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Names of the end of a document in tokenizer files, most specific first."""


class ByteTokenizer:
    """The byte tokenizer: a token is a byte; 256 ends a document. Needs no file, and takes text in any encoding."""

    size = 257
    end_of_document = 256

    def encode(self, text: bytes) -> Tokens:
        """The document's tokens, without an end of document."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def text_stream(self) -> TextStream:
        return ByteTextStream()


class FileTokenizer:
    """A tokenizer file, checked against the manifest's SHA-256 so that all data nodes cut text alike."""

    def __init__(self, path: Path, sha256: str) -> None:
        self._tokenizer = _parse(path, tokenizer_bytes(path, sha256).decode(errors="replace"))
        self.size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        found = ((name, self._tokenizer.token_to_id(name)) for name in END_OF_DOCUMENT_NAMES)
        end = next(((name, identifier) for name, identifier in found if identifier is not None), None)
        if end is None:
            names = ", ".join(END_OF_DOCUMENT_NAMES)
            raise ManifestError(
                f"data.tokenizer: {path} has no token that ends a document (one of {names})",
                hint="Add one to the tokenizer file, and put the file's new SHA-256 into the manifest.",
            )
        self.end_of_document_name: str = end[0]
        self.end_of_document: int = end[1]

    def encode(self, text: bytes) -> Tokens:
        """The document's tokens; bytes that are not UTF-8 become U+FFFD. Raises ConfigError if the tokenizer fails."""
        with _panics_told():
            # A batch of one: unlike `encode` it lets the interpreter go, and pings are answered meanwhile.
            [encoding] = self._tokenizer.encode_batch([text.decode(errors="replace")], add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int64)

    def text_stream(self) -> TextStream:
        return WindowTextStream(self._decode)

    def _decode(self, tokens: Sequence[int]) -> str:
        with _panics_told():
            text: str = self._tokenizer.decode(tokens)
        return text


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(manifest: Manifest, file: Path | None) -> Tokenizer:
    """Opens the manifest's tokenizer from `file`. Raises ConfigError or ManifestError."""
    data = manifest.data
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    assert data.tokenizer_sha256 is not None, "the manifest's schema asks for it"
    if file is None:
        raise ConfigError(
            "the manifest names a tokenizer file, and nobody has said where it lies here",
            hint="Say it with --tokenizer FILE; the run's author says where to get it.",
        )
    tokenizer = FileTokenizer(file, data.tokenizer_sha256)
    if tokenizer.size > manifest.model.vocabulary:
        raise ManifestError(
            f"model.vocabulary ({manifest.model.vocabulary}) is less than the {tokenizer.size} tokens of {file}"
        )
    return tokenizer


def tokenizer_bytes(path: Path, sha256: str) -> bytes:
    """Reads the tokenizer file with this hash. Raises ConfigError if it is missing, too large, or another one."""
    try:
        content = _content(path)
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer: {path} cannot be read: {error.strerror}",
            hint="Name the run's tokenizer file with --tokenizer; its author says where to get it.",
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ConfigError(
            f"data.tokenizer: {path} has SHA-256 {found}, the manifest asks for {sha256}",
            hint="Name the run's own tokenizer file with --tokenizer; its author says where to get it.",
        )
    return content


def tokenizer_keys(path: Path) -> dict[str, str]:
    """The keys of `[data]` for a tokenizer file. Raises ConfigError if it is missing or too large."""
    try:
        content = _content(path)
    except OSError as error:
        raise ConfigError(f"the tokenizer {path} cannot be read: {error.strerror or error}") from None
    return {"tokenizer": f"file:{path.absolute()}", "tokenizer_sha256": hashlib.sha256(content).hexdigest()}


def _content(path: Path) -> bytes:
    with open_regular(resolved(path)) as file:  # whoever names a link means what it leads to
        content = file.read(MAX_TOKENIZER_BYTES + 1)
    if len(content) > MAX_TOKENIZER_BYTES:
        raise ConfigError(f"data.tokenizer: {path} is larger than {MAX_TOKENIZER_BYTES} bytes")
    return content


@contextmanager
def _panics_told() -> Iterator[None]:
    """Maps panics of the Rust library, which are no `Exception` and known by name alone, to ConfigError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ConfigError(
                (
                    f"data.tokenizer: the run's tokenizer cannot work with this text: {type(error).__name__}: "
                    f"{str(error)[:200]}"
                ),
                hint="Tell the run's author; a pattern in the tokenizer's file may be at fault.",
            ) from None
        raise


def _parse(path: Path, text: str) -> Any:
    try:
        import tokenizers  # an extra: bytes need none
    except ImportError:
        raise ConfigError(
            "data.tokenizer names a file, and the `tokenizers` library is not installed",
            hint="Install it with `pip install 'skipstone[tokenizers]'`.",
        ) from None
    try:
        with _panics_told():
            return tokenizers.Tokenizer.from_str(text)
    except ConfigError as error:
        raise ConfigError(f"data.tokenizer: {path} is not a tokenizer file: {error}") from None


# ---- text from tokens that come one by one ---------------------------------------------------------------------------


REPLACEMENT: Final = "\ufffd"
MOST_HELD_BACK: Final = 8
"""Tokens. A UTF-8 character has at most 4 bytes."""


class ByteTextStream:
    """Text of the byte tokenizer: tokens up to 255 are bytes of UTF-8; malformed ones become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that can be shown now that this token is known; often empty."""
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def finish(self) -> str:
        """The text that was held back, once no token will follow."""
        return self._decoder.decode(b"", final=True)


class WindowTextStream:
    """Text of tokenizers whose decoding of a token depends on its neighbours. `decode` takes consecutive tokens."""

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


TextStream = ByteTextStream | WindowTextStream
