"""The position from which a data node goes on reading when it is started again from a checkpoint.

It stands alone because it speaks of microbatches under way, of which nothing else that reads text knows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from node.data.packing import Cursor, Microbatch
from swarm.vocabulary.types import MicrobatchId


class ReadingPosition:
    """The texts that wait or are under way, and those that have come back but may not be in the parameters yet.

    The event loop tells it; the compute thread asks it while it copies the parameters.

    Args:
        start: where the first text begins.
        remembered: texts that have come back and are kept in mind; more than an inner step can still hold unapplied.
    """

    def __init__(self, start: Cursor, remembered: int) -> None:
        self._next = start
        self._waiting: set[Cursor] = set()
        self._under_way: dict[Cursor, MicrobatchId] = {}
        self._back: deque[tuple[Cursor, MicrobatchId]] = deque(maxlen=remembered)
        self._lock = threading.Lock()

    def drawn(self, text: Microbatch) -> None:
        """Notes that the text has been read and waits: others may set out before it."""
        with self._lock:
            self._waiting.add(text.start)
            self._next = max(self._next, text.end)

    def sent(self, text: Microbatch, microbatch: MicrobatchId) -> None:
        """Notes that the text has set out under this name, for the first time or again."""
        with self._lock:
            self._waiting.discard(text.start)
            self._under_way[text.start] = microbatch
            self._next = max(self._next, text.end)

    def came_back(self, text: Microbatch) -> None:
        """Notes that its gradient has reached every stage of its path."""
        with self._lock:
            microbatch = self._under_way.pop(text.start, None)
            if microbatch is not None:
                self._back.append((text.start, microbatch))

    def dropped(self, text: Microbatch) -> None:
        """Notes that it will not set out again."""
        with self._lock:
            self._under_way.pop(text.start, None)

    def resume_at(self, is_applied: Callable[[MicrobatchId], bool]) -> Cursor:
        """The cursor of the first text whose gradient is not in the parameters. A few after it may be: they are read
        twice.
        """
        with self._lock:
            known = [*self._under_way.items(), *self._back]
            unapplied = [start for start, microbatch in known if not is_applied(microbatch)]
            return min([*self._waiting, *unapplied], default=self._next)
