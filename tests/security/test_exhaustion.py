"""Members that waste what a node has: links, file descriptors, memory, its time. Each is bounded, and honest work goes
on.

How much each flood costs is measured by `python -m tests.security.floods`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from itertools import count, islice

import grpc
import pytest

from node.network.client import query_status
from node.network.session import NetworkSession, visit
from node.pipeline.runner import MAX_WAITING_MESSAGES
from protocol.frames.frames import Ping
from protocol.interfaces.directory import Contact
from protocol.interfaces.transport import Question
from protocol.manifest.join_link import JoinLink
from protocol.manifest.signing import sign_manifest
from swarm.vocabulary.errors import PeerError, Rejected, Unreachable
from swarm.vocabulary.pipeline_messages import Close, Unsettled
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId, RunId
from tests.e2e.small_run import small_run
from tests.node.network.small_swarm import DATA, small_swarm
from tests.node.network.small_swarm import A as HOP
from tests.node.network.small_swarm import B as LAST_HOP
from tests.protocol.transport.link_peers import SETTINGS, BareStream, Node, Persona, Recorder, node
from tests.security.adversary import Targets, hostile_stream
from tests.security.floods import FLOODS, flooded
from tests.security.siege import BESIEGED, MAY_GROW_BYTES, MAY_STAY_OPEN, Siege

pytestmark = BESIEGED

STALLED = 40
NAMELESS = 20
SPEECHLESS = 100
A_FLOOD = 100
LET_GO_S = 45.0


async def test_who_stalls_is_let_go_and_holds_up_nobody(scene: Siege) -> None:
    victim = scene.targets.victim
    files, memory = scene.open_files(victim), scene.peak_bytes(victim)
    async with AsyncExitStack() as stack:
        for introduced in (*[True] * STALLED, *[False] * NAMELESS):
            _, stream = await stack.enter_async_context(scene.targets.attack(victim, introduced=introduced))
            stack.push_async_callback(to_its_end, stream)
        readers = []
        for reader, writer in [await connection(victim) for _ in range(SPEECHLESS)]:
            stack.callback(writer.close)
            readers.append(reader)
        async with asyncio.timeout(LET_GO_S):  # until it has accepted what the kernel has connected
            while scene.open_files(victim) <= files + STALLED + SPEECHLESS // 2:
                await asyncio.sleep(0.02)
        await scene.goes_on(5)
        async with asyncio.timeout(LET_GO_S):
            assert [await reader.read() for reader in readers] == [b""] * SPEECHLESS, "hung up on"
    async with asyncio.timeout(LET_GO_S):
        while scene.open_files(victim) > files + MAY_STAY_OPEN:
            await asyncio.sleep(0.2)
    assert scene.peak_bytes(victim) - memory < MAY_GROW_BYTES


async def to_its_end(stream: BareStream) -> None:
    """What the victim still says, until it ends the stream."""
    async with asyncio.timeout(LET_GO_S):
        with suppress(PeerError):
            while await stream.stream.read() is not None:
                pass


async def connection(to: Contact) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = to.addresses[0].rpartition(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize("deaf", [False, True], ids=["listening", "deaf"])
@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_of_small_frames_stops_nobody(scene: Siege, kind: str, deaf: bool) -> None:
    target = scene.targets.contact(FLOODS[kind][1])
    memory = scene.peak_bytes(target)
    async with flooded(scene.targets, kind, 2, deaf=deaf) as poured:
        async with asyncio.timeout(LET_GO_S):
            while poured.said < A_FLOOD:
                await asyncio.sleep(0.02)
        await scene.goes_on()
    assert scene.peak_bytes(target) - memory < MAY_GROW_BYTES


OTHER_TASKS = 16


async def test_who_asks_and_never_reads_collects_few_messages() -> None:
    """A data node answers every hop that asks whether its gradient counts; to one that does not read, answers wait."""
    async with small_swarm(HOP, LAST_HOP) as swarm, node() as server:
        runner = swarm[DATA].runner
        runner.transport = server.transport
        hostile = Persona()
        async with hostile_stream(server.persona.contact(server.port), hostile, deaf=True) as stream:
            await server.handler.until(lambda: hostile.peer in server.handler.ups)
            before = len(asyncio.all_tasks())
            numbers = count()

            async def ask() -> int:
                for number in islice(numbers, 2 * MAX_WAITING_MESSAGES):
                    runner.receive(hostile.peer, Unsettled(MicrobatchId(DATA, number)))
                await stream.say(Ping(number))  # else the link ends for silence where this machine is slow
                await asyncio.sleep(0.02)
                return len(asyncio.all_tasks()) - before

            async with asyncio.timeout(60):
                while await ask() < MAX_WAITING_MESSAGES - OTHER_TASKS:
                    pass
            assert await ask() <= MAX_WAITING_MESSAGES + 1
            assert server.handler.downs == []


async def test_what_grpc_has_compressed_is_not_taken() -> None:
    """64 MiB of zeros are 64 KiB on the line; what cannot be inflated cannot be a bomb."""
    async with node() as server, node() as honest:
        hostile, contact = Persona(), server.persona.contact(server.port)
        async with hostile_stream(contact, hostile, introduced=False, compression=grpc.Compression.Gzip) as stream:
            with suppress(PeerError):
                await stream.say(bytes(64 * 2**20))
            # UNIMPLEMENTED, before anything is inflated; or the call was cut while it was still being sent.
            with pytest.raises((Rejected, Unreachable), match=r"no Skipstone node|the stream broke"):
                await stream.farewell()
        assert server.handler.ups == []
        honest.persona.knows(server.persona, server.port)
        await honest.transport.tell(server.peer, Close(MicrobatchId(honest.peer, 0), ""))


SILENT, LYING = 10, 4
SOON_S = 40.0
LITTLE_PATIENCE_S = 2.0


async def test_silent_and_lying_peers_do_not_keep_the_manifest_from_a_newcomer(scene: Siege) -> None:
    """They are even those that the newcomer asks first."""
    async with visit(scene.targets.link, "127.0.0.1") as session, AsyncExitStack() as stack:
        hostile = set[PeerId]()
        for number in range(SILENT + LYING):
            handler = silent() if number < SILENT else lying(number, scene)
            hostile.add(await stack.enter_async_context(beside(session, scene.targets, handler)))
        async with asyncio.timeout(SOON_S):
            while not hostile < {known.peer for known in session.others()}:
                await asyncio.sleep(0.05)
            misled = replace(session, introduced=frozenset(hostile))
            signed = await misled.fetch_manifest(SOON_S)
        assert signed.manifest.name == "small"


def silent() -> Recorder:
    return Recorder(answer_gate=asyncio.Event())


def lying(number: int, scene: Siege) -> Recorder:
    """Answers with another run's manifest, in good order, or with rubbish."""
    manifest = small_run(scene.folder / "text", blocks=(0, 1))
    other = sign_manifest(manifest, Persona().identity).text

    def answer(question: Question) -> bytes:
        return other if number % 2 else b"\xff\x00" * 100

    return Recorder(answering=answer)


@asynccontextmanager
async def beside(session: NetworkSession, targets: Targets, handler: Recorder) -> AsyncIterator[PeerId]:
    """A peer that links to the newcomer, and says that it serves a module."""
    persona = targets.persona()
    known = session.own.announcement()
    persona.book.contacts[known.peer] = Contact(known.peer, known.addresses, known.certificate)
    async with node(persona, handler=handler, settings=SETTINGS) as impostor:
        await impostor.transport.tell(known.peer, Close(MicrobatchId(persona.peer, 0), ""))
        impostor.transport.announce(targets.record(persona, ModuleId(1), addresses=(address_of(impostor),)))
        yield persona.peer


def address_of(impostor: Node) -> str:
    return f"127.0.0.1:{impostor.port}"


async def test_a_link_with_another_run_leads_nowhere(scene: Siege) -> None:
    """Whoever tampers with a link can lead into a run of his own, which has another name; not into this one with
    another manifest."""
    tampered = JoinLink(RunId("0" * 64), scene.targets.link.peers)
    with pytest.raises(Unreachable):
        await query_status(tampered, LITTLE_PATIENCE_S)
