"""A relaying peer on pairs of sockets: whoever is called somebody is somebody."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protocol.generated import relay_pb2
from protocol.nat.relay import RelayLimits, RelayService, RelayStream
from swarm.vocabulary.types import PeerId
from tests.protocol.dht.running import RUN

ANNA, BERT, CARL = PeerId("anna"), PeerId("bert"), PeerId("carl")
PLENTY = 2**40


def attach(run: str = RUN) -> relay_pb2.RelayMessage:
    return relay_pb2.RelayMessage(attach=relay_pb2.RelayAttach(run=run))


def wish(target: PeerId, run: str = RUN) -> relay_pb2.RelayMessage:
    return relay_pb2.RelayMessage(open=relay_pb2.RelayOpen(run=run, target=target))


def accept(number: int) -> relay_pb2.RelayMessage:
    return relay_pb2.RelayMessage(accept=relay_pb2.RelayAccept(number=number))


def decline(number: int, reason: str) -> relay_pb2.RelayMessage:
    return relay_pb2.RelayMessage(decline=relay_pb2.RelayDecline(number=number, reason=reason))


PING = relay_pb2.RelayMessage(ping=relay_pb2.RelayPing())


class Ends:
    """Streams to one service, or to whatever else serves them."""

    def __init__(self, service: RelayService, tasks: asyncio.TaskGroup) -> None:
        self.service = service
        self._tasks = tasks
        self._streams: list[RelayStream] = []

    async def stream(self, peer: PeerId) -> RelayStream:
        """This side of a new stream; the service sees the peer at its end."""
        ours, theirs = await stream_pair(peer)
        self._streams.append(ours)
        self._tasks.create_task(self.service.serve(theirs))
        return ours

    async def said(self, peer: PeerId, *messages: relay_pb2.RelayMessage) -> RelayStream:
        stream = await self.stream(peer)
        for message in messages:
            await stream.say(message)
        return stream

    async def attached(self, peer: PeerId) -> RelayStream:
        stream = await self.said(peer, attach())
        assert (await stream.hear()).answer.refused == ""
        return stream

    async def tunnel(self, opener: PeerId, attachment: RelayStream) -> tuple[RelayStream, RelayStream]:
        """Both ends of a tunnel to the peer of the attachment."""
        near = await self.said(opener, wish(attachment.peer))
        far = await self.said(attachment.peer, accept((await attachment.hear()).incoming.number))
        for end in (near, far):
            assert (await end.hear()).answer.refused == ""
        return near, far

    async def refused(self, peer: PeerId, *messages: relay_pb2.RelayMessage) -> str:
        """Why what is said is refused; the stream has to end with it."""
        stream = await self.said(peer, *messages)
        reason = (await stream.hear()).answer.refused
        assert await stream.reader.read() == b""
        return reason

    def cut(self) -> None:
        for stream in self._streams:
            stream.cut()


@asynccontextmanager
async def relaying(**changes: float) -> AsyncIterator[Ends]:
    limits = RelayLimits(**{"bytes_per_hour": PLENTY, **changes})  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        ends = Ends(RelayService(RUN, limits), tasks)
        try:
            yield ends
        finally:
            ends.cut()


async def stream_pair(peer: PeerId) -> tuple[RelayStream, RelayStream]:
    one, other = socket.socketpair()
    return RelayStream(peer, *await asyncio.open_connection(sock=one)), RelayStream(
        peer, *await asyncio.open_connection(sock=other)
    )
