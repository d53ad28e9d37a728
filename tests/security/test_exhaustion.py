"""Members that waste links, file descriptors, memory or time: each is bounded, and honest work goes on."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from itertools import count, islice

import grpc
import pytest

from node.network.client import query_status
from node.network.session import NetworkSession, visit
from node.pipeline.runner import MAX_WAITING_MESSAGES
from protocol.frames.frames import Cancel, Farewell, FarewellReason, Frame, Ping, TensorFrame, encode_chunk
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Contact, Question, QuestionAbout
from protocol.manifest.join_link import JoinLink
from protocol.manifest.signing import sign_manifest
from swarm.vocabulary import averaging_messages as rounds
from swarm.vocabulary import pipeline_messages as messages
from swarm.vocabulary.errors import PeerError, Rejected, Unreachable
from swarm.vocabulary.types import AnchorVersion, Codec, Hop, MicrobatchId, ModuleId, Path, PeerId, PeerState, RunId
from tests.e2e.small_run import small_run
from tests.node.network.small_swarm import DATA, small_swarm
from tests.node.network.small_swarm import A as HOP
from tests.node.network.small_swarm import B as LAST_HOP
from tests.protocol.transport.link_peers import LONG, SETTINGS, BareStream, Node, Persona, Recorder, node
from tests.security.adversary import Targets, header, hostile_stream
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
                    runner.receive(hostile.peer, messages.Unsettled(MicrobatchId(DATA, number)))
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
            with pytest.raises((Rejected, Unreachable), match=r"not a Skipstone node|the stream broke"):
                await stream.farewell()
        assert server.handler.ups == []
        honest.persona.knows(server.persona, server.port)
        await honest.transport.send_control(server.peer, messages.Close(MicrobatchId(honest.peer, 0), ""))


SILENT, LYING = 10, 4
SOON_S = 40.0
LITTLE_PATIENCE_S = 1.0


async def test_silent_and_lying_peers_do_not_keep_the_manifest_from_a_newcomer(scene: Siege) -> None:
    async with visit(scene.targets.link, "127.0.0.1") as session, AsyncExitStack() as stack:
        hostile = set[PeerId]()
        for number in range(SILENT + LYING):
            handler = Recorder(answer_gate=asyncio.Event()) if number < SILENT else lying(number, scene)
            hostile.add(await stack.enter_async_context(beside(session, scene.targets, handler)))
        async with asyncio.timeout(SOON_S):
            while not hostile < {known.peer for known in session.others()}:
                await asyncio.sleep(0.05)
            misled = replace(session, introduced=frozenset(hostile))
            signed = await misled.fetch_manifest(SOON_S)
        assert signed.manifest.name == "small"


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
        await impostor.transport.send_control(known.peer, messages.Close(MicrobatchId(persona.peer, 0), ""))
        impostor.transport.announce(targets.record(persona, ModuleId(1), addresses=(f"127.0.0.1:{impostor.port}",)))
        yield persona.peer


async def test_a_link_with_another_run_leads_nowhere(scene: Siege) -> None:
    tampered = JoinLink(RunId("0" * 64), scene.targets.link.peers)
    with pytest.raises(Unreachable):
        await query_status(tampered, LITTLE_PATIENCE_S)


FORWARDS = 200


def forbidden(targets: Targets, persona: Persona) -> dict[str, list[Frame | bytes]]:
    message, tensor = targets.forward(persona), targets.tensor
    another = targets.forward(targets.persona())
    unsigned = replace(message, path=replace(message.path, route=None))
    stolen = replace(message, path=replace(message.path, route=another.path.route))
    half_gigabyte = TensorSpec((8192, 16384), DType.FLOAT32)
    half_precision = TensorSpec(tensor.shape, DType.BFLOAT16)
    piece = encode_chunk(1, 0, memoryview(bytes(4096)))
    return {
        "a tensor (1, 32, 32) FLOAT32": [header(message, TensorSpec((1, 32, 32), DType.FLOAT32))],
        "a tensor (2, 32, 32) BFLOAT16": [header(message, half_precision)],
        "a tensor (8192, 16384) FLOAT32": [header(message, half_gigabyte)],
        "module 9.0, which is not in the manifest": [header(targets.forward(persona, module=ModuleId(9)), tensor)],
        "sent a tensor that only": [header(another, tensor)],
        "its data node has not signed the route": [header(unsigned, tensor)],
        "the route's signature is not its data node's": [header(stolen, tensor)],
        "came instead of 0": [header(message, tensor, chunks=2), encode_chunk(1, 1, memoryview(bytes(4096)))],
        "came instead of 1": [header(message, tensor, chunks=2), piece, piece],
        "frame": [b"\xff" * 1000],
    }


async def test_what_is_forbidden_is_refused_with_the_reason_and_disturbs_nobody(scene: Siege) -> None:
    targets, before = scene.targets, scene.peak_bytes(scene.targets.victim)
    for reason in forbidden(targets, targets.persona()):
        persona = targets.persona()
        async with targets.attack(persona=persona, record=targets.as_data_node(persona)) as (_, stream):
            for frame in forbidden(targets, persona)[reason]:
                await stream.say(frame)
            farewell = await stream.farewell()
            assert farewell.reason is FarewellReason.VIOLATION
            assert reason in farewell.detail
    await scene.goes_on()
    assert scene.peak_bytes(targets.victim) - before < MAY_GROW_BYTES


async def test_a_flood_of_microbatches_leaves_room_for_others(scene: Siege) -> None:
    """The adversary plays a data node that never takes its results back."""
    targets, before = scene.targets, scene.peak_bytes(scene.targets.victim)
    async with targets.peer(ModuleId(0), state=PeerState.JOINING) as intruder:
        receipts = await _flood(targets, intruder)
        told = Counter(receipt.status for receipt in receipts)
        assert 8 <= told[messages.ReceiptStatus.ACCEPTED] <= 12, "half of the slots while others' microbatches are held"
        assert told[messages.ReceiptStatus.ACCEPTED] + told[messages.ReceiptStatus.BUSY] == FORWARDS
        reasons = {receipt.detail for receipt in receipts} - {""}
        assert any("the rest is for others" in reason for reason in reasons)
        assert reasons <= {
            *(f"this data node uses {n} slots, the rest is for others" for n in (8, 12)),
            "all 16 slots are used",
        }
        await scene.goes_on(5)
    assert scene.peak_bytes(targets.victim) - before < MAY_GROW_BYTES


async def test_forged_news_of_others_microbatches_changes_nothing(scene: Siege) -> None:
    """What it changes would show in the data node's account at the end of the siege."""
    async with scene.targets.peer() as intruder:
        data_node, victim = scene.targets.data_node.peer, scene.targets.victim.peer
        first, started = scene.first_number(), await _started(intruder, data_node)
        for number in range(max(0, started - 10), started + 30):
            for lie in lies_about(MicrobatchId(data_node, first + number), intruder.peer):
                await intruder.transport.send_control(data_node, lie)
                await intruder.transport.send_control(victim, lie)
        await scene.goes_on()


def lies_about(microbatch: MicrobatchId, own: PeerId) -> tuple[messages.ControlMessage, ...]:
    path = Path(microbatch.data_node, (Hop(ModuleId(1), own), Hop(ModuleId(2), own)))
    return (
        messages.Stranded(microbatch, messages.Direction.FORWARD, 0, "a lie"),
        messages.Receipt(microbatch, messages.Direction.FORWARD, 0, messages.ReceiptStatus.PASSED_ON),
        messages.Receipt(microbatch, messages.Direction.BACKWARD, -1, messages.ReceiptStatus.ACCEPTED),
        messages.Receipt(microbatch, messages.Direction.FORWARD, 0, messages.ReceiptStatus.REFUSED, detail="a lie"),
        messages.Recall(microbatch, path, 0),
        messages.Settled(microbatch, path),
        messages.Unsettled(microbatch),
        messages.Close(microbatch, "a lie"),
    )


async def _started(intruder: Node, data_node: PeerId) -> int:
    status = json.loads(await intruder.transport.ask(data_node, Question(QuestionAbout.STATUS), LONG))
    return int(status["counts"]["started"])


async def _flood(targets: Targets, intruder: Node) -> list[messages.Receipt]:
    data = memoryview(bytearray(targets.tensor.byte_length))
    for number in range(FORWARDS):
        message = targets.forward(intruder.persona, number)
        await intruder.transport.send(targets.victim.peer, message, targets.tensor, data)
    first: dict[MicrobatchId, messages.Receipt] = {}

    def all_answered() -> bool:
        for _, message in intruder.handler.messages:
            if isinstance(message, messages.Receipt):
                first.setdefault(message.microbatch, message)
        return len(first) == FORWARDS

    await intruder.handler.until(all_answered)
    return list(first.values())


MODULE = ModuleId(1)
PIECE = TensorSpec((64,), DType.FLOAT32)
FAR = 40


def versions(scene: Siege) -> tuple[AnchorVersion, AnchorVersion]:
    """The victim's anchor when it was looked up, and one that nobody has."""
    known = scene.targets.anchor(MODULE)
    return known, AnchorVersion(known.round + FAR, known.steps + 1, 2**47, known.fragment, os.urandom(32))


def lies(scene: Siege, own: PeerId, convener: PeerId) -> Iterator[messages.ControlMessage]:
    """Every word of a round, about rounds of the near future."""
    base, made_up = versions(scene)
    victim = scene.targets.victim.peer
    for number in range(base.round, base.round + FAR):
        attempt = rounds.RoundId(MODULE, number + 1, 0, convener)
        entry = rounds.Entry(own, attempt, base, 2**40, 2**47, 1e300, (), made_up, bytes(64))
        yield rounds.Progress(MODULE, made_up, 2**40, 2**47)
        yield rounds.Invitation(attempt, base)
        yield rounds.Accepting(attempt)
        yield entry
        yield rounds.SignedRoster(attempt, base, (replace(entry, peer=victim), entry), Codec.NONE, "")
        yield rounds.Pulse(attempt, (victim,), (victim,))
        yield rounds.Prepared(attempt, made_up)
        yield rounds.Commit(attempt, made_up, tuple(dict.fromkeys((victim, own, convener))))
        yield rounds.Declined(attempt, rounds.DeclineReason.PAST, made_up)
        yield rounds.Dissolved(attempt, "a lie")


async def test_a_stranger_has_no_word_in_rounds(scene: Siege) -> None:
    """In its own name and in the victim's: who hosts nothing is not heard."""
    before = scene.peak_bytes(scene.targets.victim)
    async with scene.targets.peer() as intruder:
        for convener in (intruder.peer, scene.targets.victim.peer):
            for lie in lies(scene, intruder.peer, convener):
                await intruder.transport.send_control(scene.targets.victim.peer, lie)
        committed = await scene.holds_a_round()
    assert intruder.peer not in committed.members
    assert committed.round < versions(scene)[1].round
    assert scene.peak_bytes(scene.targets.victim) - before < MAY_GROW_BYTES


async def test_one_replica_that_lies_about_everything_moves_nobody(scene: Siege) -> None:
    """It claims an anchor from the future with more tokens than anybody has, and is one of three."""
    targets, persona = scene.targets, scene.targets.persona()
    _, made_up = versions(scene)
    record = targets.record(persona, MODULE, anchor=made_up, state=PeerState.DRAINING)
    async with targets.attack(persona=persona, record=record) as (own, stream):
        for lie in lies(scene, own, own):
            await stream.say(lie)
        committed = await scene.holds_a_round()
    assert committed.round < made_up.round
    assert committed.digest != made_up.digest.hex()


def pieces(scene: Siege, own: PeerId) -> Iterator[rounds.RoundPiece]:
    """Of the rounds of the near future, in everybody's name who may convene them."""
    base = scene.targets.anchor(MODULE)
    replicas = [peer.peer for peer in scene.swarm.peers if peer.stage == MODULE.stage]
    for number in range(base.round, base.round + 4 * FAR):
        for convener in (*replicas, own):
            yield rounds.Contribution(rounds.RoundId(MODULE, number + 1, 0, convener), 0, 1, bytes(64))
            yield rounds.Reduced(rounds.RoundId(MODULE, number + 1, 0, convener), 0, 1)


UNREAD = 32


async def test_pieces_that_nobody_is_due_get_no_buffer(scene: Siege) -> None:
    """Also in the moment before a round's roster is known, when pieces of its members are kept."""
    refused = said = 0

    async def listen(stream: BareStream) -> None:
        nonlocal refused
        with suppress(PeerError):
            while (frame := await stream.hear()) is not None:
                assert not isinstance(frame, Farewell), frame
                refused += isinstance(frame, Cancel)

    async with scene.targets.attack() as (own, stream):
        listening = asyncio.create_task(listen(stream))
        held = asyncio.create_task(scene.holds_a_round())
        transfer = 1
        while not held.done():
            for piece in pieces(scene, own):
                await stream.say(TensorFrame(piece, PIECE, transfer, 1))
                await stream.say(encode_chunk(transfer, 0, memoryview(bytes(PIECE.byte_length))))
                transfer, said = transfer + 2, said + 1
                while said - refused > UNREAD and not held.done():  # a stranger's frames are read slowly
                    await asyncio.sleep(0.01)
                if held.done():
                    break
        async with asyncio.timeout(30):
            while refused < said:
                await asyncio.sleep(0.05)
        listening.cancel()
        committed = await held
    assert own not in committed.members


async def test_state_that_was_not_asked_for_gets_no_buffer(scene: Siege) -> None:
    base, made_up = versions(scene)
    async with scene.targets.attack() as (_, stream):
        for number, version in enumerate((base, made_up)):
            transfer = 2 * number + 1
            await stream.say(TensorFrame(rounds.StateChunk(MODULE, version.digest, 0), PIECE, transfer, 1))
            while (frame := await stream.hear()) != Cancel(transfer):
                assert frame is not None


async def test_a_flood_of_requests_for_state_holds_up_nobody(scene: Siege) -> None:
    """Five that ask for all there is, again and again, and read nothing of it."""
    base, _ = versions(scene)
    before = scene.peak_bytes(scene.targets.victim)
    for _ in range(5):
        async with scene.targets.attack(deaf=True) as (_, stream):
            for first in range(0, 2000, 2):
                await stream.say(rounds.StateRequest(MODULE, base.digest, (first % 100, first % 100 + 1)))
    await scene.holds_a_round()
    assert scene.peak_bytes(scene.targets.victim) - before < MAY_GROW_BYTES
