"""Runs one replica's averaging rounds: ReplicaSync moves it from anchor to anchor, as its RoundMachine decides."""

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import numpy as np

from node.averaging.anchor.anchor import Anchor, AnchorStore, distance_between
from node.averaging.anchor.outer_step import LocalReplica, OuterRule, step_alone
from node.averaging.anchor.shared_vector import SharedVector, Vector, squares
from node.averaging.auditor import Auditor
from node.averaging.exchange.all_reduce import AllReduce, ExchangeMeans
from node.averaging.exchange.pieces import Arrivals, Plan, ReceiveRates
from node.averaging.exchange.reduction import SentParts, UpdateSource
from node.concurrency.compute_thread import ComputeThread, Priority
from node.concurrency.machine_runner import MachineRunner
from node.model.optimizer import StepFigures
from node.network.dispatcher import Dispatcher
from node.observability.events import RoundCommitted
from node.observability.failpoints import crash_point
from protocol.interfaces.clock import Clock
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Refusal
from swarm.averaging import round_events as events
from swarm.averaging.roster import contributors
from swarm.averaging.round_events import RoundRules
from swarm.averaging.round_machine import RoundMachine
from swarm.averaging.schedule import steps_between_rounds
from swarm.averaging.trust import AnchorDrift
from swarm.vocabulary.averaging_messages import AuditControl, Contribution, Roster, RoundControl, RoundId, RoundPiece
from swarm.vocabulary.errors import PeerError, ProtocolViolation, ResourceExhausted, SkipstoneError, StateError
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId

log = logging.getLogger(__name__)

SLICE: Final = 2**22  # Elements per job on the compute thread (16 MiB), which takes a few milliseconds


@dataclass(frozen=True, slots=True)
class InnerWork:
    """Counts of inner optimizer steps and of their tokens."""

    steps: int = 0
    tokens: int = 0

    def __add__(self, other: "InnerWork") -> "InnerWork":
        return InnerWork(self.steps + other.steps, self.tokens + other.tokens)

    def __sub__(self, other: "InnerWork") -> "InnerWork":
        return InnerWork(self.steps - other.steps, self.tokens - other.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Pseudo-gradient of one fragment at one moment, and the inner steps in it."""

    source: UpdateSource
    part: slice
    norm: float  # Euclidean norm. Not finite if the replica diverged
    done: InnerWork
    since_anchor: InnerWork


@dataclass(frozen=True, slots=True, eq=False)
class SteppedTo:
    """Anchor that a module's only replica made alone, and the tokens trained since the previous anchor."""

    anchor: Anchor
    tokens: int


class ReplicaSync:
    """Moves one replica from anchor to anchor. Anchor arithmetic runs on the `averaging` thread."""

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
        self.is_alone: Callable[[], bool] = lambda: False  # Called on the compute thread at each inner step
        self.lost = InnerWork()  # Work discarded by adopting other anchors, since the start
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
            if self._room is None:  # zeroing takes long, so it runs on the averaging thread
                parts = [self._store.layout.range_of(*fragment) for fragment in self._store.layout.fragments]
                room = partial[Vector](np.full, max(part.stop - part.start for part in parts), 0, np.float32)
                self._room = await self._averaging.run(Priority.UPKEEP, room)
            # One job, so that anchor and counters belong together.
            base, done, since = await self._compute.run(
                Priority.UPKEEP, lambda: (self._store.current, self._done, self.since_anchor)
            )
            part = base.layout.range_of(*base.layout.fragments[base.version.fragment])
            source = UpdateSource(base, SharedVector([self._room[: part.stop - part.start]], part.start))
            return Snapshot(source, part, math.sqrt(await self._copy(part, source)), done, since)

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
            for piece in _slices(snapshot.part):  # slices let the compute thread run microbatches in between
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
        async with asyncio.TaskGroup() as tasks:  # the norm of one slice is computed while the next is copied
            for piece in _slices(part):
                await self._compute.run(Priority.UPKEEP, partial(self._replica.read, piece, source.snapshot[piece]))
                job = partial(source.squares, piece)
                norms.append(tasks.create_task(self._averaging.run(Priority.UPKEEP, job)))
        return math.fsum(norm.result() for norm in norms)

    def _carry(self, piece: slice, before: Vector | SharedVector, after: SharedVector, done: InnerWork | None) -> None:
        if done == self._done:  # without inner steps since the snapshot, copy the anchor, because the sum would round
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


MAX_WAITING_MESSAGES: Final = 64  # Unsent control messages per peer. Beyond this the peer counts as lost


@dataclass(frozen=True, slots=True, eq=False)
class StagedRound:
    """The anchor of a complete but uncommitted exchange, with our snapshot and encoded contributions."""

    anchor: Anchor
    snapshot: Snapshot
    sent: SentParts | None


@dataclass(slots=True)
class RoundTraffic:
    """Bytes of the pieces that this replica sent and received in one round, over all attempts."""

    number: int
    sent: int = 0
    received: int = 0


class RoundHost(Protocol):
    """Interface of the node to a replica's averaging rounds: other replicas, downloads, reports."""

    def others(self) -> events.ReplicasChanged: ...

    async def catch_up(self, version: AnchorVersion, donors: tuple[PeerId, ...]) -> Anchor:
        """Downloads an anchor from these donors. Raises PeerError, StateError or ResourceExhausted."""
        ...

    async def left(self, version: AnchorVersion, followed: AnchorVersion) -> None:
        """Called before our anchor `version` is replaced by another replicas' one, with which our work is lost."""
        ...

    def anchored(self, anchor: Anchor) -> None:
        """Called with each new anchor. The anchor's arrays stay valid until the round after the next."""
        ...

    def settled(self, version: AnchorVersion, event: RoundCommitted, reason: str = "", clipping: float = 1.0) -> None:
        """Called after each committed round. `reason`: why its codec was chosen; `clipping`: factor on our update."""
        ...

    def accused(self, caught: events.Caught) -> None: ...


class RoundRunner(MachineRunner[events.Event, events.Action]):
    """Runner of one replica's averaging rounds: carries out the actions of its RoundMachine."""

    def __init__(
        self,
        own: PeerId,
        module: ModuleId,
        machine: RoundMachine,
        store: AnchorStore,
        replica_sync: ReplicaSync,
        means: ExchangeMeans,
        host: RoundHost,
    ) -> None:
        super().__init__(machine.handle, events.Tick(), means.transport, means.clock, MAX_WAITING_MESSAGES)
        self.replica_sync = replica_sync
        replica_sync.is_alone = lambda: machine.is_alone
        self.auditor = Auditor(own, means, self._send_or_lose, self.handle, self.begin)
        self._own = own
        self._module = module
        self._store = store
        self._host = host
        self._means = means
        self.snapshot: Snapshot | None = None
        self.incoming = ReceiveRates(means.clock)
        self._turn = asyncio.Lock()
        self._releases = 0
        self._wanted: Roster | None = None
        self._arrivals: Arrivals | None = None
        self._running: tuple[AllReduce, asyncio.Task[None]] | None = None
        self._staged: dict[bytes, StagedRound] = {}
        self._traffic = RoundTraffic(0)
        self._drift = AnchorDrift(means.clock.wall())
        self._norm: float | None = None
        self._others: events.ReplicasChanged | None = None
        self._begun: tuple[int, float] = (0, 0.0)
        self._catching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def anchor(self) -> Anchor:
        return self._store.current

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        await super().run()

    def receiving(self, dispatcher: Dispatcher) -> AbstractContextManager[None]:
        return dispatcher.registered(
            tensors={RoundPiece: self}, messages={RoundControl: self.receive}, link_down=self.link_down
        )

    def after_inner_step(self, figures: StepFigures) -> None:
        step = self.replica_sync.after_inner_step(figures)
        if step is not None and self._loop is not None:  # runs on the compute thread
            self._loop.call_soon_threadsafe(self._stepped_alone, step)

    def stepped(self) -> None:
        work = self.replica_sync.since_anchor
        self.handle(events.Worked(work.steps, work.tokens))

    def receive(self, sender: PeerId, message: RoundControl) -> None:
        if not isinstance(message, AuditControl):
            self.handle(events.MessageArrived(sender, message))
        elif message.round.module == self._module:
            self.auditor.receive(sender, message)

    def link_down(self, to: PeerId, error: PeerError) -> None:
        self.handle(events.LinkLost(to))

    def _look_around(self) -> None:
        others = self._host.others()
        if others != self._others:
            self._others = others
            self.handle(others)

    def _stepped_alone(self, step: SteppedTo) -> None:
        version, own = step.anchor.version, (self._own,)
        event = RoundCommitted(
            self._own, str(self._module), version.round, version.digest.hex(), own, own, step.tokens, 1, 0.0, 0, 0
        )
        self._host.anchored(step.anchor)
        self.handle(events.CaughtUp(version))
        self._host.settled(version, event)

    def _carry_out(self, action: events.Action) -> None:
        match action:
            case events.SendMessage(to, message):
                self._send_or_lose(to, message)
            case events.TakeSnapshot():
                self.begin(self._take_snapshot(action))
            case events.Exchange(roster):
                self.begin(self.exchange(roster))
            case events.DropStaged(version):
                self.drop_staged(version)
            case events.Release(number, why):
                log.debug("rounds up to %d have ended: %s", number, why)
                self.begin(self.release(number))
            case events.CommitStaged():
                self._commit(action)
            case events.CatchUp():
                self._start_catching_up(action)
            case events.Caught():
                self._host.accused(action)

    def _send_or_lose(self, to: PeerId, message: RoundControl) -> None:
        if not self.send(to, message):
            self.handle(events.LinkLost(to))

    _not_sent = link_down

    async def _take_snapshot(self, action: events.TakeSnapshot) -> None:
        number = action.round.number  # all attempts of a round count towards its duration
        if self._begun[0] != number:
            self._begun = (number, self.clock.monotonic())
        snapshot = await self.take_snapshot(action.round)
        if snapshot is None:
            log.debug("round %d ended before its snapshot", number)
        elif math.isfinite(snapshot.norm):
            work, rates = snapshot.since_anchor, self.incoming.bytes_per_s()
            bandwidth = max((link.goodput_bytes_per_s for link in self.transport.figures().values()), default=0.0)
            longest = self._drift.longest(self.clock.wall(), await self._scale())
            figures = (work.steps, work.tokens, snapshot.norm, bandwidth, rates, longest)
            self.handle(events.SnapshotTaken(action.round, *figures))
        else:
            log.warning("this replica diverged: its parameters are not finite. It restarts from its anchor.")
            await self.replica_sync.adopt(self._store.current)
            self.handle(events.SnapshotBroken(action.round))

    def _commit(self, action: events.CommitStaged) -> None:
        before = self._store.current
        try:
            staged = self.take_staged(action.version)
        except SkipstoneError as error:
            log.warning("%s", error)
            others = tuple(peer for peer in action.roster.peers if peer != self._own)
            self._start_catching_up(events.CatchUp(action.version, others, "its result was dropped", by_most=True))
            return
        self._store.put(staged.anchor)
        crash_point("committing")
        self.replica_sync.trained_by(len(contributors(action.roster)))
        self.replica_sync.committed(staged.snapshot)
        own, roster = staged.snapshot, action.roster
        of_all = roster.steps - roster.base.steps
        share = own.since_anchor.steps / of_all if of_all > 0 else 0.0
        together = (peer for peer in roster.peers if peer != self._own)
        self._drift.committed(own.norm, share, roster.largest_norm, together, self.clock.wall())
        self._host.anchored(staged.anchor)
        self.stepped()
        self.begin(self._settle(action, before, staged))

    async def _settle(self, action: events.CommitStaged, before: Anchor, staged: StagedRound) -> None:
        await self.replica_sync.carry(staged.snapshot, staged.anchor, staged.sent)
        crash_point("committed")
        version, roster = staged.anchor.version, action.roster
        self._count_traffic()
        traffic = self._traffic if self._traffic.number == roster.round.number else RoundTraffic(roster.round.number)
        own = next(member for member in roster.members if member.peer == self._own)
        event = RoundCommitted(
            self._own,
            str(self._module),
            version.round,
            version.digest.hex(),
            roster.peers,
            contributors(roster),
            version.tokens - before.version.tokens,
            roster.round.attempt + 1,
            self.clock.monotonic() - self._begun[1],
            traffic.sent,
            traffic.received,
            roster.codec.name.lower(),
            *self.auditor.take_traffic(),
        )
        clipping = own.coefficient / own.share if own.share else 1.0
        self._host.settled(version, event, roster.codec_reason, clipping)
        self.auditor.committed(version)  # only now, because members wait for us to reach the anchor

    def _start_catching_up(self, action: events.CatchUp) -> None:
        if self._catching is not None:  # only the newest target matters
            self._catching.cancel()
        self._catching = self.begin(self._catch_up(action))

    def gave_other_state(self, donor: PeerId, detail: str) -> None:
        """Reports a donor that sent a state with a wrong hash, as a doubt: the donor's memory may be faulty."""
        number = self._store.current.version.round
        self.handle(events.Caught(donor, number, f"sent another state than the agreed one: {detail}", certain=False))

    async def _catch_up(self, action: events.CatchUp) -> None:
        log.info("catching up with round %d: %s", action.version.round, action.why)
        try:
            anchor = await self._host.catch_up(action.version, action.donors)
        except (PeerError, StateError, ResourceExhausted) as error:
            self.handle(events.CatchUpFailed(action.version, str(error)))
            return
        own = self._store.current  # accept only an anchor to which honest training could have moved since we last met
        distance = await self._means.thread.run(Priority.UPKEEP, partial(distance_between, own, anchor))
        rounds = anchor.version.round - own.version.round
        scale, wall = await self._scale(), self.clock.wall()
        farthest = self._drift.farthest(action.donors, wall, scale, rounds, by_most=action.by_most)
        if not distance <= farthest:
            why = f"its distance from ours is {distance:.3g}, more than the {farthest:.3g} that training explains"
            log.warning("not adopting the anchor of round %d: %s", action.version.round, why)
            self.handle(events.CatchUpFailed(action.version, why, action.donors))
            return
        if own.version.round > 0:
            await self._host.left(own.version, anchor.version)
        self._store.put(anchor)
        await self.replica_sync.adopt(anchor)
        self._host.anchored(anchor)
        self.handle(events.CaughtUp(anchor.version))

    async def _scale(self) -> float:
        """Returns the norm of our first anchor, which is measured once: it changes slowly."""
        if self._norm is None:
            pieces = self._store.current.parameters.pieces()
            lengths = [await self._means.thread.run(Priority.UPKEEP, partial(squares, piece)) for _, piece in pieces]
            self._norm = math.sqrt(math.fsum(lengths))
        return self._norm

    async def take_snapshot(self, round_id: RoundId) -> Snapshot | None:
        """Takes this round's snapshot of the replica, or returns the existing one. None if the round has ended."""
        self._expect(round_id)
        releases = self._releases
        async with self._turn:
            # The round may have ended while we waited for the lock.
            if self._store.current.version.round >= round_id.number or releases != self._releases:
                return None
            snapshot = self.snapshot
            if snapshot is None or snapshot.source.anchor is not self._store.current:
                self.snapshot = None
                snapshot = await self.replica_sync.snapshot()
                if self._store.current.version.round >= round_id.number or releases != self._releases:
                    return None
                self.snapshot = snapshot if math.isfinite(snapshot.norm) else None
            return snapshot

    async def exchange(self, roster: Roster) -> None:
        self._wanted = roster
        self._expect(roster.round)
        arrivals = self._arrivals
        async with self._turn:
            await self._end_exchange()
            # The next attempt may have started while we stopped the last exchange. Its pieces do not belong here.
            if self._wanted is roster and self._arrivals is arrivals:
                try:
                    self._begin_exchange(roster)
                except SkipstoneError as error:
                    log.warning("cannot take part in round %d: %s", roster.round.number, error)

    async def release(self, number: int) -> None:
        self._releases += 1
        if self._wanted is not None and self._wanted.round.number <= number:
            self._wanted = None
        if self._arrivals is not None and self._arrivals.round.number <= number:
            self._arrivals = None
        self._drop_staged(number)
        async with self._turn:
            if self._running is not None and self._running[0].plan.roster.round.number <= number:
                await self._end_exchange()
            if self.snapshot is not None and self.snapshot.source.anchor.version.round < number:
                self.snapshot = None

    def drop_staged(self, version: AnchorVersion) -> None:
        staged = self._staged.pop(version.digest, None)
        if staged is not None:
            self._store.give_back(staged.anchor.parameters, staged.anchor.momentum)

    def take_staged(self, version: AnchorVersion) -> StagedRound:
        """Removes and returns the complete exchange of this version. Raises SkipstoneError if it was dropped."""
        staged = self._staged.pop(version.digest, None)
        if (
            staged is None
            or staged.snapshot is not self.snapshot
            or staged.snapshot.source.anchor is not self._store.current
        ):
            raise SkipstoneError(f"cannot commit round {version.round}, because its result was dropped")
        self.snapshot = None
        self._drop_staged(version.round)
        return staged

    def admit(self, sender: PeerId, message: RoundPiece, tensor: TensorSpec) -> memoryview | Refusal:
        if isinstance(message, Contribution):  # pieces for our audits have the same message type
            audited = self.auditor.admit(sender, message, tensor)
            if audited is not None:
                return audited
        if self._arrivals is None:
            return Refusal(False, "no round is in progress here")
        admitted = self._arrivals.admit(sender, message, tensor)
        if not isinstance(admitted, Refusal):
            self.incoming.began(sender)
        return admitted

    def received(self, sender: PeerId, message: RoundPiece, tensor: TensorSpec, buffer: memoryview) -> None:
        if isinstance(message, Contribution) and self.auditor.received(sender, message, buffer, whole=True):
            return
        self.incoming.ended(sender, buffer.nbytes)
        if self._arrivals is not None and self._arrivals.round == message.round:
            self._arrivals.received(sender, message, buffer)

    def broken_off(self, sender: PeerId, message: RoundPiece, buffer: memoryview) -> None:
        if isinstance(message, Contribution) and self.auditor.received(sender, message, buffer, whole=False):
            return
        self.incoming.ended(sender, 0)
        if self._arrivals is not None and self._arrivals.round == message.round:
            self._arrivals.broken_off(sender, message, buffer)

    def _expect(self, round_id: RoundId) -> None:
        if self._arrivals is None or self._arrivals.round != round_id:
            self._count_traffic()
            self._arrivals = Arrivals(
                round_id, self._means.codecs, lambda peer, why: self.handle(events.PieceRejected(round_id, peer, why))
            )
        if self._traffic.number != round_id.number:
            self._traffic = RoundTraffic(round_id.number)

    def _begin_exchange(self, roster: Roster) -> None:
        snapshot, arrivals = self.snapshot, self._arrivals
        if snapshot is None or arrivals is None or snapshot.source.anchor.version != roster.base:
            raise ProtocolViolation("its roster has another base anchor, or we never joined it")
        plan = Plan(self._own, self._store.current.layout, roster)
        self.auditor.exchange_begins()  # old encodings use memory that this exchange overwrites
        vectors = self._store.spare(plan.layout.range_of(plan.first_chunk, plan.end_chunk))
        exchange = AllReduce(
            plan,
            snapshot.source,
            vectors,
            arrivals,
            self._means,
            self.handle,
            lambda anchor: self._keep(exchange, StagedRound(anchor, snapshot, exchange.sent)),
        )
        task = self.begin(_run(exchange))
        self._running = None if task is None else (exchange, task)

    async def _end_exchange(self) -> None:
        self._count_traffic()
        running, self._running = self._running, None
        if running is None:
            return
        exchange, task = running
        task.cancel()
        await asyncio.wait((task,))
        # Wait for jobs of the cancelled exchange that still run on the averaging thread.
        await self._means.thread.run(Priority.UPKEEP, lambda: None)
        if not exchange.complete.is_set():  # a complete result owns the vectors until it is committed or dropped
            self._store.give_back(*exchange.vectors)
        exchange.let_go()

    def _keep(self, exchange: AllReduce, staged: StagedRound) -> None:
        version = staged.anchor.version
        self.drop_staged(version)
        self._staged[version.digest] = staged
        self.auditor.completed(exchange.record(staged.anchor))
        self.handle(events.Staged(exchange.plan.roster.round, version))

    def _drop_staged(self, number: int) -> None:
        for staged in list(self._staged.values()):
            if staged.anchor.version.round <= number:
                self.drop_staged(staged.anchor.version)

    def _count_traffic(self) -> None:
        if self._arrivals is not None and self._arrivals.round.number == self._traffic.number:
            self._traffic.received += self._arrivals.received_bytes
            self._arrivals.received_bytes = 0
        exchange = None if self._running is None else self._running[0]
        if exchange is not None and exchange.plan.roster.round.number == self._traffic.number:
            self._traffic.sent += exchange.sent_bytes
            exchange.sent_bytes = 0


async def _run(exchange: AllReduce) -> None:
    """Runs an exchange and logs its failure. The other members then notice that this member is silent."""
    try:
        await exchange.run()
        exchange.let_go()
    except SkipstoneError as error:
        log.warning("the exchange of round %d failed: %s", exchange.plan.roster.round.number, error)
