"""Carries out what the round machine decides: one replica's part in the rounds of its module.

Decisions are all in `swarm.averaging`; here are the messages, the bench with the snapshot and the exchange, the
anchors, and the tasks that go with them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Protocol

from node.averaging.anchor.anchor import Anchor
from node.averaging.anchor.anchor_store import AnchorStore
from node.averaging.anchor.module_vector import LocalReplica
from node.averaging.anchor.outer_step import OuterRule
from node.averaging.audit.auditor import Auditor
from node.averaging.exchange.all_reduce import ExchangeMeans
from node.averaging.exchange.progress import Watch
from node.averaging.replica_sync import AloneRule, ReplicaSync
from node.averaging.workspace import RoundWorkspace, StagedRound
from node.concurrency.compute_thread import ComputeThread
from node.concurrency.pending_messages import PendingMessages
from node.concurrency.task_groups import task_scope
from node.model.optimizer import StepFigures
from node.observability.failpoints import crash_point
from protocol.identity.piece_signatures import PieceSignatures
from protocol.interfaces.clock import Clock
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Refusal, Transport
from swarm.averaging.roster import contributors
from swarm.averaging.round_events import (
    Accuse,
    Action,
    Arrived,
    CatchUp,
    CatchUpFailed,
    Caught,
    CaughtUp,
    CommitStaged,
    DropStaged,
    Event,
    Exchange,
    Fellow,
    FellowsChanged,
    LinkLost,
    Release,
    SnapshotBroken,
    SnapshotTaken,
    StandAlone,
    SteppedAlone,
    TakeSnapshot,
    Tell,
    Tick,
    Worked,
)
from swarm.compression.round_codecs import RoundCodecs
from swarm.vocabulary.averaging_messages import AuditControl, RoundControl, RoundPiece
from swarm.vocabulary.errors import PeerError, ResourceExhausted, SkipstoneError, StateError
from swarm.vocabulary.types import AnchorVersion, Codec, ModuleId, PeerId

log = logging.getLogger(__name__)

TICK_S: Final = 0.1
MAX_WAITING_TELLS: Final = 64
"""Messages on the way to one peer; who takes in fewer is taken for lost."""


class RoundDecider(Protocol):
    """`swarm.averaging.round_machine.RoundMachine`."""

    def handle(self, event: Event, now: float) -> list[Action]: ...


CatchUpWith = Callable[[AnchorVersion, tuple[PeerId, ...]], Awaitable[Anchor]]
"""Gets an anchor from donors. Raises PeerError, StateError or ResourceExhausted when it cannot be had."""


@dataclass(frozen=True, slots=True)
class RoundSettled:
    """A round that has been committed here."""

    module: ModuleId
    version: AnchorVersion
    members: tuple[PeerId, ...]
    contributors: tuple[PeerId, ...]
    tokens: int
    """Of the round, over all members."""
    attempts: int
    seconds: float
    """From our snapshot to the replica's standing on the new anchor."""
    sent_bytes: int
    """Of pieces, over all attempts."""
    received_bytes: int
    codec: Codec = Codec.NONE
    codec_reason: str = ""
    clipping: float = 1.0
    """What our own update was shortened to, as a share of its length."""
    audit_sent_bytes: int = 0
    """For audits, since the round before."""
    audit_received_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RoundRunnerHooks:
    """What the rest of the node wants to know, or gives. All are called on the event loop."""

    fellows: Callable[[], tuple[Fellow, ...]]
    """The live replicas of our module now, ourselves not included."""
    catch_up: CatchUpWith
    anchored: Callable[[Anchor], None] = lambda anchor: None
    """We have another anchor: to announce it, to write a checkpoint. Its arrays hold until the round after the next."""
    settled: Callable[[RoundSettled], None] = lambda settled: None
    accused: Callable[[Caught], None] = lambda caught: None
    """Another replica did what no honest one does."""
    exchanging: Watch = lambda how_far: None


@dataclass(frozen=True, slots=True)
class RoundRunnerParts:
    """What an averager is made of."""

    own: PeerId
    module: ModuleId
    machine: RoundDecider
    shelf: AnchorStore
    replica: LocalReplica
    compute: ComputeThread
    """Where the replica lives."""
    averaging: ComputeThread
    """For arithmetic on anchors; nobody else's."""
    codecs: tuple[RoundCodecs, ...]
    """That the rosters of this run may name."""
    outer: OuterRule
    inner_steps: int
    microbatch_tokens: int
    clock: Clock
    signatures: PieceSignatures
    random: Random
    """For which piece is audited: nobody else may know what it gives next."""
    longest_s: float = math.inf
    """Between two outer steps of a replica that is alone; for several the machine knows it."""


class RoundRunner:
    """`node.network.dispatcher.RoundReceiver` for messages of rounds. `run` carries it."""

    def __init__(self, parts: RoundRunnerParts, hooks: RoundRunnerHooks) -> None:
        self._parts = parts
        self._hooks = hooks
        self._machine = parts.machine
        self._shelf = parts.shelf
        rule = AloneRule(parts.inner_steps, parts.outer, parts.microbatch_tokens, parts.clock, parts.longest_s)
        self.keeper = ReplicaSync(parts.replica, parts.shelf, parts.compute, parts.averaging, rule, self._stepped_alone)
        self._events: deque[Event] = deque()
        self._handling = False
        self._fellows: tuple[Fellow, ...] | None = None
        self._tellings = PendingMessages(MAX_WAITING_TELLS)
        self._begun: tuple[int, float] = (0, 0.0)
        """Which round we took a snapshot for last, and when."""
        self._catching: asyncio.Task[None] | None = None
        self._bench: RoundWorkspace | None = None
        self.auditor: Auditor | None = None
        """While it runs."""
        self._transport: Transport | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def anchor(self) -> Anchor:
        return self._shelf.current

    async def run(self, transport: Transport) -> None:
        """Until cancelled. Before it, what arrives is refused."""
        parts = self._parts
        means = ExchangeMeans(
            codecs=parts.codecs,
            rule=parts.outer,
            thread=parts.averaging,
            transport=transport,
            clock=parts.clock,
            signatures=parts.signatures,
            random=parts.random,
            watch=self._hooks.exchanging,
        )
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        async with task_scope() as tasks:
            self._tasks = tasks
            self.auditor = Auditor(
                own=parts.own,
                shelf=self._shelf,
                means=means,
                tell=lambda peer, message: self._tell(Tell(peer, message)),
                report=self.handle,
                spawn=self._spawn,
            )
            self._bench = RoundWorkspace(parts.own, self._shelf, self.keeper, means, self.handle, self.auditor)
            try:
                while True:
                    self._look_around()
                    self.handle(Tick())
                    await asyncio.sleep(TICK_S)
            finally:
                self._tasks = self._bench = self.auditor = None

    def handle(self, event: Event) -> None:
        """Gives the event to the machine and carries out what follows; events that this brings about come after it."""
        self._events.append(event)
        if self._handling or self._tasks is None:
            return
        self._handling = True
        try:
            while self._events:
                for action in self._machine.handle(self._events.popleft(), self._parts.clock.monotonic()):
                    self._carry_out(action)
        finally:
            self._handling = False

    # ---- what happens ------------------------------------------------------------------------------------------------

    def after_inner_step(self, figures: StepFigures) -> None:
        """To be called on the compute thread after each inner step, in the same job: a lone replica takes its outer
        step here."""
        self.keeper.after_inner_step(figures)

    def stepped(self) -> None:
        """An inner step has been taken."""
        work = self.keeper.since_anchor
        self.handle(Worked(work.steps, work.tokens))

    def admit(self, sender: PeerId, message: RoundPiece, tensor: TensorSpec) -> memoryview | Refusal:
        if self._bench is None:
            return Refusal(False, "no rounds are held here")
        return self._bench.admit(sender, message, tensor)

    def received(self, sender: PeerId, message: RoundPiece, tensor: TensorSpec, buffer: memoryview) -> None:
        if self._bench is not None:
            self._bench.received(sender, message, buffer)

    def broken_off(self, sender: PeerId, message: RoundPiece, buffer: memoryview, error: PeerError) -> None:
        if self._bench is not None:
            self._bench.broken_off(sender, message, buffer)

    def told(self, sender: PeerId, message: RoundControl) -> None:
        if not isinstance(message, AuditControl):
            self.handle(Arrived(sender, message))
        elif self.auditor is not None:
            self.auditor.told(sender, message)

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        self.handle(LinkLost(peer))

    def _look_around(self) -> None:
        fellows = self._hooks.fellows()
        if fellows != self._fellows:
            self._fellows = fellows
            self.handle(FellowsChanged(fellows))

    def _stepped_alone(self, anchor: Anchor, before: AnchorVersion) -> None:
        """On the compute thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._note_lone_step, anchor, before)

    def _note_lone_step(self, anchor: Anchor, before: AnchorVersion) -> None:
        own, tokens = self._parts.own, anchor.version.tokens - before.tokens
        self._hooks.anchored(anchor)
        self.handle(SteppedAlone(anchor.version))
        self._hooks.settled(RoundSettled(self._parts.module, anchor.version, (own,), (own,), tokens, 1, 0.0, 0, 0))

    # ---- what is to be done --------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        assert self._bench is not None
        assert self._tasks is not None
        match action:
            case Tell():
                self._tell(action)
            case TakeSnapshot():
                self._spawn(self._take_snapshot(self._bench, action))
            case Exchange(roster):
                self._spawn(self._bench.exchange(roster, self._tasks))
            case DropStaged(version):
                self._bench.drop_staged(version)
            case Release(number, why):
                log.debug("rounds up to %d are over: %s", number, why)
                self._spawn(self._bench.release(number))
            case CommitStaged():
                self._commit(self._bench, action)
            case CatchUp():
                self._start_catching_up(action)
            case StandAlone(alone):
                self.keeper.alone = alone
            case Accuse(caught):
                self._hooks.accused(caught)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None
        return self._tasks.create_task(work)

    def _tell(self, action: Tell) -> None:
        if action.to == self._parts.own:
            self._events.append(Arrived(action.to, action.message))
        elif self._tellings.begin(action.to):
            self._spawn(self._telling_it(action))
        else:
            self._events.append(LinkLost(action.to))

    async def _telling_it(self, action: Tell) -> None:
        assert self._transport is not None
        try:
            await self._transport.tell(action.to, action.message)
        except PeerError as error:
            log.debug("%s could not be told: %s", action.to, error)
            self.handle(LinkLost(action.to))
        finally:
            self._tellings.end(action.to)

    async def _take_snapshot(self, bench: RoundWorkspace, action: TakeSnapshot) -> None:
        number = action.round.number
        if self._begun[0] != number:
            self._begun = (number, self._parts.clock.monotonic())
        snapshot = await bench.take_snapshot(action.round)
        if snapshot is None:
            log.debug("round %d was over before its snapshot", number)
        elif math.isfinite(snapshot.norm):
            work = snapshot.since_anchor
            figures = (work.steps, work.tokens, snapshot.norm)
            rates = bench.incoming.bytes_per_s()
            self.handle(SnapshotTaken(action.round, *figures, self._bandwidth(), rates))
        else:
            log.warning("this replica's parameters are not finite; it starts again from its anchor")
            await self.keeper.adopt(self._shelf.current)
            self.handle(SnapshotBroken(action.round))

    def _commit(self, bench: RoundWorkspace, action: CommitStaged) -> None:
        before = self._shelf.current
        try:
            staged = bench.take_staged(action.version)
        except SkipstoneError as error:
            log.warning("%s", error)
            others = tuple(peer for peer in action.roster.peers if peer != self._parts.own)
            self._start_catching_up(CatchUp(action.version, others, "its result was not kept"))
            return
        self._shelf.put(staged.anchor)
        crash_point("committing")
        self.keeper.committed(staged.snapshot)
        self._hooks.anchored(staged.anchor)
        self.stepped()
        self._spawn(self._settle(bench, action, before, staged))

    async def _settle(self, bench: RoundWorkspace, action: CommitStaged, before: Anchor, staged: StagedRound) -> None:
        await self.keeper.carry(staged.snapshot, staged.anchor, staged.sent)
        crash_point("committed")
        version, roster = staged.anchor.version, action.roster
        traffic = bench.traffic(roster.round.number)
        own = next(member for member in roster.members if member.peer == self._parts.own)
        self._hooks.settled(
            RoundSettled(
                self._parts.module,
                version,
                roster.peers,
                contributors(roster),
                version.tokens - before.version.tokens,
                roster.round.attempt + 1,
                self._parts.clock.monotonic() - self._begun[1],
                traffic.sent,
                traffic.received,
                roster.codec,
                roster.codec_reason,
                own.coefficient / own.share if own.share else 1.0,
                *((0, 0) if self.auditor is None else self.auditor.take_traffic()),
            )
        )
        if self.auditor is not None:  # not before: the replica's standing on its anchor is what others wait for
            self.auditor.committed(version)

    def _start_catching_up(self, action: CatchUp) -> None:
        if self._catching is not None:
            self._catching.cancel()
        self._catching = self._spawn(self._catch_up(action))

    def gave_other_state(self, donor: PeerId, detail: str) -> None:
        """What a donor sent is not what was agreed on. Its memory may be at fault, so it is not certain that it
        lies."""
        number = self._shelf.current.version.round
        self.handle(Caught(donor, number, f"it gave away other state than was agreed on: {detail}", certain=False))

    async def _catch_up(self, action: CatchUp) -> None:
        log.info("catching up with round %d: %s", action.version.round, action.why)
        try:
            anchor = await self._hooks.catch_up(action.version, action.donors)
        except (PeerError, StateError, ResourceExhausted) as error:
            self.handle(CatchUpFailed(action.version, str(error)))
            return
        self._shelf.put(anchor)
        await self.keeper.adopt(anchor)
        self._hooks.anchored(anchor)
        self.handle(CaughtUp(anchor.version))

    def _bandwidth(self) -> float:
        """Bytes per second of our best link; 0 when none was measured."""
        assert self._transport is not None
        return max((link.goodput_bytes_per_s for link in self._transport.figures().values()), default=0.0)
