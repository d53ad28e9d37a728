"""Microbatches packed ahead: never more than asked for, errors where they are looked for, and an end in good order."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from node.data.feed import Prefetcher
from node.data.packing import Microbatch
from swarm.vocabulary.errors import ConfigError, SkipstoneError
from swarm.vocabulary.types import PeerId
from tests.node.network.small_swarm import text_of, until
from tests.node.small_manifest import small_manifest

DEPTH = 3


class Feed:
    """Numbered microbatches, until it fails."""

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


async def test_nothing_packed_yet_is_none() -> None:
    feed = Feed(fails_after=0)
    texts = Prefetcher(feed, tuple, Arrivals(), DEPTH)  # type: ignore[arg-type]
    assert texts.ready() is None


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


async def test_leaving_with_an_error_unread_raises_nothing() -> None:
    arrivals = Arrivals()
    async with prefetcher(Feed(fails_after=0), arrivals):
        await until(lambda: arrivals.count == 1)


async def test_leaving_while_it_waits_for_room_ends_the_thread() -> None:
    feed = Feed()
    async with prefetcher(feed):
        await until(lambda: feed.packed == DEPTH + 1)
