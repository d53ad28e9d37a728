"""Packing keeps every token, labels are the tokens that follow, and a cursor brings one back to the same place."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from node.data.documents import Documents, Fragment, StreamPosition
from node.data.packing import Cursor, Microbatch, RowPacker
from node.data.tokenizers import ByteTokenizer
from tests.node.data.test_documents import Texts, everything

ROWS = st.integers(1, 3)
SEQUENCE = st.integers(1, 7)
BLOCK = st.integers(1, 60)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def fragments_of(lengths: list[int]) -> Iterator[Fragment]:
    """Documents whose tokens are running numbers, so that every token is told from every other."""
    begin = 0
    for position, length in enumerate(lengths):
        yield Fragment(StreamPosition(0, position), np.arange(begin, begin + length))
        begin += length


def packer(
    fragments: Iterator[Fragment], rows: int, sequence: int, block: int, start: Cursor | None = None
) -> RowPacker:
    return RowPacker(
        fragments,
        rows=rows,
        sequence=sequence,
        seed=5,
        start=start or Cursor(),
        cost=8.0,
        block_tokens=block,
    )


def all_of(packed: RowPacker) -> list[Microbatch]:
    microbatches = []
    while (microbatch := packed.next()) is not None:
        microbatches.append(microbatch)
    return microbatches


@given(LENGTHS, ROWS, SEQUENCE, BLOCK)
def test_no_token_is_lost_or_repeated(lengths: list[int], rows: int, sequence: int, block: int) -> None:
    microbatches = all_of(packer(fragments_of(lengths), rows, sequence, block))
    tokens = sorted(token for microbatch in microbatches for token in microbatch.tokens.flatten().tolist())
    whole = (sum(lengths) - 1) // (rows * sequence)  # the last token is nobody's input: nothing follows it
    assert len(microbatches) == whole
    assert tokens == list(range(whole * rows * sequence))


@given(LENGTHS, ROWS, SEQUENCE, BLOCK)
def test_labels_are_the_tokens_that_follow(lengths: list[int], rows: int, sequence: int, block: int) -> None:
    for microbatch in all_of(packer(fragments_of(lengths), rows, sequence, block)):
        assert microbatch.tokens.shape == microbatch.labels.shape == (rows, sequence)
        assert microbatch.size == rows * sequence
        assert (microbatch.labels == microbatch.tokens + 1).all()


@given(LENGTHS, ROWS, SEQUENCE, BLOCK, st.integers(0, 10))
def test_a_cursor_brings_one_back(lengths: list[int], rows: int, sequence: int, block: int, taken: int) -> None:
    texts = Texts({f"{number:02}": b"x" * length for number, length in enumerate(lengths)})
    documents = Documents(texts, ByteTokenizer(), seed=9)
    first = packer(documents.endless(StreamPosition(), everything), rows, sequence, block)
    for _ in range(taken):
        first.next()
    cursor = first.cursor
    second = packer(documents.endless(cursor.block, everything), rows, sequence, block, cursor)
    for _ in range(6):
        expected, got = first.next(), second.next()
        assert expected is not None
        assert got is not None
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert got.labels.tolist() == expected.labels.tolist()
        assert second.cursor == first.cursor


def test_rows_of_a_block_are_shuffled() -> None:
    rows = [microbatch.tokens[0, 0].item() for microbatch in all_of(packer(fragments_of([1001]), 1, 10, 500))]
    assert rows != sorted(rows)
    assert sorted(rows[:50]) == list(range(0, 500, 10))
    assert sorted(rows[50:]) == list(range(500, 1000, 10))
