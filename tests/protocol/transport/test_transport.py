"""Two and three honest peers over real sockets and TLS."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import pytest

from protocol.frames.frames import MAX_AGE_MS, Farewell, FarewellReason, Hello, decode, encode
from protocol.interfaces.directory import Contact
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Refusal
from protocol.transport.dialer import MOST_REPLACED, REPLACED_WITHIN_S, Turnover
from protocol.transport.settings import TransportSettings
from swarm.vocabulary.errors import ConfigError, ProtocolViolation, Rejected, Stalled, Unreachable
from swarm.vocabulary.pipeline_messages import Backward, Close, Direction, Receipt, ReceiptStatus
from swarm.vocabulary.types import MicrobatchId, PeerId
from tests.node.network.small_swarm import ManualClock
from tests.protocol.identity.minting import OTHER_RUN, certificate, credentials_for, extension_for, new_key
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
from tests.protocol.transport.peer_process import contact_from_json, contact_to_json

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
            *(send_pattern(left, right, n) for n in range(10)), *(send_pattern(right, left, n) for n in range(10, 20))
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


LARGE = TensorSpec((16 * 1024, 1024), DType.FLOAT32)


@asynccontextmanager
async def peer_process(own: Node, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Contact]]:
    """Another process with a peer that `own` has a link to."""
    contact = contact_to_json(own.persona.contact(own.port))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.protocol.transport.peer_process",
        contact,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        other = contact_from_json((await process.stdout.readline()).decode())
        own.persona.book.contacts[other.peer] = other
        await own.transport.tell(other.peer, Close(MicrobatchId(own.peer, 0), ""))
        yield process, other
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def start_sending(own: Node, other: Contact) -> asyncio.Task[None]:
    data = memoryview(bytearray(LARGE.byte_length))
    message = forward(own.peer, other.peer)
    sending = asyncio.create_task(own.transport.send(other.peer, message, LARGE, data))
    before = own.transport.figures()[other.peer].sent_bytes
    await own.handler.until(lambda: own.transport.figures()[other.peer].sent_bytes > before + 2**20)
    return sending


async def test_a_killed_receiver_fails_the_send_and_the_question_at_once() -> None:
    async with node() as own, peer_process(own) as (process, other):
        os.kill(process.pid, signal.SIGSTOP)  # so that nothing can complete before it dies
        asked = asyncio.create_task(own.transport.ask(other.peer, Question(QuestionAbout.STATUS), 60))
        sending = await start_sending(own, other)
        process.kill()
        for under_way in (sending, asked):
            with pytest.raises(Unreachable):
                await under_way
        assert [peer for peer, _ in own.handler.downs] == [other.peer]
        assert isinstance(own.handler.downs[0][1], Unreachable)
        with pytest.raises(Unreachable):
            await own.transport.tell(other.peer, Close(MicrobatchId(own.peer, 0), ""))


async def test_a_stopped_receiver_is_noticed_although_its_sockets_stay_open() -> None:
    async with node(settings=with_settings(stall_after_s=1.0)) as own, peer_process(own) as (process, other):
        os.kill(process.pid, signal.SIGSTOP)
        sending = await start_sending(own, other)
        with pytest.raises(Stalled, match="nothing was heard"):
            await sending
        assert isinstance(own.handler.downs[0][1], Stalled)


async def test_a_sender_killed_in_mid_tensor_is_reported_and_its_buffer_given_back() -> None:
    async with node() as own, peer_process(own, str(LARGE.shape[0])) as (process, _):
        await own.handler.until(lambda: own.handler.admitted)
        process.kill()
        await own.handler.until(lambda: own.handler.downs)
        assert [message for message, _ in own.handler.broken] == own.handler.admitted
        assert isinstance(own.handler.broken[0][1], Unreachable)
        assert own.handler.tensors == []


async def test_a_sender_stopped_in_mid_tensor_is_reported_and_its_buffer_given_back() -> None:
    settings = with_settings(stall_after_s=1.0)
    async with node(settings=settings) as own, peer_process(own, str(LARGE.shape[0])) as (process, _):
        await own.handler.until(lambda: own.handler.admitted)
        os.kill(process.pid, signal.SIGSTOP)
        await own.handler.until(lambda: own.handler.downs)
        assert isinstance(own.handler.broken[0][1], Stalled)
        assert isinstance(own.handler.downs[0][1], Stalled)


def greeting(peer: PeerId) -> Close:
    return Close(MicrobatchId(peer, 0), "hello")


async def test_a_caller_nobody_has_heard_of_is_let_in_and_its_record_handed_on() -> None:
    async with node() as server, node(record=b"who I am") as stranger:
        stranger.persona.knows(server.persona, server.port)
        await stranger.transport.tell(server.peer, greeting(stranger.peer))
        await server.handler.until(lambda: server.handler.messages)
        assert server.handler.ups == [stranger.peer]
        assert server.handler.records == [(stranger.peer, b"who I am")]
        assert server.handler.messages == [(stranger.peer, greeting(stranger.peer))]


async def test_a_restarted_caller_gets_in_at_once_with_its_new_certificate() -> None:
    async with node() as server:
        former = Persona()
        async with node(former) as caller:
            introduce(server, caller)
            await caller.transport.tell(server.peer, greeting(caller.peer))
            await server.handler.until(lambda: server.handler.messages)
        reborn = Persona(former.identity)
        assert reborn.credentials.certificate_der != former.credentials.certificate_der
        async with node(reborn) as caller:
            reborn.knows(server.persona, server.port)
            await caller.transport.tell(server.peer, greeting(caller.peer))
            await server.handler.until(lambda: len(server.handler.messages) == 2)
        assert server.handler.ups == [former.peer, former.peer]


async def test_a_peer_of_another_run_gets_no_link_whoever_dials() -> None:
    async with node() as server, node(Persona(run=OTHER_RUN)) as other:
        introduce(server, other)
        for dialling, dialled in ((server, other), (other, server)):
            with pytest.raises(Unreachable, match="another run"):
                await dialling.transport.tell(dialled.peer, greeting(dialling.peer))
        assert server.handler.ups == other.handler.ups == []


async def test_a_hello_for_another_run_is_told_so() -> None:
    caller = Persona()
    async with node() as server, bare_stream(caller, server, introduced=False) as stream:
        await stream.say(replace(hello_of(caller), run=OTHER_RUN))
        assert (await stream.farewell()).reason is FarewellReason.WRONG_RUN
        assert server.handler.ups == []


async def test_the_name_in_the_hello_must_be_the_certificates() -> None:
    liar, honest = Persona(), Persona()
    async with node() as server, bare_stream(liar, server, introduced=False) as stream:
        await stream.say(hello_of(honest))
        assert (await stream.farewell()).reason is FarewellReason.NOT_YOU
        assert server.handler.ups == []


async def test_a_certificate_that_carries_anothers_name_is_turned_away_at_the_door() -> None:
    """Anybody can sign it with the authority's key, so TLS lets it in."""
    impostor, key = Persona(), new_key()
    der = certificate(impostor.identity, key=key, extension=extension_for(Persona().identity, key))
    impostor.credentials = credentials_for(der, key, like=impostor.credentials)
    async with node() as server:
        async with bare_stream(impostor, server, introduced=False) as stream:
            with pytest.raises(Rejected, match="refused the connection: certificate: the common name"):
                await stream.hear()
        assert server.handler.ups == []


async def test_a_peer_that_proves_to_be_another_is_rejected_by_who_dials() -> None:
    async with node() as server, node() as caller:
        expected = Persona()
        caller.persona.knows(expected, server.port)
        with pytest.raises(Rejected, match="another peer"):
            await caller.transport.tell(expected.peer, greeting(caller.peer))
        assert server.handler.ups == []


async def linked(peer: Node, server: Node, number: int) -> None:
    await peer.transport.tell(server.peer, close_of(peer.peer, number))
    await server.handler.until(lambda: len(server.handler.messages) == number)


async def test_the_newcomer_is_told_with_the_older_ones_record() -> None:
    persona = Persona()
    async with node() as server, node(persona, record=b"of the older") as older:
        introduce(server, older)
        await linked(older, server, 1)
        async with node(persona, record=b"of the newcomer") as newcomer:
            for _ in range(3):
                with pytest.raises(Rejected, match="another process with this key runs since"):
                    await newcomer.transport.tell(server.peer, close_of(persona.peer))
            assert set(newcomer.handler.records) == {(server.peer, b"of the older")}
        assert server.handler.ups == [persona.peer]
        assert not server.handler.downs
        await linked(older, server, 2)


async def test_the_older_one_is_kept_though_the_newcomer_was_linked_first() -> None:
    persona = Persona()
    async with node() as server, node(persona, record=b"of the newcomer") as newcomer:
        introduce(server, newcomer)
        await linked(newcomer, server, 1)
        older = replace(hello_of(persona), incarnation=1, age_ms=100_000, record=b"of the older")
        async with bare_stream(persona, server, hello=older) as stream:
            await newcomer.handler.until(lambda: newcomer.handler.downs)
            assert newcomer.handler.records[-1] == (server.peer, b"of the older")
            await stream.say(close_of(persona.peer, 2))
            await server.handler.until(lambda: len(server.handler.messages) == 2)
        assert server.handler.ups == [persona.peer, persona.peer]


async def test_one_process_that_links_again_and_again_is_left_alone_for_a_while() -> None:
    """Two copies of a machine's memory are one process to everybody: each stream replaces the other's."""
    persona, answers = Persona(), list[object]()
    async with node() as server, AsyncExitStack() as stack:
        for _ in range(MOST_REPLACED + 2):
            stream = await stack.enter_async_context(bare_stream(persona, server, introduced=False))
            await stream.say(replace(hello_of(persona), incarnation=1))
            answers.append(await stream.hear())
        *taken, refused = answers
        assert all(isinstance(answer, Hello) for answer in taken)
        assert isinstance(refused, Farewell)
        assert "too often" in refused.detail
        assert len(server.handler.ups) == 1 + MOST_REPLACED


def test_turnover_is_high_for_a_while_after_the_third_replacement() -> None:
    clock = ManualClock()
    turnover, peer = Turnover(clock), PeerId("p")
    for _ in range(MOST_REPLACED):
        assert not turnover.is_high(peer)
        turnover.replaced(peer)
        clock.now += 1
    assert turnover.is_high(peer)
    assert not turnover.is_high(PeerId("q"))
    clock.now += REPLACED_WITHIN_S - MOST_REPLACED
    assert not turnover.is_high(peer)


def test_what_a_hello_says_of_its_process_arrives() -> None:
    hello = replace(hello_of(Persona()), incarnation=2**64 - 1, age_ms=MAX_AGE_MS - 1)
    assert decode(encode(hello)) == hello
    with pytest.raises(ProtocolViolation, match="no process is"):
        decode(encode(replace(hello, age_ms=MAX_AGE_MS)))
    farewell = Farewell(FarewellReason.SAME_KEY, "since yesterday", b"a record")
    assert decode(encode(farewell)) == farewell
