"""Moves a replica from anchor to anchor: snapshots, new anchors, and counts of inner steps since the last anchor."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from node.averaging.anchor.anchor import Anchor, AnchorStore
from node.averaging.anchor.local_replica import LocalReplica
from node.averaging.anchor.outer_step import OuterRule, step_alone
from node.averaging.anchor.shared_vector import SharedVector, Vector
from node.averaging.exchange.reduction import SentParts, UpdateSource
from node.concurrency.compute_thread import ComputeThread, Priority
from node.model.optimizer import StepFigures
from protocol.interfaces.clock import Clock
from swarm.averaging.round_events import RoundRules
from swarm.averaging.schedule import steps_between_rounds
from swarm.vocabulary.errors import StateError

log = logging.getLogger(__name__)

SLICE: Final = 2**22
"""Elements per job on the compute thread (16 MiB), which takes a few milliseconds."""


@dataclass(frozen=True, slots=True)
class InnerWork:
    """Counts of inner optimizer steps and of their tokens."""

    steps: int = 0
    tokens: int = 0

    def __add__(self, other: InnerWork) -> InnerWork:
        return InnerWork(self.steps + other.steps, self.tokens + other.tokens)

    def __sub__(self, other: InnerWork) -> InnerWork:
        return InnerWork(self.steps - other.steps, self.tokens - other.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Pseudo-gradient of one fragment at one moment, and the inner steps in it."""

    source: UpdateSource
    part: slice
    norm: float
    """Euclidean norm. Not finite if the replica diverged."""
    done: InnerWork
    since_anchor: InnerWork


@dataclass(frozen=True, slots=True, eq=False)
class SteppedTo:
    """Anchor that a module's only replica made alone, and the tokens trained since the previous anchor."""

    anchor: Anchor
    tokens: int


class ReplicaSync:
    """Access of averaging rounds to one replica. Anchor arithmetic runs on the `averaging` thread."""

    def __init__(
        self,
        replica: LocalReplica,
        store: AnchorStore,
        compute: ComputeThread,
        averaging: ComputeThread,
        rules: RoundRules,
        outer: OuterRule,
        clock: Clock,
    ) -> None:
        self.is_alone: Callable[[], bool] = lambda: False
        """Tells whether no other peer serves the module. Called on the compute thread at each inner step."""
        self.lost = InnerWork()
        """Work discarded by adopting other anchors, since the start."""
        self._replica = replica
        self._store = store
        self._compute = compute
        self._averaging = averaging
        self._rules = rules
        self._outer = outer
        self._clock = clock
        self._done = InnerWork()
        self._at_anchor = InnerWork()
        self._anchored_at = clock.monotonic()
        self._stepped_to: SteppedTo | None = None
        self._turn = asyncio.Lock()
        self._room: Vector | None = None
        replica.optimizer.before_step = self._before_inner_step

    @property
    def since_anchor(self) -> InnerWork:
        return self._done - self._at_anchor

    def resume(self, since: InnerWork) -> None:
        self._done, self._at_anchor = since, InnerWork()

    def trained_by(self, replicas: int) -> None:
        """Sets how many replicas train the module, because the learning rate depends on the tokens of all of them."""
        self._replica.optimizer.replicas = max(1, replicas)

    def after_inner_step(self, figures: StepFigures) -> SteppedTo | None:
        """Counts an inner step, in the same compute job. Returns the outer step taken just before, if any."""
        self._done += InnerWork(1, figures.tokens)
        stepped_to, self._stepped_to = self._stepped_to, None
        return stepped_to

    async def snapshot(self) -> Snapshot:
        """Copies the parameters of the fragment that is averaged next. Reuses the memory of the previous snapshot."""
        async with self._turn:
            # Zeroing takes long, so it runs on the averaging thread.
            if self._room is None:
                parts = [self._store.layout.range_of(*fragment) for fragment in self._store.layout.fragments]
                largest = max(part.stop - part.start for part in parts)
                room = partial[Vector](np.full, largest, 0, np.float32)
                self._room = await self._averaging.run(Priority.UPKEEP, room)
            # One job, so that anchor and counters belong together.
            base, done, since = await self._compute.run(
                Priority.UPKEEP, lambda: (self._store.current, self._done, self.since_anchor)
            )
            part = base.layout.range_of(*base.layout.fragments[base.version.fragment])
            source = UpdateSource(base, SharedVector([self._room[: part.stop - part.start]], part.start))
            squares = await self._copy(part, source)
            return Snapshot(source, part, math.sqrt(squares), done, since)

    def committed(self, snapshot: Snapshot) -> None:
        """Records the commit of this snapshot's round: `since_anchor` now counts inner steps after the snapshot."""
        self._stand(snapshot.done)

    async def carry(self, snapshot: Snapshot, anchor: Anchor, sent: SentParts | None) -> None:
        """Sets the replica to the new anchor, plus its changes since the snapshot and values that the codec dropped."""
        async with self._turn:
            before, after = snapshot.source.snapshot, anchor.parameters
            if sent is not None:
                base = snapshot.source.anchor.parameters
                await self._averaging.run(Priority.UPKEEP, partial(sent.rewrite, base, before))
            # Slices let the compute thread run microbatches in between.
            for piece in _slices(snapshot.part):
                job = partial(self._carry, piece, before, after, done=snapshot.done if sent is None else None)
                await self._compute.run(Priority.UPKEEP, job)
            await self._compute.run(Priority.UPKEEP, partial(self._follow_schedule, anchor))

    async def adopt(self, anchor: Anchor) -> None:
        """Sets the replica to `anchor`. Discards its inner steps since the last anchor and its optimizer state."""
        self.lost += self.since_anchor
        self._stand(self._done)
        async with self._turn:
            for part, _ in anchor.parameters.pieces():
                for piece in _slices(part):
                    job = partial(self._replica.write, piece, anchor.parameters[piece])
                    await self._compute.run(Priority.UPKEEP, job)
            await self._compute.run(Priority.UPKEEP, partial(self._start_anew, anchor))

    def _before_inner_step(self) -> None:
        """Takes the outer step if one is due and no other peer serves the module. Runs on the compute thread."""
        # `solo` takes its outer steps at the same points, so one replica per stage computes the same as one process.
        if not self.is_alone():
            return
        self.trained_by(1)
        work, waited_s = self.since_anchor, self._clock.monotonic() - self._anchored_at
        if not work.steps or (work.steps < steps_between_rounds(self._rules) and waited_s < self._rules.longest_s):
            return
        before = self._store.current
        try:
            anchor = step_alone(self._replica, self._store, self._outer, work.steps, work.tokens)
        except StateError as error:
            # Restart from the last anchor instead of spreading the divergence.
            log.warning("%s. It restarts from its anchor.", error)
            for part, array in before.parameters.pieces():
                self._replica.write(part, array)
            self._start_anew(before)
            return
        self._stand(self._done)
        self._stepped_to = SteppedTo(anchor, anchor.version.tokens - before.version.tokens)

    async def _copy(self, part: slice, source: UpdateSource) -> float:
        norms = []
        # The norm of one slice is computed while the next is copied.
        async with asyncio.TaskGroup() as tasks:
            for piece in _slices(part):
                await self._compute.run(Priority.UPKEEP, partial(self._replica.read, piece, source.snapshot[piece]))
                job = partial(source.squares, piece)
                norms.append(tasks.create_task(self._averaging.run(Priority.UPKEEP, job)))
        return math.fsum(norm.result() for norm in norms)

    def _carry(self, piece: slice, before: Vector | SharedVector, after: SharedVector, done: InnerWork | None) -> None:
        # Without inner steps since the snapshot, copy the anchor, because the sum would round.
        if done == self._done:
            self._replica.write(piece, after[piece])
        else:
            self._replica.carry(piece, before[piece], after[piece])

    def _follow_schedule(self, anchor: Anchor) -> None:
        optimizer, since = self._replica.optimizer, self.since_anchor
        optimizer.steps = anchor.version.steps + since.steps
        optimizer.tokens = anchor.version.tokens + since.tokens * optimizer.replicas

    def _start_anew(self, anchor: Anchor) -> None:
        self.lost += self.since_anchor
        self._stand(self._done)
        self._replica.optimizer.start_anew(anchor.version.steps, anchor.version.tokens)

    def _stand(self, done: InnerWork) -> None:
        self._at_anchor, self._anchored_at = done, self._clock.monotonic()


def _slices(part: slice) -> list[slice]:
    return [slice(start, min(start + SLICE, part.stop)) for start in range(part.start, part.stop, SLICE)]
