"""Documents as tokens and labels, in an order and split that follow from the seed and their names alone.

A data set read file by file walks the files in a random order, and each file's rows in theirs. A row's place is its
file's rank and its number there, so a file's number of rows need not be known. The packer shuffles within its blocks.
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
from typing import Any, Final, NamedTuple

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
    # ChatML. A tokenizer's own template is a Jinja program, and no stranger's program is run here.
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


# ---- order and split -------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

MOST_TOLD: Final = 100
"""Excluded documents that are logged."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The place of a token in the endless stream of documents. Later ones are greater."""

    epoch: int = 0
    position: int = 0
    offset: int = 0
    """Tokens of that document before this one."""


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """The tokens of a document from a place on, its end included."""

    start: Place
    tokens: Tokens
    name: str = ""
    opening: Tokens = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The document's beginning without its end token, by which its route is chosen."""
    wanted: Tokens | None = None
    """The tokens as labels; None if all are."""

    @property
    def labels(self) -> Tokens:
        return self.tokens if self.wanted is None else self.wanted


def is_held_out(seed: int, name: str, share: float) -> bool:
    """Whether a document is never trained on. Depends on no other document."""
    return is_drawn(f"held-out:{seed}:{name}", share)


def is_drawn(key: str, share: float) -> bool:
    """Whether a key is among those that are drawn, of which there are so many of all."""
    return _hash(key) < int(share * 2**64)


def owner(seed: int, name: str, data_nodes: Sequence[PeerId]) -> PeerId:
    """The data node that reads a document, by rendezvous hashing (Thaler and Ravishankar 1998)."""
    return max(data_nodes, key=lambda peer: (_hash(f"split:{seed}:{name}:{peer}"), peer))


def epoch_order(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    return permutation(f"order:{seed}:{epoch}", count)


def permutation(key: str, count: int) -> npt.NDArray[np.int64]:
    """A permutation of the numbers below `count`, the same for the same key on every machine."""
    digest = hashlib.sha256(key.encode()).digest()
    generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    return np.argsort(generator.random_raw(count), kind="stable")


class Documents:
    """A source's documents as tokens, in the order of each epoch. `mark` makes tokens of bytes; None for plain text."""

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
        self._left_out = 0

    @property
    def files(self) -> int | None:
        return None if isinstance(self._source, Source) else len(self._source.files)

    def openings(self, wanted: Selection, count: int, tokens: int) -> Iterator[tuple[Tokens, int]]:
        """Yields the first `tokens` tokens and the number of all, for `count` wanted documents at most."""
        for fragment in islice(self.epoch(Place(), wanted), count):
            yield fragment.tokens[:-1][:tokens].copy(), fragment.tokens.size

    def epoch(
        self, start: Place, wanted: Selection, files: Selection = everything, *, ahead: bool = False
    ) -> Iterator[Fragment]:
        """The wanted documents from `start` to the end of its epoch, with the begun one. `ahead`: prefetch files."""
        for due in self._due(start, wanted, files, ahead):
            offset = start.offset if due.position == start.position else 0
            marked = self._marked(due)
            tokens, labels = marked.tokens, marked.wanted
            if marked.is_of_use and tokens.size > offset:
                rest = None if labels is None else labels[offset:]
                yield Fragment(Place(start.epoch, due.position, offset), tokens[offset:], due.name, tokens[:-1], rest)

    def endless(self, start: Place, wanted: Selection, files: Selection = everything) -> Iterator[Fragment]:
        """The wanted documents, epoch after epoch. Raises ConfigError if a whole epoch has none with a label."""
        while True:
            empty = True
            for fragment in self.epoch(start, wanted, files, ahead=True):
                empty = False
                yield fragment
            if empty and start.position == 0:
                count = len(self._source.names) if isinstance(self._source, Source) else len(self._source.files)
                kind = "documents" if isinstance(self._source, Source) else "files"
                raise ConfigError(
                    f"none of the {count} {kind} of data.source is this data node's to train on",
                    hint="Use more text, fewer data nodes, or a smaller data.held_out.",
                )
            start = Place(start.epoch + 1)

    def _due(self, start: Place, wanted: Selection, files: Selection, ahead: bool) -> Iterator[Due]:
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
        """Nothing at all for a document that is empty, is none, or cannot be read any more."""
        try:
            return self._mark(due.read())
        except (OSError, MalformedDocumentError) as error:
            self._left_out += 1
            if self._left_out <= MOST_TOLD:
                why = error.strerror if isinstance(error, OSError) else error
                more = "; of others nothing is said" if self._left_out == MOST_TOLD else ""
                logger.warning("document %s is left out: %s%s", due.name, why, more)
            return Marked(np.empty(0, dtype=np.int64))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:8], "big")


# ---- data sets that are read file by file ----------------------------------------------------------------------------


ROWS: Final = 2**32
"""More than a file has."""
FILES_EACH: Final = 16
"""Files per data node from which on whole files are dealt: with fewer, a data node might get none."""

Owner = Callable[[str, tuple[PeerId, ...]], PeerId]


@dataclass(frozen=True, slots=True)
class Due:
    position: int
    name: str
    read: Callable[[], bytes]
    """Raises OSError if it cannot be read."""


def due_rows(
    stream: HubStream,
    orders: Callable[[int], npt.NDArray[np.int64]],
    start: tuple[int, int, bool],
    wanted: tuple[Selection, Selection],
    *,
    ahead: bool,
) -> Iterator[Due]:
    """The wanted rows of an epoch, named `FILE@NUMBER`.

    Args:
        orders: the order in which an epoch walks the files.
        start: the epoch, the position, and whether the row there was begun and is read in any case.
        wanted: selects files, and rows. A file is left as soon as it is no longer wanted.
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
                if ahead and row == at:  # not earlier: the two would share the link, and the first document wait
                    later = (stream.files[int(index)] for index in chain(order[rank + 1 :], orders(epoch + 1)))
                    if (following := next(filter(of_files, later), None)) is not None:
                        stream.expect(following)
                if place != begun and not of_files(file):
                    break
                if place == begun or of_rows(name):
                    yield Due(place, name, read)


class FileShare:
    """A data node's share of a data set of files: whole files, or rows if there are few. No two shares meet."""

    def __init__(self, own: PeerId, files: int, owner: Owner) -> None:
        self._own, self._files = own, files
        self._owner = owner
        self._of_file = lru_cache(maxsize=1024)(owner)

    def has_file(self, file: str, data_nodes: tuple[PeerId, ...]) -> bool:
        return not self._by_files(data_nodes) or self._of_file(file, data_nodes) == self._own

    def has_row(self, name: str, data_nodes: tuple[PeerId, ...]) -> bool:
        if self._by_files(data_nodes):
            return self._of_file(name.rpartition("@")[0], data_nodes) == self._own
        return self._owner(name, data_nodes) == self._own

    def _by_files(self, data_nodes: tuple[PeerId, ...]) -> bool:
        return self._files >= FILES_EACH * len(data_nodes)
