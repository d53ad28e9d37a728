"""What data nodes read together: everything once, and never what is held out."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.data.documents import Place
from node.data.feed import Prefetcher, ReadingPosition, TrainingFeed, held_out_microbatches, open_documents
from node.data.packing import Cursor, Microbatch
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError, SkipstoneError
from swarm.vocabulary.types import MicrobatchId, PeerId
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


def test_too_little_held_out_text_is_said(manifest: Manifest) -> None:
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
    return Cursor(Place(position=index // 2), index % 2)


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


def test_it_begins_at_the_start_and_ends_behind_what_is_applied() -> None:
    assert ReadingPosition(at(3), 8).resume_at(among()) == at(3)
    assert position_after(5, 5).resume_at(among(0, 1, 2, 3, 4)) == at(5)


def test_what_is_under_way_or_not_applied_is_read_again() -> None:
    assert position_after(5, 3).resume_at(among(0, 1, 2)) == at(3)
    assert position_after(5, 3).resume_at(among(0)) == at(1)
    assert position_after(5, 3).resume_at(among(0, 2, 3, 4)) == at(1)


def test_a_text_that_sets_out_again_counts_under_its_new_name_and_a_dropped_one_not_at_all() -> None:
    position = position_after(3, 0)
    position.sent(text(0), named(7))
    assert position.resume_at(among(0, 1, 2)) == at(0)
    assert position.resume_at(among(7, 1, 2)) == at(3)
    position.dropped(text(1))
    assert position.resume_at(among(7)) == at(2)


@given(st.permutations(range(8)), st.integers(0, 8))
def test_no_text_is_left_out_in_whatever_order_they_come_back(order: list[int], applied: int) -> None:
    position = position_after(8, 0)
    for index in order:
        position.came_back(text(index))
    resumed = position.resume_at(among(*order[:applied]))
    assert resumed == at(min(order[applied:], default=8))


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
