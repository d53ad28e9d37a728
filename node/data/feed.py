"""A data node's training and evaluation microbatches. Reads files: call it from a thread, not from the event loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Final

from node.data.document_packer import DocumentPacker, reading_place
from node.data.documents import Documents, Fragment, Place, is_held_out, owner
from node.data.file_order import FileShare
from node.data.labels import marking
from node.data.packing import Cursor, Microbatch, Packer
from node.data.places import Places, as_written
from node.data.row_packer import RowPacker
from node.data.sources import open_source, open_stream
from node.data.tokenizers import open_tokenizer
from node.experts.router import DocumentRouter, Router, document_router
from protocol.manifest.manifest import Manifest
from protocol.manifest.model import document_cost
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import PeerId

START: Final = Cursor()
ENOUGH: Final = 2
"""Times the tokens of the held-out microbatches that are wanted are read for them, of a data set that is read file by
file: no microbatch is quite full."""


def open_documents(manifest: Manifest, where: Places | None = None, router: Router | None = None) -> Documents:
    """Opens the manifest's source and tokenizer on this machine.

    Args:
        where: what may be opened; None for what is written in a manifest of one's own.
        router: that which the manifest names, if it names one.

    Raises:
        ConfigError, ManifestError: as `open_source`, `open_tokenizer` and `document_router`.
    """
    routing = document_router(manifest, router)
    return _documents(manifest, where or as_written(manifest.data), routing)


def open_text(manifest: Manifest) -> Documents:
    """Opens a source and tokenizer on this machine without any routes: what a router is fitted to. Errors as
    `open_documents`."""
    return _documents(manifest, as_written(manifest.data), None)


def _documents(manifest: Manifest, where: Places, routing: DocumentRouter | None) -> Documents:
    tokenizer = open_tokenizer(manifest, where.tokenizer)
    source = open_stream(manifest.data) or open_source(manifest.data, where.text)
    return Documents(source, tokenizer, manifest.seed, routing, marking(manifest.data, tokenizer))


class TrainingFeed:
    """One data node's microbatches: its share of the documents that are not held out, epoch after epoch."""

    def __init__(
        self,
        manifest: Manifest,
        documents: Documents,
        own: PeerId,
        start: Cursor = START,
    ) -> None:
        self._manifest = manifest
        self._own = own
        self._data_nodes: tuple[PeerId, ...] = (own,)
        of_names = partial(owner, manifest.seed)
        self._share = None if documents.files is None else FileShare(own, documents.files, of_names)
        fragments = documents.endless(_reading_place(manifest, start), self._is_mine, self._may_have_mine)
        if manifest.packs_documents:
            self._packer: Packer = DocumentPacker(manifest, fragments, start, router=documents.router)
        else:
            self._packer = _row_packer(manifest, fragments, start)

    @property
    def cursor(self) -> Cursor:
        """The place where the next microbatch begins; a feed started there, with the same data nodes, gives the same
        ones.
        """
        return self._packer.cursor

    def next(self, data_nodes: tuple[PeerId, ...] = ()) -> Microbatch:
        """The next microbatch with a label in it, when these data nodes are live (this one always counts as live).

        A change of the data nodes takes effect with the next block of the packer.

        Raises:
            ConfigError: a whole epoch has nothing for this data node.
        """
        self._data_nodes = tuple(sorted({*data_nodes, self._own}))
        while True:  # an epoch without a label is an error of the documents
            microbatch = self._packer.next()
            assert microbatch is not None, "epochs do not end"
            if microbatch.scored:
                return microbatch

    def _is_mine(self, name: str) -> bool:
        if is_held_out(self._manifest.seed, name, self._manifest.data.held_out):
            return False
        if len(self._data_nodes) == 1:
            return True
        if self._share is not None:
            return self._share.has_row(name, self._data_nodes)
        return owner(self._manifest.seed, name, self._data_nodes) == self._own

    def _may_have_mine(self, file: str) -> bool:
        return self._share is None or self._share.has_file(file, self._data_nodes)


def held_out_microbatches(
    manifest: Manifest, count: int, documents: Documents | None = None, unscored: int | None = None
) -> Iterator[Microbatch]:
    """The first `count` microbatches of the held-out documents, or as many whole ones as there are.

    Args:
        unscored: the first tokens of each document that are no labels; None for those that its route is chosen by.

    Raises:
        ConfigError: the held-out text does not fill one; also as `open_documents`.
    """
    seed, share = manifest.seed, manifest.data.held_out
    opened = documents or open_documents(manifest)
    fragments = opened.epoch(Place(), lambda name: is_held_out(seed, name, share))
    if opened.files is not None:  # a packer's block of held-out text may be that of many files
        fragments = _about(fragments, ENOUGH * count * manifest.microbatch_tokens)
    unscored = manifest.route_prefix if unscored is None else unscored
    packer: Packer = (
        DocumentPacker(manifest, fragments, START, unscored, opened.router, uneven=math.inf)
        if manifest.packs_documents
        else _row_packer(manifest, fragments, START)
    )
    given = 0
    while given < count:
        microbatch = packer.next()
        if microbatch is None and given == 0:
            raise ConfigError(
                f"the held-out documents (data.held_out = {share}) have less text than one microbatch of"
                f" {manifest.microbatch_tokens} tokens",
                hint="Use more text, or make a run with a larger data.held_out.",
            )
        if microbatch is None:
            return
        if microbatch.scored:
            given += 1
            yield microbatch


def _about(fragments: Iterator[Fragment], tokens: int) -> Iterator[Fragment]:
    """The fragments until they have so many tokens."""
    for fragment in fragments:
        yield fragment
        tokens -= fragment.tokens.size
        if tokens <= 0:
            return


def _reading_place(manifest: Manifest, start: Cursor) -> Place:
    return reading_place(start.block) if manifest.packs_documents else start.block


def _row_packer(manifest: Manifest, fragments: Iterator[Fragment], start: Cursor) -> RowPacker:
    return RowPacker(
        fragments,
        rows=manifest.training.rows,
        sequence=manifest.model.sequence,
        seed=manifest.seed,
        start=start,
        cost=manifest.training.rows * document_cost(manifest.model, manifest.model.sequence),
    )
