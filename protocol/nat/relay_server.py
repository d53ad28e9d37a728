"""The relay: carries tunnels to attached peers, within limits. The ends of a tunnel speak TLS with each other."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from protocol.generated import dht_process_pb2, relay_pb2
from protocol.libp2p.messages import RelayStream, answer, as_text, readable, splice
from protocol.transport.rate_limits import Allowance
from swarm.vocabulary.errors import PeerError, ProtocolViolation, Rejected, Unreachable
from swarm.vocabulary.types import PeerId, RunId, short

HOUR_S: Final = 3600.0
MIN_OPEN_BYTES: Final = 64 * 1024
"""With less than this left no tunnel is opened: a TLS handshake alone takes some thousand bytes."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Limits of a relaying peer: the volunteer's bytes, and bounds on memory, files and time."""

    bytes_per_hour: int  # Both ways together
    pair_share: float = 0.25  # Share of the bytes for any two peers
    tunnels: int = 16
    tunnels_of_a_peer: int = 4
    opens: int = 16
    open_refill_s: float = 2.0  # Each tunnel costs its far end a handshake
    attached: int = 64
    greeting: int = 32  # Streams without a first message
    greeting_of_a_peer: int = 4
    handshake_s: float = 8.0  # For the first message, and for the far end to accept a tunnel
    idle_s: float = 60.0  # Longest silence of a tunnel or an attachment


class RelayBudget:
    """The byte budget of the hour: half may go at once, the other half comes back in its course."""

    def __init__(self, limits: RelayLimits, now: Callable[[], float] = time.monotonic, left: int | None = None) -> None:
        """`left`: of the burst, when somebody before us has used up some of it."""
        self._now = now
        self._all = _hourly(limits.bytes_per_hour)
        self._pairs = _hourly(limits.bytes_per_hour * limits.pair_share)
        if left is not None:
            self._all.take("", now(), max(0, self._all.left("", now()) - left))

    def left(self) -> int:
        return self._all.left("", self._now())

    def pair_left(self, one: PeerId, other: PeerId) -> int:
        return self._pairs.left(_pair(one, other), self._now())

    def spend(self, one: PeerId, other: PeerId, amount: int) -> str:
        """Takes so many bytes for these two peers; returns the reason if they are not to be had."""
        now = self._now()
        if not self._pairs.take(_pair(one, other), now, amount):
            return "these two peers have had their share of the relay's bytes for now"
        if not self._all.take("", now, amount):
            return "the relay's bytes are used up for now"
        return ""


def _hourly(amount: float) -> Allowance:
    half = max(1, int(amount / 2))
    return Allowance(burst=half, refill_s=HOUR_S / half)


def _pair(one: PeerId, other: PeerId) -> str:
    return "|".join(sorted((one, other)))


@dataclasses.dataclass(frozen=True, slots=True)
class RelayFigures:
    """The relay's account, with the names of `DhtRelayFigures` (proto/dht_process.proto)."""

    carried_bytes: int = 0
    left_bytes: int = 0
    attached: int = 0
    tunnels: int = 0
    opened: int = 0
    refused: int = 0
    cut_off: int = 0


def write_figures(figures: RelayFigures) -> dht_process_pb2.DhtRelayFigures:
    return dht_process_pb2.DhtRelayFigures(**dataclasses.asdict(figures))


def read_figures(message: dht_process_pb2.DhtRelayFigures) -> RelayFigures:
    return RelayFigures(**{field.name: getattr(message, field.name) for field in dataclasses.fields(RelayFigures)})


log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A tunnel that its far end has not accepted yet, and then the tunnel: the far end's stream lives until `over`."""

    target: PeerId
    taken: asyncio.Future[RelayStream]
    over: asyncio.Event = field(default_factory=asyncio.Event)


class RelayService:
    """Serves streams to the relay: `serve` is called once for each and returns when it has ended."""

    def __init__(
        self,
        run: RunId,
        limits: RelayLimits,
        before: RelayFigures | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`before`: what was given already, in a life that this one goes on with."""
        self._run = run
        self._limits = limits
        self._budget = RelayBudget(limits, now, None if before is None else before.left_bytes)
        self._carried, self._opened, self._refused, self._cut_off = (
            (0, 0, 0, 0) if before is None else (before.carried_bytes, before.opened, before.refused, before.cut_off)
        )
        self._attachments: dict[PeerId, RelayStream] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = itertools.count(1)
        self._now = now
        self._opens = Allowance(limits.opens, limits.open_refill_s)
        self._greeting: Counter[PeerId] = Counter()
        self._open: Counter[PeerId] = Counter()

    def figures(self) -> RelayFigures:
        return RelayFigures(
            carried_bytes=self._carried,
            left_bytes=self._budget.left(),
            attached=len(self._attachments),
            tunnels=self._open.total(),
            opened=self._opened,
            refused=self._refused,
            cut_off=self._cut_off,
        )

    async def serve(self, stream: RelayStream) -> None:
        """Serves a stream from its first message to its end; never raises but CancelledError."""
        try:
            first = await self._greeted(stream)
            match first.WhichOneof("kind"):
                case "attach":
                    await self._attach(stream, first.attach)
                case "open":
                    await self._carry_for(stream, first.open)
                case "accept":
                    await self._accept(stream, first.accept)
                case kind:
                    raise ProtocolViolation(f"relay: a stream begins with {kind}")
        except Unreachable as error:
            log.debug("a stream of %s: %s", short(stream.peer), error)
        except PeerError as error:
            self._refused += 1
            log.info("a stream of %s is refused: %s", short(stream.peer), error)
            with suppress(Unreachable, TimeoutError):
                async with asyncio.timeout(self._limits.handshake_s):
                    await stream.say(answer(as_text(error)))
        finally:
            await stream.close()

    async def _greeted(self, stream: RelayStream) -> relay_pb2.RelayMessage:
        """The first message. Raises Rejected when there are too many that have said nothing yet."""
        limits = self._limits
        if self._greeting.total() >= limits.greeting or self._greeting[stream.peer] >= limits.greeting_of_a_peer:
            raise Rejected("too many streams have not said what they want")
        with _counted(self._greeting, stream.peer):
            try:
                async with asyncio.timeout(limits.handshake_s):
                    return await stream.hear()
            except TimeoutError:
                raise Rejected(f"a stream said nothing for {limits.handshake_s:g} s") from None

    # ---- who waits for tunnels ----------------------------------------------------------------------------------

    async def _attach(self, stream: RelayStream, wish: relay_pb2.RelayAttach) -> None:
        self._check_run(wish.run)
        before = self._attachments.pop(stream.peer, None)
        if before is not None:
            before.cut()
        elif len(self._attachments) >= self._limits.attached:
            raise Rejected(f"{self._limits.attached} peers are attached already")
        self._attachments[stream.peer] = stream
        try:
            await stream.say(answer())
            while True:
                await self._hear_attached(stream)
        finally:
            if self._attachments.get(stream.peer) is stream:
                del self._attachments[stream.peer]

    async def _hear_attached(self, stream: RelayStream) -> None:
        try:
            async with asyncio.timeout(self._limits.idle_s):
                message = await stream.hear()
                match message.WhichOneof("kind"):
                    case "ping":
                        await stream.say(message)
                    case "decline":
                        self._declined(stream.peer, message.decline)
                    case kind:
                        raise ProtocolViolation(f"relay: who is attached said {kind}")
        except TimeoutError:
            raise Unreachable(f"an attachment was silent for {self._limits.idle_s:g} s") from None

    def _declined(self, peer: PeerId, decline: relay_pb2.RelayDecline) -> None:
        waiting = self._waiting.get(decline.number)
        if waiting is not None and waiting.target == peer and not waiting.taken.done():
            waiting.taken.set_exception(Rejected(f"the far end declined: {readable(decline.reason)}"))

    async def _accept(self, stream: RelayStream, accept: relay_pb2.RelayAccept) -> None:
        waiting = self._waiting.get(accept.number)
        if waiting is None or waiting.target != stream.peer or waiting.taken.done():
            raise Rejected(f"nobody waits for number {accept.number}")
        waiting.taken.set_result(stream)
        await waiting.over.wait()

    # ---- who opens them -----------------------------------------------------------------------------------------

    async def _carry_for(self, stream: RelayStream, wish: relay_pb2.RelayOpen) -> None:
        self._check_run(wish.run)
        target = PeerId(wish.target)
        attached = self._attachments.get(target)
        if attached is None or target == stream.peer:
            raise Rejected("the peer is not attached here")
        self._check_room(stream.peer, target)
        with _counted(self._open, stream.peer):
            async with self._far_end(attached, stream.peer) as far:
                await far.say(answer())
                await stream.say(answer())
                self._opened += 1
                await self._carry(stream, far)

    def _check_room(self, peer: PeerId, target: PeerId) -> None:
        limits = self._limits
        if self._open.total() >= limits.tunnels:
            raise Rejected(f"{limits.tunnels} tunnels are open here already")
        if self._open[peer] >= limits.tunnels_of_a_peer:
            raise Rejected(f"the peer has {limits.tunnels_of_a_peer} tunnels here already")
        if not self._opens.take(peer, self._now()):
            raise Rejected("the peer has opened tunnels often enough for now")
        if self._budget.left() < MIN_OPEN_BYTES:
            raise Rejected("the relay's bytes are used up for now")
        if self._budget.pair_left(peer, target) < MIN_OPEN_BYTES:
            raise Rejected("these two peers have had their share of the relay's bytes for now")

    @asynccontextmanager
    async def _far_end(self, attached: RelayStream, opener: PeerId) -> AsyncIterator[RelayStream]:
        """Has the attached peer accept; its stream is open within the block. Raises Rejected."""
        number = next(self._numbers)
        waiting = _Waiting(attached.peer, asyncio.get_running_loop().create_future())
        self._waiting[number] = waiting
        try:
            incoming = relay_pb2.RelayIncoming(number=number, peer=opener)
            try:
                async with asyncio.timeout(self._limits.handshake_s):
                    await attached.say(relay_pb2.RelayMessage(incoming=incoming))
                    far = await waiting.taken
            except TimeoutError:
                raise Rejected(f"the far end did not accept within {self._limits.handshake_s:g} s") from None
            except Unreachable:
                raise Rejected("the peer is not attached here any more") from None
            yield far
        finally:
            del self._waiting[number]
            waiting.taken.cancel()
            waiting.over.set()

    async def _carry(self, stream: RelayStream, far: RelayStream) -> None:
        objection = ""

        def spend(amount: int) -> str:
            nonlocal objection
            objection = self._budget.spend(stream.peer, far.peer, amount)
            self._carried += 0 if objection else amount
            return objection

        ended = await splice((stream.reader, stream.writer), (far.reader, far.writer), spend, self._limits.idle_s)
        self._cut_off += bool(objection)
        log.info("a tunnel from %s to %s ended (%s)", short(stream.peer), short(far.peer), ended)

    def _check_run(self, run: str) -> None:
        if run != self._run:
            raise Rejected("this peer relays for another run")


@contextmanager
def _counted(counter: Counter[PeerId], peer: PeerId) -> Iterator[None]:
    counter[peer] += 1
    try:
        yield
    finally:
        counter[peer] -= 1
        if not counter[peer]:
            del counter[peer]
