"""Training and evaluation microbatches of a data node. Reads files, so call it from a thread."""

import asyncio
import math
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Final, Self

from node.data.documents import (
    Documents,
    FileShare,
    Fragment,
    MalformedDocumentError,
    StreamPosition,
    is_held_out,
    marking,
    owner,
)
from node.data.hub import HubStream, source_keys
from node.data.local_paths import LocalPaths, as_written
from node.data.packing import UNEVEN, Cursor, DocumentPacker, Microbatch, Packer, RowPacker, reading_position
from node.data.row_files import Row, encoding_problem
from node.data.sources import FileStream, LocalSource, open_source
from node.data.tokenizers import open_tokenizer
from node.experts.router import (
    DocumentRouter,
    OwnRoute,
    Router,
    document_router,
    documents_to_fit,
    fit_router,
    router_digest,
)
from protocol.manifest.manifest import DEFAULT_PREFIX, Manifest, manifest_from_table
from swarm.experts.routes import readers_of
from swarm.vocabulary.errors import ConfigError, SkipstoneError
from swarm.vocabulary.types import MicrobatchId, PeerId, Route

START: Final = Cursor()
ENOUGH: Final = 2  # Tokens read for held-out microbatches per token wanted, because microbatches are never quite full


def open_documents(manifest: Manifest, where: LocalPaths | None = None, router: Router | None = None) -> Documents:
    """Opens the run's text and tokenizer at the paths `where`. Without `where`, trusts the manifest's paths."""
    return _documents(manifest, where or as_written(manifest.data), document_router(manifest, router))


def _documents(manifest: Manifest, where: LocalPaths, routing: DocumentRouter | None) -> Documents:
    tokenizer = open_tokenizer(manifest, where.tokenizer)
    source = open_source(manifest.data, where.text)
    return Documents(source, tokenizer, manifest.seed, routing, marking(manifest.data, tokenizer))


def with_router(manifest: Manifest, source: str) -> tuple[Manifest, Router]:
    """Fits a router to the training documents of `source`. Returns a manifest that names the router, and the router."""
    table = manifest.model_dump()
    text = manifest_from_table(table | {"data": table["data"] | source_keys(source)})
    if not manifest.stages.has_experts:
        raise ConfigError("--route-from needs experts, and this run has none", hint="Set their number with --experts.")
    seed, held_out, experts = manifest.seed, manifest.data.held_out, manifest.stages.experts_of_each
    opened, most = _documents(text, as_written(text.data), None), documents_to_fit(experts)
    documents = list(opened.openings(lambda name: not is_held_out(seed, name, held_out), most, DEFAULT_PREFIX))
    router = fit_router(documents, experts, DEFAULT_PREFIX, seed)
    routing = {"router": router_digest(router.to_bytes()), "prefix": DEFAULT_PREFIX}
    return manifest_from_table(table | {"routing": routing}), router


class TrainingFeed:
    """Training microbatches of one data node: its share of the documents that are not held out, in all epochs."""

    def __init__(
        self,
        manifest: Manifest,
        documents: Documents,
        own: PeerId,
        start: Cursor = START,
        routes: Callable[[], Mapping[PeerId, Route]] = dict,  # Of data nodes with a whole path
    ) -> None:
        self._manifest, self._own, self._find_routes, self._routes = manifest, own, routes, routes()
        self._data_nodes: tuple[PeerId, ...] = (own,)
        self._router = documents.router if manifest.stages.workers == "paths" else None
        share = None if documents.files is None else FileShare(own, documents.files, partial(owner, manifest.seed))
        self._share = None if self._router is not None else share  # A path's documents are in all files
        # Packed documents also read the token before the block.
        place = reading_position(start.block) if manifest.packs_documents else start.block
        fragments = documents.endless(place, self._is_mine, self._may_have_mine, self._is_for_my_path)
        if manifest.packs_documents:
            route, router, uneven = self._routes.get(own, ()), documents.router, UNEVEN
            if route and self._router is not None:
                router, uneven = OwnRoute(self._router, route), math.inf
            self._packer: Packer = DocumentPacker(manifest, fragments, start, router=router, uneven=uneven)
        else:
            self._packer = RowPacker(manifest, fragments, start)

    @property
    def cursor(self) -> Cursor:
        """Position of the next microbatch. A feed that starts here with equal data nodes gives equal microbatches."""
        return self._packer.cursor

    def next(self, data_nodes: tuple[PeerId, ...] = ()) -> Microbatch:
        """Returns the next microbatch while `data_nodes` share the text. Raises ConfigError if no text has labels."""
        self._data_nodes = tuple(sorted({*data_nodes, self._own}))
        if self._router is not None:
            self._routes = self._find_routes()
        while True:  # `Documents.endless` raises if a whole epoch has no label
            microbatch = self._packer.next()
            assert microbatch is not None, "epochs do not end"
            if microbatch.scored:
                return microbatch

    def _is_mine(self, name: str) -> bool:
        if is_held_out(self._manifest.seed, name, self._manifest.data.held_out):
            return False
        if len(self._data_nodes) == 1 or self._router is not None:
            return True
        if self._share is not None:
            return self._share.has_row(name, self._data_nodes)
        return owner(self._manifest.seed, name, self._data_nodes) == self._own

    def _may_have_mine(self, file: str) -> bool:
        return self._share is None or self._share.has_file(file, self._data_nodes)

    def _is_for_my_path(self, document: Fragment) -> bool:
        if self._router is None or len(self._data_nodes) == 1:
            return True
        affinity = self._router.affinity(document.name, document.opening)
        readers = readers_of(affinity, {peer: self._routes.get(peer, ()) for peer in self._data_nodes})
        return owner(self._manifest.seed, document.name, readers) == self._own


def held_out_microbatches(
    manifest: Manifest, count: int, documents: Documents | None = None, unscored: int | None = None
) -> Iterator[Microbatch]:
    """Yields up to `count` microbatches of held-out documents. Raises ConfigError if there is not a single one."""
    seed, share = manifest.seed, manifest.data.held_out
    opened = documents or open_documents(manifest)
    fragments = opened.epoch(StreamPosition(), lambda name: is_held_out(seed, name, share))
    if opened.files is not None:  # one block could need many downloads
        fragments = _about(fragments, ENOUGH * count * manifest.microbatch_tokens)
    # Tokens without loss at the start of each document; by default those that determine its route.
    unscored = manifest.route_prefix if unscored is None else unscored
    packer: Packer = (
        DocumentPacker(manifest, fragments, START, unscored, opened.router, uneven=math.inf)
        if manifest.packs_documents
        else RowPacker(manifest, fragments, START)
    )
    given = 0
    while given < count and (microbatch := packer.next()) is not None:
        if microbatch.scored:
            given += 1
            yield microbatch
    if not given:
        raise ConfigError(
            f"the held-out documents (data.held_out = {share}) have less than {manifest.microbatch_tokens} tokens",
            hint="Use more text, or create a run with a larger data.held_out.",
        )


def _about(fragments: Iterator[Fragment], tokens: int) -> Iterator[Fragment]:
    for fragment in fragments:
        yield fragment
        tokens -= fragment.tokens.size
        if tokens <= 0:
            return


SAMPLED_BYTES: Final = 2**21
SAMPLED_DOCUMENTS: Final = 256
SAMPLED_FILES: Final = 32
LEAST_ROWS: Final = 16
SHOWN_TOKENS: Final = 100


@dataclass(slots=True)
class Sample:
    """Documents from all over a text, or from the beginning of each of its files of rows."""

    text: str = ""  # Beginning of the first document, as its tokens say
    documents: int = 0
    tokens: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # Sampled documents that cannot be used, by reason
    files_left_out: dict[str, str] = field(default_factory=dict)  # Reason for each file that is not text
    all_tokens: float = 0.0  # Tokens of the whole text, estimated


def sample_text(manifest: Manifest) -> Sample:
    """Reads some documents of a new run's text. Raises ConfigError if they, or most of a file, cannot be used."""
    data, found = manifest.data, Sample()
    where = as_written(data)
    tokenizer = open_tokenizer(manifest, where.tokenizer)
    if data.files is not None and where.text is not None and not where.text.exists():  # of another machine's manifest
        return found
    source, mark = open_source(data, where.text, is_new=True), marking(data, tokenizer)
    if isinstance(source, HubStream):  # it would download a whole file
        return found
    for file, size, documents in _sampled(source):
        bad, used, example = Counter[str](), 0, b""
        for name, read in documents:
            document = b""
            try:
                document = read()
                if data.labels == "all" and (problem := encoding_problem(document, name)):
                    raise problem
                marked = mark(document)
                if marked.tokens.size and not marked.is_of_use:
                    raise MalformedDocumentError("it has no text of the assistant")
            except (OSError, MalformedDocumentError) as error:
                bad[str(error.strerror if isinstance(error, OSError) else error)] += 1
                example = example or document[:80]
            else:
                used, found.tokens = used + 1, found.tokens + marked.tokens.size
                if not found.text:
                    found.text = "".join(map(tokenizer.text_stream().push, marked.tokens[:SHOWN_TOKENS].tolist()))
            size -= len(document)
            if size < 0 and used + bad.total() >= LEAST_ROWS:
                break
        found.documents, found.left_out = found.documents + used, found.left_out + bad
        if bad.total() > used:
            raise ConfigError(
                f"data.source: {bad.total()} of {bad.total() + used} documents of {file} cannot be used, mostly because"
                f" {bad.most_common(1)[0][0]}. One begins {example.decode(errors='replace')!r}",
                hint="Choose text of this kind. A conversation is a row with `messages`, `conversations`, "
                "`prompt` and `completion`, or `instruction` and `output`.",
            )
    if not found.tokens:
        raise ConfigError(f"data.source: {source.listing.place} contains no text", hint="Choose a file with text.")
    if isinstance(source, FileStream):
        share = source.bytes_read / sum(source.listing.size_of(file) or 0 for file in source.files)
    else:
        share = (found.documents + found.left_out.total()) / len(source.names)
    found.files_left_out, found.all_tokens = source.listing.left_out, found.tokens / share
    return found


def _sampled(source: LocalSource) -> Iterator[tuple[str, int, Iterator[tuple[str, Row]]]]:
    """Yields names of files, how many bytes to read of each, and the names and readers of documents."""
    if isinstance(source, FileStream):
        files = source.files[:: -(-len(source.files) // SAMPLED_FILES)]
        for file in files:
            with closing(source.rows(file, 0)) as rows:
                yield file, SAMPLED_BYTES // len(files), ((f"{file}@{row}", read) for row, read in enumerate(rows))
        return
    wanted = min(SAMPLED_DOCUMENTS, max(LEAST_ROWS, SAMPLED_BYTES * len(source.names) // sum(source.listing.sizes)))
    names = source.names[:: -(-len(source.names) // wanted)]
    for file, of_file in groupby(names, lambda name: name.rpartition("@")[0] or name):
        yield file, SAMPLED_BYTES, ((name, partial(source.read, name)) for name in of_file)


class Prefetcher:
    """Bounded queue of microbatches, packed on a thread. Calls `arrived` on the event loop for each microbatch."""

    def __init__(
        self, feed: TrainingFeed, data_nodes: Callable[[], tuple[PeerId, ...]], arrived: Callable[[], None], depth: int
    ) -> None:
        self._feed = feed
        self._data_nodes = data_nodes
        self._arrived = arrived
        self._packed: queue.Queue[Microbatch | Exception] = queue.Queue(depth)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._pack, name="data", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        with suppress(queue.Empty):
            self._packed.get_nowait()  # unblocks a thread that waits in `put`
        self._thread.join(timeout=5.0)

    def ready(self) -> Microbatch | None:
        try:
            packed = self._packed.get_nowait()
        except queue.Empty:
            return None
        if isinstance(packed, Exception):
            raise packed
        return packed

    def _pack(self) -> None:
        assert self._loop is not None
        while not self._stopping.is_set():
            packed: Microbatch | Exception
            try:
                packed = self._feed.next(self._data_nodes())
            except Exception as error:  # `ready` raises it
                packed = error
            except BaseException as error:  # a panic of a Rust library
                packed = SkipstoneError(f"cannot pack the text: {type(error).__name__}: {error}")
            self._packed.put(packed)
            if not self._stopping.is_set():
                self._loop.call_soon_threadsafe(self._arrived)
            if isinstance(packed, Exception):
                return


class ReadingPosition:
    """Tracker of a data node's microbatches, to find where a restart must read the text again. Thread-safe."""

    def __init__(self, start: Cursor, remembered: int) -> None:
        self._next = start
        self._waiting: set[Cursor] = set()
        self._in_flight: dict[Cursor, MicrobatchId] = {}
        self._back: deque[tuple[Cursor, MicrobatchId]] = deque(maxlen=remembered)
        self._lock = threading.Lock()

    def drawn(self, text: Microbatch) -> None:
        """Records a microbatch that was packed and waits to be launched, possibly after later ones."""
        with self._lock:
            self._waiting.add(text.start)
            self._next = max(self._next, text.end)

    def sent(self, text: Microbatch, microbatch: MicrobatchId) -> None:
        """Records the launch of `text` under the id `microbatch`, for the first time or as a retry."""
        with self._lock:
            self._waiting.discard(text.start)
            self._in_flight[text.start] = microbatch
            self._next = max(self._next, text.end)

    def came_back(self, text: Microbatch) -> None:
        with self._lock:
            microbatch = self._in_flight.pop(text.start, None)
            if microbatch is not None:
                self._back.append((text.start, microbatch))

    def dropped(self, text: Microbatch) -> None:
        with self._lock:
            self._in_flight.pop(text.start, None)

    def resume_at(self, is_applied: Callable[[MicrobatchId], bool]) -> Cursor:
        """Returns the position of the first text whose gradient is not applied. Later texts may be read twice."""
        with self._lock:
            known = [*self._in_flight.items(), *self._back]
            unapplied = [start for start, microbatch in known if not is_applied(microbatch)]
            # Texts that wait are lost in a restart, so they count as unapplied.
            return min([*self._waiting, *unapplied], default=self._next)
