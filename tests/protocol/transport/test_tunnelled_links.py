"""gRPC links through a tunnel."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from protocol.interfaces.directory import Contact
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Ask
from protocol.libp2p.messages import RelayStream
from protocol.nat.relay_client import Attachment, Incoming, OpenTunnels
from protocol.nat.relay_server import RelayLimits, RelayService
from protocol.transport.dialer import NoTunnels, Ways
from swarm.vocabulary.errors import Unreachable
from swarm.vocabulary.pipeline_messages import Close
from swarm.vocabulary.types import MicrobatchId, PeerId
from tests.protocol.dht.running import Marked, needs_proc, until
from tests.protocol.nat.relay_ends import stream_pair
from tests.protocol.transport.link_peers import (
    RUN,
    Node,
    Persona,
    Three,
    forward,
    node,
    pattern,
    three_at,
    with_settings,
)

pytestmark = pytest.mark.e2e

LARGE = TensorSpec((16 * 1024, 1024), DType.FLOAT32)
SETTINGS = with_settings(chunk_bytes=512 * 1024)


class Hidden:
    """`protocol.interfaces.transport.Caller` of a node behind address translation."""

    def can_be_dialled(self) -> bool:
        return False

    async def call(self, contact: Contact, ask: Ask, patience_s: float) -> None:
        raise AssertionError("nobody is called who cannot dial us")


class Through(NoTunnels):
    """Tunnels that are there only after the nodes are: they need each other's ports."""

    def __init__(self) -> None:
        self.peers: Three | None = None

    async def way_to(self, contact: Contact) -> str:
        assert self.peers is not None
        return await self.peers.tunnels.way_to(contact)


@asynccontextmanager
async def both_hidden() -> AsyncIterator[tuple[Node, Node, Three]]:
    """The near node has a way to the far one through the relay, and no other."""
    through, persona = Through(), Persona()
    async with (
        node(settings=SETTINGS, ways=Ways(Hidden(), through)) as near,
        node(persona, settings=SETTINGS, ways=Ways(Hidden())) as far,
        three_at(far.port, far=persona.identity) as peers,
    ):
        through.peers = peers
        near.persona.book.contacts[far.peer] = replace(far.persona.contact(), via=peers.contact.via)
        far.persona.book.contacts[near.peer] = near.persona.contact()
        yield near, far, peers


async def test_a_link_through_a_tunnel_carries_tensors_both_ways() -> None:
    async with both_hidden() as (near, far, peers):
        with pytest.raises(Unreachable, match="cannot be dialled"):
            await far.transport.tell(near.peer, Close(MicrobatchId(far.peer, 0), ""))
        data = pattern(LARGE, 3)
        await near.transport.send(far.peer, forward(near.peer, far.peer), LARGE, memoryview(data))
        await far.transport.send(near.peer, forward(far.peer, near.peer), LARGE, memoryview(data))
        for end in (near, far):
            await end.handler.until(lambda end=end: end.handler.tensors)  # type: ignore[misc]
            assert end.handler.tensors[0][3] == data
        leads_to = near.transport.far_end(far.peer)
        assert leads_to is not None
        assert leads_to.host == "", "the tunnel's local end must not pass for the peer's address"
        await until(lambda: peers.relaying.situation.relay.carried_bytes > 2 * len(data))
        assert peers.relaying.situation.relay.opened == 1


class InProcess(NoTunnels):
    """Tunnels through a relay in this process: all of it but p2pd."""

    def __init__(self, own: PeerId, service: RelayService, tasks: asyncio.TaskGroup) -> None:
        self._own = own
        self._service = service
        self._tasks = tasks
        self._opened = OpenTunnels(RUN, self.dial, tasks)

    async def dial(self, relay: str) -> RelayStream:
        ours, theirs = await stream_pair(self._own)
        self._tasks.create_task(self._service.serve(theirs))
        return ours

    async def way_to(self, contact: Contact) -> str:
        return f"127.0.0.1:{await self._opened.open('the relay', contact.peer)}"

    def attach(self, port: int) -> None:
        attachment = Attachment("the relay", RUN, self.dial, Incoming(("127.0.0.1", port)))
        self._tasks.create_task(attachment.keep())


async def test_two_that_open_tunnels_to_each_other_at_once_end_with_one_link() -> None:
    service = RelayService(RUN, RelayLimits(2**40))
    one, other = Persona(), Persona()
    ended = asyncio.Event()

    async def carrying(through: asyncio.Future[list[InProcess]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            through.set_result([InProcess(persona.peer, service, tasks) for persona in (one, other)])
            await ended.wait()
            raise _Ended

    through: asyncio.Future[list[InProcess]] = asyncio.get_running_loop().create_future()
    carried = asyncio.ensure_future(carrying(through))
    ways = await through
    try:
        async with node(one, ways=Ways(Hidden(), ways[0])) as left, node(other, ways=Ways(Hidden(), ways[1])) as right:
            for end, way, far in ((left, ways[0], other), (right, ways[1], one)):
                way.attach(end.port)
                end.persona.book.contacts[far.peer] = far.contact()
            await left.handler.until(lambda: service.figures().attached == 2)
            told = (Close(MicrobatchId(left.peer, 0), ""), Close(MicrobatchId(right.peer, 0), ""))
            async with asyncio.TaskGroup() as telling:
                telling.create_task(left.transport.tell(right.peer, told[0]))
                telling.create_task(right.transport.tell(left.peer, told[1]))
            for end, far, said in ((right, left, told[0]), (left, right, told[1])):
                await end.handler.until(lambda end=end: end.handler.messages)  # type: ignore[misc]
                assert end.handler.messages == [(far.peer, said)]
            assert [end.handler.downs for end in (left, right)] == [[], []]
            assert left.transport.figures().keys() == {right.peer}
            assert right.transport.figures().keys() == {left.peer}
    finally:
        ended.set()
        with pytest.raises(ExceptionGroup, match="unhandled"):
            await carried


class _Ended(Exception):
    """Ends the relay and all that goes through it."""


@needs_proc
async def test_when_the_relay_dies_in_mid_transfer_the_sender_is_told(marked: Marked) -> None:
    async with both_hidden() as (near, far, peers):
        data = memoryview(bytes(LARGE.byte_length))
        sending = asyncio.create_task(near.transport.send(far.peer, forward(near.peer, far.peer), LARGE, data))
        await far.handler.until(lambda: far.handler.admitted)
        os.kill(marked.network_daemon_of(peers.relaying.process_id), signal.SIGKILL)
        with pytest.raises(Unreachable):
            await sending
        await far.handler.until(lambda: far.handler.downs)
        await near.handler.until(lambda: near.handler.downs)
        assert len(far.handler.broken) == 1
