"""Tokenizers (bytes, or a file of the `tokenizers` library), a model folder's token files, streaming detokenization."""

import base64
import codecs
import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from node.data.files import read_named, read_table
from node.data.tokenizer_trial import fault_of
from protocol.manifest.manifest import MAX_TOKEN_FILES_LENGTH, DataSection, Manifest
from swarm.vocabulary.errors import ConfigError, ManifestError

Tokens = npt.NDArray[np.int64]

MOST_GROWTH: Final = 16.0  # Factor by which all replacements together may lengthen text; a few could fill the memory
END_OF_DOCUMENT_NAMES: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Special tokens that end a document if no model folder names the end, most specific first."""
END_OF_TURN: Final = "<|im_end|>"  # End of the assistant's text, which the model learns with `labels = "assistant"`


class ByteTokenizer:
    """Tokenizer with one token per byte, and 256 for the end of a document. Accepts text in any encoding."""

    size = 257
    end_of_document = 256
    ends = (256,)
    learned_end = 256
    beginning = None

    def encode(self, text: bytes) -> Tokens:
        """Returns the document's tokens, without an end-of-document token."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def name_of(self, token: int) -> str:
        """Returns the name of a token in an export."""
        return END_OF_DOCUMENT_NAMES[0] if token == self.end_of_document else bytes([token]).decode("latin-1")

    def text_stream(self) -> "TextStream":
        return ByteTextStream()

    def encode_parts(self, parts: "Sequence[Part]") -> tuple[Tokens, npt.NDArray[np.bool_]]:
        """Returns the tokens of the joined parts, and for each token whether its part is wanted."""
        texts = [part.text.encode(errors="replace") for part in parts]
        return self.encode(b"".join(texts)), np.repeat([part.is_wanted for part in parts], [*map(len, texts)])


UNSET: Final = DataSection()


class FileTokenizer:
    """Tokenizer from a file, checked against the manifest's SHA-256 so that all data nodes agree."""

    def __init__(
        self, path: Path, sha256: str | None, data: DataSection = UNSET, files: "TokenFiles" = MappingProxyType({})
    ) -> None:
        """Takes the ends from `data`, else from a model folder's `files`, else the end that has a usual name."""
        content = tokenizer_bytes(path, sha256)
        self.sha256 = sha256 or hashlib.sha256(content).hexdigest()
        self._tokenizer = _parse(path, content.decode(errors="replace"))
        self._tokenizer.no_truncation()  # trainers save these settings, which would cut or fill each document
        self._tokenizer.no_padding()
        self.size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.beginning = data.beginning
        found = [end for end in data.ends if end < self.size] or self._stated_ends(files)
        if not found:
            raise ConfigError(
                f"data.tokenizer: {path} has no special token that ends a document",
                hint="Name it as eos_token in the model's tokenizer_config.json, or add one of these special tokens: "
                f"{', '.join(END_OF_DOCUMENT_NAMES)}.",
            )
        self.end_of_document = self.learned_end = found[0]
        if data.labels == "assistant" and (turn := self._tokenizer.token_to_id(END_OF_TURN)) is not None:
            self.learned_end = turn
        self.ends: tuple[int, ...] = tuple(dict.fromkeys([*found, self.learned_end]))

    def _stated_ends(self, files: "TokenFiles") -> list[int]:
        """Returns the ends of a text that a model folder's files state, the end of a document first, or one by name."""
        found = list[int]()
        added = self._tokenizer.get_added_tokens_decoder()
        for file, key in _END_KEYS:
            stated = files.get(file, {}).get(key)
            for end in stated if isinstance(stated, list) else [stated]:
                name = end.get("content") if isinstance(end, dict) else end
                if isinstance(name, str) and (token := self._tokenizer.token_to_id(name)) is not None:
                    found.append(token)
                # A config may still have the default id of its class, which is an ordinary token here.
                elif type(end) is int and end in added:
                    found.append(end)
        special = {token.content: id for id, token in added.items() if token.special}
        return found or [special[name] for name in END_OF_DOCUMENT_NAMES if name in special][:1]

    def encode(self, text: bytes) -> Tokens:
        """Returns the document's tokens. Invalid UTF-8 becomes U+FFFD. Raises ConfigError if the tokenizer fails."""
        return self._encode(text, special=False)

    def _encode(self, text: bytes, *, special: bool) -> Tokens:
        with _panics_raised():
            # Unlike `encode`, a batch of one releases the GIL, so that the node answers pings meanwhile.
            [encoding] = self._tokenizer.encode_batch([text.decode(errors="replace")], add_special_tokens=special)
        return np.asarray(encoding.ids, dtype=np.int64)

    def own_beginning(self) -> int | None:
        """Returns the token that the file itself puts before each text, if any."""
        plain, whole = (self._encode(b"a", special=special).tolist() for special in (False, True))
        return whole[0] if len(whole) > len(plain) and whole[1 : 1 + len(plain)] == plain else None

    def name_of(self, token: int) -> str:
        name: str | None = self._tokenizer.id_to_token(token)
        return name or ""

    def text_stream(self) -> "TextStream":
        return WindowTextStream(self._decode)

    def _decode(self, tokens: Sequence[int]) -> str:
        with _panics_raised():
            text: str = self._tokenizer.decode(tokens)
        return text

    def encode_parts(self, parts: "Sequence[Part]") -> tuple[Tokens, npt.NDArray[np.bool_]]:
        """Returns the tokens of the joined parts, and for each token whether it is in a wanted one."""
        if not any(name in part.text for part in parts if not part.is_mark for name in self._special):
            return _encoded(self._tokenizer, parts)  # at once: some tokenizers put a blank in front of each text
        # The text of a special token in a message stays text.
        found = list[tuple[Any, Any]]()
        for is_special, group in groupby(parts, lambda part: part.is_mark and part.text in self._special):
            if is_special:
                found += [([self._special[part.text]], [part.is_wanted]) for part in group]
            else:
                found.append(_encoded(self._literal, [*group]))
        tokens, wanted = zip(*found, strict=True)
        return np.concatenate(tokens), np.concatenate(wanted)

    @cached_property
    def _special(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def _literal(self) -> Any:
        """A copy that reads special tokens as text."""
        literal = type(self._tokenizer).from_str(self._tokenizer.to_str())
        literal.encode_special_tokens = True
        return literal


class Part(NamedTuple):
    """A part of a conversation."""

    text: str
    is_wanted: bool
    is_mark: bool = False  # Whether the text may become a special token


def _encoded(tokenizer: Any, parts: Sequence[Part]) -> tuple[Tokens, npt.NDArray[np.bool_]]:
    text = "".join(part.text for part in parts)
    with _panics_raised():
        [encoding] = tokenizer.encode_batch([text.encode(errors="replace").decode()], add_special_tokens=False)
    begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    bounds, is_wanted = np.cumsum([len(part.text) for part in parts]), np.array([part.is_wanted for part in parts])
    # A token in two parts counts if one of them is wanted: the last may hold the end of the answer.
    first = np.searchsorted(bounds[:-1], begins, "right")
    last = np.where(begins < ends, np.searchsorted(bounds, ends), first)
    return np.asarray(encoding.ids, dtype=np.int64), is_wanted[first] | is_wanted[last]


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
    tokenizer = FileTokenizer(file, data.tokenizer_sha256, data)
    require_fits(tokenizer, manifest.model.vocabulary, file)
    return tokenizer


def require_fits(tokenizer: FileTokenizer, vocabulary: int, file: Path) -> None:
    """Raises ManifestError if the tokenizer has more tokens than the model."""
    if tokenizer.size > vocabulary:
        raise ManifestError(
            f"{file} has {tokenizer.size} tokens, but the model only {vocabulary} (model.vocabulary)",
            hint="Choose the tokenizer file that belongs to the model.",
        )


def tokenizer_bytes(path: Path, sha256: str | None) -> bytes:
    """Reads a tokenizer file. Raises ConfigError if it is missing, too large or, with a hash, different."""
    content = read_named(path, 2**27, "Give the run's tokenizer file with --tokenizer.")
    found = hashlib.sha256(content).hexdigest()
    if sha256 not in (None, found):
        raise ConfigError(
            f"data.tokenizer: {path} has SHA-256 {found}, but the manifest requires {sha256}",
            hint="Give the run's own tokenizer file with --tokenizer; ask the run's author for it.",
        )
    return content


def chosen_tokenizer(path: Path, folder: Path | None = None) -> tuple[FileTokenizer, dict[str, Any]]:
    """Opens a user's tokenizer file, alone or in a model folder. Also returns its `[data]` keys. Raises ConfigError."""
    files = {} if folder is None else read_token_files(folder)
    tokenizer = FileTokenizer(path, None, files=files)
    tokenizer.beginning = tokenizer.own_beginning()
    return tokenizer, {
        "tokenizer": f"file:{path}",
        "tokenizer_sha256": tokenizer.sha256,
        "ends": tokenizer.ends,
        "beginning": tokenizer.beginning,
        "token_files": packed(files),
    }


@contextmanager
def _panics_raised() -> Iterator[None]:
    """Converts errors of the `tokenizers` library to ConfigError. Its Rust panics are not an `Exception`."""
    try:
        yield
    except BaseException as error:
        # A panic derives from BaseException, and its class cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ConfigError(
                f"the run's tokenizer failed on this text: {type(error).__name__}: {str(error)[:200]}",
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


TOKEN_FILES: Final = re.compile(
    r"(config|generation_config|tokenizer_config|special_tokens_map|chat_template)\.json"
    r"|(chat_template|additional_chat_templates/\w[\w.-]{0,63})\.jinja",
    re.ASCII,
)
MAX_TOKEN_FILES_BYTES: Final = 2**20
CONFIG: Final = "config.json"
# Code to load, and paths on the author's machine.
_UNWANTED_KEYS: Final = re.compile(r"auto_map|custom_generate|_?name_or_path|\w{0,80}_file", re.ASCII)

_END_KEYS: Final = (
    ("tokenizer_config.json", "eos_token"),
    ("special_tokens_map.json", "eos_token"),
    ("generation_config.json", "eos_token_id"),
    (CONFIG, "eos_token_id"),
)

TokenFiles = Mapping[str, Any]  # By file name: object of a JSON file, or text of a template (never executed)


def read_token_files(folder: Path) -> TokenFiles:
    """Reads a model folder's settings of tokens, chat template and generation. Raises ConfigError."""
    hint = "Fetch the model's files again, or remove this one."
    paths = [*folder.glob("*.json"), *folder.glob("*.jinja"), *folder.glob("additional_chat_templates/*.jinja")]
    found: dict[str, Any] = {}
    for path in paths:
        if not TOKEN_FILES.fullmatch(name := path.relative_to(folder).as_posix()):
            continue
        if path.suffix == ".json":
            found[name] = read_table(path, MAX_TOKEN_FILES_BYTES, hint)
        else:
            found[name] = read_named(path, MAX_TOKEN_FILES_BYTES, hint).decode(errors="replace")
    return _cleaned(found)


def _cleaned(files: Mapping[Any, Any]) -> TokenFiles:
    """Returns only the files and keys that an export may contain."""
    return {
        name: content
        if isinstance(content, str)
        else {k: v for k, v in content.items() if not _UNWANTED_KEYS.fullmatch(k)}
        for name, content in files.items()
        if TOKEN_FILES.fullmatch(name) and isinstance(content, dict if name.endswith(".json") else str)
    }


def packed(files: TokenFiles) -> str:
    """Returns `data.token_files`. Raises ConfigError if it exceeds the manifest's limit."""
    content = json.dumps(files, sort_keys=True).encode() if files else b""
    text = base64.b64encode(zlib.compress(content, 9)).decode() if content else ""
    if len(text) > MAX_TOKEN_FILES_LENGTH or len(content) >= MAX_TOKEN_FILES_BYTES:
        raise ConfigError(
            f"{', '.join(files)} are too large for the manifest: {len(content)} bytes, {len(text)} when compressed",
            hint="Remove chat templates that you do not need from the folder.",
        )
    return text


def unpacked(text: str) -> TokenFiles:
    """Reads `data.token_files`. Raises ManifestError if it is invalid or larger than MAX_TOKEN_FILES_BYTES."""
    try:
        unzip = zlib.decompressobj()
        content = unzip.decompress(base64.b64decode(text), MAX_TOKEN_FILES_BYTES)
        files = json.loads(content if unzip.eof else b"") if text else {}
        json.dumps(files, ensure_ascii=False).encode()  # an export could not write lone surrogates
        return _cleaned(files)
    except (ValueError, RecursionError, AttributeError, zlib.error):
        raise ManifestError("data.token_files is invalid") from None


MOST_HELD_BACK: Final = 8  # Tokens, before incomplete text is shown. A UTF-8 character has at most 4 bytes


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
        if piece.endswith("\ufffd") and len(self._held_back) < MOST_HELD_BACK:  # perhaps an incomplete character
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
        return self._decode([*self._shown, *self._held_back])[len(self._decode(self._shown)) :]


TextStream = ByteTextStream | WindowTextStream
