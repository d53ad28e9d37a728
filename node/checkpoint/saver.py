"""Captures a replica between inner steps, restores it, and saves it in the background."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn

from node.checkpoint.folder import Header, own_tensors
from node.checkpoint.state import Agreed, Counters, Post, ReplicaState, StateCopy
from node.concurrency.compute_thread import ComputeThread, Priority
from node.concurrency.task_groups import set_or_after
from node.model.device import copied
from node.model.initialization import floats_of, parameters_of
from node.model.optimizer import InnerOptimizer
from node.observability.events import EventSink, Note
from swarm.vocabulary.errors import ResourceExhausted, StateError

log = logging.getLogger(__name__)


def capture_module(
    parts: tuple[nn.Module, ...],
    optimizer: InnerOptimizer,
    post: Post | None = None,
    *,
    visits: int,
    tokens: int,
    agreed: Agreed | None = None,
) -> ReplicaState:
    """Captures a replica's state. `post` schedules its copy in slices while it is written (None: copies now)."""
    optimizer.before_change()  # finishes the previous copy
    names, floats = parameters_of(*parts), floats_of(*parts)
    since = (optimizer.steps, tokens) if agreed is None else (agreed.steps_since, agreed.tokens_since)
    counters, anchor = Counters(tokens, visits, *since), None if agreed is None else agreed.anchor
    if post is None:
        local = {name: copied(each) if isinstance(each, Tensor) else each.copied() for name, each in floats.items()}
        return ReplicaState(local, optimizer.export_state(names), counters, anchor)
    own, inner = optimizer.moved(names), optimizer.shared_state(names)
    copying = StateCopy(own_tensors({name: floats[name] for name in names if name in own}, inner), post)
    optimizer.before_change = copying.finish
    # Only the optimizer waits for the copy. A router's tables may change at any time, so copy them now.
    local = {name: tensor if name in own else copied(tensor) for name, tensor in names.items()}
    return ReplicaState(local, inner, counters, anchor, copying=copying)


@torch.no_grad()
def restore_module(parts: tuple[nn.Module, ...], optimizer: InnerOptimizer, state: ReplicaState) -> None:
    """Restores a replica's parameters and optimizer. Raises StateError, changing nothing, for another model."""
    parameters = parameters_of(*parts)
    saved, own = ({name: t.shape for name, t in tensors.items()} for tensors in (state.local, parameters))
    if saved != own:
        raise StateError("the snapshot has other parameters than the manifest's model")
    optimizer.import_state(parameters, state.inner)
    agreed = 0 if state.anchor is None else state.anchor.version.tokens
    optimizer.tokens = agreed + state.counters.tokens_since_anchor
    for name, floats in floats_of(*parts).items():
        if isinstance(floats, Tensor):
            floats.copy_(state.local[name])
        else:
            floats.store(state.local[name])


class SaveRequests:
    """Pending request for a snapshot, from anywhere in the node. Several requests before a save are merged."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        self.reason = ""

    def request_save(self, reason: str) -> None:
        """Requests a snapshot, written later. Call on the event loop. No effect if the node writes no checkpoint."""
        self.reason = reason
        self.wanted.set()


@dataclass(slots=True, eq=False)
class Saver:
    """Periodic and requested saves of a replica, captured on the compute thread and written in the background."""

    capture: Callable[[], ReplicaState]
    write: Callable[[ReplicaState], Header]
    compute: ComputeThread
    requests: SaveRequests
    events: EventSink
    every_s: float
    saved_steps: int | None = None  # Inner steps of the last snapshot
    _warned: tuple[str, float] = ("", 0.0)
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.shutdown(wait=True, cancel_futures=True)  # a save in progress is completed

    async def run(self) -> None:
        """Saves a snapshot at every interval and request until cancelled. A failed save is only a warning."""
        while True:
            await set_or_after(self.requests.wanted, self.every_s)
            reason, self.requests.reason = self.requests.reason, ""
            try:
                await self._save(reason)
            except (StateError, ResourceExhausted) as error:
                said, now = f"{error}. {error.hint}", time.monotonic()
                if said != self._warned[0] or now - self._warned[1] >= 300.0:
                    self._warned = said, now
                    self.events.emit(Note("warning", said))

    async def save_at_the_end(self) -> None:
        """Writes the last snapshot of a node that stops. Raises StateError, ResourceExhausted."""
        await self._save("the node stops")

    def _written(self, state: ReplicaState) -> Header:
        """Writes a captured state to the checkpoint. Runs on the saver's thread."""
        try:
            return self.write(state)
        finally:
            _no_more(state)

    async def _save(self, reason: str) -> None:
        state = await self.compute.run(Priority.UPKEEP, self.capture)
        if not reason and state.inner.steps == self.saved_steps:  # nothing new to save since the last snapshot
            _no_more(state)
            return
        begun = time.perf_counter()
        header = await asyncio.get_running_loop().run_in_executor(self._writer, self._written, state)
        self.saved_steps = state.inner.steps
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
    """Ends the unfinished copy of a captured state and frees the copy's memory."""
    if state.copying is not None:
        state.copying.give_up()
