"""Attachment to relaying peers: how a peer that nobody can dial takes tunnels."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from protocol.generated import relay_pb2
from protocol.libp2p.messages import Dial, RelayStream, ask
from protocol.nat.splice import freely, splice
from protocol.transport.rate_limits import Allowance
from swarm.vocabulary.errors import PeerError, ProtocolViolation, Unreachable
from swarm.vocabulary.types import RunId

log = logging.getLogger(__name__)

PING_S: Final = 20.0
"""Routers at home forget connections that are silent for some minutes."""
SILENCE_S: Final = 60.0
ANSWER_S: Final = 8.0
IDLE_S: Final = 90.0
"""Longer than the relay's own, so that it is the relay that says when a tunnel is idle."""
RETRY_S: Final = (1.0, 60.0)
"""First and longest pause before attaching again; doubled each time, shortened at random by up to half."""
MAX_INCOMING: Final = 32
"""Tunnels to this peer at once, through all relays."""
TAKEN_BURST: Final = 64
TAKEN_REFILL_S: Final = 0.5
"""Those that are taken through one relay at once, and after how long one more: each is work that the relay can make us
do."""


@dataclass(slots=True)
class Incoming:
    """The tunnels that lead to this peer now, through whatever relay."""

    local: tuple[str, int]
    """Host and port that they lead to."""
    tunnels: int = 0
    allowance: Allowance = field(default_factory=lambda: Allowance(TAKEN_BURST, TAKEN_REFILL_S))

    def objection(self, relay: str, now: float) -> str:
        """The reason against another tunnel through this relay; empty when it may come."""
        if self.tunnels >= MAX_INCOMING:
            return f"{MAX_INCOMING} tunnels lead there already"
        if not self.allowance.take(relay, now):
            return "enough tunnels came through this relay for now"
        return ""


class Attachment:
    """The attachment to one relaying peer. `keep` runs as long as it is wanted."""

    def __init__(
        self,
        relay: str,
        run: RunId,
        dial: Dial,
        incoming: Incoming,
        jitter: Callable[[], float] = random.random,
        ping_s: float = PING_S,
    ) -> None:
        """`relay`: the multiaddr at which it serves tunnels. `jitter`: a number from 0 to 1."""
        self.relay = relay
        self.standing = False
        self.reason = "not tried yet"
        """Why it does not stand."""
        self._run = run
        self._dial = dial
        self._incoming = incoming
        self._jitter = jitter
        self._ping_s = ping_s

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
                await asyncio.sleep(pause_s * (1 - self._jitter() / 2))
                pause_s = min(longest_s, 2 * pause_s)

    async def _attend(self, tunnels: asyncio.TaskGroup) -> None:
        """One attachment, from its start to its end. Raises PeerError, always."""
        stream = await self._dial(self.relay)
        try:
            attach = relay_pb2.RelayAttach(run=self._run)
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
                await asyncio.sleep(self._ping_s)
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
        if objection := self._incoming.objection(self.relay, time.monotonic()):
            decline = relay_pb2.RelayDecline(number=number, reason=objection)
            await stream.say(relay_pb2.RelayMessage(decline=decline))
            return
        self._incoming.tunnels += 1
        taking = tunnels.create_task(self._accept(number))
        taking.add_done_callback(self._let_go)

    def _let_go(self, _: asyncio.Task[None]) -> None:
        self._incoming.tunnels -= 1

    async def _accept(self, number: int) -> None:
        """Carries one tunnel between the relay and this peer's own port."""
        try:
            stream = await self._dial(self.relay)
            try:
                await self._carry(number, stream)
            finally:
                await stream.close()
        except (PeerError, OSError) as error:
            log.info("a tunnel through %s was not taken: %s", self.relay, error)

    async def _carry(self, number: int, stream: RelayStream) -> None:
        accept = relay_pb2.RelayAccept(number=number)
        await ask(stream, relay_pb2.RelayMessage(accept=accept), ANSWER_S)
        local = RelayStream(stream.peer, *await asyncio.open_connection(*self._incoming.local))
        try:
            ended = await splice((stream.reader, stream.writer), (local.reader, local.writer), freely, IDLE_S)
            log.info("a tunnel through %s ended: %s", self.relay, ended)
        finally:
            await local.close()
