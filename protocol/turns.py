"""Whose chunk goes next on a link: the lanes take turns, and in each lane its transfers."""

from __future__ import annotations

import enum
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Lane(enum.Enum):
    """What shares a link. Each lane waits for itself only, so that a round of hundreds of megabytes does not stand before a
    microbatch that others wait for; and when both have something to send, each gets half of the chunks, so that a busy pipeline
    does not stop a round either."""

    MICROBATCHES = 0
    BULK = 1
    """Rounds and state."""


class Turns(Generic[Item]):
    """Queues of what has something to send, one for each lane."""

    def __init__(self) -> None:
        self._queues: deque[tuple[Lane, deque[Item]]] = deque((lane, deque()) for lane in Lane)

    def __bool__(self) -> bool:
        return any(queue for _, queue in self._queues)

    def add(self, lane: Lane, item: Item) -> None:
        """At the end of its lane."""
        self._queue(lane).append(item)

    def first(self) -> Item | None:
        """What `take` would give."""
        return next((queue[0] for _, queue in self._queues if queue), None)

    def take(self) -> Item:
        """Whose turn it is; its lane's next turn comes after the others'.

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
        """Whether it was there."""
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
