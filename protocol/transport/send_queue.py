"""Shared send capacity: a byte budget given out first come, first served, and the turns of the lanes.

Whose chunk goes next on a link: the lanes take turns, and in each lane its transfers.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from swarm.vocabulary.errors import PeerError


class ByteBudget:
    """A budget of bytes under way; senders wait until there is room for theirs.

    Something larger than the whole budget goes when it is alone: it could never go otherwise.
    """

    def __init__(self, budget_bytes: int, places: int) -> None:
        self._budget_bytes = budget_bytes
        self._places = places
        self._used_bytes = 0
        self._used_places = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._error: PeerError | None = None

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @asynccontextmanager
    async def share(self, size_bytes: int) -> AsyncIterator[None]:
        """Waits for room, and holds it within the block.

        Raises:
            PeerError: the one given to `close`.
        """
        await self._acquire(size_bytes)
        try:
            yield
        finally:
            self._release(size_bytes)

    def close(self, error: PeerError) -> None:
        """Fails everyone who waits or comes later."""
        self._error = error
        while self._waiting:
            _, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)

    async def _acquire(self, size_bytes: int) -> None:
        if self._error is not None:
            raise self._error
        if not self._waiting and self._fits(size_bytes):
            self._take(size_bytes)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            granted = turn.done() and not turn.cancelled() and turn.exception() is None
            if granted:
                self._release(size_bytes)
            else:
                turn.cancel()
                self._grant()
            raise

    def _fits(self, size_bytes: int) -> bool:
        if self._used_places == 0:
            return True
        return self._used_places < self._places and self._used_bytes + size_bytes <= self._budget_bytes

    def _take(self, size_bytes: int) -> None:
        self._used_bytes += size_bytes
        self._used_places += 1

    def _release(self, size_bytes: int) -> None:
        self._used_bytes -= size_bytes
        self._used_places -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            size_bytes, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
            elif self._fits(size_bytes):
                self._waiting.popleft()
                self._take(size_bytes)
                turn.set_result(None)
            else:
                return


Item = TypeVar("Item")


class Lane(enum.Enum):
    """A class of tensors on a link, with a budget and turns of its own. Each lane waits for itself only, so that a
    round of hundreds of megabytes does not stand before a microbatch that others wait for; and when both have something
    to send, each gets half of the chunks, so that a busy pipeline does not stop a round either.
    """

    MICROBATCHES = 0
    BULK = 1
    """Rounds and state."""


class Turns(Generic[Item]):
    """Queues of what has something to send, one for each lane, served in turn."""

    def __init__(self) -> None:
        self._queues: deque[tuple[Lane, deque[Item]]] = deque((lane, deque()) for lane in Lane)

    def __bool__(self) -> bool:
        return any(queue for _, queue in self._queues)

    def add(self, lane: Lane, item: Item) -> None:
        """Appends at the end of its lane."""
        self._queue(lane).append(item)

    def first(self) -> Item | None:
        """The one that `take` would return."""
        return next((queue[0] for _, queue in self._queues if queue), None)

    def take(self) -> Item:
        """Removes and returns the next in turn; its lane's next turn comes after the others'.

        Raises:
            IndexError: nobody's.
        """
        for lane, queue in self._queues:
            if queue:
                self._queues.remove((lane, queue))
                self._queues.append((lane, queue))
                return queue.popleft()
        raise IndexError("nothing has a turn")

    def remove(self, lane: Lane, item: Item) -> bool:
        """Removes it; whether it was there."""
        queue = self._queue(lane)
        if item not in queue:
            return False
        queue.remove(item)
        return True

    def clear(self) -> None:
        for _, queue in self._queues:
            queue.clear()

    def _queue(self, lane: Lane) -> deque[Item]:
        return next(queue for own, queue in self._queues if own is lane)
