"""Two and three honest peers over real sockets and TLS."""

import asyncio
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protocol.codecs import decode_into, encode_into
from protocol.frames import frames
from protocol.generated import link_pb2 as wire
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Ask, Contact, Question, QuestionAbout, Refusal, Topic
from protocol.nat.relay import Attachment, Incoming, OpenTunnels, RelayLimits, RelayService, RelayStream
from protocol.transport.dialer import Ways
from protocol.transport.grpc_streams import AcceptedStream, DialledStream, make_server, open_channel, target_of
from protocol.transport.grpc_transport import MAX_STREAMS_PER_PEER
from protocol.transport.link import MAX_WAITING_BYTES
from protocol.transport.rate_limits import COMMON_A_SECOND, COMMON_SAVED, FRAMES_A_SECOND, IN_ADVANCE, PAUSE_AFTER
from protocol.transport.settings import MAX_OPEN_TRANSFERS, TransportSettings
from swarm.vocabulary import errors
from swarm.vocabulary.averaging_messages import Accepting, Contribution, RoundId, StateChunk
from swarm.vocabulary.pipeline_messages import Close, Direction, Receipt, ReceiptStatus
from swarm.vocabulary.types import Codec, MicrobatchId, ModuleId, PeerId
from tests.kit.waiting import until
from tests.protocol.dht.running import Marked, needs_proc
from tests.protocol.identity.minting import OTHER_RUN, certificate, credentials_for, extension_for, new_key
from tests.protocol.nat.relay_ends import stream_pair
from tests.protocol.transport.link_peers import (
    FLOATS,
    LONG,
    RUN,
    BareStream,
    Node,
    Persona,
    Recorder,
    Three,
    bare_stream,
    committed_bytes,
    forward,
    hello_of,
    introduce,
    node,
    pattern,
    refuse_to_answer,
    three_at,
    two_nodes,
    with_settings,
)

pytestmark = pytest.mark.e2e


def close_of(peer: PeerId, number: int = 0) -> Close:
    return Close(MicrobatchId(peer, number), "done")


async def send_pattern(sender: Node, receiver: Node, number: int, tensor: TensorSpec = FLOATS) -> bytes:
    data = pattern(tensor, number)
    await sender.transport.send(receiver.peer, forward(sender.peer, receiver.peer, number), tensor, memoryview(data))
    return data


async def test_tensors_travel_both_ways_at_once_and_arrive_whole_and_no_task_is_left_behind() -> None:
    before = asyncio.all_tasks()
    async with two_nodes() as (left, right):
        sent = await asyncio.gather(
            *(send_pattern(left, right, n) for n in range(10)), *(send_pattern(right, left, n) for n in range(10, 20))
        )
        await right.handler.until(lambda: len(right.handler.tensors) == 10)
        await left.handler.until(lambda: len(left.handler.tensors) == 10)
        for own, other, numbers in ((right, left, range(10)), (left, right, range(10, 20))):
            got = {message.microbatch.number: data for _, message, _, data in own.handler.tensors}
            assert got == {n: sent[n] for n in numbers}
            assert {sender for sender, *_ in own.handler.tensors} == {other.peer}
        assert (left.handler.ups, right.handler.ups) == ([right.peer], [left.peer])
    await asyncio.sleep(0)
    assert not {task for task in asyncio.all_tasks() - before if "grpc" not in repr(task.get_coro())}


async def test_a_caller_nobody_has_heard_of_is_let_in_and_its_records_are_handed_on() -> None:
    left_persona, right_persona = Persona(), Persona()
    async with node(left_persona, record=b"left") as left, node(right_persona, record=b"right") as right:
        left_persona.knows(right_persona, right.port)
        await left.transport.send_control(right.peer, close_of(left.peer))
        left.transport.announce(b"")  # none that could be said: nothing that a peer would have to end the link for
        left.transport.announce(b"left, later")
        await right.handler.until(lambda: len(right.handler.records) == 2)
        assert right.handler.records == [(left.peer, b"left"), (left.peer, b"left, later")]
        assert (left.handler.records, right.handler.ups) == ([(right.peer, b"right")], [left.peer])
        assert right.handler.messages == [(left.peer, close_of(left.peer))]


async def test_questions_are_answered_refused_and_time_out() -> None:
    async with two_nodes() as (left, right):
        assert await left.transport.ask(right.peer, Question(QuestionAbout.STATUS), 10) == b"status"
        assert await left.transport.ask(right.peer, Question(QuestionAbout.EVALUATE, 3), 10) == b"evaluate"
        right.handler.answering = refuse_to_answer
        with pytest.raises(errors.Rejected, match="no manifest for you"):
            await left.transport.ask(right.peer, Question(QuestionAbout.MANIFEST), 10)
        right.handler.answering = lambda question: bytes(68 * 1024 + 1)
        with pytest.raises(errors.Rejected, match="69633 bytes"):
            await left.transport.ask(right.peer, Question(QuestionAbout.STATUS), 10)
        right.handler.answer_gate = asyncio.Event()
        with pytest.raises(errors.Stalled, match="did not answer a status question"):
            await left.transport.ask(right.peer, Question(QuestionAbout.STATUS), 0.1)
        right.handler.answer_gate.set()
        right.handler.answering = lambda question: b"again"
        assert await left.transport.ask(right.peer, Question(QuestionAbout.STATUS), 10) == b"again"
        assert not right.handler.downs


async def test_more_questions_than_may_be_open_wait_for_a_place() -> None:
    async with two_nodes() as (left, right):
        right.handler.answer_gate = asyncio.Event()
        status = Question(QuestionAbout.STATUS)
        asked = [asyncio.create_task(left.transport.ask(right.peer, status, 10)) for _ in range(20)]
        await left.handler.until(lambda: left.handler.ups)
        right.handler.answer_gate.set()
        assert await asyncio.gather(*asked) == [b"status"] * 20


@pytest.mark.parametrize(("busy", "status"), [(True, ReceiptStatus.BUSY), (False, ReceiptStatus.REFUSED)])
async def test_a_refused_tensor_gets_a_receipt_and_the_link_goes_on(busy: bool, status: ReceiptStatus) -> None:
    async with two_nodes() as (left, right):
        right.handler.refusal = Refusal(busy, "no slot", 1.5)
        refused = MAX_OPEN_TRANSFERS + 5
        for number in range(refused):
            await send_pattern(left, right, number, TensorSpec((256, 1024), DType.FLOAT32))
        await left.handler.until(lambda: len(left.handler.messages) == refused)
        expected = Receipt(MicrobatchId(left.peer, refused - 1), Direction.FORWARD, 0, status, 1.5, "no slot")
        assert left.handler.messages[-1] == (right.peer, expected)
        right.handler.refusal = None
        await send_pattern(left, right, refused)
        await right.handler.until(lambda: right.handler.tensors)
        assert (len(right.handler.tensors), left.handler.ups) == (1, [right.peer])


async def test_cancelling_a_send_breaks_it_off_and_leaves_the_link_usable() -> None:
    async with two_nodes(with_settings(chunk_bytes=4096)) as (left, right):
        huge = TensorSpec((64, 1024, 1024), DType.FLOAT32)
        message = forward(left.peer, right.peer, 1)
        data = memoryview(bytearray(huge.byte_length))
        sending = asyncio.create_task(left.transport.send(right.peer, message, huge, data))
        await right.handler.until(lambda: right.handler.admitted)
        sending.cancel()
        await right.handler.until(lambda: right.handler.broken)
        assert [broken for broken, _ in right.handler.broken] == [message]
        assert isinstance(right.handler.broken[0][1], errors.Unreachable)
        assert sending.cancelled()
        whole = await send_pattern(left, right, 2)
        await right.handler.until(lambda: right.handler.tensors)
        assert (right.handler.tensors[0][3], left.handler.ups) == (whole, [right.peer])


async def test_figures_measure_the_link() -> None:
    async with two_nodes() as (left, right):
        await send_pattern(left, right, 0)
        assert left.transport.goodput_bytes_per_s(right.peer) == 0
        await left.handler.until(lambda: left.transport.goodput_bytes_per_s(right.peer) > 0)
        await left.handler.until(lambda: left.transport.figures()[right.peer].round_trip_s > 0)
        figures = left.transport.figures()[right.peer]
        assert figures.sent_bytes > FLOATS.byte_length
        assert 0 < figures.received_bytes < FLOATS.byte_length
        assert figures.goodput_bytes_per_s == left.transport.goodput_bytes_per_s(right.peer)
        assert left.transport.goodput_bytes_per_s(PeerId("nobody")) == 0
        assert set(right.transport.figures()) == {left.peer}


async def test_leaving_tells_the_peers_and_ends_what_was_under_way() -> None:
    async with node() as right:
        async with node() as left:
            introduce(left, right)
            await left.transport.send_control(right.peer, close_of(left.peer))
            left.handler.answer_gate = asyncio.Event()
            asked = asyncio.create_task(right.transport.ask(left.peer, Question(QuestionAbout.STATUS), 30))
            await right.handler.until(lambda: right.handler.ups)
        with pytest.raises(errors.Unreachable, match="leaves"):
            await asked
        assert [peer for peer, _ in right.handler.downs] == [left.peer]
        assert right.transport.figures() == {}
        with pytest.raises(errors.Unreachable):
            await right.transport.send_control(left.peer, close_of(right.peer))


@pytest.mark.parametrize("attempt", range(5))
async def test_peers_that_dial_each_other_at_once_end_up_with_one_link(attempt: int) -> None:
    async with two_nodes() as (left, right):
        await asyncio.gather(send_pattern(left, right, 1), send_pattern(right, left, 2))
        await right.handler.until(lambda: right.handler.tensors)
        await left.handler.until(lambda: left.handler.tensors)
        assert (left.handler.ups, right.handler.ups) == ([right.peer], [left.peer])
        assert left.handler.downs == right.handler.downs == []


async def test_a_dial_that_gets_nowhere_gives_way_to_the_peer_that_gets_through() -> None:
    """The smaller peer id's dial wins only if it succeeds: here, a router swallows what it sends."""
    smaller, larger = sorted((Persona(), Persona()), key=lambda persona: persona.peer)

    settings = with_settings(dial_timeout_s=2.0)
    async with node(smaller, settings=settings) as left, node(larger, settings=settings) as right:
        larger.knows(smaller, left.port)
        with socket.create_server(("127.0.0.1", 0)) as router:  # takes connections and never looks at them
            smaller.knows(larger, router.getsockname()[1])
            held_up = asyncio.create_task(send_pattern(left, right, 1))
            await asyncio.sleep(0)
            await send_pattern(right, left, 2)
            await held_up
            await right.handler.until(lambda: right.handler.tensors)
            await left.handler.until(lambda: left.handler.tensors)
        assert left.handler.ups == [right.peer]


async def test_a_second_stream_from_the_peer_that_loses_is_a_duplicate() -> None:
    smaller, larger = sorted((Persona(), Persona()), key=lambda persona: persona.peer)
    async with node(smaller) as left, node(larger) as right:
        introduce(left, right)
        await left.transport.send_control(right.peer, close_of(left.peer))
        async with bare_stream(larger, left, introduced=False) as stream:
            await stream.say(replace(hello_of(larger), incarnation=right.transport.incarnation))
            assert await stream.farewell() == frames.Farewell(frames.FarewellReason.DUPLICATE)
        await left.transport.send_control(right.peer, close_of(left.peer, 1))
        await right.handler.until(lambda: len(right.handler.messages) == 2)


@pytest.mark.parametrize("with_new_certificate", [True, False])
async def test_a_peer_that_restarts_on_its_port_is_reached_again(with_new_certificate: bool) -> None:
    former = Persona()
    later = Persona(former.identity, book=former.book) if with_new_certificate else former
    async with node() as left:
        async with node(former) as right:
            introduce(left, right)
            port = right.port
            await send_pattern(left, right, 1)
        await left.handler.until(lambda: left.handler.downs)
        left.persona.knows(later, port)
        async with node(later, settings=with_settings(listen_port=port)) as right:
            await send_pattern(left, right, 2)
            await right.handler.until(lambda: right.handler.tensors)
        assert left.handler.ups == [former.peer, former.peer]


async def test_a_peer_that_has_lost_its_end_replaces_the_link() -> None:
    """Its host lost power, say: nothing told us that the former stream is dead, but nobody answers there."""
    persona = Persona()
    async with (
        node(settings=with_settings(proof_of_life_s=0.1)) as server,
        bare_stream(persona, server, hello=replace(hello_of(persona), incarnation=1, age_ms=10_000)),
        node(persona) as reborn,
    ):
        introduce(server, reborn)
        await reborn.transport.send_control(server.peer, close_of(reborn.peer, 1))
        await server.handler.until(lambda: server.handler.messages)
        assert server.handler.ups == [persona.peer, persona.peer]
        assert [peer for peer, _ in server.handler.downs] == [persona.peer]
        await server.transport.send_control(persona.peer, close_of(server.peer))
        await reborn.handler.until(lambda: reborn.handler.messages)


async def test_a_port_in_use_or_impossible_is_a_configuration_error() -> None:
    with pytest.raises(errors.ConfigError, match="listen_port"):
        TransportSettings(listen_port=65536)
    async with node() as first:
        with pytest.raises(errors.ConfigError, match=f"cannot listen on 127.0.0.1:{first.port}"):
            async with node(settings=with_settings(listen_port=first.port)):
                pass


async def test_a_start_that_is_cancelled_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def start() -> None:
        async with node():
            await asyncio.Event().wait()

    for turns in range(4):  # of the event loop, before the cancellation
        starting = asyncio.create_task(start())
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        del starting
        gc.collect()  # an abandoned server shuts down here
        await asyncio.sleep(0)
    assert not caplog.records


async def test_links_are_limited() -> None:
    async with node(settings=with_settings(max_links=1)) as server, node() as first, node() as second:
        introduce(server, first)
        introduce(server, second)
        await first.transport.send_control(server.peer, close_of(first.peer))
        with pytest.raises(errors.Unreachable, match="no room"):
            await second.transport.send_control(server.peer, close_of(second.peer))
        with pytest.raises(errors.Unreachable, match="links are in use"):
            await server.transport.send_control(second.peer, close_of(server.peer))
        await server.transport.send_control(first.peer, close_of(server.peer))


async def test_a_broken_handler_ends_the_transport() -> None:
    class Broken(Recorder):
        def received_control(self, sender: PeerId, message: object) -> None:
            raise LookupError("a bug")

    async def serve_and_be_told() -> None:
        async with node() as left, node(handler=Broken()) as right:
            introduce(left, right)
            await left.transport.send_control(right.peer, close_of(left.peer))
            await asyncio.sleep(20)

    with pytest.raises(ExceptionGroup) as raised:
        await serve_and_be_told()
    assert raised.value.split(LookupError)[1] is None


LARGE = TensorSpec((16 * 1024, 1024), DType.FLOAT32)


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        ({"run": OTHER_RUN}, frames.FarewellReason.WRONG_RUN, ""),
        ({"peer": Persona().peer}, frames.FarewellReason.NOT_YOU, ""),
        ({"lowest_version": 6, "highest_version": 7}, frames.FarewellReason.WRONG_VERSION, "5 to 5"),
    ],
)
async def test_a_hello_of_another_run_name_or_version_is_refused(
    change: dict[str, Any], reason: frames.FarewellReason, detail: str
) -> None:
    caller = Persona()
    async with node() as server, bare_stream(caller, server, introduced=False) as stream:
        await stream.say(replace(hello_of(caller), **change))
        farewell = await stream.farewell()
        assert farewell.reason is reason
        assert detail in farewell.detail
        assert server.handler.ups == []


async def test_a_certificate_that_carries_anothers_name_is_turned_away_at_the_door() -> None:
    """Anybody can sign it with the authority's key, so TLS lets it in."""
    impostor, key = Persona(), new_key()
    der = certificate(impostor.identity, key=key, extension=extension_for(Persona().identity, key))
    impostor.credentials = credentials_for(der, key, like=impostor.credentials)
    async with node() as server:
        async with bare_stream(impostor, server, introduced=False) as stream:
            with pytest.raises(errors.Rejected, match="refused the connection: certificate: the common name"):
                await stream.hear()
        assert server.handler.ups == []


QUARTER_MB = TensorSpec((64, 1024), DType.FLOAT32)


@asynccontextmanager
async def server_and_honest(**settings: Any) -> AsyncIterator[tuple[Node, Node]]:
    """A server and an honest peer linked to it, which must go on whatever the test does."""
    async with node(settings=with_settings(**settings)) as server, node() as honest:
        introduce(server, honest)
        await honest.transport.send_control(server.peer, close_of(honest.peer))
        yield server, honest
        server.handler.admit_error = server.handler.refusal = None
        await send_pattern(honest, server, 99)
        await server.handler.until(lambda: any(sender == honest.peer for sender, *_ in server.handler.tensors))
        assert (server.handler.ups.count(honest.peer), honest.handler.downs) == (1, [])


@asynccontextmanager
async def attack(server: Node, **how: Any) -> AsyncIterator[tuple[Persona, BareStream]]:
    hostile = Persona()
    async with bare_stream(hostile, server, **how) as stream:
        yield hostile, stream


def header_of(hostile: Persona, server: Node, transfer: int = 1, tensor: TensorSpec = QUARTER_MB) -> frames.TensorFrame:
    chunks = -(-tensor.byte_length // frames.MAX_CHUNK_BYTES)
    return frames.TensorFrame(forward(hostile.peer, server.peer, transfer), tensor, transfer, chunks)


def wire_header(hostile: Persona, server: Node, **lie: Any) -> bytes:
    frame = wire.Frame.FromString(frames.encode(header_of(hostile, server)))
    for name, value in lie.items():
        if name == "shape":
            frame.forward.tensor.shape[:] = value
        else:
            setattr(frame.forward.tensor, name, value)
    return frame.SerializeToString()


@pytest.mark.parametrize(
    "lie",
    [
        {"shape": [2**32 - 1] * 4},
        {"shape": [64, 1024, 0]},
        {"shape": [64, 1025]},
        {"dtype": 99},
        {"dtype": 2},
        {"byte_length": 2**60},
        {"chunk_count": 1000},
        {"transfer": 2},
    ],
)
async def test_a_lying_header_ends_the_link_before_anything_is_admitted(lie: dict[str, Any]) -> None:
    async with server_and_honest() as (server, _), attack(server) as (hostile, stream):
        await stream.say(wire_header(hostile, server, **lie))
        assert (await stream.farewell()).reason is frames.FarewellReason.VIOLATION
        await server.handler.until(lambda: server.handler.downs)
        [(peer, error)] = server.handler.downs
        assert peer == hostile.peer
        assert isinstance(error, errors.ProtocolViolation)
        assert server.handler.admitted == []


async def test_what_contradicts_the_manifest_is_told_why() -> None:
    async with server_and_honest() as (server, _), attack(server) as (hostile, stream):
        server.handler.admit_error = errors.ProtocolViolation("hidden states are [4, 64, 32] in this run")
        await stream.say(header_of(hostile, server))
        farewell = await stream.farewell()
        assert farewell == frames.Farewell(frames.FarewellReason.VIOLATION, "hidden states are [4, 64, 32] in this run")


def chunk_with_wrong_checksum() -> bytes:
    data = bytes(QUARTER_MB.byte_length)
    chunk = wire.Chunk(transfer=1, checksum=frames.checksum_of(memoryview(data)) ^ 1, data=data)
    return wire.Frame(chunk=chunk).SerializeToString()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (chunk_with_wrong_checksum(), "checksum"),
        (frames.encode_chunk(1, 1, memoryview(bytes(4096))), "came instead of"),
        (frames.encode_chunk(1, 0, memoryview(bytes(4096))), "a different number"),
        (frames.encode_chunk(3, 0, memoryview(bytes(4096))), "not open"),
        (b"\x12\xff\xff", "chunk"),
        (b"no frame at all", "not a frame"),
        (b"", "not a frame"),
        (frames.encode(hello_of(Persona())), "second Hello"),
    ],
)
async def test_a_bad_frame_gives_the_buffer_back_and_ends_the_link(bad: bytes, why: str) -> None:
    async with server_and_honest() as (server, _), attack(server) as (hostile, stream):
        await stream.say(header_of(hostile, server))
        await stream.say(bad)
        farewell = await stream.farewell()
        assert farewell.reason is frames.FarewellReason.VIOLATION
        assert why in farewell.detail
        await server.handler.until(lambda: server.handler.downs)
        [(message, error)] = server.handler.broken
        assert message == forward(hostile.peer, server.peer, 1)
        assert isinstance(error, errors.ProtocolViolation)
        assert server.handler.tensors == []


async def test_a_frame_beyond_all_bounds_is_cut_off_by_grpc() -> None:
    async with server_and_honest() as (server, _):
        hostile = Persona()
        contact = server.persona.contact(server.port)
        channel = open_channel(contact, contact.addresses[0], hostile.credentials, max_frame_bytes=2**26)
        stream = BareStream(DialledStream(channel))
        await stream.say(hello_of(hostile))
        assert isinstance(await stream.hear(), frames.Hello)
        await stream.say(bytes(2**25))
        with pytest.raises(errors.PeerError):
            await hear_until(stream, lambda frame: False)
        await stream.stream.close()
        await server.handler.until(lambda: server.handler.downs)


async def test_a_stream_that_breaks_off_in_mid_tensor_is_no_success() -> None:
    async with server_and_honest() as (server, _), attack(server) as (hostile, stream):
        await stream.say(header_of(hostile, server, tensor=TensorSpec((2048, 1024), DType.FLOAT32)))
        await stream.say(frames.encode_chunk(1, 0, memoryview(bytes(frames.MAX_CHUNK_BYTES))))
        await server.handler.until(lambda: server.handler.admitted)
        await stream.stream.half_close()
        await server.handler.until(lambda: server.handler.downs)
        assert isinstance(server.handler.broken[0][1], errors.Unreachable)
        assert isinstance(server.handler.downs[0][1], errors.Unreachable)
        assert server.handler.tensors == []


async def test_too_many_transfers_at_once_are_a_violation() -> None:
    async with server_and_honest() as (server, _), attack(server) as (hostile, stream):
        for n in range(MAX_OPEN_TRANSFERS + 1):
            await stream.say(header_of(hostile, server, 2 * n + 1))
        assert "transfers at once" in (await stream.farewell()).detail
        await server.handler.until(lambda: len(server.handler.broken) == MAX_OPEN_TRANSFERS)
        assert len(server.handler.admitted) == MAX_OPEN_TRANSFERS


async def test_a_refused_sender_that_goes_on_is_swallowed_but_not_beyond_its_count() -> None:
    async with server_and_honest() as (server, _), attack(server) as (hostile, stream):
        server.handler.refusal = Refusal(busy=True, detail="full")
        await stream.say(header_of(hostile, server))
        receipt = await hear_until(stream, lambda frame: isinstance(frame, Receipt))
        assert isinstance(receipt, Receipt)
        assert receipt.status is ReceiptStatus.BUSY
        await stream.say(frames.encode_chunk(1, 0, memoryview(bytes(QUARTER_MB.byte_length))))
        await stream.say(frames.encode_chunk(1, 1, memoryview(bytes(4096))))
        assert "not open" in (await stream.farewell()).detail


async def test_a_transfer_that_stands_still_gives_its_buffer_back() -> None:
    async with server_and_honest(stall_after_s=0.5) as (server, _), attack(server) as (hostile, stream):
        await stream.say(header_of(hostile, server))
        while not server.handler.broken:
            await stream.say(frames.Ping(1))
            await asyncio.sleep(0.05)
        assert isinstance(server.handler.broken[0][1], errors.Stalled)
        await hear_until(stream, lambda frame: frame == frames.Cancel(1))
        assert server.handler.downs == []


async def test_a_transfer_whose_turn_has_not_come_is_not_broken_off() -> None:
    async with server_and_honest(stall_after_s=0.3) as (server, _), attack(server) as (hostile, stream):
        for number in (1, 3):
            await stream.say(replace(header_of(hostile, server, number), chunk_count=64))
        for index in range(10):
            await stream.say(frames.encode_chunk(1, index, memoryview(bytes(4096))))
            await asyncio.sleep(0.1)
        assert server.handler.broken == []


async def test_a_transfer_that_trickles_cannot_hold_its_buffer_for_ever() -> None:
    """It makes progress all the time, but at 16 KiB a second 256 KiB are not to take longer than 16 s; here, 0.5 s."""
    settings = {"stall_after_s": 0.3, "slowest_bytes_per_s": 2.0**21}
    async with server_and_honest(**settings) as (server, _), attack(server) as (hostile, stream):
        await stream.say(replace(header_of(hostile, server), chunk_count=64))
        index = 0
        while not server.handler.broken:
            await stream.say(frames.encode_chunk(1, index, memoryview(bytes(4096))))
            index += 1
            await asyncio.sleep(0.1)
        assert index < 64
        assert isinstance(server.handler.broken[0][1], errors.Stalled)


async def hear_until(stream: BareStream, wanted: Callable[[frames.Frame], bool]) -> frames.Frame:
    while (frame := await stream.hear()) is not None:
        if wanted(frame):
            return frame
    raise AssertionError("the stream ended first")


async def test_a_silent_peer_is_taken_for_dead() -> None:
    async with server_and_honest(stall_after_s=0.5) as (server, _), attack(server) as (hostile, _stream):
        await server.handler.until(lambda: server.handler.downs)
        [(peer, error)] = server.handler.downs
        assert peer == hostile.peer
        assert isinstance(error, errors.Stalled)


async def test_who_says_no_hello_is_dropped() -> None:
    async with server_and_honest(hello_timeout_s=0.2) as (server, _):
        async with attack(server, introduced=False) as (_, stream):
            await stream.say(frames.Ping(1))
            assert (await stream.farewell()).reason is frames.FarewellReason.VIOLATION
        async with attack(server, introduced=False) as (_, stream):
            late = frames.Farewell(frames.FarewellReason.UNSPECIFIED, "no Hello arrived in time")
            assert await stream.farewell() == late
        assert server.handler.downs == []


async def test_who_asks_more_than_may_be_open_is_refused() -> None:
    async with server_and_honest() as (server, _), attack(server) as (_, stream):
        server.handler.answer_gate = asyncio.Event()
        for number in range(9):
            await stream.say(frames.QuestionFrame(number, Question(QuestionAbout.STATUS)))
        refused = await hear_until(stream, lambda frame: isinstance(frame, frames.AnswerFrame))
        assert refused == frames.AnswerFrame(8, None, b"8 questions are open already")
        server.handler.answer_gate.set()
        answered = await hear_until(stream, lambda frame: isinstance(frame, frames.AnswerFrame))
        assert answered == frames.AnswerFrame(0, QuestionAbout.STATUS, b"status")


TELLS = 16_000


async def test_who_says_more_than_its_due_is_read_later_and_loses_nothing() -> None:
    due = IN_ADVANCE + COMMON_SAVED + PAUSE_AFTER
    many = int(due + COMMON_A_SECOND + FRAMES_A_SECOND)
    async with server_and_honest() as (server, _), attack(server) as (_, stream):

        async def shout() -> None:
            for token in range(many):
                await stream.say(frames.Ping(token))

        async with asyncio.timeout(LONG), asyncio.TaskGroup() as tasks:
            tasks.create_task(shout())
            for token in range(many):
                while not isinstance(answer := await stream.hear(), frames.Pong):
                    assert isinstance(answer, frames.Ping), answer
                assert answer.token == token


async def test_what_nobody_minds_is_left_out_unread_and_the_link_stays() -> None:
    async with server_and_honest() as (server, _), attack(server) as (hostile, stream):
        server.handler.minded = (Topic.MICROBATCHES,)
        for kind in ("prepared", "roster", "state_refused"):
            tag = wire.Frame.DESCRIPTOR.fields_by_name[kind].number << 3 | 2
            await stream.say(bytes((tag & 0x7F | 0x80, tag >> 7, 9)) + b"\xff" * 9)  # no protobuf at all
        await stream.say(close_of(hostile.peer, 1))
        await server.handler.until(lambda: server.handler.messages)
        assert server.handler.downs == []
        server.handler.minded = tuple(Topic)
        await stream.say(bytes((30 << 3 & 0x7F | 0x82, 30 << 3 >> 7, 9)) + b"\xff" * 9)
        assert (await stream.farewell()).reason is frames.FarewellReason.VIOLATION


async def test_a_peer_that_does_not_read_makes_senders_wait_and_holds_no_memory() -> None:
    budget = 2 * 1024 * 1024
    tensor = TensorSpec((256, 1024), DType.FLOAT32)
    data = memoryview(bytearray(tensor.byte_length))
    settings = {"send_budget_bytes": budget, "stall_after_s": 60.0, "chunk_bytes": 256 * 1024}
    async with server_and_honest(**settings) as (server, _), attack(server) as (hostile, stream):
        outbox = server.transport._links[hostile.peer].outbox
        own, to, send, tell = server.peer, hostile.peer, server.transport.send, server.transport.send_control
        sends = [asyncio.create_task(send(to, forward(own, to, n), tensor, data)) for n in range(64)]
        await standstill(lambda: server.transport.figures()[hostile.peer].sent_bytes)
        tells = [asyncio.create_task(tell(to, Close(MicrobatchId(own, n), "x" * 256))) for n in range(TELLS)]
        await standstill(lambda: outbox.waiting_bytes)
        assert committed_bytes(outbox) <= budget
        assert outbox.waiting_bytes <= MAX_WAITING_BYTES
        assert server.transport.figures()[hostile.peer].sent_bytes < 32 * tensor.byte_length
        assert sum(task.done() for task in sends) < 32
        assert sum(task.done() for task in tells) < TELLS
        everything = asyncio.gather(*sends, *tells)
        while not everything.done():
            await stream.hear()
        await everything
        assert committed_bytes(outbox) == 0


async def standstill(figure: Callable[[], int]) -> None:
    """Waits until a figure has not changed for a while."""
    async with asyncio.timeout(LONG):
        before = -1
        while (now := figure()) != before:
            before = now
            await asyncio.sleep(0.3)


async def test_a_peer_that_asks_and_does_not_read_loses_its_link() -> None:
    async with server_and_honest(stall_after_s=60.0) as (server, _), attack(server) as (hostile, stream):
        server.handler.answering = lambda question: bytes(65536)

        async def ask_for_ever() -> None:
            number = 0
            while True:
                await stream.say(frames.QuestionFrame(number, Question(QuestionAbout.STATUS)))
                number += 1

        asking = asyncio.create_task(ask_for_ever())
        await server.handler.until(lambda: server.handler.downs)
        assert server.handler.downs[0][0] == hostile.peer
        assert isinstance(server.handler.downs[0][1], errors.Stalled)
        asking.cancel()
        await asyncio.wait((asking,))


async def test_one_peer_gets_few_streams_even_when_it_reads_none() -> None:
    async with (
        server_and_honest(hello_timeout_s=60.0) as (server, _),
        attack(server, introduced=False) as (hostile, first),
    ):
        async with bare_stream(hostile, server, introduced=False), bare_stream(hostile, server, introduced=False):
            await server.handler.until(lambda: server.transport._streams[hostile.peer] == MAX_STREAMS_PER_PEER)
            async with bare_stream(hostile, server, introduced=False) as fourth:
                with pytest.raises(errors.Unreachable, match="too many streams"):
                    await fourth.hear()
        await server.handler.until(lambda: server.transport._streams[hostile.peer] == 1)
        await first.say(hello_of(hostile))
        assert isinstance(await first.hear(), frames.Hello)


async def test_garbage_on_the_port_is_hung_up_on() -> None:
    async with server_and_honest() as (server, _):
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(10_000), b"\x16\x03\x01\xff\xff" + bytes(70_000)):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(garbage)
            async with asyncio.timeout(LONG):
                with suppress(ConnectionError):  # the server may close before it has read everything
                    await reader.read()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        assert len(server.handler.ups) == 1


@asynccontextmanager
async def scripted_server(own: Persona, answer: frames.SmallFrame | None, ends: bool) -> AsyncIterator[int]:
    """A gRPC server with the persona's certificate that reads a Hello, answers, and is silent or `ends` the stream."""

    async def serve(_requests: object, context: Any) -> None:
        stream = AcceptedStream(context)
        await stream.read()
        if answer is not None:
            await stream.write(frames.encode(answer))
        if not ends:
            await stream.read()

    server, port = make_server(serve, own.credentials, "127.0.0.1:0", 4)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


DIALLED = Persona()


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (frames.Farewell(frames.FarewellReason.WRONG_VERSION, "9 only"), errors.StaleVersion),
        (frames.Farewell(frames.FarewellReason.WRONG_RUN), errors.Rejected),
        (frames.Farewell(frames.FarewellReason.NOT_YOU), errors.Rejected),
        (frames.Farewell(frames.FarewellReason.VIOLATION), errors.Rejected),
        (frames.Farewell(frames.FarewellReason.LEAVING), errors.Unreachable),
        (frames.Farewell(frames.FarewellReason.UNSPECIFIED), errors.Unreachable),
        (frames.Ping(1), errors.ProtocolViolation),
        (replace(hello_of(DIALLED), lowest_version=9, highest_version=9), errors.StaleVersion),
        (replace(hello_of(DIALLED), run=OTHER_RUN), errors.Rejected),
        (replace(hello_of(DIALLED), peer=Persona().peer), errors.Rejected),
        (None, errors.Unreachable),
    ],
)
async def test_what_comes_instead_of_a_hello(first: frames.SmallFrame | None, kind: type[errors.PeerError]) -> None:
    for ends in (False,) if first else (True, False):
        settings = with_settings(dial_timeout_s=5.0 if first or ends else 0.3)
        async with node(settings=settings) as own, scripted_server(DIALLED, first, ends) as port:
            own.persona.knows(DIALLED, port)
            with pytest.raises(kind) as raised:
                await own.transport.send_control(DIALLED.peer, close_of(own.peer))
            assert type(raised.value) is kind
            assert own.handler.ups == []


async def test_an_unknown_peer_cannot_be_reached_and_oneself_without_a_link() -> None:
    async with node() as own:
        with pytest.raises(errors.Unreachable):
            await own.transport.send_control(Persona().peer, close_of(own.peer))
        await own.transport.send_control(own.peer, close_of(own.peer))
        assert (own.handler.messages, own.handler.ups) == ([(own.peer, close_of(own.peer))], [])


async def test_addresses_are_tried_one_after_the_other() -> None:
    async with node() as left, node() as right:
        introduce(left, right)
        contact = right.persona.contact(1, right.port)
        left.persona.book.contacts[right.peer] = replace(contact, addresses=("unix:/nobody", *contact.addresses))
        await left.transport.send_control(right.peer, close_of(left.peer))
        await right.handler.until(lambda: right.handler.messages)


@pytest.mark.parametrize(
    "address",
    ["unix:/tmp/x", "xds:///a:1", "a:1,b:2", "host", "host:0", "host:65536", ":1", "-h:1", "a b:1", "[::1]x:1"],
)
def test_addresses_are_host_and_port_only(address: str) -> None:
    with pytest.raises(errors.Unreachable):
        target_of(address)


TUNNELLED = TensorSpec((2048, 1024), DType.FLOAT32)
TUNNEL_SETTINGS = with_settings(chunk_bytes=512 * 1024)


class Hidden:
    """`protocol.transport.dialer.Calls` of a node behind address translation."""

    def can_be_dialled(self) -> bool:
        return False

    async def call(self, contact: Contact, ask: Ask, patience_s: float) -> None:
        raise AssertionError("nobody is called who cannot dial us")


class Through:
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
        node(settings=TUNNEL_SETTINGS, ways=Ways(Hidden(), through)) as near,
        node(persona, settings=TUNNEL_SETTINGS, ways=Ways(Hidden())) as far,
        three_at(far.port, far=persona.identity) as peers,
    ):
        through.peers = peers
        near.persona.book.contacts[far.peer] = replace(far.persona.contact(), via=peers.contact.via)
        far.persona.book.contacts[near.peer] = near.persona.contact()
        yield near, far, peers


async def test_a_link_through_a_tunnel_carries_tensors_both_ways_at_once() -> None:
    async with both_hidden() as (near, far, peers):
        with pytest.raises(errors.Unreachable, match="cannot be dialled"):
            await far.transport.send_control(near.peer, close_of(far.peer))
        await near.transport.send_control(far.peer, close_of(near.peer))
        data, _ = await asyncio.gather(send_pattern(near, far, 3, TUNNELLED), send_pattern(far, near, 3, TUNNELLED))
        for end in (near, far):
            await end.handler.until(lambda end=end: end.handler.tensors)  # type: ignore[misc]
            assert end.handler.tensors[0][3] == data
        leads_to = near.transport.far_end(far.peer)
        assert leads_to is not None
        assert leads_to.host == "", "the tunnel's local end must not pass for the peer's address"
        await until(lambda: peers.relaying.situation.relay.carried_bytes > 2 * len(data))
        assert peers.relaying.situation.relay.opened == 1


class InProcess:
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
        self._tasks.create_task(Attachment("the relay", RUN, self.dial, Incoming(("127.0.0.1", port))).keep())


async def test_two_that_open_tunnels_to_each_other_at_once_end_with_one_link() -> None:
    service = RelayService(RUN, RelayLimits(2**40))
    one, other = Persona(), Persona()
    try:
        async with asyncio.TaskGroup() as tasks:
            ways = [InProcess(persona.peer, service, tasks) for persona in (one, other)]
            await meet(service, (one, other), ways)
            raise LookupError("the end of the relay and of all that goes through it")
    except* LookupError:
        pass


async def meet(service: RelayService, personas: tuple[Persona, Persona], ways: list[InProcess]) -> None:
    """Both dial each other at the same time; they end with one link."""
    nodes = [node(persona, ways=Ways(Hidden(), way)) for persona, way in zip(personas, ways, strict=True)]
    async with nodes[0] as left, nodes[1] as right:
        for end, way, far in ((left, ways[0], personas[1]), (right, ways[1], personas[0])):
            way.attach(end.port)
            end.persona.book.contacts[far.peer] = far.contact()
        await left.handler.until(lambda: service.figures().attached == 2)
        pairs = ((left, right), (right, left))
        await asyncio.gather(*(end.transport.send_control(far.peer, close_of(end.peer)) for end, far in pairs))
        for end, far in pairs:
            await end.handler.until(lambda end=end: end.handler.messages)  # type: ignore[misc]
            assert (end.handler.messages, end.handler.downs) == ([(far.peer, close_of(far.peer))], [])
            assert end.transport.figures().keys() == {far.peer}


@needs_proc
async def test_when_the_relay_dies_in_mid_transfer_the_sender_is_told(marked: Marked) -> None:
    async with both_hidden() as (near, far, peers):
        data = memoryview(bytes(LARGE.byte_length))
        sending = asyncio.create_task(near.transport.send(far.peer, forward(near.peer, far.peer), LARGE, data))
        await far.handler.until(lambda: far.handler.admitted)
        os.kill(marked.network_daemon_of(peers.relaying.process_id), signal.SIGKILL)
        with pytest.raises(errors.Unreachable):
            await sending
        await far.handler.until(lambda: far.handler.downs)
        await near.handler.until(lambda: near.handler.downs)
        assert len(far.handler.broken) == 1


def round_of(peer: PeerId) -> RoundId:
    return RoundId(ModuleId(1), 3, 0, peer)


async def send_piece(sender: Node, receiver: Node, chunk: int, spec: TensorSpec, data: bytes) -> None:
    message = Contribution(round_of(sender.peer), chunk, chunk + 1, bytes(64))
    await sender.transport.send(receiver.peer, message, spec, memoryview(data))


async def test_an_encoded_vector_and_a_chunk_of_state_arrive_as_they_are() -> None:
    values = np.random.default_rng(0).standard_normal(50_001).astype(np.float32)
    spec = TensorSpec(values.shape, DType.FLOAT32, Codec.INT8)
    encoded = bytearray(spec.byte_length)
    encode_into(Codec.INT8, values, memoryview(encoded))
    async with two_nodes() as (left, right):
        await send_piece(left, right, 7, spec, encoded)
        await right.handler.until(lambda: right.handler.tensors)
        sender, message, tensor, data = right.handler.tensors[0]
        assert (sender, message, tensor) == (left.peer, Contribution(round_of(left.peer), 7, 8), spec)
        chunk, flat = StateChunk(ModuleId(1), b"d" * 32, 5), TensorSpec((4096,), DType.FLOAT32)
        await left.transport.send(right.peer, chunk, flat, memoryview(pattern(flat, 1)))
        await right.handler.until(lambda: len(right.handler.tensors) == 2)
        assert right.handler.tensors[1] == (left.peer, chunk, flat, pattern(flat, 1))
        result = np.empty_like(values)
        decode_into(tensor.codec, memoryview(data), result)
        assert np.linalg.norm(result - values) <= 7e-3 * np.linalg.norm(values)


async def test_a_piece_that_is_not_wanted_is_cancelled_without_a_receipt_and_the_link_goes_on() -> None:
    spec = TensorSpec((2**20,), DType.FLOAT32)
    async with two_nodes() as (left, right):
        right.handler.refusal = Refusal(False, "an older round")
        for chunk in range(100):
            await send_piece(left, right, chunk, spec, bytes(spec.byte_length))
        await right.transport.send_control(left.peer, Accepting(round_of(left.peer)))
        await left.handler.until(lambda: left.handler.messages)
        assert left.handler.messages == [(right.peer, Accepting(round_of(left.peer)))]
        right.handler.refusal = None
        await send_piece(left, right, 0, spec, bytes(spec.byte_length))
        await right.handler.until(lambda: right.handler.tensors)
        assert not left.handler.downs


async def test_more_pieces_than_may_be_open_can_be_given_at_once_and_microbatches_pass_them() -> None:
    spec = TensorSpec((2**18,), DType.FLOAT32)
    data = bytes(spec.byte_length)
    async with two_nodes(with_settings(bulk_chunk_bytes=64 * 1024)) as (left, right), asyncio.timeout(LONG):
        pieces = [asyncio.create_task(send_piece(left, right, chunk, spec, data)) for chunk in range(100)]
        await right.handler.until(lambda: right.handler.tensors)
        message, floats = forward(left.peer, right.peer), memoryview(pattern(FLOATS, 1))
        await asyncio.gather(left.transport.send(right.peer, message, FLOATS, floats), *pieces)
        await right.handler.until(lambda: len(right.handler.tensors) == 101)
        order = [message for _, message, _, _ in right.handler.tensors]
        assert order.index(message) < 50
        assert sorted(piece.first_chunk for piece in order if isinstance(piece, Contribution)) == list(range(100))
        assert not left.handler.downs
