"""Opening of tunnels: a local port that leads, through a relaying peer, to a peer that nobody can dial."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

from protocol.generated import relay_pb2
from protocol.libp2p.messages import Dial, RelayStream, ask
from protocol.nat.relay_client import IDLE_S
from protocol.nat.splice import freely, splice
from swarm.vocabulary.errors import ResourceExhausted
from swarm.vocabulary.types import PeerId, RunId, short

log = logging.getLogger(__name__)

LOCAL_HOST: Final = "127.0.0.1"
OPEN_S: Final = 10.0
"""For the relay's answer; it gives the far end 8 s of them."""
TAKE_S: Final = 10.0
"""For the connection to the local port."""
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
        """Opens a tunnel and returns the port on 127.0.0.1 that leads into it. The port takes one connection, within 10
        s.

        Any program of this machine could be the one that connects: it would speak to the target's TLS, which the node's
        own connection finds out by failing.

        Raises:
            PeerError: the relay cannot be reached, or does not carry it.
            ResourceExhausted: too many are open, or there is no port.
        """
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
        """A stream that is the tunnel's near end."""
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
