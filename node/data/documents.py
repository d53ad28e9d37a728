"""Documents as tokens and labels. Their order and split depend only on the seed and their names.

A data set of several files is read one file at a time: files in random order, rows in file order. A row's position
combines the rank of its file and its row number, so files need not be counted. The packer shuffles within its blocks.
"""

import hashlib
import json
import logging
from collections import Counter
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
from node.data.sources import FileStream, Source
from node.data.tokenizers import Part, Tokenizer, Tokens
from node.experts.router import DocumentRouter
from protocol.manifest.manifest import DataSection
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import PeerId

UNSCORED: Final = -100  # Label of a token without loss, as in `torch.nn.functional.cross_entropy`
ASSISTANT: Final = "assistant"
ROLES: Final = {"human": "user", "gpt": ASSISTANT, "function_call": ASSISTANT, "observation": "tool"}
"""Roles by their names in ShareGPT's format."""


@dataclass(frozen=True, slots=True, eq=False)
class Marked:
    """A document's tokens with the end-of-document token, and its labels. No tokens if the document is empty."""

    tokens: Tokens
    wanted: Tokens | None = None  # Labels, UNSCORED for tokens without loss. None if every token is a label

    @property
    def is_of_use(self) -> bool:
        return bool(self.tokens.size) if self.wanted is None else bool((self.wanted >= 0).any())


RowStream = HubStream | FileStream

Marking = Callable[[bytes], Marked]  # Converts a document's bytes to tokens and labels. Raises MalformedDocumentError


class MalformedDocumentError(Exception):
    """A document that does not have the format that the manifest requires, and is excluded."""


def marking(data: DataSection, tokenizer: Tokenizer) -> Marking:
    """Chooses the function that converts the run's documents from bytes to tokens and labels."""
    convert = conversation if data.labels == "assistant" else whole_text
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


def conversation(document: bytes, tokenizer: Tokenizer) -> Marked:
    """Tokenizes a JSON conversation. Only the assistant's tokens are labels. Raises MalformedDocumentError."""
    found, is_said = tokenizer.encode_parts([*_parts(_messages(document))])
    tokens = np.append(found, tokenizer.end_of_document)
    return Marked(tokens, np.where(np.append(is_said, [False]), tokens, UNSCORED))


def _parts(messages: list[tuple[str, str]]) -> Iterator[Part]:
    # Always ChatML: a tokenizer's own template is a Jinja program, and untrusted programs must not run here.
    for role, content in messages:
        is_said = role == ASSISTANT  # A role's header is never a label. The assistant's text and its end are
        yield Part("<|im_start|>", False, is_mark=True)
        yield Part(f"{role}\n", False)
        yield Part(content, is_said)
        yield Part("<|im_end|>", is_said, is_mark=True)
        yield Part("\n", False)


def _messages(document: bytes) -> list[tuple[str, str]]:
    """Reads the roles and texts of a conversation, of any kind in CHAT_COLUMNS. Raises MalformedDocumentError."""
    try:
        row: Any = json.loads(document)
        row = row if isinstance(row, dict) else {}
        messages = next((row[key] for key in ("messages", "conversations") if key in row), None)
        messages = json.loads(messages) if isinstance(messages, str) else messages
        if messages is None and "completion" in row:
            messages = _turn(row.get("prompt"), "user") + _turn(row["completion"], ASSISTANT)
        elif messages is None and "instruction" in row and "output" in row:
            asked = "\n\n".join(str(row[key]) for key in ("instruction", "input") if row.get(key))
            messages = _turn(asked, "user") + _turn(row["output"], ASSISTANT)
        if not isinstance(messages, list) or not messages:
            raise MalformedDocumentError("it has no conversation in `messages` or another known form")
        system = _turn(row["system"], "system") if row.get("system") else []
        return [_message(each) for each in system + messages]
    except (ValueError, RecursionError):
        raise MalformedDocumentError("it is not JSON") from None


def _turn(said: Any, role: str) -> list[Any]:
    return said if isinstance(said, list) else [{"role": role, "content": said}]


def _message(message: Any) -> tuple[str, str]:
    """Returns a message's role and text. Tool calls are `<tool_call>` and their JSON, as in Hermes and Qwen models."""
    table: dict[str, Any] = message if isinstance(message, dict) else {}
    role, content = table.get("role", table.get("from")), table.get("content", table.get("value"))
    parts = content if isinstance(content, list) else [content]
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts if part is not None]
    text = "".join(texts) if all(isinstance(part, str) for part in texts) else None
    calls = table.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    if not isinstance(role, str) or text is None or not (calls or content is not None):
        raise MalformedDocumentError("a message lacks a `role` or a text as `content`")
    return ROLES.get(role, role), "\n".join(filter(None, (text, *map(_tool_call, calls))))


def _tool_call(call: Any) -> str:
    found = call.get("function", call) if isinstance(call, dict) else call
    return f"<tool_call>\n{json.dumps(found, ensure_ascii=False)}\n</tool_call>"


logger = logging.getLogger(__name__)

MOST_REASONS: Final = 16  # Reasons for leaving out documents that are counted separately


@dataclass(frozen=True, slots=True, order=True)
class StreamPosition:
    """Position of a token in the endless stream of documents: epoch, document, token. Later positions are greater."""

    epoch: int = 0
    position: int = 0
    offset: int = 0  # Tokens of the document before this one


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """Tokens and labels of a document from some position to the document's end."""

    start: StreamPosition
    tokens: Tokens
    name: str = ""
    opening: Tokens = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """First tokens of the document, without its end, which determine its route."""
    wanted: Tokens | None = None  # Labels. None if every token is a label

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
    generator = np.random.Philox(key=int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little"))
    return np.argsort(generator.random_raw(count), kind="stable")


class Documents:
    """A source's documents as tokens, in another order each epoch. `mark` tokenizes them (default: plain text)."""

    def __init__(
        self,
        source: Source | RowStream,
        tokenizer: Tokenizer,
        seed: int,
        router: DocumentRouter | None = None,
        mark: Marking | None = None,
    ) -> None:
        self.router = router
        self._source = source
        self._mark = mark or (lambda document: whole_text(document, tokenizer))
        self._seed = seed
        self.left_out = Counter[str]()  # Number of documents left out, by reason

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
            offset = start.offset if due.position == start.position else 0  # continue a started document
            marked = self._marked(due)
            tokens, labels = marked.tokens, marked.wanted
            if marked.is_of_use and tokens.size > offset:
                rest = None if labels is None else labels[offset:]
                yield Fragment(
                    StreamPosition(start.epoch, due.position, offset), tokens[offset:], due.name, tokens[:-1], rest
                )

    def endless(
        self,
        start: StreamPosition,
        wanted: Selection,
        files: Selection = everything,
        also: Callable[[Fragment], bool] | None = None,  # Of a document that was read
    ) -> Iterator[Fragment]:
        """Yields the wanted documents of all epochs. Raises ConfigError if a whole epoch has no labels."""
        while True:
            empty = True
            for fragment in filter(also, self.epoch(start, wanted, files, ahead=True)):
                empty = False
                yield fragment
            if empty and start.position == 0:  # an epoch that started in the middle proves nothing
                source = self._source
                many = f"{len(source.names)} documents" if isinstance(source, Source) else f"{len(source.files)} files"
                raise ConfigError(
                    f"none of the {many} of data.source "
                    + (f"can be used: {self.reasons}" if self.left_out else "is for this data node to train on"),
                    hint="Choose the text for this kind of run, or create a run for this kind of text."
                    if self.left_out
                    else "Use more text, fewer data nodes, or a smaller data.held_out.",
                )
            if start.epoch == 0 and self.left_out.total() > 1:
                logger.warning("excluded %d documents so far: %s", self.left_out.total(), self.reasons)
            start = StreamPosition(start.epoch + 1)

    def _due(self, start: StreamPosition, wanted: Selection, files: Selection, ahead: bool) -> "Iterator[Due]":
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

    @property
    def reasons(self) -> str:
        return ", ".join(f"{count} because {why}" for why, count in self.left_out.most_common())

    def _marked(self, due: "Due") -> Marked:
        """Reads and tokenizes a document. Returns no tokens if it is empty, malformed or unreadable."""
        try:
            marked = self._mark(due.read())
            if marked.is_of_use or not marked.tokens.size:
                return marked
            why = "it has no text of the assistant"
        except (OSError, MalformedDocumentError) as error:
            why = str(error.strerror if isinstance(error, OSError) else error)
        if not self.left_out:
            logger.warning("excluding document %s: %s; others are only counted", due.name, why)
        self.left_out[why if why in self.left_out or len(self.left_out) < MOST_REASONS else "of other reasons"] += 1
        return Marked(np.empty(0, dtype=np.int64))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:8], "big")


ROWS: Final = 2**32  # Row numbers reserved per file, more than a file has rows
FILES_EACH: Final = 16  # Files per data node from which whole files are assigned. With fewer, one might get none

Owner = Callable[[str, tuple[PeerId, ...]], PeerId]


@dataclass(frozen=True, slots=True)
class Due:
    position: int
    name: str
    read: Callable[[], bytes]  # Reads the document. Raises OSError


def due_rows(
    stream: RowStream,
    orders: Callable[[int], npt.NDArray[np.int64]],  # File order of an epoch
    start: tuple[int, int, bool],  # Epoch, position, and whether the row there was started and must be read
    wanted: tuple[Selection, Selection],  # Of files and of rows. Iteration leaves a file that is no longer wanted
    *,
    ahead: bool,  # Whether to prefetch the next wanted file
) -> Iterator[Due]:
    """Yields the wanted rows of a data set of several files in one epoch, named `FILE@NUMBER`."""
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
                if place != begun and not of_files(file):  # data nodes joined or left, and another one has the file
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
        if self._by_files(data_nodes):  # rows are named FILE@NUMBER
            return self._of_file(name.rpartition("@")[0], data_nodes) == self._own
        return self._owner(name, data_nodes) == self._own

    def _by_files(self, data_nodes: tuple[PeerId, ...]) -> bool:
        return self._files >= FILES_EACH * len(data_nodes)
