"""Tunnels through relays: the relay, the attachment of a peer to a relay, and the opening of tunnels."""

import asyncio
import itertools
import logging
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from protocol.frames.codec import parsed, printable
from protocol.generated import dht_process_pb2, relay_pb2
from protocol.transport.rate_limits import TokenBuckets
from swarm.vocabulary.errors import PeerError, ProtocolViolation, Rejected, ResourceExhausted, Unreachable
from swarm.vocabulary.types import PeerId, RunId, short

MAX_MESSAGE_BYTES: Final = 1024
MAX_REASON: Final = 200
CLOSE_PATIENCE_S: Final = 1.0  # Time to send the remaining bytes before they are dropped
_LENGTH_BYTES: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class RelayStream:
    """A byte stream to a peer, authenticated by libp2p."""

    peer: PeerId
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, message: relay_pb2.RelayMessage) -> None:
        """Sends a message, waiting for the other side to read. Raises Unreachable if the stream is broken."""
        data = message.SerializeToString()
        assert len(data) <= MAX_MESSAGE_BYTES
        try:
            self.writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
            await self.writer.drain()
        except (OSError, RuntimeError) as error:  # RuntimeError: asyncio's, of a transport that is closing
            raise Unreachable("the stream broke") from error

    async def hear(self) -> relay_pb2.RelayMessage:
        """Reads the stream's next message. Raises Unreachable at its end, ProtocolViolation for an invalid message."""
        try:
            length = int.from_bytes(await self.reader.readexactly(_LENGTH_BYTES), "big")
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolViolation(f"relay: a message of {length} bytes is longer than {MAX_MESSAGE_BYTES}")
            data = await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Unreachable("the stream ended") from error
        message = parsed(relay_pb2.RelayMessage, data, "relay: the bytes on the stream are not a message")
        if message.WhichOneof("kind") is None:
            raise ProtocolViolation("relay: a message of unknown kind")
        return message

    async def aclose(self) -> None:
        """Ends the stream after sending the written bytes, or after CLOSE_PATIENCE_S. Raises only CancelledError."""
        self.writer.close()
        try:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_PATIENCE_S):
                    await self.writer.wait_closed()
        finally:
            self.cut()

    def cut(self) -> None:
        """Ends the stream at once. Does nothing if it has ended."""
        self.writer.transport.abort()


Dial = Callable[[str], Awaitable[RelayStream]]  # Opens a stream to a relay's multiaddr. Raises Unreachable.


async def ask(stream: RelayStream, message: relay_pb2.RelayMessage, timeout_s: float) -> None:
    """Sends a stream's first message and waits for consent. Raises Rejected, Unreachable, ProtocolViolation."""
    try:
        async with asyncio.timeout(timeout_s):
            await stream.say(message)
            answer = await stream.hear()
    except TimeoutError:
        raise Unreachable(f"the relay did not answer within {timeout_s:g} s") from None
    if answer.WhichOneof("kind") != "answer":
        raise ProtocolViolation(f"relay: {answer.WhichOneof('kind')} is not an answer")
    if answer.answer.refused:
        raise Rejected(f"the relay refused: {printable(answer.answer.refused[:MAX_REASON])}")


def answer(refused: str = "") -> relay_pb2.RelayMessage:
    return relay_pb2.RelayMessage(answer=relay_pb2.RelayAnswer(refused=refused[:MAX_REASON]))


READ_BYTES: Final = 128 * 1024  # Limit of asyncio's reader

Spend = Callable[[int], str]  # Called before bytes are carried; returns the objection, or ""


async def splice(one: RelayStream, other: RelayStream, idle_s: float, spend: Spend = lambda amount: "") -> str:
    """Copies bytes between two streams until one ends, `spend` refuses, or `idle_s` pass without bytes. Returns why."""
    # Reading pauses while the other side does not accept the bytes. The callers close the streams.
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(idle_s) as limit:

            def moved() -> None:
                limit.reschedule(loop.time() + idle_s)

            async with asyncio.TaskGroup() as tasks:
                ways = (
                    tasks.create_task(_pump(one.reader, other.writer, spend, moved)),
                    tasks.create_task(_pump(other.reader, one.writer, spend, moved)),
                )
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                ended = next(way for way in ways if way.done())
                for way in ways:
                    way.cancel()
            return ended.result()
    except TimeoutError:
        return f"idle for {idle_s:g} s"


async def _pump(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, spend: Spend, moved: Callable[[], None]
) -> str:
    try:
        while chunk := await source.read(READ_BYTES):
            if objection := spend(len(chunk)):
                return objection
            sink.write(chunk)
            await sink.drain()
            moved()
    except (OSError, RuntimeError) as error:  # RuntimeError: asyncio's, of a transport that is closing
        return f"a stream broke: {error}"
    return "one side ended it"


HOUR_S: Final = 3600.0
MIN_OPEN_BYTES: Final = 64 * 1024  # Fewest bytes left for a new tunnel: a TLS handshake alone takes some thousand bytes


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Limits of a relay: bytes per hour, numbers of tunnels and attached peers, and timeouts."""

    bytes_per_hour: int  # Both directions together
    pair_share: float = 0.25  # Largest share of the bytes for any two peers
    tunnels: int = 16
    tunnels_of_a_peer: int = 4
    opens: int = 16
    open_refill_s: float = 2.0  # Seconds per tunnel that a peer opens: each one costs its far end a handshake
    attached: int = 64
    greeting: int = 32  # Streams without a first message
    greeting_of_a_peer: int = 4
    handshake_s: float = 8.0  # Timeout of the first message, and of a tunnel's acceptance
    idle_s: float = 60.0  # Longest silence of a tunnel or an attachment


class RelayBudget:
    """Budget of relayed bytes per hour: half is available at once, the other half refills during the hour."""

    def __init__(self, limits: RelayLimits, now: Callable[[], float] = time.monotonic, left: int | None = None) -> None:
        """`left`: bytes of the first half that a previous process has not used."""
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
        """Charges the budget for bytes relayed between two peers. Returns the reason if too few are left, or ""."""
        now, pair = self._now(), _pair(one, other)
        if not self._pairs.take(pair, now, amount):
            self._pairs.take(pair, now, self._pairs.left(pair, now))  # the rest would open another tunnel
            return "these two peers have had their share of the relay's bytes for now"
        return "" if self._all.take("", now, amount) else "the relay's bytes are used up for now"


def _hourly(amount: float) -> TokenBuckets:
    half = max(1, int(amount / 2))
    return TokenBuckets(burst=half, refill_s=HOUR_S / half)


def _pair(one: PeerId, other: PeerId) -> str:
    return "|".join(sorted((one, other)))


log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    """Tunnel that waits for its target. `taken` gets the target's stream, which stays open until `over` is set."""

    target: PeerId
    taken: asyncio.Future[RelayStream]
    over: asyncio.Event = field(default_factory=asyncio.Event)


class RelayService:
    """Relay of this node. Call `serve` once for each incoming stream; it returns when the stream has ended."""

    def __init__(
        self,
        run: RunId,
        limits: RelayLimits,
        before: dht_process_pb2.DhtRelayFigures | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`before`: statistics of a previous process, which this one continues."""
        self._run, self._limits, self._now = run, limits, now
        self._budget = RelayBudget(limits, now, None if before is None else before.left_bytes)
        self._figures = before or dht_process_pb2.DhtRelayFigures()
        self._attachments: dict[PeerId, RelayStream] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = itertools.count(1)
        self._opens = TokenBuckets(limits.opens, limits.open_refill_s)
        self._greeting: Counter[PeerId] = Counter()
        self._open: Counter[PeerId] = Counter()

    def figures(self) -> dht_process_pb2.DhtRelayFigures:
        figures = self._figures
        figures.attached, figures.tunnels = len(self._attachments), self._open.total()
        figures.left_bytes = self._budget.left()
        return figures

    async def serve(self, stream: RelayStream) -> None:
        """Serves an incoming stream by its first message: attach, open or accept. Raises only CancelledError."""
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
            self._figures.refused += 1
            log.info("a stream of %s is refused: %s", short(stream.peer), error)
            with suppress(Unreachable, TimeoutError):
                async with asyncio.timeout(self._limits.handshake_s):
                    await stream.say(answer(str(error)))
        finally:
            await stream.aclose()

    async def _greeted(self, stream: RelayStream) -> relay_pb2.RelayMessage:
        """Reads a stream's first message. Raises Rejected if it is late, or if too many streams wait for theirs."""
        limits = self._limits
        if self._greeting.total() >= limits.greeting or self._greeting[stream.peer] >= limits.greeting_of_a_peer:
            raise Rejected("too many streams have not sent their first message")
        with _counted(self._greeting, stream.peer):
            try:
                async with asyncio.timeout(limits.handshake_s):
                    return await stream.hear()
            except TimeoutError:
                raise Rejected(f"a stream sent nothing for {limits.handshake_s:g} s") from None

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
                        waiting = self._waiting.get(message.decline.number)
                        if waiting is not None and waiting.target == stream.peer and not waiting.taken.done():
                            why = printable(message.decline.reason[:MAX_REASON])
                            waiting.taken.set_exception(Rejected(f"the far end declined: {why}"))
                    case kind:
                        raise ProtocolViolation(f"relay: an attached peer sent {kind}")
        except TimeoutError:
            raise Unreachable(f"an attachment was silent for {self._limits.idle_s:g} s") from None

    async def _accept(self, stream: RelayStream, accept: relay_pb2.RelayAccept) -> None:
        waiting = self._waiting.get(accept.number)
        if waiting is None or waiting.target != stream.peer or waiting.taken.done():
            raise Rejected(f"no tunnel has the number {accept.number}")
        waiting.taken.set_result(stream)
        await waiting.over.wait()

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
                self._figures.opened += 1
                await self._carry(stream, far)

    def _check_room(self, peer: PeerId, target: PeerId) -> None:
        limits = self._limits
        if self._open.total() >= limits.tunnels:
            raise Rejected(f"{limits.tunnels} tunnels are open here already")
        if self._open[peer] >= limits.tunnels_of_a_peer:
            raise Rejected(f"the peer has {limits.tunnels_of_a_peer} tunnels here already")
        if not self._opens.take(peer, self._now()):
            raise Rejected("the peer opens tunnels too often")
        if self._budget.left() < MIN_OPEN_BYTES:
            raise Rejected("the relay's bytes are used up for now")
        if self._budget.pair_left(peer, target) < MIN_OPEN_BYTES:
            raise Rejected("these two peers have had their share of the relay's bytes for now")

    @asynccontextmanager
    async def _far_end(self, attached: RelayStream, opener: PeerId) -> AsyncIterator[RelayStream]:
        """Asks an attached peer to accept a tunnel from `opener`. Yields the stream that it opens. Raises Rejected."""
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
                raise Rejected("the peer is not attached here any longer") from None
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
            self._figures.carried_bytes += 0 if objection else amount
            return objection

        ended = await splice(stream, far, self._limits.idle_s, spend)
        self._figures.cut_off += bool(objection)
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
        counter -= Counter((peer,))  # and nothing is kept of 0


SILENCE_S: Final = 60.0
ANSWER_S: Final = 8.0
IDLE_S: Final = 90.0  # Longer than the relay's timeout, so that the relay decides when a tunnel is idle
# First and longest pause before attaching again; doubled each time, with up to 50 % jitter
RETRY_S: Final = (1.0, 60.0)
MAX_INCOMING: Final = 32  # Concurrent tunnels to this peer, through all relays
TAKEN_BURST: Final = 64
# Burst of tunnels accepted through one relay, and seconds per further tunnel, because a relay can invent tunnels
TAKEN_REFILL_S: Final = 0.5


@dataclass(slots=True)
class Incoming:
    """Tunnels that others open to this peer through all relays: local address, number and rate limit."""

    local: tuple[str, int]  # Host and port to which tunnels lead
    tunnels: int = 0
    allowance: TokenBuckets = field(default_factory=lambda: TokenBuckets(TAKEN_BURST, TAKEN_REFILL_S))

    def objection(self, relay: str, now: float) -> str:
        """Returns why another tunnel through this relay is declined; empty if it is accepted."""
        if self.tunnels >= MAX_INCOMING:
            return f"the peer has {MAX_INCOMING} tunnels already"
        return "" if self.allowance.take(relay, now) else "too many tunnels through this relay for now"


@dataclass(slots=True, eq=False)
class Attachment:
    """Attachment of this peer to one relay, through which others can reach it. It lasts while `keep` runs."""

    relay: str
    run: RunId
    dial: Dial
    incoming: Incoming
    jitter: Callable[[], float] = random.random  # From 0 to 1
    ping_s: float = 20.0  # Home routers forget connections after some minutes of silence
    standing: bool = field(default=False, init=False)
    reason: str = field(default="not tried yet", init=False)  # Reason if it is not standing

    async def keep(self) -> None:
        """Attaches to the relay, again after each failure, until cancelled. All tunnels through the relay end then."""
        pause_s, longest_s = RETRY_S
        async with asyncio.TaskGroup() as tunnels:
            while True:
                try:
                    await self._attend(tunnels)
                except PeerError as error:
                    log.info("not attached to %s: %s", self.relay, error)
                    self.reason = str(error)
                if self.standing:
                    pause_s = RETRY_S[0]
                self.standing = False
                await asyncio.sleep(pause_s * (1 - self.jitter() / 2))
                pause_s = min(longest_s, 2 * pause_s)

    async def _attend(self, tunnels: asyncio.TaskGroup) -> None:
        """Attaches to the relay and handles its messages until the stream fails. Always ends with a PeerError."""
        async with aclosing(await self.dial(self.relay)) as stream:
            attach = relay_pb2.RelayAttach(run=self.run)
            await ask(stream, relay_pb2.RelayMessage(attach=attach), ANSWER_S)
            self.standing, self.reason = True, ""
            pinging = asyncio.ensure_future(self._ping(stream))
            try:
                while True:
                    await self._hear(stream, tunnels)
            finally:
                pinging.cancel()
                await asyncio.wait((pinging,))

    async def _ping(self, stream: RelayStream) -> None:
        with suppress(Unreachable):  # the task that reads the stream gets the error too
            while True:
                await asyncio.sleep(self.ping_s)
                await stream.say(relay_pb2.RelayMessage(ping=relay_pb2.RelayPing()))

    async def _hear(self, stream: RelayStream, tunnels: asyncio.TaskGroup) -> None:
        try:
            async with asyncio.timeout(SILENCE_S):
                message = await stream.hear()
        except TimeoutError:
            raise Unreachable(f"the relay was silent for {SILENCE_S:g} s") from None
        match message.WhichOneof("kind"):
            case "ping":
                pass
            case "incoming":
                await self._take(message.incoming.number, stream, tunnels)
            case kind:
                raise ProtocolViolation(f"relay: {kind} was sent to an attached peer")

    async def _take(self, number: int, stream: RelayStream, tunnels: asyncio.TaskGroup) -> None:
        if objection := self.incoming.objection(self.relay, time.monotonic()):
            decline = relay_pb2.RelayDecline(number=number, reason=objection)
            await stream.say(relay_pb2.RelayMessage(decline=decline))
            return
        self.incoming.tunnels += 1
        taking = tunnels.create_task(self._accept(number))
        taking.add_done_callback(self._let_go)

    def _let_go(self, _: asyncio.Task[None]) -> None:
        self.incoming.tunnels -= 1

    async def _accept(self, number: int) -> None:
        """Accepts tunnel `number` on a new stream to the relay, and connects the stream to this peer's local port."""
        try:
            async with aclosing(await self.dial(self.relay)) as stream:
                await self._carry(number, stream)
        except (PeerError, OSError) as error:
            log.info("a tunnel through %s was not accepted: %s", self.relay, error)

    async def _carry(self, number: int, stream: RelayStream) -> None:
        accept = relay_pb2.RelayAccept(number=number)
        await ask(stream, relay_pb2.RelayMessage(accept=accept), ANSWER_S)
        async with aclosing(RelayStream(stream.peer, *await asyncio.open_connection(*self.incoming.local))) as local:
            ended = await splice(stream, local, IDLE_S)
            log.info("a tunnel through %s ended: %s", self.relay, ended)


OPEN_S: Final = 10.0  # Timeout of the relay's answer, which includes 8 s for the far end
TAKE_S: Final = 10.0  # Timeout of the connection to the local port
MAX_OPENING: Final = 8
MAX_OPENED: Final = 64


class OpenTunnels:
    """Tunnels that this peer opened to others through relays. They end with the task group `tasks`."""

    def __init__(self, run: RunId, dial: Dial, tasks: asyncio.TaskGroup) -> None:
        self._run, self._dial, self._tasks = run, dial, tasks
        self._opening, self._opened = 0, 0

    async def open(self, relay: str, target: PeerId) -> int:
        """Opens a tunnel to `target`. Returns a local port for one connection. Raises PeerError, ResourceExhausted."""
        # If another local program connects first, it reaches only the target's TLS, and the node's connection fails.
        if self._opening >= MAX_OPENING or self._opened >= MAX_OPENED:
            raise ResourceExhausted(f"{self._opening} tunnels are being opened and {self._opened} are open already")
        self._opening += 1
        try:
            stream = await self._stream(relay, target)
        finally:
            self._opening -= 1
        try:
            listener = socket.create_server(("127.0.0.1", 0), backlog=1)
            listener.setblocking(False)
        except OSError as error:
            await stream.aclose()
            raise ResourceExhausted(f"no local port for a tunnel: {error}") from error
        self._opened += 1
        port = int(listener.getsockname()[1])
        carrying = self._tasks.create_task(self._carry(listener, stream, target))
        carrying.add_done_callback(self._let_go)
        return port

    async def _stream(self, relay: str, target: PeerId) -> RelayStream:
        stream = await self._dial(relay)
        try:
            wish = relay_pb2.RelayOpen(run=self._run, target=target)
            await ask(stream, relay_pb2.RelayMessage(open=wish), OPEN_S)
        except BaseException:
            await stream.aclose()
            raise
        return stream

    def _let_go(self, _: asyncio.Task[None]) -> None:
        self._opened -= 1

    async def _carry(self, listener: socket.socket, stream: RelayStream, target: PeerId) -> None:
        try:
            async with aclosing(stream), aclosing(await _one_connection(listener, target)) as local:
                ended = await splice(local, stream, IDLE_S)
                log.info("the tunnel to %s ended: %s", short(target), ended)
        except (TimeoutError, OSError) as error:
            log.info("the tunnel to %s was not used: %s", short(target), error or "no connection came")


async def _one_connection(listener: socket.socket, target: PeerId) -> RelayStream:
    """Accepts one connection to a tunnel's local port and closes the port. Raises TimeoutError, OSError."""
    try:
        async with asyncio.timeout(TAKE_S):
            accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
    finally:
        listener.close()
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader, writer = await asyncio.open_connection(sock=accepted)
    return RelayStream(target, reader, writer)
