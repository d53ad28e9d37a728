"""Two and three honest peers over real sockets and TLS."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import pytest

from protocol.frames.frames import Farewell, FarewellReason
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Refusal
from protocol.transport.settings import TransportSettings
from swarm.vocabulary.errors import ConfigError, Rejected, Stalled, Unreachable
from swarm.vocabulary.pipeline_messages import Backward, Close, Direction, Receipt, ReceiptStatus
from swarm.vocabulary.types import MicrobatchId, PeerId
from tests.protocol.transport.link_peers import (
    FLOATS,
    SETTINGS,
    Node,
    Persona,
    Recorder,
    bare_stream,
    forward,
    hello_of,
    introduce,
    node,
    pattern,
    refuse_to_answer,
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


async def test_tensors_travel_both_ways_at_once_and_arrive_whole() -> None:
    async with two_nodes() as (left, right):
        sent = await asyncio.gather(
            *(send_pattern(left, right, n) for n in range(10)),
            *(send_pattern(right, left, n) for n in range(10, 20)),
        )
        await right.handler.until(lambda: len(right.handler.tensors) == 10)
        await left.handler.until(lambda: len(left.handler.tensors) == 10)
        for own, other, numbers in ((right, left, range(10)), (left, right, range(10, 20))):
            got = {message.microbatch.number: data for _, message, _, data in own.handler.tensors}
            assert got == {n: sent[n] for n in numbers}
            assert {sender for sender, *_ in own.handler.tensors} == {other.peer}
        assert left.handler.ups == [right.peer]
        assert right.handler.ups == [left.peer]


@pytest.mark.parametrize("dtype", list(DType))
async def test_sizes_that_do_not_fill_the_last_chunk(dtype: DType) -> None:
    chunk = SETTINGS.chunk_bytes // dtype.size_bytes
    async with two_nodes() as (left, right):
        for number, elements in enumerate((2, chunk - 2, chunk, chunk + 2, 3 * chunk)):
            spec = TensorSpec((elements,), dtype)
            data = pattern(spec, number)
            await left.transport.send(right.peer, forward(left.peer, right.peer, number), spec, memoryview(data))
            await right.handler.until(lambda n=number: len(right.handler.tensors) == n + 1)
            assert right.handler.tensors[-1][2:] == (spec, data)


async def test_a_backward_message_keeps_its_route() -> None:
    async with two_nodes() as (left, right):
        path = forward(left.peer, right.peer).path
        message = Backward(MicrobatchId(left.peer, 7), path, -1)
        await right.transport.send(left.peer, message, FLOATS, memoryview(pattern(FLOATS, 1)))
        await left.handler.until(lambda: left.handler.tensors)
        assert left.handler.tensors[0][:3] == (right.peer, message, FLOATS)


async def test_small_messages_keep_their_order() -> None:
    async with two_nodes() as (left, right):
        for number in range(100):
            await left.transport.tell(right.peer, close_of(left.peer, number))
        await right.handler.until(lambda: len(right.handler.messages) == 100)
        assert right.handler.messages == [(left.peer, close_of(left.peer, n)) for n in range(100)]


async def test_hello_carries_the_record_and_announce_updates_it() -> None:
    left_persona, right_persona = Persona(), Persona()
    async with node(left_persona, record=b"left") as left, node(right_persona, record=b"right") as right:
        introduce(left, right)
        await left.transport.tell(right.peer, close_of(left.peer))
        left.transport.announce(b"")  # none that could be said: nothing that a peer would have to end the link for
        left.transport.announce(b"left, later")
        await right.handler.until(lambda: len(right.handler.records) == 2)
        assert right.handler.records == [(left.peer, b"left"), (left.peer, b"left, later")]
        assert left.handler.records == [(right.peer, b"right")]


async def test_questions_are_answered_refused_and_time_out() -> None:
    async with two_nodes() as (left, right):
        assert await left.transport.ask(right.peer, Question(QuestionAbout.STATUS), 10) == b"status"
        assert await left.transport.ask(right.peer, Question(QuestionAbout.EVALUATE, 3), 10) == b"evaluate"
        right.handler.answering = refuse_to_answer
        with pytest.raises(Rejected, match="no manifest for you"):
            await left.transport.ask(right.peer, Question(QuestionAbout.MANIFEST), 10)
        right.handler.answer_gate = asyncio.Event()
        with pytest.raises(Stalled, match="did not answer a status question"):
            await left.transport.ask(right.peer, Question(QuestionAbout.STATUS), 0.1)
        right.handler.answer_gate.set()
        right.handler.answering = lambda question: b"again"
        assert await left.transport.ask(right.peer, Question(QuestionAbout.STATUS), 10) == b"again"


async def test_more_questions_than_may_be_open_wait_for_a_place() -> None:
    async with two_nodes() as (left, right):
        right.handler.answer_gate = asyncio.Event()
        asked = [
            asyncio.create_task(left.transport.ask(right.peer, Question(QuestionAbout.STATUS), 10)) for _ in range(20)
        ]
        await left.handler.until(lambda: left.handler.ups)
        right.handler.answer_gate.set()
        assert await asyncio.gather(*asked) == [b"status"] * 20


async def test_an_answer_that_is_too_long_is_refused_by_its_own_side() -> None:
    async with two_nodes() as (left, right):
        right.handler.answering = lambda question: bytes(68 * 1024 + 1)
        with pytest.raises(Rejected, match="69633 bytes"):
            await left.transport.ask(right.peer, Question(QuestionAbout.STATUS), 10)
        assert not right.handler.downs


@pytest.mark.parametrize(("busy", "status"), [(True, ReceiptStatus.BUSY), (False, ReceiptStatus.REFUSED)])
async def test_a_refused_tensor_is_answered_with_a_receipt_and_the_link_goes_on(
    busy: bool, status: ReceiptStatus
) -> None:
    async with two_nodes() as (left, right):
        right.handler.refusal = Refusal(busy, "no slot", 1.5)
        large = TensorSpec((8, 256, 1024), DType.FLOAT32)
        for number in range(100):
            message = forward(left.peer, right.peer, number)
            await left.transport.send(right.peer, message, large, memoryview(bytearray(large.byte_length)))
        await left.handler.until(lambda: len(left.handler.messages) == 100)
        expected = Receipt(MicrobatchId(left.peer, 99), Direction.FORWARD, 0, status, 1.5, "no slot")
        assert left.handler.messages[-1] == (right.peer, expected)
        right.handler.refusal = None
        await send_pattern(left, right, 100)
        await right.handler.until(lambda: right.handler.tensors)
        assert len(right.handler.tensors) == 1
        assert left.handler.ups == [right.peer]


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
        assert isinstance(right.handler.broken[0][1], Unreachable)
        assert sending.cancelled()
        whole = await send_pattern(left, right, 2)
        await right.handler.until(lambda: right.handler.tensors)
        assert right.handler.tensors[0][3] == whole
        assert left.handler.ups == [right.peer]


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
            await left.transport.tell(right.peer, close_of(left.peer))
            left.handler.answer_gate = asyncio.Event()
            asked = asyncio.create_task(right.transport.ask(left.peer, Question(QuestionAbout.STATUS), 30))
            await right.handler.until(lambda: right.handler.ups)
        with pytest.raises(Unreachable, match="leaves"):
            await asked
        assert [peer for peer, _ in right.handler.downs] == [left.peer]
        assert right.transport.figures() == {}
        with pytest.raises(Unreachable):
            await right.transport.tell(left.peer, close_of(right.peer))


async def test_leaving_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    async with two_nodes() as (left, right):
        await send_pattern(left, right, 0)
    await asyncio.sleep(0)
    left_over = {task for task in asyncio.all_tasks() - before if "grpc" not in repr(task.get_coro())}
    assert not left_over


@pytest.mark.parametrize("attempt", range(20))
async def test_peers_that_dial_each_other_at_once_end_up_with_one_link(attempt: int) -> None:
    async with two_nodes() as (left, right):
        await asyncio.gather(send_pattern(left, right, 1), send_pattern(right, left, 2))
        await right.handler.until(lambda: right.handler.tensors)
        await left.handler.until(lambda: left.handler.tensors)
        assert left.handler.ups == [right.peer]
        assert right.handler.ups == [left.peer]
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
        await left.transport.tell(right.peer, close_of(left.peer))
        async with bare_stream(larger, left, introduced=False) as stream:
            await stream.say(replace(hello_of(larger), incarnation=right.transport.incarnation))
            assert await stream.farewell() == Farewell(FarewellReason.DUPLICATE)
        await left.transport.tell(right.peer, close_of(left.peer, 1))
        await right.handler.until(lambda: len(right.handler.messages) == 2)


async def test_many_peers_that_all_dial_each_other() -> None:
    async with node() as a, node() as b, node() as c, node() as d:
        nodes = (a, b, c, d)
        pairs = [(x, y) for x in nodes for y in nodes if x is not y]
        for x, y in pairs:
            introduce(x, y)
        await asyncio.gather(*(send_pattern(x, y, n) for n, (x, y) in enumerate(pairs)))
        for x in nodes:
            await x.handler.until(lambda own=x: len(own.handler.tensors) == 3)
            assert len(x.handler.ups) == 3
            assert not x.handler.downs


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
    hello = replace(hello_of(persona), incarnation=1, age_ms=10_000)
    async with (
        node(settings=with_settings(proof_of_life_s=0.1)) as server,
        bare_stream(persona, server, hello=hello),
        node(persona) as reborn,
    ):
        introduce(server, reborn)
        await reborn.transport.tell(server.peer, close_of(reborn.peer, 1))
        await server.handler.until(lambda: server.handler.messages)
        assert server.handler.ups == [persona.peer, persona.peer]
        assert [peer for peer, _ in server.handler.downs] == [persona.peer]
        await server.transport.tell(persona.peer, close_of(server.peer))
        await reborn.handler.until(lambda: reborn.handler.messages)


async def test_a_port_in_use_is_a_configuration_error() -> None:
    async with node() as first:
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{first.port}"):
            async with node(settings=with_settings(listen_port=first.port)):
                pass


async def test_links_are_limited() -> None:
    async with node(settings=with_settings(max_links=1)) as server, node() as first, node() as second:
        introduce(server, first)
        introduce(server, second)
        await first.transport.tell(server.peer, close_of(first.peer))
        with pytest.raises(Unreachable, match="no room"):
            await second.transport.tell(server.peer, close_of(second.peer))
        with pytest.raises(Unreachable, match="links are in use"):
            await server.transport.tell(second.peer, close_of(server.peer))
        await server.transport.tell(first.peer, close_of(server.peer))


async def test_an_error_in_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(LookupError):
        async with node():
            raise LookupError


async def test_a_broken_handler_ends_the_transport() -> None:
    class Broken(Recorder):
        def told(self, sender: PeerId, message: object) -> None:
            raise LookupError("a bug")

    async def serve_and_be_told() -> None:
        async with node() as left, node(handler=Broken()) as right:
            introduce(left, right)
            await left.transport.tell(right.peer, close_of(left.peer))
            await asyncio.sleep(20)

    with pytest.raises(ExceptionGroup) as raised:
        await serve_and_be_told()
    assert raised.value.split(LookupError)[1] is None


@pytest.mark.parametrize(
    ("name", "value"), [("chunk_bytes", 4095), ("chunk_bytes", 2**20 + 1), ("max_links", 0), ("stall_after_s", 0.1)]
)
def test_impossible_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        TransportSettings(**{name: value})  # type: ignore[arg-type]
