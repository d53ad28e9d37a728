"""Data nodes that read a data set of the hub file by file: all rows once, those of its own, and on from where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.data.documents import Documents, owner
from node.data.feed import TrainingFeed, held_out_microbatches, open_documents
from node.data.file_order import FILES_EACH
from node.data.packing import Cursor
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import PeerId
from tests.node.hub_on_loopback import COMMIT, NAME, LoopbackHub, serving
from tests.node.small_manifest import small_manifest

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
FILES, ROWS = 40, 12


def text_of(number: int) -> str:
    """Tells its row: 15 signs, so that with its end it is a row of 16 tokens."""
    return f"row {number:011}"


def manifest_of(**changes: object) -> Manifest:
    data = {"data__source": f"huggingface:{NAME}", "data__revision": COMMIT, "data__dealt_by": "files"}
    return small_manifest(**data, training__inner_tokens=32, data__held_out=0.1, **changes)


def serve(files: int, home: Path) -> LoopbackHub:
    held = {}
    for file in range(files):
        texts = [text_of(file * ROWS + row) for row in range(ROWS)]
        held[f"data/{file:03}.jsonl"] = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    return LoopbackHub(held)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with serving(serve(FILES, tmp_path), tmp_path / "home") as serves:
        yield serves


def an_epoch(manifest: Manifest, own: PeerId, nodes: tuple[PeerId, ...]) -> list[str]:
    """The names of the documents that a data node reads in the first epoch."""
    feed = TrainingFeed(manifest, open_documents(manifest), own)
    feed.next(nodes)
    first = feed._documents_of_an_epoch()
    return first


def rows_read(manifest: Manifest, documents: Documents, own: PeerId, nodes: tuple[PeerId, ...]) -> list[int]:
    """The rows of a feed's microbatches up to the end of its first epoch."""
    feed, found = TrainingFeed(manifest, documents, own), list[int]()
    while True:
        microbatch = feed.next(nodes)
        if microbatch.end.block.epoch > 0 or microbatch.start.block.epoch > 0:
            return found
        for tokens in microbatch.tokens.tolist():
            found += [int(bytes(t for t in tokens if t < 256)[4:])] if len(tokens) else []
