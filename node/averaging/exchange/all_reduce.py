"""All-reduce of pseudo-gradients among the members of a round, as one member computes it.

Encoding, sending, summing and the outer step of different pieces overlap. A member has at most WINDOW pieces in flight
to a reducer (the member that sums these pieces), paced by that reducer's results.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Final, TypeVar

import numpy as np

from node.averaging.anchor.anchor import Anchor, hash_of
from node.averaging.anchor.outer_step import OuterRule, Staging
from node.averaging.anchor.shared_vector import StateVectors, Vector
from node.averaging.exchange.pieces import Arrivals, ExchangeProgress, Piece, Plan, Watch, early_pieces
from node.averaging.exchange.reduction import Comparison, NormLimit, Reduction, SentParts, UpdateSource, read_encoding
from node.concurrency.compute_thread import ComputeThread, Priority
from node.concurrency.task_groups import task_scope
from node.model.device import gradual_underflow
from node.observability.failpoints import crash_point
from protocol.codecs import encoded_bytes
from protocol.identity.signatures import PieceSignatures
from protocol.interfaces.clock import Clock
from protocol.interfaces.transport import Transport
from swarm.averaging.round_events import Event, LinkLost, Owing, PieceArrived, PieceRejected
from swarm.compression.round_codecs import LEAVES_OVER
from swarm.vocabulary.averaging_messages import Contribution, Reduced, RoundPiece, SignedHash
from swarm.vocabulary.errors import PeerError, ProtocolViolation, StateError
from swarm.vocabulary.types import Codec, PeerId

Result = TypeVar("Result")

WINDOW: Final = 8
TRAFFIC_CLASSES: Final = 2  # Concurrent pieces per member and direction: one being sent, the next being prepared

PROGRESS_EVERY_S: Final = 0.1  # Minimum interval between reports of one member's pieces, in seconds


@dataclass(frozen=True, slots=True)
class ExchangeMeans:
    """Objects that all exchanges of a replica share: codecs, outer optimizer, thread, transport, signatures."""

    codecs: tuple[Codec, ...]
    rule: OuterRule
    thread: ComputeThread
    transport: Transport
    clock: Clock
    signatures: PieceSignatures
    random: Random
    watch: Watch = lambda attempt, chunks, percent: None


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeRecord:
    """Data of a complete exchange that audits need: partition, resulting anchor, and signed contributions."""

    plan: Plan
    anchor: Anchor | None  # The resulting anchor. None once the next exchange has started.
    signed: Mapping[Piece, Mapping[PeerId, SignedHash]]
    own: Mapping[Piece, SignedHash]
    source: UpdateSource | None
    sent: SentParts | None
    samples: Mapping[PeerId, Vector] = field(default_factory=dict)  # From contributions that we reduced
    suspect: PeerId | None = None  # Reducer of a mean in which the other contributions oppose ours

    def encoded(self, piece: Piece) -> memoryview | None:
        """Encodes our contribution to a piece again, on the averaging thread. None if its input was overwritten."""
        signed, codec = self.own.get(piece), self.plan.codec
        if signed is None or self.source is None:
            return None
        if self.sent is not None:
            data = memoryview(self.sent.encoding(piece.part) or b"")
        else:
            data = np.empty(encoded_bytes(codec, piece.elements), np.uint8).data
            try:
                self.source.encode(piece.part, codec, data, np.empty(piece.elements, np.float32))
            except StateError:  # the next snapshot overwrites this one
                return None
        return data if hash_of(data) == signed.hash else None  # its memory may already belong to the next round


@dataclass(eq=False)
class AllReduce:
    """One member's all-reduce with the other members of a round. Call `run` once; cancelling it has no side effects."""

    plan: Plan
    _source: UpdateSource
    vectors: StateVectors  # Memory for parameters and momentum of the fragment in the next anchor
    _arrivals: Arrivals
    _means: ExchangeMeans
    _report: Callable[[Event], None]
    _staged: Callable[[Anchor], None]  # Called once with the complete next anchor

    def __post_init__(self) -> None:
        plan, source, means = self.plan, self._source, self._means
        self.sent_bytes = 0
        self.sent = SentParts(plan.codec) if plan.codec in LEAVES_OVER else None
        """Encoded contributions, kept if the codec drops much of the pseudo-gradient."""
        self._comparison = Comparison(plan, source, means.random)
        self._signed: dict[Piece, dict[PeerId, SignedHash]] = {piece: {} for piece in plan.shards[plan.own]}
        self._own_signed: dict[Piece, SignedHash] = {}
        self._reduction = Reduction(plan, source)
        self._staging = Staging(source.anchor, means.rule, *self.vectors)
        self._result_limits = {peer: NormLimit(plan.roster.largest_norm, plan.result_codec) for peer in plan.shards}
        """One limit per reducer. With a shared limit, one reducer could use it up and have the next one blamed."""
        self._progress = ExchangeProgress(plan, means.watch)
        self._owing: frozenset[PeerId] = frozenset()
        self._reported_at: dict[PeerId, float] = {}
        self._room: Vector = np.empty(max(piece.elements for piece in plan.pieces), np.float32)
        width = min(WINDOW, early_pieces(len(plan.others)))
        self._windows = {peer: asyncio.Semaphore(width) for peer in plan.others}
        self._widths = dict.fromkeys(plan.others, width)
        own = len(plan.shards[plan.own])
        self._results: dict[PeerId, asyncio.Queue[tuple[Piece, memoryview]]] = {
            peer: asyncio.Queue(own) for peer in plan.others
        }
        self.complete = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._is_over = False

    def record(self, anchor: Anchor) -> ExchangeRecord:
        samples, suspect = self._reduction.samples, self._comparison.suspect()
        return ExchangeRecord(
            self.plan, anchor, self._signed, self._own_signed, self._source, self.sent, samples, suspect
        )

    async def run(self) -> None:
        """Exchanges pieces until the next anchor is complete and our pieces were sent to every other member."""
        async with task_scope() as tasks:
            self._tasks = tasks
            try:
                for peer in self.plan.others:
                    # The tasks of one member share an iterator: one sends while the other encodes.
                    contributions = iter(self.plan.shards[peer] if self.plan.contributes else ())
                    results = iter(range(len(self.plan.shards[self.plan.own])))
                    for _ in range(TRAFFIC_CLASSES):
                        tasks.create_task(self._send_contributions(peer, contributions))
                        tasks.create_task(self._send_results(peer, results))
                self._arrivals.open(self.plan, self._take)
                # Without other contributors no arriving piece triggers the reduction of our shard.
                if not set(self.plan.contributors) - {self.plan.own}:
                    for piece in self.plan.shards[self.plan.own]:
                        tasks.create_task(self._pass_on(piece))
                self._tell_owing()
                await self.complete.wait()
            finally:
                self._tasks = None

    def let_go(self) -> None:
        """Drops vectors and buffers after `run`. Reference cycles would keep them until a garbage collection."""
        if not self._is_over:
            self._is_over = True
            self._arrivals.let_go()
            self._results.clear()
            del self._staging, self._reduction, self._comparison, self._source, self._staged, self._room

    async def _send_contributions(self, reducer: PeerId, pieces: Iterator[Piece]) -> None:
        codec = self.plan.codec
        largest = max((piece.elements for piece in self.plan.shards[reducer]), default=0)
        room = np.empty(encoded_bytes(codec, largest) if largest else 0, np.uint8).data
        for piece in pieces:
            await self._windows[reducer].acquire()
            data = room[: encoded_bytes(codec, piece.elements)]
            message = await self._on_thread(partial(self._encode, piece, codec, data))
            if not await self._send(reducer, message, piece, data):
                return
            self._progress.contributed(reducer)
            self._tell_owing()

    def _encode(self, piece: Piece, codec: Codec, data: memoryview) -> Contribution:
        """Encodes our contribution to a piece into `data`, on the averaging thread. Returns its signed message."""
        self._source.encode(piece.part, codec, data, self._room)
        if self.sent is not None:
            self.sent.note(piece.part, data)
        message, data_hash = self.plan.contribution(piece), hash_of(data)
        signature = self._means.signatures.sign(message, data_hash)
        self._own_signed[piece] = SignedHash(self.plan.own, data_hash, signature)
        return replace(message, signature=signature)

    async def _send_results(self, peer: PeerId, numbers: Iterator[int]) -> None:
        for _ in numbers:
            piece, data = await self._results[peer].get()
            if not await self._send(peer, self.plan.result(piece), piece, data):
                return

    async def _send(self, peer: PeerId, message: Contribution | Reduced, piece: Piece, data: memoryview) -> bool:
        try:
            spec = self.plan.spec(message, piece)
            await self._means.transport.send(peer, message, spec, data)
        except PeerError:
            self._report(LinkLost(peer))
            return False
        self.sent_bytes += data.nbytes
        crash_point("piece sent")
        return True

    def _take(self, sender: PeerId, message: RoundPiece, piece: Piece, buffer: memoryview) -> None:
        crash_point("piece arrived")
        if self._tasks is None:  # `run` has ended
            self._arrivals.give_back(buffer)
        elif isinstance(message, Contribution):
            self._tasks.create_task(self._add(sender, message, piece, buffer))
        else:
            self._tasks.create_task(self._receive_result(sender, piece, buffer))

    async def _add(self, sender: PeerId, message: Contribution, piece: Piece, buffer: memoryview) -> None:
        try:
            encoding = await self._on_thread(partial(self._check_and_add, sender, message, piece, buffer))
        except ProtocolViolation as error:
            self._arrivals.give_back(buffer)
            self._report(PieceRejected(self.plan.roster.round, sender, str(error)))
            return
        self._arrivals.give_back(buffer)
        self._tell_of_piece(sender)
        self._progress.added(sender, piece)
        self._tell_owing()
        if encoding is not None:
            await self._pass_on(piece, encoding)

    def _check_and_add(
        self, sender: PeerId, message: Contribution, piece: Piece, buffer: memoryview
    ) -> memoryview | None:
        data_hash = hash_of(buffer)  # the signature covers the encoded bytes, so verify before decoding
        if not self._means.signatures.holds(sender, message, data_hash, message.signature):
            raise ProtocolViolation("a contribution with an invalid signature")
        self._signed[piece][sender] = SignedHash(sender, data_hash, message.signature)
        return self._reduction.add(piece, sender, buffer, self._room)

    async def _pass_on(self, piece: Piece, data: memoryview | None = None) -> None:
        if data is None:
            data = await self._on_thread(partial(self._reduction.finish, piece))
        crash_point("reduced")
        for queue in self._results.values():
            queue.put_nowait((piece, data))
        await self._apply(self.plan.own, piece, data)

    async def _receive_result(self, reducer: PeerId, piece: Piece, buffer: memoryview) -> None:
        applied = await self._apply(reducer, piece, buffer)
        self._arrivals.give_back(buffer)
        if applied:
            self._tell_of_piece(reducer)
            # Allow one more piece in flight to this reducer, or two while its window still grows.
            self._windows[reducer].release()
            if self._widths[reducer] < WINDOW:
                self._widths[reducer] += 1
                self._windows[reducer].release()

    async def _apply(self, reducer: PeerId, piece: Piece, data: memoryview) -> bool:
        # Other members wait for pieces to be sent and summed, so the outer step has lower priority.
        try:
            await self._means.thread.run(Priority.TRAIN, partial(self._step, piece, data))
        except ProtocolViolation as error:
            self._report(PieceRejected(self.plan.roster.round, reducer, str(error)))
            return False
        complete = self._progress.applied(piece)
        self._tell_owing()
        if complete:
            await self._finish()
        return True

    async def _finish(self) -> None:
        """Passes the next anchor to `staged`. If a member's result cannot be the mean, reports that member instead."""
        roster = self.plan.roster
        odd = self._comparison.oddities()  # the comparison needs the results of all reducers
        for reducer, why in odd.items():
            self._report(PieceRejected(roster.round, reducer, why))
        if odd:
            return
        anchor = await self._on_thread(partial(self._staging.finish, roster.round.number, roster.steps, roster.tokens))
        self.complete.set()
        crash_point("staged")
        self._staged(anchor)

    def _step(self, piece: Piece, data: memoryview) -> None:
        with gradual_underflow():  # all members must decode the same bits
            gradient = read_encoding(self.plan.result_codec, data, self._room[: piece.elements])
        self._result_limits[piece.reducer].check(gradient)
        self._comparison.add(piece, gradient)
        self._staging.apply(piece.first_chunk, piece.end_chunk, gradient)

    def _tell_of_piece(self, sender: PeerId) -> None:
        now = self._means.clock.monotonic()
        if now - self._reported_at.get(sender, -math.inf) >= PROGRESS_EVERY_S:
            self._reported_at[sender] = now
            self._report(PieceArrived(self.plan.roster.round, sender))

    def _tell_owing(self) -> None:
        owing = self._progress.owing()
        if owing != self._owing:
            self._owing = owing
            self._report(Owing(self.plan.roster.round, owing))

    async def _on_thread(self, job: Callable[[], Result]) -> Result:
        return await self._means.thread.run(Priority.UPKEEP, job)
