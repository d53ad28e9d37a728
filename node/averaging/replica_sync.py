"""The state of a replica between its anchors: snapshots, carrying over, starting anew, and the work done since the
anchor.

The replica belongs to the compute thread, so what is done to it is done there, in slices: between two of them
microbatches are computed. One such thing is under way at a time, in the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from node.averaging.anchor.anchor import Anchor
from node.averaging.anchor.anchor_store import AnchorStore
from node.averaging.anchor.lone_replica import LoneStep, step_alone, steps_between_rounds
from node.averaging.anchor.module_vector import LocalReplica
from node.averaging.anchor.outer_step import OuterRule
from node.averaging.anchor.shared_vector import SharedVector, Vector
from node.averaging.exchange.pseudo_gradient import SentParts, Source
from node.concurrency.compute_thread import ComputeThread, Priority
from node.model.optimizer import StepFigures
from protocol.interfaces.clock import Clock
from swarm.vocabulary.errors import ResourceExhausted, StateError

log = logging.getLogger(__name__)

SLICE: Final = 2**22
"""Elements (16 MiB) that hold the compute thread at a time: a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Work:
    """An amount of work: inner steps and the tokens in them."""

    steps: int = 0
    tokens: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.steps + other.steps, self.tokens + other.tokens)

    def __sub__(self, other: Work) -> Work:
        return Work(self.steps - other.steps, self.tokens - other.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A fixed pseudo-gradient."""

    source: Source
    part: slice
    """The fragment's elements."""
    norm: float
    """Euclidean; not finite when the replica is broken."""
    done: Work
    """All work of the replica up to it."""
    since_anchor: Work


@dataclass(frozen=True, slots=True)
class AloneRule:
    """The rule by which a lone replica takes its outer step."""

    inner_steps: int
    outer: OuterRule
    clock: Clock
    longest_s: float = math.inf
    """After so many seconds since the last outer step, the next inner step makes another due."""


@dataclass(frozen=True, slots=True, eq=False)
class SteppedTo:
    """An outer step that a replica took by itself: the anchor that it made, and the tokens in it."""

    anchor: Anchor
    tokens: int


class ReplicaSync:
    """The access of the event loop to one replica on the compute thread.

    Args:
        averaging: the thread for arithmetic on anchors.
    """

    def __init__(
        self,
        replica: LocalReplica,
        store: AnchorStore,
        compute: ComputeThread,
        averaging: ComputeThread,
        rule: AloneRule,
    ) -> None:
        self.is_alone = False
        """Read on the compute thread with each inner step."""
        self.lost = Work()
        """Given up by adopting another anchor, since the start."""
        self._replica = replica
        self._store = store
        self._compute = compute
        self._averaging = averaging
        self._rule = rule
        self._lone_every = steps_between_rounds(rule.inner_steps, len(replica.layout.fragments))
        self._done = Work()
        self._at_anchor = Work()
        self._anchored_at = rule.clock.monotonic()
        self._is_due = False
        """The outer step, should the replica be alone."""
        self._prepared: tuple[Snapshot, Anchor] | None = None
        """The anchor of that outer step, made of what the replica is now. As `_stepped_to` the compute thread's."""
        self._stepped_to: SteppedTo | None = None
        self._turn = asyncio.Lock()
        self._room: Vector | None = None
        replica.optimizer.before_step = self._before_inner_step

    @property
    def since_anchor(self) -> Work:
        """Our work since the current anchor."""
        return self._done - self._at_anchor

    def resume(self, since: Work) -> None:
        """Takes over the work since its anchor of a replica that was restored. To be called before it takes a step."""
        self._done, self._at_anchor = since, Work()
        self._is_due = since.steps >= self._lone_every

    def stand_alone(self, alone: bool) -> None:
        """Sets whether the replica takes its outer steps by itself from now on."""
        self.is_alone = alone
        if alone:
            self.trained_by(1)
        else:
            self._prepared = None

    def trained_by(self, replicas: int) -> None:
        """Sets how many replicas train the module: the learning rate follows from the tokens of all of them."""
        self._replica.optimizer.replicas = max(1, replicas)

    def after_inner_step(self, figures: StepFigures) -> SteppedTo | None:
        """Counts an inner step; returns the outer step that a lone replica took at its beginning. To be called on the
        compute thread, in the same job as the step.
        """
        self._done += Work(1, figures.tokens)
        work, waited_s = self.since_anchor, self._rule.clock.monotonic() - self._anchored_at
        self._is_due = work.steps >= self._lone_every or waited_s >= self._rule.longest_s
        stepped_to, self._stepped_to = self._stepped_to, None
        return stepped_to

    @property
    def lone_step_due(self) -> bool:
        """Whether the next inner step begins with the outer step of a lone replica."""
        return self.is_alone and self._is_due

    async def prepare_lone_step(self) -> None:
        """Makes the anchor of a lone replica's outer step on the averaging thread, so that the inner step that begins
        with it only has to put the replica on it. If that comes before it is made, or something else is under way, it
        is made in that step."""
        if not self.lone_step_due or self._prepared is not None or self._turn.locked():
            return
        async with self._turn:
            try:
                snapshot = await self._take_snapshot()
                if math.isfinite(snapshot.norm):
                    await self._prepare(snapshot)
                    return
            except ResourceExhausted as error:
                log.warning("%s", error)
                return
        log.warning("this replica's parameters are not finite; it starts again from its anchor")
        await self.adopt(self._store.current)

    async def snapshot(self) -> Snapshot:
        """Fixes the pseudo-gradient of the fragment whose turn it is. Its norm is computed on the averaging thread
        meanwhile.

        The memory of the one before is used again.
        """
        async with self._turn:
            return await self._take_snapshot()

    def committed(self, snapshot: Snapshot) -> None:
        """Notes that the anchor made with this snapshot holds now: what came after the snapshot is our work since the
        anchor.
        """
        self._stand(snapshot.done)

    async def carry(self, snapshot: Snapshot, anchor: Anchor, sent: SentParts | None) -> None:
        """Puts the replica on the new anchor, with the work done since the snapshot, and with what was left out of what
        was sent, if that is known."""
        async with self._turn:
            before, after = snapshot.source.snapshot, anchor.parameters
            if sent is not None:
                base = snapshot.source.anchor.parameters
                await self._averaging.run(Priority.UPKEEP, partial(sent.rewrite, base, before))
            for piece in _slices(snapshot.part):
                job = partial(self._carry, piece, before, after, done=snapshot.done if sent is None else None)
                await self._compute.run(Priority.UPKEEP, job)
            await self._compute.run(Priority.UPKEEP, partial(self._follow_schedule, anchor))

    async def adopt(self, anchor: Anchor) -> None:
        """Puts the replica on an anchor and forgets its own work and its inner optimizer's state. The anchor is on the
        store already."""
        self.lost += self.since_anchor
        self._stand(self._done)
        async with self._turn:
            for part, _ in anchor.parameters.pieces():
                for piece in _slices(part):
                    job = partial(self._replica.write, piece, anchor.parameters[piece])
                    await self._compute.run(Priority.UPKEEP, job)
            await self._compute.run(Priority.UPKEEP, partial(self._start_anew, anchor))

    # ---- a lone replica's outer step ---------------------------------------------------------------------------------

    async def _prepare(self, snapshot: Snapshot) -> None:
        """Gives up when an inner step has come: what the replica is now is not what its anchor has to be made of."""
        source, work = snapshot.source, snapshot.since_anchor

        def read(part: slice, out: Vector) -> None:
            np.copyto(out, source.snapshot[part])

        step = await self._averaging.run(Priority.UPKEEP, partial(LoneStep, self._store, self._rule.outer, read))
        for piece in step.pieces():
            if not self._is_what_it_was(snapshot):
                return
            await self._averaging.run(Priority.UPKEEP, piece)
        anchor = await self._averaging.run(Priority.UPKEEP, partial(step.anchor, work.steps, work.tokens))
        await self._compute.run(Priority.UPKEEP, partial(self._keep, snapshot, anchor))

    def _is_what_it_was(self, snapshot: Snapshot) -> bool:
        """Whether the replica has taken no inner step since, and stands on the anchor on which it stood."""
        return self._done == snapshot.done and self._store.current is snapshot.source.anchor

    def _keep(self, snapshot: Snapshot, anchor: Anchor) -> None:
        """On the compute thread, where no inner step can come between."""
        if self.lone_step_due and self._is_what_it_was(snapshot):
            self._prepared = snapshot, anchor

    def _before_inner_step(self) -> None:
        """Takes a lone replica's outer step when it is due. On the compute thread, in the inner step's job."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and not self._is_what_it_was(prepared[0]):
            prepared = None
        if not self.lone_step_due:
            return
        before = self._store.current.version
        try:
            anchor = self._step_at_once() if prepared is None else self._put_on(*prepared)
        except StateError as error:
            log.warning("%s; it starts again from its anchor", error)
            anchor = self._store.current
            for part, array in anchor.parameters.pieces():
                self._replica.write(part, array)
            self._start_anew(anchor)
            return
        self._stand(self._done)
        self._stepped_to = SteppedTo(anchor, anchor.version.tokens - before.tokens)

    def _put_on(self, snapshot: Snapshot, anchor: Anchor) -> Anchor:
        """What others than the inner optimizer have moved since the snapshot (a router's tables) is carried over."""
        part, before, after = snapshot.part, snapshot.source.snapshot, anchor.parameters
        self._store.put(anchor)
        self._replica.carry(part, before[part], after[part])
        return anchor

    def _step_at_once(self) -> Anchor:
        work = self.since_anchor
        return step_alone(self._replica, self._store, self._rule.outer, work.steps, work.tokens)

    # ---- inside ------------------------------------------------------------------------------------------------------

    async def _take_snapshot(self) -> Snapshot:
        """To be called by whoever has the turn."""
        if self._room is None:
            self._room = await self._averaging.run(Priority.UPKEEP, self._room_for_a_fragment)
        base, done, since = await self._compute.run(Priority.UPKEEP, self._where_we_stand)
        part = base.layout.range_of(*base.layout.fragments[base.version.fragment])
        source = Source(base, SharedVector([self._room[: part.stop - part.start]], part.start))
        squares = await self._copy(part, source)
        return Snapshot(source, part, math.sqrt(squares), done, since)

    async def _copy(self, part: slice, source: Source) -> float:
        """Copies slice after slice, and returns the sum of squares of what is to be sent."""
        norms = []
        async with asyncio.TaskGroup() as tasks:
            for piece in _slices(part):
                await self._compute.run(Priority.UPKEEP, partial(self._replica.read, piece, source.snapshot[piece]))
                job = partial(source.squares, piece)
                norms.append(tasks.create_task(self._averaging.run(Priority.UPKEEP, job)))
        return math.fsum(norm.result() for norm in norms)

    def _carry(self, piece: slice, before: Vector | SharedVector, after: SharedVector, done: Work | None) -> None:
        """On the compute thread. Where there was no work since the snapshot, the replica is the new anchor, and one
        copy makes it so.

        Args:
            done: all work up to the snapshot; None when that says nothing of the replica.
        """
        if done == self._done:
            self._replica.write(piece, after[piece])
        else:
            self._replica.carry(piece, before[piece], after[piece])

    def _room_for_a_fragment(self) -> Vector:
        """Written once, so that the system gives the memory now and not to the compute thread, slice by slice: a mean
        of 47 ms for the first two snapshots of 40 MB instead of 3."""
        layout = self._replica.layout
        parts = [layout.range_of(*fragment) for fragment in layout.fragments]
        return np.full(max(part.stop - part.start for part in parts), 0, np.float32)

    def _where_we_stand(self) -> tuple[Anchor, Work, Work]:
        """On the compute thread, where no outer step can come between."""
        return self._store.current, self._done, self.since_anchor

    def _follow_schedule(self, anchor: Anchor) -> None:
        optimizer, since = self._replica.optimizer, self.since_anchor
        optimizer.steps = anchor.version.steps + since.steps
        optimizer.tokens = anchor.version.tokens + since.tokens * optimizer.replicas

    def _start_anew(self, anchor: Anchor) -> None:
        """What inner steps came between two slices is gone, too."""
        self.lost += self.since_anchor
        self._stand(self._done)
        self._replica.optimizer.start_anew(anchor.version.steps, anchor.version.tokens)

    def _stand(self, done: Work) -> None:
        """On a new anchor, which has this much of our work in it."""
        self._at_anchor, self._anchored_at, self._is_due = done, self._rule.clock.monotonic(), False


def _slices(part: slice) -> list[slice]:
    return [slice(start, min(start + SLICE, part.stop)) for start in range(part.start, part.stop, SLICE)]
