"""Packing keeps every token, each is a label once, and a cursor brings one back to the same place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.data import packing
from node.data.documents import UNSCORED, Documents, Fragment, Place
from node.data.feed import held_out_microbatches
from node.data.packing import (
    BLOCK_MICROBATCHES,
    MOST_DOCUMENTS,
    PACKING,
    ROUTED,
    Cursor,
    DocumentPacker,
    Microbatch,
    RowPacker,
    reading_place,
)
from node.data.tokenizers import ByteTokenizer, Tokens
from node.experts.router import DocumentRouter
from protocol.manifest.manifest import document_cost
from swarm.experts.routes import best_route
from swarm.vocabulary.types import Affinity
from tests.node.data.test_documents import Texts, everything
from tests.node.small_manifest import small_manifest

MANIFEST = small_manifest(model__attention="documents")
ROUTED_MANIFEST = small_manifest(model__attention="documents", stages__experts=2)
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


class ByFirstByte:
    """A router that only knows a document's first byte."""

    def affinity(self, name: str, opening: Tokens) -> Affinity:
        first = int(opening[0])
        return (10 + first % 2, 11), (5, 5 + first // 2 % 2)


def letters_of(lengths: list[int], router: DocumentRouter | None = None) -> Documents:
    contents = {f"{number:02}": bytes([65 + number]) * length for number, length in enumerate(lengths)}
    return Documents(Texts(contents), ByteTokenizer(), seed=9, router=router or ByFirstByte())


def packer_of(
    documents: Documents, block: int, start: Cursor | None = None, *, endless: bool = False, uneven: float = math.inf
) -> DocumentPacker:
    """Blocks are small, so that a few documents make several."""
    start = start or Cursor()
    read = documents.endless if endless else documents.epoch
    manifest = MANIFEST if documents.router is None else ROUTED_MANIFEST
    fragments = read(reading_place(start.block), everything)
    packer = DocumentPacker(manifest, fragments, start, router=documents.router, uneven=uneven)
    packer._block_tokens = max(block, LONGEST)
    return packer


def all_of(packer: DocumentPacker | RowPacker) -> list[Microbatch]:
    return list(iter(packer.next, None))


def following(packer: DocumentPacker | RowPacker) -> Microbatch:
    microbatch = packer.next()
    assert microbatch is not None
    return microbatch


def labels_of(text: Microbatch) -> Iterator[Tokens]:
    for labels in text.labels[0].split(text.documents):
        yield labels.numpy()


def documents_in(microbatch: Microbatch) -> Iterator[tuple[list[int], list[int]]]:
    tokens, labels = (row.split(microbatch.documents) for row in (microbatch.tokens[0], microbatch.labels[0]))
    for some, following in zip(tokens, labels, strict=True):
        yield some.tolist(), following.tolist()


def pieces_of(documents: Documents, block: int) -> Iterator[tuple[list[int], list[int]]]:
    for text in all_of(packer_of(documents, block)):
        yield from documents_in(text)


@given(LENGTHS, BLOCK)
def test_every_token_is_a_label_once_and_follows_its_own_document(lengths: list[int], block: int) -> None:
    documents = texts_of(lengths)
    found = list(pieces_of(documents, block))
    whole = [fragment.tokens.tolist() for fragment in documents.epoch(Place(), everything)]
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
    for one in (fragment.tokens.tolist() for fragment in documents.epoch(Place(), everything)):
        if len(one) <= LONGEST:
            assert ([END, *one[:-1]], one) in found


@given(LENGTHS, BLOCK)
def test_a_microbatch_is_one_row_that_is_not_too_long(lengths: list[int], block: int) -> None:
    for text in all_of(packer_of(texts_of(lengths), block)):
        assert text.tokens.shape == text.labels.shape == (1, sum(text.documents))
        assert 1 <= min(text.documents) <= max(text.documents) <= LONGEST
        assert text.size <= MOST
        assert text.cost == pytest.approx(sum(document_cost(MANIFEST.model, tokens) for tokens in text.documents))


def state_of(text: Microbatch) -> tuple[object, ...]:
    where = text.documents, text.start, text.end, text.route, text.affinity
    return text.tokens.tolist(), text.labels.tolist(), *where


@given(LENGTHS, BLOCK, st.integers(0, 10), st.booleans())
def test_a_cursor_brings_one_back(lengths: list[int], block: int, taken: int, routed: bool) -> None:
    documents = letters_of([length + 1 for length in lengths]) if routed else texts_of(lengths)
    first = packer_of(documents, block, endless=True)
    before = [following(first) for _ in range(taken)]
    second = packer_of(documents, block, first.cursor, endless=True)
    assert routed or all(text.end <= first.cursor for text in before), "cursors rise"
    for _ in range(6):
        expected, got = following(first), following(second)
        assert state_of(got) == state_of(expected)
        assert got.start < got.end
        assert second.cursor == first.cursor


def test_a_short_text_is_not_read_again_and_again_for_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BLOCK_TOKENS", 2**20)
    texts = texts_of([30] * 40)
    packer = DocumentPacker(MANIFEST, texts.endless(Place(), everything), Cursor())
    first = following(packer)
    while first.start.block == packer.cursor.block:
        packer.next()
    end, epoch_tokens = packer.cursor.block, 40 * 31
    assert (end.position, end.offset) == (0, 0)
    assert (end.epoch - 1) * epoch_tokens < ROUTED * BLOCK_MICROBATCHES * MOST <= end.epoch * epoch_tokens


def test_a_block_of_very_short_documents_has_no_more_of_them_than_can_soon_be_packed() -> None:
    packer = DocumentPacker(MANIFEST, texts_of([1] * 50).endless(Place(), everything), Cursor())
    packer._block_tokens = packer._enough_tokens = 10 * MOST_DOCUMENTS
    first = following(packer)
    sizes = [first.size]
    while packer.cursor.block == first.start.block:
        sizes.append(following(packer).size)
    assert MOST_DOCUMENTS <= sum(sizes) / 2 <= MOST_DOCUMENTS + MOST
    assert sum(sizes) > 0.95 * MOST * len(sizes), "the last one is filled"


def test_little_held_out_text_is_measured_too() -> None:
    manifest = small_manifest(model__attention="documents", data={"held_out": 0.5})
    texts = list(held_out_microbatches(manifest, 5, texts_of([3] * 8)))
    assert 1 <= len(texts) <= 2
    assert sum(text.size for text in texts) < MOST


def test_a_block_that_was_packed_in_another_way_is_begun_anew() -> None:
    texts = texts_of([30] * 40)
    packer = packer_of(texts, 400, endless=True)
    begin = packer.cursor
    first = following(packer)
    following(packer)
    assert packer.cursor.packing == PACKING != Cursor().packing
    older = replace(packer.cursor, packing=1)
    assert older.taken == 2
    again = packer_of(texts, 400, older, endless=True)
    assert again.cursor == begin
    assert following(again).tokens.tolist() == first.tokens.tolist()


def test_documents_that_would_not_fill_a_microbatch_are_of_the_next_block() -> None:
    """Two fill a microbatch of twice their length; an odd number that has been read leaves one over."""
    texts = texts_of([LONGEST - 1] * 40)
    assert MOST % LONGEST == 0
    each = MOST // LONGEST
    packer = packer_of(texts, (3 * each + 1) * LONGEST, endless=True)
    for _ in range(12):
        assert following(packer).documents == (LONGEST,) * each


@given(st.lists(st.integers(1, 60), min_size=1, max_size=16), BLOCK)
def test_every_piece_of_a_document_goes_the_documents_route_and_none_is_lost(lengths: list[int], block: int) -> None:
    texts = all_of(packer_of(letters_of(lengths), block))
    router = ByFirstByte()
    seen: Counter[int] = Counter()
    for text in texts:
        scores = []
        for labels in labels_of(text):
            seen.update(labels.tolist())
            letter = labels[labels != ByteTokenizer.end_of_document]
            if letter.size:  # a piece that is but the end of a document does not tell whose
                scores.append(router.affinity("", letter))
        assert all(best_route(of) == text.route for of in scores)
        if len(scores) == len(text.documents):
            summed = [np.sum(of_stage, axis=0).tolist() for of_stage in zip(*scores, strict=True)]
            assert [list(of_stage) for of_stage in text.affinity] == summed
    assert seen == Counter({65 + number: length for number, length in enumerate(lengths)} | {256: len(lengths)})


class ByLetter:
    def affinity(self, name: str, opening: Tokens) -> Affinity:
        return ((int(opening[0]) - 68, 0),)


@pytest.mark.parametrize(("uneven", "most"), [(math.inf, 17), (1.1, 11)])
def test_no_expert_has_much_more_of_a_block_than_others(uneven: float, most: int) -> None:
    documents = letters_of([30] * 20, ByLetter())
    taken: dict[int, set[int]] = {0: set(), 1: set()}
    for text in all_of(packer_of(documents, 20 * 31, uneven=uneven)):
        assert text.route == best_route(text.affinity)
        taken[text.route[0]].update(int(labels[0]) for labels in labels_of(text) if labels[0] < 256)
    assert sum(map(len, taken.values())) == 20, "every document has one route"
    assert len(taken[0]) == most
    assert min(taken[0]) > max(taken[1]), "those that lose the least go elsewhere"


def test_held_out_text_leaves_out_the_tokens_that_its_route_is_chosen_by() -> None:
    manifest = small_manifest(model__attention="documents", data__held_out=0.99)
    lengths = [10, 33, 50]
    texts = list(held_out_microbatches(manifest, 99, letters_of(lengths), 20))
    labels = np.concatenate([piece for text in texts for piece in labels_of(text)])
    scored = Counter(labels[labels != UNSCORED].tolist())
    assert scored == {66: 13, 67: 30, 256: 2}, "of the one shorter than the prefix nothing is left"
    assert all(text.scored for text in texts)
    whole = list(held_out_microbatches(manifest, 99, letters_of(lengths), 0))
    assert sum(text.scored for text in whole) == sum(lengths) + 3


ROWS = st.integers(1, 3)
SEQUENCE = st.integers(1, 7)
ROW_BLOCK = st.integers(1, 60)
ROW_LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def fragments_of(lengths: list[int]) -> Iterator[Fragment]:
    """Documents whose tokens are running numbers, so that every token is told from every other."""
    begin = 0
    for position, length in enumerate(lengths):
        yield Fragment(Place(0, position), np.arange(begin, begin + length))
        begin += length


def row_packer(
    fragments: Iterator[Fragment], rows: int, sequence: int, block: int, start: Cursor | None = None
) -> RowPacker:
    start = start or Cursor()
    return RowPacker(fragments, rows=rows, sequence=sequence, seed=5, start=start, cost=8.0, block_tokens=block)


@given(ROW_LENGTHS, ROWS, SEQUENCE, ROW_BLOCK)
def test_no_token_is_lost_or_repeated(lengths: list[int], rows: int, sequence: int, block: int) -> None:
    microbatches = all_of(row_packer(fragments_of(lengths), rows, sequence, block))
    tokens = sorted(token for microbatch in microbatches for token in microbatch.tokens.flatten().tolist())
    whole = (sum(lengths) - 1) // (rows * sequence)  # the last token is nobody's input: nothing follows it
    assert len(microbatches) == whole
    assert tokens == list(range(whole * rows * sequence))


@given(ROW_LENGTHS, ROWS, SEQUENCE, ROW_BLOCK)
def test_labels_are_the_tokens_that_follow(lengths: list[int], rows: int, sequence: int, block: int) -> None:
    for microbatch in all_of(row_packer(fragments_of(lengths), rows, sequence, block)):
        assert microbatch.tokens.shape == microbatch.labels.shape == (rows, sequence)
        assert microbatch.size == rows * sequence
        assert (microbatch.labels == microbatch.tokens + 1).all()


@given(ROW_LENGTHS, ROWS, SEQUENCE, ROW_BLOCK, st.integers(0, 10))
def test_a_cursor_brings_rows_back(lengths: list[int], rows: int, sequence: int, block: int, taken: int) -> None:
    texts = Texts({f"{number:02}": b"x" * length for number, length in enumerate(lengths)})
    documents = Documents(texts, ByteTokenizer(), seed=9)
    first = row_packer(documents.endless(Place(), everything), rows, sequence, block)
    for _ in range(taken):
        first.next()
    cursor = first.cursor
    second = row_packer(documents.endless(cursor.block, everything), rows, sequence, block, cursor)
    for _ in range(6):
        assert state_of(following(second)) == state_of(following(first))
        assert second.cursor == first.cursor


def test_rows_of_a_block_are_shuffled() -> None:
    rows = [microbatch.tokens[0, 0].item() for microbatch in all_of(row_packer(fragments_of([1001]), 1, 10, 500))]
    assert rows != sorted(rows)
    assert sorted(rows[:50]) == list(range(0, 500, 10))
    assert sorted(rows[50:]) == list(range(500, 1000, 10))
