"""Data nodes read everything once and never what is held out; packing keeps every token; cursors bring one back."""

import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.data import packing
from node.data.documents import UNSCORED, Documents, Fragment, StreamPosition
from node.data.feed import Prefetcher, ReadingPosition, TrainingFeed, held_out_microbatches, open_documents
from node.data.packing import Cursor, DocumentPacker, Microbatch, RowPacker, reading_position
from node.data.tokenizers import ByteTokenizer, Tokens
from node.experts.router import DocumentRouter
from protocol.manifest.manifest import Manifest, document_cost
from swarm.experts.routes import best_route
from swarm.vocabulary.errors import ConfigError, SkipstoneError
from swarm.vocabulary.types import Affinity, MicrobatchId, PeerId
from tests.node.data.test_documents import Texts, everything
from tests.node.network.small_swarm import text_of, until
from tests.node.small_manifest import small_manifest

A, B = PeerId("a"), PeerId("b")
LENGTH = 63


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Sixty documents; the text of a document is its own letter, and nothing else has that letter."""
    for number in range(60):
        (tmp_path / f"{number:02}").write_bytes(bytes([100 + number]) * LENGTH)
    return small_manifest(data__source=f"path:{tmp_path}", data__held_out=0.2, training__inner_tokens=32)


def documents_in(microbatches: list[Microbatch]) -> set[int]:
    return {token for microbatch in microbatches for token in microbatch.tokens.flatten().tolist()} - {256}


def read_by(manifest: Manifest, own: PeerId, nodes: tuple[PeerId, ...]) -> set[int]:
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


def test_workers_of_whole_paths_divide_the_documents_by_route(manifest: Manifest) -> None:
    stages = manifest.stages.model_copy(update={"experts": 2, "workers": "paths"})
    model = manifest.model.model_copy(update={"attention": "documents"})
    run = manifest.model_copy(update={"stages": stages, "model": model})
    router = open_documents(run).router
    assert router is not None
    depth = run.stages.count - 1
    of_name = {100 + number: best_route(router.affinity(f"{number:02}", np.empty(0))) for number in range(60)}
    routes = {A: (0,) * depth, B: (1,) * depth}

    def read(own: PeerId) -> set[int]:
        feed = TrainingFeed(run, open_documents(run), own, routes=lambda: routes)
        microbatches = [feed.next((A, B)) for _ in range(150)]
        assert {microbatch.route for microbatch in microbatches} == {routes[own]}
        return documents_in(microbatches)

    held_out = documents_in(list(held_out_microbatches(manifest, 1000)))
    of_a, of_b = read(A), read(B)
    assert not of_a & of_b
    for own, documents in ((A, of_a), (B, of_b)):
        assert documents >= {each for each, route in of_name.items() if route == routes[own]} - held_out
    assert of_a | of_b == set(of_name) - held_out


def test_one_data_node_reads_the_same_whatever_its_name(manifest: Manifest) -> None:
    documents = open_documents(manifest)
    first, second = TrainingFeed(manifest, documents, A), TrainingFeed(manifest, documents, B)
    for _ in range(20):
        assert first.next((A,)).tokens.tolist() == second.next().tokens.tolist()


def test_held_out_microbatches_end_with_the_text_and_repeat_nothing(manifest: Manifest) -> None:
    microbatches = list(held_out_microbatches(manifest, 1000))
    per_document = [
        sum((microbatch.tokens == letter).sum().item() for microbatch in microbatches)
        for letter in documents_in(microbatches)
    ]
    assert max(per_document) <= LENGTH
    assert len(list(held_out_microbatches(manifest, 2))) == 2
    none = manifest.model_copy(update={"data": manifest.data.model_copy(update={"held_out": 0.0})})
    with pytest.raises(ConfigError, match="held_out"):
        list(held_out_microbatches(none, 1))


DEPTH = 3


class Feed:
    def __init__(self, fails_after: int | None = None, error: Exception | None = None) -> None:
        self.packed = 0
        self.asked_for: list[tuple[PeerId, ...]] = []
        self._fails_after = fails_after
        self._error = error or ConfigError("there is no text for this data node")

    def next(self, data_nodes: tuple[PeerId, ...] = ()) -> Microbatch:
        if self.packed == self._fails_after:
            raise self._error
        self.asked_for.append(data_nodes)
        self.packed += 1
        return text_of(small_manifest(), self.packed)


class Arrivals:
    def __init__(self) -> None:
        self.count = 0
        self.threads: set[str] = set()

    def __call__(self) -> None:
        self.count += 1
        self.threads.add(threading.current_thread().name)


@asynccontextmanager
async def prefetcher(feed: Feed, arrivals: Arrivals | None = None) -> AsyncIterator[Prefetcher]:
    before = threading.active_count()
    with Prefetcher(feed, lambda: (PeerId("one"),), arrivals or Arrivals(), DEPTH) as texts:  # type: ignore[arg-type]
        yield texts
    assert threading.active_count() == before, "the thread is still there"


def is_number(text: Microbatch | None, number: int) -> bool:
    return text is not None and text.tokens.equal(text_of(small_manifest(), number).tokens)


async def test_they_come_in_order_and_are_told_of_on_the_loop() -> None:
    feed, arrivals = Feed(), Arrivals()
    async with prefetcher(feed, arrivals) as texts:
        for number in range(1, 10):
            await until(lambda number=number: arrivals.count >= number)
            assert is_number(texts.ready(), number)
    assert arrivals.threads == {threading.main_thread().name}
    assert set(feed.asked_for) == {(PeerId("one"),)}


async def test_no_more_are_packed_than_the_depth_and_the_one_in_hand() -> None:
    feed = Feed()
    async with prefetcher(feed) as texts:
        await until(lambda: feed.packed == DEPTH + 1)
        assert texts._packed.full()
        texts.ready()
        await until(lambda: feed.packed == DEPTH + 2)


@pytest.mark.parametrize("error", [ConfigError("no text"), OSError(5, "the disk is gone"), KeyError("a defect")])
async def test_an_error_surfaces_after_what_was_packed_before_it(error: Exception) -> None:
    feed, arrivals = Feed(fails_after=1, error=error), Arrivals()
    async with prefetcher(feed, arrivals) as texts:
        await until(lambda: arrivals.count == 2)
        assert is_number(texts.ready(), 1)
        with pytest.raises(type(error)) as raised:
            texts.ready()
        assert raised.value is error
        assert texts.ready() is None


class PanicException(BaseException):
    """What a library in Rust raises; no `Exception`."""


async def test_the_thread_never_ends_unheard() -> None:
    feed, arrivals = Feed(fails_after=0, error=PanicException("give up")), Arrivals()  # type: ignore[arg-type]
    async with prefetcher(feed, arrivals) as texts:
        await until(lambda: arrivals.count == 1)
        with pytest.raises(SkipstoneError, match="PanicException: give up"):
            texts.ready()


@pytest.mark.parametrize("fails_after", [0, None], ids=["with an error unread", "while it waits for room"])
async def test_leaving_ends_the_thread_and_raises_nothing(fails_after: int | None) -> None:
    feed, arrivals = Feed(fails_after), Arrivals()
    async with prefetcher(feed, arrivals):
        await until(lambda: arrivals.count == 1 if fails_after == 0 else feed.packed == DEPTH + 1)


def text(index: int) -> Microbatch:
    nothing = torch.zeros(0)
    return Microbatch(nothing, nothing, 0.0, at(index), at(index + 1))


def at(index: int) -> Cursor:
    return Cursor(StreamPosition(position=index // 2), index % 2)


def named(number: int) -> MicrobatchId:
    return MicrobatchId(PeerId("a"), number)


def among(*numbers: int) -> Callable[[MicrobatchId], bool]:
    return lambda microbatch: microbatch.number in numbers


def position_after(sent: int, back: int) -> ReadingPosition:
    position = ReadingPosition(at(0), remembered=8)
    for index in range(sent):
        position.sent(text(index), named(index))
    for index in range(back):
        position.came_back(text(index))
    return position


def test_what_is_in_flight_or_not_applied_is_read_again() -> None:
    assert ReadingPosition(at(3), 8).resume_at(among()) == at(3)
    assert position_after(5, 3).resume_at(among(0, 1, 2)) == at(3)
    assert position_after(5, 3).resume_at(among(0, 2, 3, 4)) == at(1)


def test_a_text_that_sets_out_again_counts_under_its_new_name_and_a_dropped_one_not_at_all() -> None:
    position = position_after(3, 0)
    position.sent(text(0), named(7))
    assert (position.resume_at(among(0, 1, 2)), position.resume_at(among(7, 1, 2))) == (at(0), at(3))
    position.dropped(text(1))
    assert position.resume_at(among(7)) == at(2)


@given(st.permutations(range(8)), st.integers(0, 8))
def test_no_text_is_left_out_in_whatever_order_they_come_back(order: list[int], applied: int) -> None:
    position = position_after(8, 0)
    for index in order:
        position.came_back(text(index))
    assert position.resume_at(among(*order[:applied])) == at(min(order[applied:], default=8))


def test_what_waits_while_others_set_out_is_read_again() -> None:
    position = ReadingPosition(at(0), remembered=8)
    for index in range(3):
        position.drawn(text(index))
    position.sent(text(2), named(2))
    position.came_back(text(2))
    assert position.resume_at(among(2)) == at(0)
    position.sent(text(0), named(3))
    assert position.resume_at(among(2, 3)) == at(1)
    position.sent(text(1), named(4))
    assert position.resume_at(among(2, 3, 4)) == at(3)


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
    fragments = read(reading_position(start.block), everything)
    packer = DocumentPacker(manifest, fragments, start, router=documents.router, uneven=uneven)
    packer._block_tokens = max(block, LONGEST)
    return packer


def all_of(packer: DocumentPacker | RowPacker) -> list[Microbatch]:
    return list(iter(packer.next, None))


def labels_of(text: Microbatch) -> Iterator[Tokens]:
    for labels in text.labels[0].split(text.documents):
        yield labels.numpy()


@given(LENGTHS, BLOCK)
def test_every_token_is_a_label_once_and_follows_its_own_document_in_short_rows(lengths: list[int], block: int) -> None:
    documents = texts_of(lengths)
    found = list[tuple[list[int], list[int]]]()
    for text in all_of(packer_of(documents, block)):
        assert text.tokens.shape == text.labels.shape == (1, sum(text.documents))
        assert 1 <= min(text.documents) <= max(text.documents) <= LONGEST
        assert text.size <= MOST
        assert text.cost == pytest.approx(sum(document_cost(MANIFEST.model, tokens) for tokens in text.documents))
        pieces = (row[0].split(text.documents) for row in (text.tokens, text.labels))
        found += [(tokens.tolist(), labels.tolist()) for tokens, labels in zip(*pieces, strict=True)]
    whole = [fragment.tokens.tolist() for fragment in documents.epoch(StreamPosition(), everything)]
    assert Counter(label for _, labels in found for label in labels) == Counter(token for one in whole for token in one)
    for tokens, labels in found:
        assert tokens[1:] == labels[:-1]
        assert any(
            labels == one[at : at + len(labels)] and tokens[0] == (one[at - 1] if at else END)
            for one in whole
            for at in range(len(one))
        )
    for one in whole:
        assert len(one) > LONGEST or ([END, *one[:-1]], one) in found, "what fits is never cut"


def state_of(text: Microbatch) -> tuple[object, ...]:
    where = text.documents, text.start, text.end, text.route, text.affinity
    return text.tokens.tolist(), text.labels.tolist(), *where


@given(LENGTHS, BLOCK, st.integers(0, 10), st.booleans())
def test_a_cursor_brings_one_back(lengths: list[int], block: int, taken: int, routed: bool) -> None:
    documents = letters_of([length + 1 for length in lengths]) if routed else texts_of(lengths)
    first = packer_of(documents, block, endless=True)
    before = [first.next() for _ in range(taken)]
    second = packer_of(documents, block, first.cursor, endless=True)
    assert routed or all(text.end <= first.cursor for text in before), "cursors rise"
    for _ in range(6):
        expected, got = first.next(), second.next()
        assert state_of(got) == state_of(expected)
        assert got.start < got.end
        assert second.cursor == first.cursor


def test_a_short_text_is_not_read_again_and_again_for_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BLOCK_TOKENS", 2**20)
    packer = DocumentPacker(MANIFEST, texts_of([30] * 40).endless(StreamPosition(), everything), Cursor())
    first = packer.next()
    while first.start.block == packer.cursor.block:
        packer.next()
    end, epoch_tokens = packer.cursor.block, 40 * 31
    assert (end.position, end.offset) == (0, 0)
    enough = packing.ROUTED * packing.BLOCK_MICROBATCHES * MOST
    assert (end.epoch - 1) * epoch_tokens < enough <= end.epoch * epoch_tokens


def test_a_block_of_very_short_documents_has_no_more_of_them_than_can_soon_be_packed() -> None:
    packer = DocumentPacker(MANIFEST, texts_of([1] * 50).endless(StreamPosition(), everything), Cursor())
    packer._block_tokens = packer._enough_tokens = 10 * packing.MOST_DOCUMENTS
    first = packer.next()
    sizes = [first.size]
    while packer.cursor.block == first.start.block:
        sizes.append(packer.next().size)
    assert packing.MOST_DOCUMENTS <= sum(sizes) / 2 <= packing.MOST_DOCUMENTS + MOST
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
    first = packer.next()
    packer.next()
    assert packer.cursor.packing == packing.PACKING != Cursor().packing
    older = replace(packer.cursor, packing=1)
    assert older.taken == 2
    again = packer_of(texts, 400, older, endless=True)
    assert (again.cursor, again.next().tokens.tolist()) == (begin, first.tokens.tolist())


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
        yield Fragment(StreamPosition(0, position), np.arange(begin, begin + length))
        begin += length


def row_packer(
    fragments: Iterator[Fragment], rows: int, sequence: int, block: int, start: Cursor | None = None
) -> RowPacker:
    model = MANIFEST.model.model_copy(update={"sequence": sequence})  # shorter than a manifest may have
    training = MANIFEST.training.model_copy(update={"rows": rows})
    manifest = MANIFEST.model_copy(update={"model": model, "training": training})
    return RowPacker(manifest, fragments, start or Cursor(), block_tokens=block)


@given(ROW_LENGTHS, ROWS, SEQUENCE, ROW_BLOCK)
def test_no_token_is_lost_or_repeated(lengths: list[int], rows: int, sequence: int, block: int) -> None:
    microbatches = all_of(row_packer(fragments_of(lengths), rows, sequence, block))
    tokens = sorted(token for microbatch in microbatches for token in microbatch.tokens.flatten().tolist())
    whole = (sum(lengths) - 1) // (rows * sequence)  # the last token is nobody's input: nothing follows it
    assert (len(microbatches), tokens) == (whole, list(range(whole * rows * sequence)))
    for microbatch in microbatches:
        assert microbatch.tokens.shape == microbatch.labels.shape == (rows, sequence)
        assert microbatch.size == rows * sequence
        assert (microbatch.labels == microbatch.tokens + 1).all(), "labels are the tokens that follow"


@given(ROW_LENGTHS, ROWS, SEQUENCE, ROW_BLOCK, st.integers(0, 10))
def test_a_cursor_brings_rows_back(lengths: list[int], rows: int, sequence: int, block: int, taken: int) -> None:
    texts = Texts({f"{number:02}": b"x" * length for number, length in enumerate(lengths)})
    documents = Documents(texts, ByteTokenizer(), seed=9)
    first = row_packer(documents.endless(StreamPosition(), everything), rows, sequence, block)
    for _ in range(taken):
        first.next()
    cursor = first.cursor
    second = row_packer(documents.endless(cursor.block, everything), rows, sequence, block, cursor)
    for _ in range(6):
        assert (state_of(second.next()), second.cursor) == (state_of(first.next()), first.cursor)


def test_rows_of_a_block_are_shuffled() -> None:
    rows = [microbatch.tokens[0, 0].item() for microbatch in all_of(row_packer(fragments_of([1001]), 1, 10, 500))]
    assert rows != sorted(rows)
    assert sorted(rows[:50]) == list(range(0, 500, 10))
    assert sorted(rows[50:]) == list(range(500, 1000, 10))
