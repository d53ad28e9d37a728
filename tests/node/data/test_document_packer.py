"""Whole documents keep every token, each is a label once, and a cursor brings one back to the same place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.data.documents import Documents, StreamPosition
from node.data.feed import TrainingFeed, held_out_microbatches
from node.data.packing import (
    BLOCK_MICROBATCHES,
    MOST_DOCUMENTS,
    PACKING,
    ROUTED,
    Cursor,
    DocumentPacker,
    Microbatch,
    reading_position,
)
from node.data.tokenizers import ByteTokenizer
from protocol.manifest.manifest import document_cost
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import PeerId
from tests.node.data.test_documents import Texts, everything
from tests.node.small_manifest import small_manifest

MANIFEST = small_manifest(model__attention="documents")
LONGEST, MOST = MANIFEST.model.sequence, MANIFEST.microbatch_tokens
END = ByteTokenizer().end_of_document
BLOCK = st.integers(1, 200)
LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any)


def texts_of(lengths: list[int]) -> Documents:
    """Documents of letters that tell where in them they stand."""
    contents = {
        f"{number:02}": bytes(32 + (7 * number + place) % 90 for place in range(length))
        for number, length in enumerate(lengths)
    }
    return Documents(Texts(contents), ByteTokenizer(), seed=9)


class SmallBlocks(DocumentPacker):
    """So that a few documents make several."""

    def __init__(self, documents: Documents, block: int, start: Cursor, *, endless: bool) -> None:
        read = documents.endless if endless else documents.epoch
        super().__init__(MANIFEST, read(reading_position(start.block), everything), start)
        self._block_tokens = max(block, LONGEST)


def all_of(packer: DocumentPacker) -> list[Microbatch]:
    return list(iter(packer.next, None))


def documents_in(microbatch: Microbatch) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens and labels of each."""
    tokens, labels = (row.split(microbatch.documents) for row in (microbatch.tokens[0], microbatch.labels[0]))
    for some, following in zip(tokens, labels, strict=True):
        yield some.tolist(), following.tolist()


def pieces_of(documents: Documents, block: int) -> Iterator[tuple[list[int], list[int]]]:
    """Of one epoch."""
    for text in all_of(SmallBlocks(documents, block, Cursor(), endless=False)):
        yield from documents_in(text)


@given(LENGTHS, BLOCK)
def test_every_token_is_a_label_once_and_follows_its_own_document(lengths: list[int], block: int) -> None:
    documents = texts_of(lengths)
    found = list(pieces_of(documents, block))
    whole = [fragment.tokens.tolist() for fragment in documents.epoch(StreamPosition(), everything)]
    assert Counter(label for _, labels in found for label in labels) == Counter(token for one in whole for token in one)
    for tokens, labels in found:
        assert tokens[1:] == labels[:-1]
        assert any(
            labels == one[at : at + len(labels)] and tokens[0] == (one[at - 1] if at else END)
            for one in whole
            for at in range(len(one))
        )


@given(LENGTHS, BLOCK)
def test_what_fits_is_never_cut(lengths: list[int], block: int) -> None:
    documents = texts_of(lengths)
    found = list(pieces_of(documents, block))
    for one in (fragment.tokens.tolist() for fragment in documents.epoch(StreamPosition(), everything)):
        if len(one) <= LONGEST:
            assert ([END, *one[:-1]], one) in found


@given(LENGTHS, BLOCK)
def test_a_microbatch_is_one_row_that_is_not_too_long(lengths: list[int], block: int) -> None:
    for text in all_of(SmallBlocks(texts_of(lengths), block, Cursor(), endless=False)):
        assert text.tokens.shape == text.labels.shape == (1, sum(text.documents))
        assert 1 <= min(text.documents) <= max(text.documents) <= LONGEST
        assert text.size <= MOST
        assert text.cost == pytest.approx(sum(document_cost(MANIFEST.model, tokens) for tokens in text.documents))


@settings(deadline=None)
@given(LENGTHS, BLOCK, st.integers(0, 10))
def test_a_cursor_brings_one_back(lengths: list[int], block: int, taken: int) -> None:
    documents = texts_of(lengths)
    first = SmallBlocks(documents, block, Cursor(), endless=True)
    before = [first.next() for _ in range(taken)]
    second = SmallBlocks(documents, block, first.cursor, endless=True)
    assert all(text is not None and text.end <= first.cursor for text in before), "cursors rise"
    for _ in range(6):
        expected, got = first.next(), second.next()
        assert expected is not None
        assert got is not None
        assert (got.tokens.tolist(), got.labels.tolist()) == (expected.tokens.tolist(), expected.labels.tolist())
        assert (got.documents, got.start, got.end) == (expected.documents, expected.start, expected.end)
        assert got.start < got.end
        assert second.cursor == first.cursor


def test_a_short_text_is_not_read_again_and_again_for_one_block() -> None:
    """A block ends with an epoch once it has enough microbatches."""
    texts = texts_of([30] * 40)
    packer = DocumentPacker(MANIFEST, texts.endless(StreamPosition(), everything), Cursor())
    first = packer.next()
    assert first is not None
    while first.start.block == packer.cursor.block:
        packer.next()
    end, epoch_tokens = packer.cursor.block, 40 * 31
    assert (end.position, end.offset) == (0, 0)
    assert (end.epoch - 1) * epoch_tokens < ROUTED * BLOCK_MICROBATCHES * MOST <= end.epoch * epoch_tokens


def test_a_block_of_very_short_documents_has_no_more_of_them_than_can_soon_be_packed() -> None:
    packer = DocumentPacker(MANIFEST, texts_of([1] * 50).endless(StreamPosition(), everything), Cursor())
    packer._block_tokens = packer._enough_tokens = 10 * MOST_DOCUMENTS
    first = packer.next()
    assert first is not None
    sizes = [first.size]
    while packer.cursor.block == first.start.block:
        text = packer.next()
        assert text is not None
        sizes.append(text.size)
    assert MOST_DOCUMENTS <= sum(sizes) / 2 <= MOST_DOCUMENTS + MOST
    assert sum(sizes) > 0.95 * MOST * len(sizes), "the last one is filled"


def test_data_nodes_divide_the_documents() -> None:
    documents = texts_of([30] * 40)
    feeds = [TrainingFeed(MANIFEST, documents, PeerId(name)) for name in ("a", "b")]
    both = (PeerId("a"), PeerId("b"))
    texts = [[feed.next(both) for _ in range(3)] for feed in feeds]
    starts = [{tuple(tokens) for text in of for tokens, _ in documents_in(text)} for of in texts]
    assert not starts[0] & starts[1]


def test_little_held_out_text_is_measured_too() -> None:
    """Rows of a stream would need a whole microbatch of it."""
    manifest = small_manifest(model__attention="documents", data={"held_out": 0.5})
    texts = list(held_out_microbatches(manifest, 5, texts_of([3] * 8)))
    assert 1 <= len(texts) <= 2
    assert sum(text.size for text in texts) < MOST


def test_no_held_out_text_at_all() -> None:
    manifest = small_manifest(model__attention="documents", data={"held_out": 0.0})
    with pytest.raises(ConfigError, match="held-out"):
        list(held_out_microbatches(manifest, 5, texts_of([3] * 8)))


def test_a_block_that_was_packed_in_another_way_is_begun_anew() -> None:
    texts = texts_of([30] * 40)
    packer = SmallBlocks(texts, 400, Cursor(), endless=True)
    begin = packer.cursor
    first = packer.next()
    assert first is not None
    assert packer.next() is not None
    assert packer.cursor.packing == PACKING != Cursor().packing
    older = replace(packer.cursor, packing=1)
    assert older.taken == 2
    again = SmallBlocks(texts, 400, older, endless=True)
    assert again.cursor == begin
    repeated = again.next()
    assert repeated is not None
    assert repeated.tokens.tolist() == first.tokens.tolist()


def test_documents_that_would_not_fill_a_microbatch_are_of_the_next_block() -> None:
    """Two fill a microbatch of twice their length; an odd number that has been read leaves one over."""
    texts = texts_of([LONGEST - 1] * 40)
    assert MOST % LONGEST == 0
    each = MOST // LONGEST
    packer = SmallBlocks(texts, (3 * each + 1) * LONGEST, Cursor(), endless=True)
    for _ in range(12):
        text = packer.next()
        assert text is not None
        assert text.documents == (LONGEST,) * each
