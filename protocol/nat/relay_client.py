"""Attachment to relaying peers: how a peer that nobody can dial takes tunnels."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from protocol.generated import relay_pb2
from protocol.libp2p.messages import Dial, RelayStream, ask, freely, splice
from protocol.transport.rate_limits import Allowance
from swarm.vocabulary.errors import PeerError, ProtocolViolation, ResourceExhausted, Unreachable
from swarm.vocabulary.types import PeerId, RunId, short

log = logging.getLogger(__name__)

PING_S: Final = 20.0  # Routers at home forget connections that are silent for some minutes
SILENCE_S: Final = 60.0
ANSWER_S: Final = 8.0
IDLE_S: Final = 90.0  # Longer than the relay's own, so that it is the relay that says when a tunnel is idle
RETRY_S: Final = (1.0, 60.0)
"""First and longest pause before attaching again; doubled each time, shortened at random by up to half."""
MAX_INCOMING: Final = 32  # Tunnels to this peer at once, through all relays
TAKEN_BURST: Final = 64
TAKEN_REFILL_S: Final = 0.5
"""Tunnels taken at once through one relay, and seconds until one more: each is work that the relay can cause."""


@dataclass(slots=True)
class Incoming:
    """The tunnels that lead to this peer now, through whatever relay."""

    local: tuple[str, int]  # Host and port that they lead to
    tunnels: int = 0
    allowance: Allowance = field(default_factory=lambda: Allowance(TAKEN_BURST, TAKEN_REFILL_S))

    def objection(self, relay: str, now: float) -> str:
        """The reason against another tunnel through this relay; empty when it may come."""
        if self.tunnels >= MAX_INCOMING:
            return f"{MAX_INCOMING} tunnels lead there already"
        if not self.allowance.take(relay, now):
            return "enough tunnels came through this relay for now"
        return ""


@dataclass(slots=True, eq=False)
class Attachment:
    """The attachment to the relay at a multiaddr. `keep` runs as long as it is wanted."""

    relay: str
    run: RunId
    dial: Dial
    incoming: Incoming
    jitter: Callable[[], float] = random.random  # From 0 to 1
    ping_s: float = PING_S
    standing: bool = field(default=False, init=False)
    reason: str = field(default="not tried yet", init=False)  # Why it does not stand

    async def keep(self) -> None:
        """Attaches, and attaches again with growing pauses when that ends; until cancelled, with its tunnels."""
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
        """One attachment, from its start to its end. Raises PeerError, always."""
        stream = await self.dial(self.relay)
        try:
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
        finally:
            await stream.close()

    async def _ping(self, stream: RelayStream) -> None:
        with contextlib.suppress(Unreachable):  # whoever listens on the stream hears of it too
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
                raise ProtocolViolation(f"relay: {kind} was said to an attached peer")

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
        """Carries one tunnel between the relay and this peer's own port."""
        try:
            stream = await self.dial(self.relay)
            try:
                await self._carry(number, stream)
            finally:
                await stream.close()
        except (PeerError, OSError) as error:
            log.info("a tunnel through %s was not taken: %s", self.relay, error)

    async def _carry(self, number: int, stream: RelayStream) -> None:
        accept = relay_pb2.RelayAccept(number=number)
        await ask(stream, relay_pb2.RelayMessage(accept=accept), ANSWER_S)
        local = RelayStream(stream.peer, *await asyncio.open_connection(*self.incoming.local))
        try:
            ended = await splice((stream.reader, stream.writer), (local.reader, local.writer), freely, IDLE_S)
            log.info("a tunnel through %s ended: %s", self.relay, ended)
        finally:
            await local.close()


LOCAL_HOST: Final = "127.0.0.1"
OPEN_S: Final = 10.0  # For the relay's answer; it gives the far end 8 s of them
TAKE_S: Final = 10.0  # For the connection to the local port
MAX_OPENING: Final = 8
MAX_OPENED: Final = 64


class OpenTunnels:
    """The tunnels that this peer has opened. They end with the task group."""

    def __init__(self, run: RunId, dial: Dial, tasks: asyncio.TaskGroup) -> None:
        self._run = run
        self._dial = dial
        self._tasks = tasks
        self._opening = 0
        self._opened = 0

    async def open(self, relay: str, target: PeerId) -> int:
        """Opens a tunnel; returns a port on 127.0.0.1 for one connection. Raises PeerError, ResourceExhausted."""
        # Another local program that connects only speaks to the target's TLS; the node's own connection then fails.
        if self._opening >= MAX_OPENING or self._opened >= MAX_OPENED:
            raise ResourceExhausted(f"{self._opening} tunnels are being opened and {self._opened} are open already")
        self._opening += 1
        try:
            stream = await self._stream(relay, target)
        finally:
            self._opening -= 1
        try:
            listener = socket.create_server((LOCAL_HOST, 0), backlog=1)
            listener.setblocking(False)
        except OSError as error:
            await stream.close()
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
            await stream.close()
            raise
        return stream

    def _let_go(self, _: asyncio.Task[None]) -> None:
        self._opened -= 1

    async def _carry(self, listener: socket.socket, stream: RelayStream, target: PeerId) -> None:
        try:
            local = await _one_connection(listener, target)
            try:
                near, far = (local.reader, local.writer), (stream.reader, stream.writer)
                ended = await splice(near, far, freely, IDLE_S)
                log.info("the tunnel to %s ended: %s", short(target), ended)
            finally:
                await local.close()
        except (TimeoutError, OSError) as error:
            log.info("nobody used the tunnel to %s: %s", short(target), error or "no connection came")
        finally:
            await stream.close()


async def _one_connection(listener: socket.socket, target: PeerId) -> RelayStream:
    """The first connection that comes; later ones are refused by the system. Raises TimeoutError, OSError."""
    try:
        async with asyncio.timeout(TAKE_S):
            accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
    finally:
        listener.close()
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader, writer = await asyncio.open_connection(sock=accepted)
    return RelayStream(target, reader, writer)
