"""The saving of a node's replica, out of the way of training."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from node.checkpoint.snapshot import Header
from node.checkpoint.state import ReplicaState
from node.concurrency.compute_thread import ComputeThread, Priority
from node.concurrency.task_groups import set_or_after
from node.observability.events import EventSink, Note
from swarm.vocabulary.errors import ResourceExhausted, StateError

log = logging.getLogger(__name__)


class SaveRequests:
    """Requests for a save, from any part of a node. Several requests before a save are one."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        self.reason = ""

    def request_save(self, reason: str) -> None:
        """Asks for a snapshot soon; returns at once. Call it on the event loop; does nothing where no checkpoints are
        kept.
        """
        self.reason = reason
        self.wanted.set()


class Saver:
    """Captures the replica on the compute thread, then hashes and writes it on a thread of its own: one write at a
    time, in order.

    Used as `with`: leaving it waits for a write that is under way.

    Args:
        capture: the replica as it is, copied or to be copied as it is written; called on the compute thread.
        write: puts it where it belongs (`node.checkpoint.folder.save_state`); called on the saver's own thread.
        every_s: seconds between two saves that nobody has asked for; those are left out while no step has been taken.
    """

    def __init__(
        self,
        capture: Callable[[], ReplicaState],
        write: Callable[[ReplicaState], Header],
        compute: ComputeThread,
        requests: SaveRequests,
        events: EventSink,
        every_s: float,
    ) -> None:
        self._capture = capture
        self._write = write
        self._compute = compute
        self._requests = requests
        self._events = events
        self._every_s = every_s
        self._saved_steps: int | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.shutdown(wait=True, cancel_futures=True)

    async def run(self) -> None:
        """Saves at every request and interval, until cancelled. A save that fails is a warning, and training goes
        on."""
        while True:
            await set_or_after(self._requests.wanted, self._every_s)
            reason, self._requests.reason = self._requests.reason, ""
            try:
                await self._save(reason)
            except (StateError, ResourceExhausted) as error:
                self._events.emit(Note("warning", f"{error}. {error.hint}"))

    async def save_at_the_end(self) -> None:
        """Writes the last snapshot of a node that stops; after the one being written, if there is one.

        Raises:
            StateError, ResourceExhausted: it could not be written.
        """
        await self._save("the node stops")

    def _written(self, state: ReplicaState) -> Header:
        """On the saver's own thread."""
        try:
            return self._write(state)
        finally:
            _no_more(state)

    async def _save(self, reason: str) -> None:
        state = await self._compute.run(Priority.UPKEEP, self._capture)
        if not reason and state.inner.steps == self._saved_steps:
            _no_more(state)
            return
        begun = time.perf_counter()
        header = await asyncio.get_running_loop().run_in_executor(self._writer, self._written, state)
        self._saved_steps = state.inner.steps
        log.info(
            "snapshot %d of module %s at inner step %d, %d bytes in %.2f s%s",
            header.number,
            header.owner.module,
            header.steps,
            header.file.size,
            time.perf_counter() - begun,
            f" ({reason})" if reason else "",
        )


def _no_more(state: ReplicaState) -> None:
    """Nothing of it is to be copied any more."""
    if state.copying is not None:
        state.copying.give_up()
