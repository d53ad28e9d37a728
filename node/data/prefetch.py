"""Prefetching of microbatches on a thread of its own, so that neither the event loop nor the compute device waits for
files.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from node.data.feed import TrainingFeed
from node.data.packing import Microbatch
from swarm.vocabulary.errors import SkipstoneError
from swarm.vocabulary.types import PeerId


class Prefetcher:
    """A bounded queue of microbatches in front of a feed.

    Args:
        data_nodes: the live data nodes now; asked before each microbatch is packed.
        arrived: called on the event loop after each one.
        depth: microbatches packed ahead.
    """

    def __init__(
        self, feed: TrainingFeed, data_nodes: Callable[[], tuple[PeerId, ...]], arrived: Callable[[], None], depth: int
    ) -> None:
        self._feed = feed
        self._data_nodes = data_nodes
        self._arrived = arrived
        self._packed: queue.Queue[Microbatch | Exception] = queue.Queue(depth)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._pack, name="data", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        with suppress(queue.Empty):
            self._packed.get_nowait()  # makes room, so that a thread that waits for it sees that it is to stop
        self._thread.join(timeout=5.0)

    def ready(self) -> Microbatch | None:
        """The next microbatch, or None when it is not packed yet.

        Raises:
            SkipstoneError: the feed has failed; or whatever else ended the thread.
        """
        try:
            packed = self._packed.get_nowait()
        except queue.Empty:
            return None
        if isinstance(packed, Exception):
            raise packed
        return packed

    def _pack(self) -> None:
        assert self._loop is not None
        while not self._stopping.is_set():
            packed: Microbatch | Exception
            try:
                packed = self._feed.next(self._data_nodes())
            except Exception as error:  # handed to whoever asks for the next one
                packed = error
            except BaseException as error:  # a panic of a library: this thread must not end unheard
                packed = SkipstoneError(f"the text cannot be packed: {type(error).__name__}: {error}")
            self._packed.put(packed)
            if not self._stopping.is_set():
                self._loop.call_soon_threadsafe(self._arrived)
            if isinstance(packed, Exception):
                return
