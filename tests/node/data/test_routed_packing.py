"""Documents of one route are packed together, none is lost, and a cursor brings one back, also into a document."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.data.documents import UNSCORED, Documents, StreamPosition
from node.data.feed import held_out_microbatches
from node.data.packing import Cursor, DocumentPacker, Microbatch, reading_position
from node.data.tokenizers import ByteTokenizer, Tokens
from swarm.experts.routes import best_route
from swarm.vocabulary.types import Affinity
from tests.node.data.test_documents import Texts, everything
from tests.node.small_manifest import small_manifest

MANIFEST = small_manifest(model__attention="documents", stages__experts=2)
LONGEST = MANIFEST.model.sequence
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=16)
BLOCK = st.integers(1, 200)


class ByFirstByte:
    """A router that only knows a document's first byte."""

    def affinity(self, name: str, opening: Tokens) -> Affinity:
        first = int(opening[0])
        return (10 + first % 2, 11), (5, 5 + first // 2 % 2)


def texts_of(lengths: list[int]) -> Documents:
    """Documents of one letter each."""
    contents = {f"{number:02}": bytes([65 + number]) * length for number, length in enumerate(lengths)}
    return Documents(Texts(contents), ByteTokenizer(), seed=9, router=ByFirstByte())


def packer_of(
    documents: Documents, block: int, start: Cursor, *, endless: bool, uneven: float = math.inf
) -> DocumentPacker:
    read = documents.endless if endless else documents.epoch
    fragments = read(reading_position(start.block), everything)
    packer = DocumentPacker(MANIFEST, fragments, start, router=documents.router, uneven=uneven)
    packer._block_tokens = max(block, LONGEST)
    return packer


def all_of(packer: DocumentPacker) -> list[Microbatch]:
    return list(iter(packer.next, None))


def labels_of(text: Microbatch) -> Iterator[Tokens]:
    for labels in text.labels[0].split(text.documents):
        yield labels.numpy()


@given(LENGTHS, BLOCK)
def test_every_piece_of_a_document_goes_the_documents_route_and_none_is_lost(lengths: list[int], block: int) -> None:
    texts = all_of(packer_of(texts_of(lengths), block, Cursor(), endless=False))
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


@settings(deadline=None)
@given(LENGTHS, BLOCK, st.integers(0, 10))
def test_a_cursor_brings_one_back(lengths: list[int], block: int, taken: int) -> None:
    documents = texts_of(lengths)
    first = packer_of(documents, block, Cursor(), endless=True)
    for _ in range(taken):
        first.next()
    second = packer_of(documents, block, first.cursor, endless=True)
    for _ in range(6):
        expected, got = first.next(), second.next()
        assert expected is not None
        assert got is not None
        assert got.labels.tolist() == expected.labels.tolist()
        assert (got.route, got.affinity, got.end) == (expected.route, expected.affinity, expected.end)


class ByLetter:
    """Of two experts the first for most letters, by more and more."""

    def affinity(self, name: str, opening: Tokens) -> Affinity:
        return ((int(opening[0]) - 68, 0),)


@pytest.mark.parametrize(("uneven", "most"), [(math.inf, 17), (1.1, 11)])
def test_no_expert_has_much_more_of_a_block_than_others(uneven: float, most: int) -> None:
    contents = {f"{number:02}": bytes([65 + number]) * 30 for number in range(20)}
    documents = Documents(Texts(contents), ByteTokenizer(), 9, ByLetter())
    taken: dict[int, set[int]] = {0: set(), 1: set()}
    for text in all_of(packer_of(documents, 20 * 31, Cursor(), endless=False, uneven=uneven)):
        assert text.route == best_route(text.affinity)
        taken[text.route[0]].update(int(labels[0]) for labels in labels_of(text) if labels[0] < 256)
    assert sum(map(len, taken.values())) == 20, "every document has one route"
    assert len(taken[0]) == most
    assert min(taken[0]) > max(taken[1]), "those that lose the least go elsewhere"


def test_held_out_text_leaves_out_the_tokens_that_its_route_is_chosen_by() -> None:
    lengths = [10, 33, 50]
    texts = list(
        held_out_microbatches(
            small_manifest(model__attention="documents", data__held_out=0.99), 99, texts_of(lengths), 20
        )
    )
    labels = np.concatenate([piece for text in texts for piece in labels_of(text)])
    scored = Counter(labels[labels != UNSCORED].tolist())
    assert scored == {66: 13, 67: 30, 256: 2}, "of the one shorter than the prefix nothing is left"
    assert all(text.scored for text in texts)
    documents = texts_of(lengths)
    whole = list(
        held_out_microbatches(small_manifest(model__attention="documents", data__held_out=0.99), 99, documents, 0)
    )
    assert sum(text.scored for text in whole) == sum(lengths) + 3
    assert all(
        fragment.start == StreamPosition(0, fragment.start.position)
        for fragment in documents.epoch(StreamPosition(), everything)
    )
