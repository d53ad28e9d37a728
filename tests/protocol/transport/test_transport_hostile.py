"""Peers that lie, stumble or shout: each is refused with its own error, and an honest third does not notice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest

from protocol.frames.frames import Cancel, Farewell, FarewellReason, Frame, Hello, Ping, Pong, SmallFrame, encode
from protocol.frames.rpc import AnswerFrame, QuestionFrame
from protocol.frames.tensors import MAX_CHUNK_BYTES, TensorFrame, checksum_of, encode_chunk
from protocol.generated import link_pb2 as wire
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Refusal, Topic
from protocol.transport.grpc_streams import AcceptedStream, DialledStream, make_server, open_channel, target_of
from protocol.transport.handshake import MAX_STREAMS_PER_PEER
from protocol.transport.inbox import MAX_OPEN_TRANSFERS
from protocol.transport.rate_limits import (
    BYTES_A_FRAME,
    COMMON_A_SECOND,
    COMMON_SAVED,
    FRAMES_A_SECOND,
    IN_ADVANCE,
    PAUSE_AFTER,
    STRANGERS,
)
from protocol.transport.send_queue import MAX_WAITING_BYTES
from swarm.vocabulary.errors import PeerError, ProtocolViolation, Rejected, StaleVersion, Stalled, Unreachable
from swarm.vocabulary.pipeline_messages import Close, Receipt, ReceiptStatus
from swarm.vocabulary.types import MicrobatchId, VersionRange
from tests.protocol.identity.minting import OTHER_RUN
from tests.protocol.transport.link_peers import (
    FLOATS,
    LONG,
    BareStream,
    Node,
    Persona,
    bare_stream,
    forward,
    hello_of,
    introduce,
    node,
    pattern,
    with_settings,
)

pytestmark = pytest.mark.e2e

QUARTER_MB = TensorSpec((64, 1024), DType.FLOAT32)


@asynccontextmanager
async def server_and_honest(**settings: Any) -> AsyncIterator[tuple[Node, Node]]:
    """A server and an honest peer linked to it, which must go on whatever the test does."""
    async with node(settings=with_settings(**settings)) as server, node() as honest:
        introduce(server, honest)
        await honest.transport.tell(server.peer, Close(MicrobatchId(honest.peer, 0), "hello"))
        yield server, honest
        server.handler.admit_error = server.handler.refusal = None
        data = pattern(FLOATS, 9)
        await honest.transport.send(server.peer, forward(honest.peer, server.peer, 99), FLOATS, memoryview(data))
        await server.handler.until(lambda: any(sender == honest.peer for sender, *_ in server.handler.tensors))
        assert server.handler.ups.count(honest.peer) == 1
        assert honest.handler.downs == []


@asynccontextmanager
async def attack(server: Node, **how: Any) -> AsyncIterator[tuple[Persona, BareStream]]:
    hostile = Persona()
    async with bare_stream(hostile, server, **how) as stream:
        yield hostile, stream


def header_of(hostile: Persona, server: Node, transfer: int = 1, tensor: TensorSpec = QUARTER_MB) -> TensorFrame:
    chunks = -(-tensor.byte_length // MAX_CHUNK_BYTES)
    return TensorFrame(forward(hostile.peer, server.peer, transfer), tensor, transfer, chunks)


def wire_header(hostile: Persona, server: Node, **lie: Any) -> bytes:
    frame = wire.Frame.FromString(encode(header_of(hostile, server)))
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
        assert (await stream.farewell()).reason is FarewellReason.VIOLATION
        await server.handler.until(lambda: server.handler.downs)
        [(peer, error)] = server.handler.downs
        assert peer == hostile.peer
        assert isinstance(error, ProtocolViolation)
        assert server.handler.admitted == []


async def test_what_contradicts_the_manifest_is_told_why() -> None:
    async with server_and_honest() as (server, _), attack(server) as (hostile, stream):
        server.handler.admit_error = ProtocolViolation("hidden states are [4, 64, 32] in this run")
        await stream.say(header_of(hostile, server))
        farewell = await stream.farewell()
        assert farewell == Farewell(FarewellReason.VIOLATION, "hidden states are [4, 64, 32] in this run")


def chunk_with_wrong_checksum() -> bytes:
    data = bytes(QUARTER_MB.byte_length)
    chunk = wire.Chunk(transfer=1, checksum=checksum_of(memoryview(data)) ^ 1, data=data)
    return wire.Frame(chunk=chunk).SerializeToString()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (chunk_with_wrong_checksum(), "checksum"),
        (encode_chunk(1, 1, memoryview(bytes(4096))), "was due"),
        (encode_chunk(1, 0, memoryview(bytes(4096))), "another number"),
        (encode_chunk(3, 0, memoryview(bytes(4096))), "not open"),
        (b"\x12\xff\xff", "chunk"),
        (b"no frame at all", "not a frame"),
        (b"", "unknown kind"),
        (encode(hello_of(Persona())), "second Hello"),
    ],
)
async def test_a_bad_frame_gives_the_buffer_back_and_ends_the_link(bad: bytes, why: str) -> None:
    async with server_and_honest() as (server, _), attack(server) as (hostile, stream):
        await stream.say(header_of(hostile, server))
        await stream.say(bad)
        farewell = await stream.farewell()
        assert farewell.reason is FarewellReason.VIOLATION
        assert why in farewell.detail
        await server.handler.until(lambda: server.handler.downs)
        [(message, error)] = server.handler.broken
        assert message == forward(hostile.peer, server.peer, 1)
        assert isinstance(error, ProtocolViolation)
        assert server.handler.tensors == []


async def test_a_frame_beyond_all_bounds_is_cut_off_by_grpc() -> None:
    async with server_and_honest() as (server, _):
        hostile = Persona()
        channel = open_channel(
            server.persona.contact(server.port), f"127.0.0.1:{server.port}", hostile.credentials, max_frame_bytes=2**26
        )
        stream = BareStream(DialledStream(channel))
        await stream.say(hello_of(hostile))
        assert isinstance(await stream.hear(), Hello)
        await stream.say(bytes(2**25))
        with pytest.raises(PeerError):
            await hear_until(stream, lambda frame: False)
        await stream.stream.close()
        await server.handler.until(lambda: server.handler.downs)


async def test_a_stream_that_breaks_off_in_mid_tensor_is_no_success() -> None:
    async with server_and_honest() as (server, _), attack(server) as (hostile, stream):
        tensor = TensorSpec((2048, 1024), DType.FLOAT32)
        await stream.say(header_of(hostile, server, tensor=tensor))
        await stream.say(encode_chunk(1, 0, memoryview(bytes(MAX_CHUNK_BYTES))))
        await server.handler.until(lambda: server.handler.admitted)
        await stream.stream.half_close()
        await server.handler.until(lambda: server.handler.downs)
        assert isinstance(server.handler.broken[0][1], Unreachable)
        assert isinstance(server.handler.downs[0][1], Unreachable)
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
        await stream.say(encode_chunk(1, 0, memoryview(bytes(QUARTER_MB.byte_length))))
        await stream.say(encode_chunk(1, 1, memoryview(bytes(4096))))
        assert "not open" in (await stream.farewell()).detail


async def test_a_transfer_that_stands_still_gives_its_buffer_back() -> None:
    async with server_and_honest(stall_after_s=0.5) as (server, _), attack(server) as (hostile, stream):
        await stream.say(header_of(hostile, server))
        async with keep_talking(stream):
            await server.handler.until(lambda: server.handler.broken)
            assert isinstance(server.handler.broken[0][1], Stalled)
            await hear_until(stream, lambda frame: frame == Cancel(1))
            assert server.handler.downs == []


async def test_a_transfer_that_trickles_cannot_hold_its_buffer_for_ever() -> None:
    """It makes progress all the time, but at 16 KiB a second 256 KiB are not to take longer than 16 s; here, 0.5 s."""
    settings = {"stall_after_s": 0.3, "slowest_bytes_per_s": 2.0**21}
    async with server_and_honest(**settings) as (server, _), attack(server) as (hostile, stream):
        await stream.say(replace(header_of(hostile, server), chunk_count=64))
        index = 0
        while not server.handler.broken:
            await stream.say(encode_chunk(1, index, memoryview(bytes(4096))))
            index += 1
            await asyncio.sleep(0.1)
        assert index < 64
        assert isinstance(server.handler.broken[0][1], Stalled)


@asynccontextmanager
async def keep_talking(stream: BareStream) -> AsyncIterator[None]:
    async def talk() -> None:
        while True:
            await stream.say(Ping(1))
            await asyncio.sleep(0.05)

    talking = asyncio.create_task(talk())
    try:
        yield
    finally:
        talking.cancel()
        await asyncio.wait((talking,))


async def hear_until(stream: BareStream, wanted: Callable[[Frame], bool]) -> Frame:
    while (frame := await stream.hear()) is not None:
        if wanted(frame):
            return frame
    raise AssertionError("the stream ended first")


async def test_a_silent_peer_is_taken_for_dead() -> None:
    async with server_and_honest(stall_after_s=0.5) as (server, _), attack(server) as (hostile, _stream):
        await server.handler.until(lambda: server.handler.downs)
        [(peer, error)] = server.handler.downs
        assert peer == hostile.peer
        assert isinstance(error, Stalled)


async def test_who_says_no_hello_is_dropped() -> None:
    async with server_and_honest(hello_timeout_s=0.2) as (server, _), attack(server, introduced=False) as (_, stream):
        await stream.say(Ping(1))
        assert (await stream.farewell()).reason is FarewellReason.VIOLATION
    async with server_and_honest(hello_timeout_s=0.2) as (server, _), attack(server, introduced=False) as (_, stream):
        farewell = await stream.farewell()
        assert farewell == Farewell(FarewellReason.UNSPECIFIED, "no Hello came in time")
        assert server.handler.downs == []


async def test_who_asks_more_than_may_be_open_is_refused() -> None:
    async with server_and_honest() as (server, _), attack(server) as (_, stream):
        server.handler.answer_gate = asyncio.Event()
        for number in range(9):
            await stream.say(QuestionFrame(number, Question(QuestionAbout.STATUS)))
        refused = await hear_until(stream, lambda frame: isinstance(frame, AnswerFrame))
        assert refused == AnswerFrame(8, None, b"8 questions are open already")
        server.handler.answer_gate.set()
        answered = await hear_until(stream, lambda frame: isinstance(frame, AnswerFrame))
        assert answered == AnswerFrame(0, QuestionAbout.STATUS, b"status")


TELLS = 16_000


async def test_who_says_more_than_its_due_is_read_later_and_loses_nothing() -> None:
    due = IN_ADVANCE + COMMON_SAVED + PAUSE_AFTER
    many = int(due + COMMON_A_SECOND + FRAMES_A_SECOND)
    begun = time.monotonic()
    async with server_and_honest() as (server, _), attack(server) as (_, stream):

        async def shout() -> None:
            for token in range(many):
                await stream.say(Ping(token))

        async with asyncio.timeout(LONG), asyncio.TaskGroup() as tasks:
            tasks.create_task(shout())
            for token in range(many):
                while not isinstance(answer := await stream.hear(), Pong):
                    assert isinstance(answer, Ping), answer
                assert answer.token == token
    assert time.monotonic() - begun >= 1


async def test_what_nobody_minds_is_left_out_unread_and_the_link_stays() -> None:
    async with server_and_honest() as (server, _), attack(server) as (hostile, stream):
        server.handler.minded = (Topic.MICROBATCHES,)
        for kind in ("lane_told", "roster", "state_refused"):
            number = wire.Frame.DESCRIPTOR.fields_by_name[kind].number
            tag = number << 3 | 2
            await stream.say(bytes((tag & 0x7F | 0x80, tag >> 7, 9)) + b"\xff" * 9)  # no protobuf at all
        await stream.say(encode(Close(MicrobatchId(hostile.peer, 1), "")))
        await server.handler.until(lambda: server.handler.messages)
        assert server.handler.downs == []
        server.handler.minded = tuple(Topic)
        await stream.say(bytes((34 << 3 & 0x7F | 0x82, 34 << 3 >> 7, 9)) + b"\xff" * 9)
        assert (await stream.farewell()).reason is FarewellReason.VIOLATION


async def test_long_frames_of_who_serves_nothing_are_read_later() -> None:
    size = 40 * 1024
    async with server_and_honest() as (server, _), attack(server) as (_, stream):
        server.handler.is_served, server.handler.minded = False, ()
        frame = long_frame(size)
        weight = STRANGERS * (1 + len(frame) / BYTES_A_FRAME)
        begun = time.monotonic()
        for _ in range(int(IN_ADVANCE / weight) + 1):
            await stream.say(frame)
        await stream.say(Ping(7))
        async with asyncio.timeout(LONG):
            while await stream.hear() != Pong(7):
                pass
        assert time.monotonic() - begun >= (weight - IN_ADVANCE % weight - PAUSE_AFTER) / FRAMES_A_SECOND - 0.2


def long_frame(size: int) -> bytes:
    return wire.Frame(lane_told=wire.LaneTold(epoch=bytes(size))).SerializeToString()


async def test_a_peer_that_does_not_read_makes_senders_wait_and_holds_no_memory() -> None:
    budget = 2 * 1024 * 1024
    tensor = TensorSpec((256, 1024), DType.FLOAT32)
    data = memoryview(bytearray(tensor.byte_length))
    settings = {"send_budget_bytes": budget, "stall_after_s": 60.0, "chunk_bytes": 256 * 1024}
    async with server_and_honest(**settings) as (server, _), attack(server) as (hostile, stream):
        outbox = server.transport._links[hostile.peer].outbox
        sends = [
            asyncio.create_task(
                server.transport.send(hostile.peer, forward(server.peer, hostile.peer, n), tensor, data)
            )
            for n in range(64)
        ]
        await standstill(lambda: server.transport.figures()[hostile.peer].sent_bytes)
        tells = [
            asyncio.create_task(server.transport.tell(hostile.peer, Close(MicrobatchId(server.peer, n), "x" * 256)))
            for n in range(TELLS)
        ]
        await standstill(lambda: outbox.waiting_bytes)
        assert outbox.committed_bytes <= budget
        assert outbox.waiting_bytes <= MAX_WAITING_BYTES
        assert server.transport.figures()[hostile.peer].sent_bytes < 32 * tensor.byte_length
        assert sum(task.done() for task in sends) < 32
        assert sum(task.done() for task in tells) < TELLS
        everything = asyncio.gather(*sends, *tells)
        while not everything.done():
            await stream.hear()
        await everything
        assert outbox.committed_bytes == 0


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
                await stream.say(QuestionFrame(number, Question(QuestionAbout.STATUS)))
                number += 1

        asking = asyncio.create_task(ask_for_ever())
        await server.handler.until(lambda: server.handler.downs)
        assert server.handler.downs[0][0] == hostile.peer
        assert isinstance(server.handler.downs[0][1], Stalled)
        asking.cancel()
        await asyncio.wait((asking,))


async def test_one_peer_gets_few_streams_even_when_it_reads_none() -> None:
    async with (
        server_and_honest(hello_timeout_s=60.0) as (server, _),
        attack(server, introduced=False) as (hostile, first),
    ):
        async with bare_stream(hostile, server, introduced=False), bare_stream(hostile, server, introduced=False):
            streams = server.transport._door._streams
            await server.handler.until(lambda: streams[hostile.peer] == MAX_STREAMS_PER_PEER)
            async with bare_stream(hostile, server, introduced=False) as fourth:
                with pytest.raises(Unreachable, match="too many streams"):
                    await fourth.hear()
        await server.handler.until(lambda: server.transport._door._streams[hostile.peer] == 1)
        await first.say(hello_of(hostile))
        assert isinstance(await first.hear(), Hello)


async def test_garbage_on_the_port_is_hung_up_on() -> None:
    async with server_and_honest() as (server, _):
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(10_000), b"\x16\x03\x01\xff\xff" + bytes(70_000)):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(garbage)
            async with asyncio.timeout(LONG):
                try:
                    while await reader.read(4096):
                        pass
                except ConnectionError:
                    pass  # hung up on with what it sent unread
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        assert len(server.handler.ups) == 1


async def test_another_grpc_method_is_unknown() -> None:
    async with server_and_honest() as (server, _):
        hostile = Persona()
        channel = open_channel(server.persona.contact(server.port), f"127.0.0.1:{server.port}", hostile.credentials)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await channel.close()


async def test_a_dialler_without_a_common_version_is_told() -> None:
    async with server_and_honest() as (server, _), attack(server, introduced=False) as (hostile, stream):
        await stream.say(replace(hello_of(hostile), versions=VersionRange(3, 4)))
        farewell = await stream.farewell()
        assert farewell.reason is FarewellReason.WRONG_VERSION
        assert "2 to 2" in farewell.detail


@asynccontextmanager
async def scripted_server(own: Persona, script: Callable[[AcceptedStream], Awaitable[None]]) -> AsyncIterator[int]:
    """A gRPC server with the persona's certificate that does what the script says with each stream."""

    async def serve(_requests: object, context: Any) -> None:
        await script(AcceptedStream(context))

    server, port = make_server(serve, own.credentials, "127.0.0.1:0", 4)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (Farewell(FarewellReason.WRONG_VERSION, "9 only"), StaleVersion),
        (Farewell(FarewellReason.WRONG_RUN), Rejected),
        (Farewell(FarewellReason.NOT_YOU), Rejected),
        (Farewell(FarewellReason.VIOLATION), Rejected),
        (Farewell(FarewellReason.LEAVING), Unreachable),
        (Farewell(FarewellReason.UNSPECIFIED), Unreachable),
        (Ping(1), ProtocolViolation),
        (None, Unreachable),
    ],
)
async def test_what_the_dialled_peer_says_instead_of_hello(first: SmallFrame | None, kind: type[PeerError]) -> None:
    async def script(stream: AcceptedStream) -> None:
        await stream.read()
        if first is not None:
            await stream.write(encode(first))

    await dialling_raises(kind, script)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"versions": VersionRange(9, 9)}, StaleVersion),
        ({"run": OTHER_RUN}, Rejected),
        ({"peer": Persona().peer}, Rejected),
    ],
)
async def test_a_hello_of_the_dialled_peer_that_cannot_be(change: dict[str, Any], kind: type[PeerError]) -> None:
    persona = Persona()

    async def script(stream: AcceptedStream) -> None:
        await stream.read()
        await stream.write(encode(replace(hello_of(persona), **change)))
        await stream.read()

    await dialling_raises(kind, script, persona)


async def test_a_dialled_peer_that_says_nothing_is_given_up() -> None:
    async def script(stream: AcceptedStream) -> None:
        await stream.read()
        await stream.read()

    await dialling_raises(Unreachable, script, dial_timeout_s=0.3)


async def dialling_raises(
    kind: type[PeerError],
    script: Callable[[AcceptedStream], Awaitable[None]],
    persona: Persona | None = None,
    **settings: Any,
) -> None:
    persona = persona or Persona()
    async with node(settings=with_settings(**settings)) as own, scripted_server(persona, script) as port:
        own.persona.knows(persona, port)
        with pytest.raises(kind) as raised:
            await own.transport.tell(persona.peer, Close(MicrobatchId(own.peer, 0), ""))
        assert type(raised.value) is kind
        assert own.handler.ups == []


async def test_an_unknown_peer_and_oneself_cannot_be_reached() -> None:
    async with node() as own:
        for peer in (Persona().peer, own.peer):
            with pytest.raises(Unreachable):
                await own.transport.tell(peer, Close(MicrobatchId(own.peer, 0), ""))


async def test_addresses_are_tried_one_after_the_other() -> None:
    async with node() as left, node() as right:
        introduce(left, right)
        contact = right.persona.contact(1, right.port)
        left.persona.book.contacts[right.peer] = replace(contact, addresses=("unix:/nobody", *contact.addresses))
        await left.transport.tell(right.peer, Close(MicrobatchId(left.peer, 0), ""))
        await right.handler.until(lambda: right.handler.messages)


@pytest.mark.parametrize(
    "address",
    ["unix:/tmp/x", "xds:///a:1", "a:1,b:2", "host", "host:0", "host:65536", ":1", "-h:1", "a b:1", "[::1]x:1"],
)
def test_addresses_are_host_and_port_only(address: str) -> None:
    with pytest.raises(Unreachable):
        target_of(address)


@pytest.mark.parametrize("address", ["127.0.0.1:80", "host.example:1", "[::1]:65535"])
def test_addresses_that_can_be_dialled(address: str) -> None:
    assert target_of(address) == f"dns:///{address}"
