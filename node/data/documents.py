"""Documents as tokens and labels. Their order and split depend only on the seed and their names.

A data set of several files is read one file at a time: files in random order, rows in file order. A row's position
combines the rank of its file and its row number, so files need not be counted. The packer shuffles within its blocks.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from node.data.files import Selection, everything
from node.data.hub import HubStream
from node.data.sources import READ_AS, Source
from node.data.tokenizers import Tokenizer, Tokens
from node.experts.router import DocumentRouter
from protocol.manifest.manifest import DataSection
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import PeerId

UNSCORED: Final = -100
"""Label of a token without loss, as in `torch.nn.functional.cross_entropy`."""
ASSISTANT: Final = "assistant"


@dataclass(frozen=True, slots=True, eq=False)
class Marked:
    """A document's tokens with the end-of-document token, and its labels. No tokens if the document is empty."""

    tokens: Tokens
    wanted: Tokens | None = None
    """Labels, UNSCORED for tokens without loss. None if every token is a label."""

    @property
    def is_of_use(self) -> bool:
        return bool(self.tokens.size) if self.wanted is None else bool((self.wanted >= 0).any())


Marking = Callable[[bytes], Marked]
"""Converts a document's bytes to tokens and labels. Raises MalformedDocumentError."""


class MalformedDocumentError(Exception):
    """A document that does not have the format that the manifest requires, and is excluded."""


def marking(data: DataSection, tokenizer: Tokenizer) -> Marking:
    """Chooses the function that converts the run's documents from bytes to tokens and labels."""
    convert = whole_text
    if data.kind == "tokens":
        convert = made_before
    elif data.labels == "assistant":
        convert = conversation
    return lambda document: _begun(convert(document, tokenizer), tokenizer.beginning)


def _begun(marked: Marked, beginning: int | None) -> Marked:
    """Puts the run's beginning, if any, before a document's tokens. It has no loss in conversations."""
    tokens, wanted = marked.tokens, marked.wanted
    if beginning is None or not tokens.size or tokens[0] == beginning:
        return marked
    return Marked(np.insert(tokens, 0, beginning), None if wanted is None else np.insert(wanted, 0, UNSCORED))


def whole_text(document: bytes, tokenizer: Tokenizer) -> Marked:
    """Tokenizes a plain text document, with every token as a label."""
    tokens = tokenizer.encode(document)
    return Marked(np.append(tokens, tokenizer.end_of_document) if tokens.size else tokens)


def made_before(document: bytes, tokenizer: Tokenizer) -> Marked:
    """Reads a document stored as tokens (READ_AS), adds a missing end token. Raises ConfigError for unknown tokens."""
    tokens = np.frombuffer(document, dtype=READ_AS).astype(np.int64)
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.size:
        raise ConfigError(
            f"data.source has tokens {tokens.min()} to {tokens.max()}, but the run's tokenizer has {tokenizer.size}",
            hint="Make the shards with the run's own tokenizer.",
        )
    # Shards are written with or without end tokens.
    ends = not tokens.size or tokens[-1] in tokenizer.ends
    return Marked(tokens if ends else np.append(tokens, tokenizer.end_of_document))


def conversation(document: bytes, tokenizer: Tokenizer) -> Marked:
    """Tokenizes a JSON conversation. Only the assistant's tokens are labels. Raises MalformedDocumentError."""
    tokens, wanted = list[Tokens](), list[Tokens]()
    for text, is_said in _parts(_messages(document)):
        found = tokenizer.encode(text.encode(errors="replace"))
        tokens.append(found)
        wanted.append(found if is_said else np.full(found.size, UNSCORED))
    tokens.append(np.array([tokenizer.end_of_document]))
    wanted.append(np.array([UNSCORED]))
    return Marked(np.concatenate(tokens), np.concatenate(wanted))


def _parts(messages: list[tuple[str, str]]) -> Iterator[tuple[str, bool]]:
    # Always ChatML: a tokenizer's own template is a Jinja program, and untrusted programs must not run here.
    before = ""
    for role, content in messages:
        before += f"<|im_start|>{role}\n"
        said = f"{content}<|im_end|>"
        # A role's header is never a label. The assistant's text and its end are.
        if role == ASSISTANT:
            yield before, False
            yield said, True
            before = "\n"
        else:
            before += f"{said}\n"
    yield before, False


def _messages(document: bytes) -> list[tuple[str, str]]:
    try:
        read: Any = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise MalformedDocumentError(f"it is not JSON: {str(error)[:100]}") from None
    messages = read.get("messages") if isinstance(read, dict) else None
    if not isinstance(messages, list) or not messages:
        raise MalformedDocumentError("it has no `messages` list")
    tables: list[dict[str, Any]] = [each if isinstance(each, dict) else {} for each in messages]
    found: list[Any] = [(each.get("role"), each.get("content")) for each in tables]
    if not all(isinstance(part, str) for message in found for part in message):
        raise MalformedDocumentError("a message lacks a text `role` or `content`")
    return found


# ---- order and split -------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

MOST_LOGGED: Final = 100
"""Maximum number of excluded documents that are logged."""


@dataclass(frozen=True, slots=True, order=True)
class StreamPosition:
    """Position of a token in the endless stream of documents: epoch, document, token. Later positions are greater."""

    epoch: int = 0
    position: int = 0
    offset: int = 0
    """Tokens of the document before this one."""


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """Tokens and labels of a document from some position to the document's end."""

    start: StreamPosition
    tokens: Tokens
    name: str = ""
    opening: Tokens = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """First tokens of the document, without its end, which determine its route."""
    wanted: Tokens | None = None
    """Labels. None if every token is a label."""

    @property
    def labels(self) -> Tokens:
        return self.tokens if self.wanted is None else self.wanted


def is_held_out(seed: int, name: str, share: float) -> bool:
    """Tells whether a document is held out from training, which depends only on its name and the seed."""
    return _hash(f"held-out:{seed}:{name}") < int(share * 2**64)


def owner(seed: int, name: str, data_nodes: Sequence[PeerId]) -> PeerId:
    """Returns the data node that reads a document, by rendezvous hashing (Thaler and Ravishankar 1998)."""
    return max(data_nodes, key=lambda peer: (_hash(f"split:{seed}:{name}:{peer}"), peer))


def epoch_order(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    return permutation(f"order:{seed}:{epoch}", count)


def permutation(key: str, count: int) -> npt.NDArray[np.int64]:
    """Returns a permutation of 0..count-1 that depends only on `key`, the same on every machine."""
    digest = hashlib.sha256(key.encode()).digest()
    generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    return np.argsort(generator.random_raw(count), kind="stable")


class Documents:
    """A source's documents as tokens, in another order each epoch. `mark` tokenizes them (default: plain text)."""

    def __init__(
        self,
        source: Source | HubStream,
        tokenizer: Tokenizer,
        seed: int,
        router: DocumentRouter | None = None,
        mark: Marking | None = None,
    ) -> None:
        self.router = router
        self._source = source
        self._mark = mark or (lambda document: whole_text(document, tokenizer))
        self._seed = seed
        self._skipped = 0

    @property
    def files(self) -> int | None:
        return None if isinstance(self._source, Source) else len(self._source.files)

    def openings(self, wanted: Selection, count: int, tokens: int) -> Iterator[tuple[Tokens, int]]:
        """Yields up to `count` wanted documents, each as its first `tokens` tokens and its length."""
        for fragment in islice(self.epoch(StreamPosition(), wanted), count):
            yield fragment.tokens[:-1][:tokens].copy(), fragment.tokens.size

    def epoch(
        self, start: StreamPosition, wanted: Selection, files: Selection = everything, *, ahead: bool = False
    ) -> Iterator[Fragment]:
        """Yields the wanted documents from position `start` to the end of that epoch. `ahead`: prefetch files."""
        for due in self._due(start, wanted, files, ahead):
            # A document that was started is continued at its offset.
            offset = start.offset if due.position == start.position else 0
            marked = self._marked(due)
            tokens, labels = marked.tokens, marked.wanted
            if marked.is_of_use and tokens.size > offset:
                rest = None if labels is None else labels[offset:]
                yield Fragment(
                    StreamPosition(start.epoch, due.position, offset), tokens[offset:], due.name, tokens[:-1], rest
                )

    def endless(self, start: StreamPosition, wanted: Selection, files: Selection = everything) -> Iterator[Fragment]:
        """Yields the wanted documents of all epochs. Raises ConfigError if a whole epoch has no labels."""
        while True:
            empty = True
            for fragment in self.epoch(start, wanted, files, ahead=True):
                empty = False
                yield fragment
            # An epoch that started in the middle proves nothing.
            if empty and start.position == 0:
                count = len(self._source.names) if isinstance(self._source, Source) else len(self._source.files)
                kind = "documents" if isinstance(self._source, Source) else "files"
                raise ConfigError(
                    f"none of the {count} {kind} of data.source is for this data node to train on",
                    hint="Use more text, fewer data nodes, or a smaller data.held_out.",
                )
            start = StreamPosition(start.epoch + 1)

    def _due(self, start: StreamPosition, wanted: Selection, files: Selection, ahead: bool) -> Iterator[Due]:
        source = self._source
        if not isinstance(source, Source):
            at = (start.epoch, start.position, start.offset > 0)
            orders = partial(epoch_order, self._seed, count=len(source.files))
            yield from due_rows(source, orders, at, (files, wanted), ahead=ahead)
            return
        order = epoch_order(self._seed, start.epoch, len(source.names))
        for position in range(start.position, len(order)):
            name = source.names[int(order[position])]
            if (start.offset and position == start.position) or wanted(name):
                yield Due(position, name, partial(source.read, name))

    def _marked(self, due: Due) -> Marked:
        """Reads and tokenizes a document. Returns no tokens if it is empty, malformed or unreadable."""
        try:
            return self._mark(due.read())
        except (OSError, MalformedDocumentError) as error:
            self._skipped += 1
            if self._skipped <= MOST_LOGGED:
                why = error.strerror if isinstance(error, OSError) else error
                more = "; further ones are not logged" if self._skipped == MOST_LOGGED else ""
                logger.warning("excluding document %s: %s%s", due.name, why, more)
            return Marked(np.empty(0, dtype=np.int64))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:8], "big")


# ---- data sets of several files --------------------------------------------------------------------------------------


ROWS: Final = 2**32
"""Row numbers reserved per file, more than a file has rows."""
FILES_EACH: Final = 16
"""Files per data node from which whole files are assigned. With fewer, a data node might get none."""

Owner = Callable[[str, tuple[PeerId, ...]], PeerId]


@dataclass(frozen=True, slots=True)
class Due:
    position: int
    name: str
    read: Callable[[], bytes]
    """Reads the document. Raises OSError."""


def due_rows(
    stream: HubStream,
    orders: Callable[[int], npt.NDArray[np.int64]],
    start: tuple[int, int, bool],
    wanted: tuple[Selection, Selection],
    *,
    ahead: bool,
) -> Iterator[Due]:
    """Yields the wanted rows of a data set of several files in one epoch, named `FILE@NUMBER`.

    Args:
        orders: file order of an epoch.
        start: epoch, position, and whether the row there was started and must be read.
        wanted: selects files and rows. Iteration leaves a file once it is no longer wanted.
        ahead: whether to prefetch the next wanted file.
    """
    epoch, position, is_begun = start
    of_files, of_rows = wanted
    order = orders(epoch)
    first, number = divmod(position, ROWS)
    for rank in range(first, len(order)):
        file = stream.files[int(order[rank])]
        begun = position if is_begun and rank == first else -1
        if begun < 0 and not of_files(file):
            continue
        at = number if rank == first else 0
        with closing(stream.rows(file, at)) as rows:
            for row, read in enumerate(rows, at):
                place, name = rank * ROWS + row, f"{file}@{row}"
                if ahead and row == at:  # earlier, both downloads would share the link
                    later = (stream.files[int(index)] for index in chain(order[rank + 1 :], orders(epoch + 1)))
                    if (following := next(filter(of_files, later), None)) is not None:
                        stream.expect(following)
                # Data nodes joined or left, and this file now belongs to another one.
                if place != begun and not of_files(file):
                    break
                if place == begun or of_rows(name):
                    yield Due(place, name, read)


class FileShare:
    """A data node's disjoint share of a data set of several files: whole files, or rows if the files are few."""

    def __init__(self, own: PeerId, files: int, owner: Owner) -> None:
        self._own, self._files = own, files
        self._owner = owner
        self._of_file = lru_cache(maxsize=1024)(owner)

    def has_file(self, file: str, data_nodes: tuple[PeerId, ...]) -> bool:
        return not self._by_files(data_nodes) or self._of_file(file, data_nodes) == self._own

    def has_row(self, name: str, data_nodes: tuple[PeerId, ...]) -> bool:
        # Rows are named FILE@NUMBER.
        if self._by_files(data_nodes):
            return self._of_file(name.rpartition("@")[0], data_nodes) == self._own
        return self._owner(name, data_nodes) == self._own

    def _by_files(self, data_nodes: tuple[PeerId, ...]) -> bool:
        return self._files >= FILES_EACH * len(data_nodes)
