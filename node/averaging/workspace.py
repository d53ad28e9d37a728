"""The working state of the round under way: the snapshot, the exchange, and results that are complete but not
committed.

Used on the event loop. What is asked of it in vain (a round that is over, an anchor that has changed) is passed over:
the round machine hears nothing, and goes on by its limits of patience.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from node.averaging.anchor.anchor import Anchor
from node.averaging.anchor.anchor_store import AnchorStore
from node.averaging.anchor.shared_vector import StateVectors
from node.averaging.audit.auditor import Auditor
from node.averaging.exchange.all_reduce import Exchange, ExchangeMeans
from node.averaging.exchange.arrival_rates import Incoming
from node.averaging.exchange.partition import Plan
from node.averaging.exchange.piece_receiver import Arrivals
from node.averaging.exchange.pseudo_gradient import SentParts
from node.averaging.replica_sync import ReplicaSync, Snapshot
from node.concurrency.compute_thread import Priority
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Refusal
from swarm.averaging.round_events import Event, PieceRejected, Staged
from swarm.vocabulary.averaging_messages import Contribution, Roster, RoundId, RoundPiece
from swarm.vocabulary.errors import ProtocolViolation, SkipstoneError
from swarm.vocabulary.types import AnchorVersion, PeerId

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    exchange: Exchange
    vectors: StateVectors
    task: asyncio.Task[None]


@dataclass(frozen=True, slots=True, eq=False)
class StagedRound:
    """A complete result with its snapshot and record."""

    anchor: Anchor
    snapshot: Snapshot
    sent: SentParts | None


@dataclass(slots=True)
class Traffic:
    """The bytes of pieces of one round, over all attempts at it."""

    number: int
    sent: int = 0
    received: int = 0


class RoundWorkspace:
    """The working state of one replica's rounds.

    Args:
        report: gets what the exchange has to say to the round machine.
        begin: does something in a task of its own.
        auditor: told what there is to audit.
    """

    def __init__(
        self,
        own: PeerId,
        store: AnchorStore,
        replica_sync: ReplicaSync,
        means: ExchangeMeans,
        report: Callable[[Event], None],
        begin: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None] | None],
        auditor: Auditor,
    ) -> None:
        self.snapshot: Snapshot | None = None
        self.incoming = Incoming(means.clock)
        self._own = own
        self._store = store
        self._replica_sync = replica_sync
        self._means = means
        self._report = report
        self._begin_task = begin
        self._auditor = auditor
        self._turn = asyncio.Lock()
        self._releases = 0
        self._wanted: Roster | None = None
        self._arrivals: Arrivals | None = None
        self._running: _Running | None = None
        self._staged: dict[bytes, StagedRound] = {}
        self._traffic = Traffic(0)

    # ---- the round -------------------------------------------------------------------------------------------------

    async def take_snapshot(self, round_id: RoundId) -> Snapshot | None:
        """Takes the snapshot for this round, or returns the one there is. None when the round is over meanwhile."""
        self._expect(round_id)
        releases = self._releases
        async with self._turn:
            if not self._is_next(round_id.number) or releases != self._releases:
                return None
            snapshot = self.snapshot
            if snapshot is None or snapshot.source.anchor is not self._store.current:
                self.snapshot = None
                snapshot = await self._replica_sync.snapshot()
                if not self._is_next(round_id.number) or releases != self._releases:
                    return None
                self.snapshot = snapshot if math.isfinite(snapshot.norm) else None
            return snapshot

    async def exchange(self, roster: Roster) -> None:
        """Begins the exchange in a task of its own; ends the one before."""
        self._wanted = roster
        self._expect(roster.round)
        arrivals = self._arrivals
        async with self._turn:
            await self._end_exchange()
            # While the one before was ended, the next attempt may have begun: its pieces are not for this exchange.
            if self._wanted is roster and self._arrivals is arrivals:
                try:
                    self._begin(roster)
                except SkipstoneError as error:
                    log.warning("no part in round %d: %s", roster.round.number, error)

    async def release(self, number: int) -> None:
        """Frees everything kept for rounds up to this one, which are over."""
        self._releases += 1
        if self._wanted is not None and self._wanted.round.number <= number:
            self._wanted = None
        if self._arrivals is not None and self._arrivals.round.number <= number:
            self._arrivals = None
        self._drop_staged(number)
        async with self._turn:
            if self._running is not None and self._running.exchange.plan.roster.round.number <= number:
                await self._end_exchange()
            if self.snapshot is not None and self.snapshot.source.anchor.version.round < number:
                self.snapshot = None

    def drop_staged(self, version: AnchorVersion) -> None:
        """Drops a complete result that will not be committed."""
        staged = self._staged.pop(version.digest, None)
        if staged is not None:
            self._store.give_back(staged.anchor.parameters, staged.anchor.momentum)

    def take_staged(self, version: AnchorVersion) -> StagedRound:
        """Removes and returns the complete result of this version, to be committed.

        Raises:
            SkipstoneError: it is not here, or was made from another anchor than the current one.
        """
        staged = self._staged.pop(version.digest, None)
        if (
            staged is None
            or staged.snapshot is not self.snapshot
            or staged.snapshot.source.anchor is not self._store.current
        ):
            raise SkipstoneError(f"round {version.round} cannot be committed here: its result was not kept")
        self.snapshot = None
        self._drop_staged(version.round)
        return staged

    def traffic(self, number: int) -> Traffic:
        """The traffic of this round, if it is the last one that was begun."""
        self._count_traffic()
        return self._traffic if self._traffic.number == number else Traffic(number)

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def admit(self, sender: PeerId, message: RoundPiece, tensor: TensorSpec) -> memoryview | Refusal:
        if isinstance(message, Contribution) and self._auditor.wants(sender, message):
            return self._auditor.admit(sender, message, tensor)
        if self._arrivals is None:
            return Refusal(False, "no round is under way here")
        admitted = self._arrivals.admit(sender, message, tensor)
        if not isinstance(admitted, Refusal):
            self.incoming.began(sender)
        return admitted

    def received(self, sender: PeerId, message: RoundPiece, tensor: TensorSpec, buffer: memoryview) -> None:
        if isinstance(message, Contribution) and self._auditor.received(sender, message, buffer, whole=True):
            return
        self.incoming.ended(sender, buffer.nbytes)
        if self._arrivals is not None and self._arrivals.round == message.round:
            self._arrivals.received(sender, message, buffer)

    def broken_off(self, sender: PeerId, message: RoundPiece, buffer: memoryview) -> None:
        if isinstance(message, Contribution) and self._auditor.received(sender, message, buffer, whole=False):
            return
        self.incoming.ended(sender, 0)
        if self._arrivals is not None and self._arrivals.round == message.round:
            self._arrivals.broken_off(sender, message, buffer)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _is_next(self, number: int) -> bool:
        """Whether our anchor is from before this round. (Numbers may leave some out.)"""
        return self._store.current.version.round < number

    def _expect(self, round_id: RoundId) -> None:
        """Pieces of this attempt are taken in from now on, and no others."""
        if self._arrivals is None or self._arrivals.round != round_id:
            self._count_traffic()
            self._arrivals = Arrivals(
                round_id, self._means.codecs, lambda peer, why: self._report(PieceRejected(round_id, peer, why))
            )
        if self._traffic.number != round_id.number:
            self._traffic = Traffic(round_id.number)

    def _begin(self, roster: Roster) -> None:
        snapshot, arrivals = self.snapshot, self._arrivals
        if snapshot is None or arrivals is None or snapshot.source.anchor.version != roster.base:
            raise ProtocolViolation("its roster starts from another anchor, or we never entered")
        plan = Plan(self._own, self._store.current.layout, roster)
        self._auditor.exchange_begins()
        vectors = self._store.spare(plan.layout.range_of(plan.first_chunk, plan.end_chunk))
        exchange = Exchange(
            plan,
            snapshot.source,
            vectors,
            arrivals,
            self._means,
            self._report,
            lambda anchor: self._keep(exchange, StagedRound(anchor, snapshot, exchange.sent)),
        )
        task = self._begin_task(_run(exchange))
        self._running = None if task is None else _Running(exchange, vectors, task)

    async def _end_exchange(self) -> None:
        """Whatever the thread still does for it is done before its vectors are written for something else."""
        self._count_traffic()
        running, self._running = self._running, None
        if running is None:
            return
        running.task.cancel()
        await asyncio.wait((running.task,))
        await self._means.thread.run(Priority.UPKEEP, lambda: None)
        if not running.exchange.is_staged:
            self._store.give_back(*running.vectors)
        running.exchange.let_go()

    def _keep(self, exchange: Exchange, staged: StagedRound) -> None:
        version = staged.anchor.version
        self.drop_staged(version)
        self._staged[version.digest] = staged
        self._auditor.completed(exchange.record(staged.anchor))
        self._report(Staged(exchange.plan.roster.round, version))

    def _drop_staged(self, number: int) -> None:
        for staged in list(self._staged.values()):
            if staged.anchor.version.round <= number:
                self.drop_staged(staged.anchor.version)

    def _count_traffic(self) -> None:
        """Takes over what the exchange and the arrivals have counted so far."""
        if self._arrivals is not None and self._arrivals.round.number == self._traffic.number:
            self._traffic.received += self._arrivals.received_bytes
            self._arrivals.received_bytes = 0
        exchange = None if self._running is None else self._running.exchange
        if exchange is not None and exchange.plan.roster.round.number == self._traffic.number:
            self._traffic.sent += exchange.sent_bytes
            exchange.sent_bytes = 0


async def _run(exchange: Exchange) -> None:
    """An exchange that fails here is to the others a member that has fallen silent; the round goes on without it."""
    try:
        await exchange.run()
        exchange.let_go()
    except SkipstoneError as error:
        log.warning("the exchange of round %d broke off: %s", exchange.plan.roster.round.number, error)
