"""Tunnels with real processes and p2pd's on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal

import pytest

from protocol.dht.directory import RelayTunnels
from protocol.interfaces.directory import Contact
from swarm.vocabulary.errors import Unreachable
from tests.protocol.dht.running import PATIENCE_S, Marked, needs_proc, until
from tests.protocol.transport.link_peers import MIB, connected, digest_of, echo, sent, three

pytestmark = pytest.mark.e2e


async def test_64_mib_go_both_ways_at_once_and_arrive_as_they_were() -> None:
    there, back = random.Random(1).randbytes(64 * MIB), random.Random(2).randbytes(64 * MIB)
    arrived: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def far_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sent(writer, back))
            arrived.set_result(await digest_of(reader, len(there)))
        await reader.read()
        writer.close()

    async with three(far_end) as peers:
        async with connected(await peers.tunnels.way_to(peers.contact)) as (reader, writer):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(sent(writer, there))
                assert await digest_of(reader, len(back)) == hashlib.sha256(back).hexdigest()
            assert await arrived == hashlib.sha256(there).hexdigest()
            await until(lambda: peers.relaying.situation.relay.carried_bytes == 128 * MIB)
        await until(lambda: peers.relaying.situation.relay.tunnels == 0)
        assert peers.relaying.situation.relay.opened == 1


async def test_the_bytes_of_the_hour_end_the_tunnel_and_then_none_is_opened() -> None:
    async with three(echo, bytes_per_hour=16 * MIB) as peers:
        async with connected(await peers.tunnels.way_to(peers.contact)) as (reader, writer):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await _exchange_for_ever(
                    reader, writer
                )  # a pair has a quarter, half of that at once: 2 MiB, the echo counted
        await until(lambda: peers.relaying.situation.relay.cut_off == 1)
        assert MIB < peers.relaying.situation.relay.carried_bytes <= 2 * MIB
        with pytest.raises(Unreachable, match="had their share"):
            await peers.tunnels.way_to(peers.contact)


async def way_after_backoff(tunnels: RelayTunnels, contact: Contact) -> str:
    """For some seconds after it has failed to dial somebody, libp2p does not try again and says so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await tunnels.way_to(contact)
            except Unreachable as error:
                if "dial backoff" not in str(error):
                    raise
            await asyncio.sleep(0.1)


@needs_proc
async def test_when_the_relay_dies_the_tunnel_ends_and_the_next_one_says_why(marked: Marked) -> None:
    async with three(echo) as peers:
        killed = peers.relaying.process_id
        assert killed is not None
        async with connected(await peers.tunnels.way_to(peers.contact)) as (reader, writer):
            await sent(writer, b"x")
            assert await reader.readexactly(1) == b"x"
            os.kill(killed, signal.SIGSTOP)  # so that nobody starts it again before the assertions below
            os.kill(marked.network_daemon_of(killed), signal.SIGKILL)
            assert await reader.read() == b"", "the tunnel has to end, not to hang"
        with pytest.raises(Unreachable, match="no tunnel"):
            await peers.tunnels.way_to(peers.contact)
        os.kill(killed, signal.SIGKILL)
        await until(lambda: peers.relaying.process_id not in (None, killed))
        await until(lambda: peers.relaying.situation.relay.attached == 1)
        async with connected(await way_after_backoff(peers.tunnels, peers.contact)) as (reader, writer):
            await sent(writer, b"y")
            assert await reader.readexactly(1) == b"y", "the attachment has to be made again"
    assert marked.processes() == {}


@needs_proc
async def test_attachments_and_what_was_given_survive_the_end_of_a_child() -> None:
    async with three(echo) as peers:
        async with connected(await peers.tunnels.way_to(peers.contact)) as (reader, writer):
            await sent(writer, bytes(MIB))
            await digest_of(reader, MIB)
        await until(lambda: peers.relaying.situation.relay.carried_bytes == 2 * MIB)
        left = peers.relaying.situation.relay.left_bytes
        for each in (peers.relaying, peers.far):
            restarts, process = each.statistics.restarts, each.process_id
            assert process is not None
            os.kill(process, signal.SIGKILL)
            await until(lambda each=each, restarts=restarts: each.statistics.restarts > restarts)  # type: ignore[misc]
        await until(lambda: peers.relaying.situation.relay.attached == 1)
        await until(lambda: [each.standing for each in peers.far_tunnels.attachments()] == [True])
        after = peers.relaying.situation.relay
        assert (after.carried_bytes, after.opened) == (2 * MIB, 1)
        assert after.left_bytes <= left + 10 * MIB, "a death must not refill the hour"


async def test_who_is_no_relay_or_has_nobody_attached_is_said() -> None:
    async with three(echo) as peers:
        relay_of = {peers.contact.via[0]: peers.far.multiaddrs()[0]}.__getitem__
        with pytest.raises(Unreachable, match="no stream to the relay"):
            await RelayTunnels(peers.near, relay_of).way_to(peers.contact)
        with pytest.raises(Unreachable, match="no relay that is known"):
            await RelayTunnels(peers.near, lambda peer: "").way_to(peers.contact)
        with pytest.raises(Unreachable, match="is not like"):
            await RelayTunnels(peers.near, lambda peer: "/unix/tmp/x/p2p/Qm").way_to(peers.contact)
        await peers.far_tunnels.attach([], "")
        await until(lambda: peers.relaying.situation.relay.attached == 0)
        with pytest.raises(Unreachable, match="not attached here"):
            await peers.tunnels.way_to(peers.contact)


async def _exchange_for_ever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await sent(writer, bytes(64 * 1024))
        await digest_of(reader, 64 * 1024)
