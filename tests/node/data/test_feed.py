"""What data nodes read together: everything once, and never what is held out."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.data.feed import TrainingFeed, held_out_microbatches, open_documents
from node.data.packing import Microbatch
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import PeerId
from tests.node.small_manifest import small_manifest

A, B = PeerId("a"), PeerId("b")
LENGTH = 63
"""Of each document, so that with its end it is four rows of 16."""


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Sixty documents; the text of a document is its own letter, and nothing else has that letter."""
    for number in range(60):
        (tmp_path / f"{number:02}").write_bytes(bytes([100 + number]) * LENGTH)
    return small_manifest(data__source=f"path:{tmp_path}", data__held_out=0.2, training__inner_tokens=32)


def documents_in(microbatches: list[Microbatch]) -> set[int]:
    return {token for microbatch in microbatches for token in microbatch.tokens.flatten().tolist()} - {256}


def read_by(manifest: Manifest, own: PeerId, nodes: tuple[PeerId, ...]) -> set[int]:
    """The documents of more than an epoch."""
    feed = TrainingFeed(manifest, open_documents(manifest), own)
    return documents_in([feed.next(nodes) for _ in range(150)])


def test_data_nodes_and_the_held_out_part_divide_the_documents(manifest: Manifest) -> None:
    held_out = documents_in(list(held_out_microbatches(manifest, 1000)))
    of_a, of_b = read_by(manifest, A, (A, B)), read_by(manifest, B, (A, B))
    assert of_a
    assert of_b
    assert not of_a & of_b
    assert of_a | of_b == read_by(manifest, A, (A,)) == set(range(100, 160)) - held_out
    assert 3 <= len(held_out) <= 25


def test_one_data_node_reads_the_same_whatever_its_name(manifest: Manifest) -> None:
    documents = open_documents(manifest)
    first, second = TrainingFeed(manifest, documents, A), TrainingFeed(manifest, documents, B)
    for _ in range(20):
        assert first.next((A,)).tokens.tolist() == second.next().tokens.tolist()


def test_a_feed_goes_on_at_its_cursor(manifest: Manifest) -> None:
    documents = open_documents(manifest)
    feed = TrainingFeed(manifest, documents, A)
    for _ in range(7):
        feed.next()
    again = TrainingFeed(manifest, documents, A, feed.cursor)
    for _ in range(7):
        assert feed.next().tokens.tolist() == again.next().tokens.tolist()


def test_held_out_microbatches_end_with_the_text_and_repeat_nothing(manifest: Manifest) -> None:
    microbatches = list(held_out_microbatches(manifest, 1000))
    per_document = [
        sum((microbatch.tokens == letter).sum().item() for microbatch in microbatches)
        for letter in documents_in(microbatches)
    ]
    assert max(per_document) <= LENGTH
    assert len(list(held_out_microbatches(manifest, 2))) == 2


def test_too_little_held_out_text_is_said(manifest: Manifest) -> None:
    none = manifest.model_copy(update={"data": manifest.data.model_copy(update={"held_out": 0.0})})
    with pytest.raises(ConfigError, match="held_out"):
        list(held_out_microbatches(none, 1))
