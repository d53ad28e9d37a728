"""Peers of one process: their links have no stream."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from protocol.frames.frames import Farewell, FarewellReason
from protocol.interfaces.transport import Question, QuestionAbout, Refusal
from swarm.vocabulary.averaging_messages import StateChunk
from swarm.vocabulary.errors import ProtocolViolation, Rejected, Stalled, Unreachable
from swarm.vocabulary.pipeline_messages import Direction, Receipt, ReceiptStatus
from swarm.vocabulary.types import MicrobatchId, ModuleId
from tests.protocol.transport.link_peers import (
    FLOATS,
    Node,
    Persona,
    bare_stream,
    forward,
    hello_of,
    introduce,
    node,
    pattern,
    refuse_to_answer,
)
from tests.protocol.transport.test_transport import close_of, send_pattern

pytestmark = pytest.mark.e2e

STATUS = Question(QuestionAbout.STATUS)


@asynccontextmanager
async def two_modules() -> AsyncIterator[tuple[Node, Node]]:
    """Two peers of one process; neither knows an address of the other."""
    async with node(record=b"of the left") as left, node(record=b"of the right") as right:
        left.transport.link_locally(right.transport)
        yield left, right


async def test_what_is_sent_arrives_at_once_and_over_no_stream() -> None:
    async with two_modules() as (left, right):
        assert (left.handler.ups, right.handler.ups) == ([right.peer], [left.peer])
        assert left.handler.records == [(right.peer, b"of the right")]
        left.transport.announce(b"newer")
        left.transport.announce(b"")
        assert right.handler.records == [(left.peer, b"of the left"), (left.peer, b"newer")]
        data = bytearray(await send_pattern(left, right, 1))
        await send_pattern(right, left, 2)
        data[:] = bytes(len(data))
        assert right.handler.tensors == [(left.peer, forward(left.peer, right.peer, 1), FLOATS, pattern(FLOATS, 1))]
        assert [sender for sender, *_ in left.handler.tensors] == [right.peer]
        await left.transport.send_control(right.peer, close_of(left.peer))
        assert right.handler.messages == [(left.peer, close_of(left.peer))]
        for transport, other in ((left.transport, right.peer), (right.transport, left.peer)):
            assert transport.is_linked(other)
            assert transport.goodput_bytes_per_s(other) == math.inf
            assert transport.figures() == {}


@pytest.mark.parametrize(("busy", "status"), [(True, ReceiptStatus.BUSY), (False, ReceiptStatus.REFUSED)])
async def test_a_refused_tensor_has_a_receipt(busy: bool, status: ReceiptStatus) -> None:
    async with two_modules() as (left, right):
        right.handler.refusal = Refusal(busy, "full", 0.5)
        await send_pattern(left, right, 3)
        receipt = Receipt(MicrobatchId(left.peer, 3), Direction.FORWARD, 0, status, 0.5, "full")
        assert left.handler.messages == [(right.peer, receipt)]
        chunk = StateChunk(ModuleId(1), b"d" * 32, 0)
        await left.transport.send(right.peer, chunk, FLOATS, memoryview(pattern(FLOATS, 4)))
        assert len(left.handler.messages) == 1, "only microbatches have receipts"
        assert right.handler.tensors == []
        right.handler.admit_error = ProtocolViolation("not on this path")
        with pytest.raises(ProtocolViolation, match="not on this path"):
            await send_pattern(left, right, 5)
        assert left.transport.is_linked(right.peer)


async def test_questions_are_answered_refused_or_late() -> None:
    async with two_modules() as (left, right):
        assert await left.transport.ask(right.peer, STATUS, 5.0) == b"status"
        right.handler.answering = refuse_to_answer
        with pytest.raises(Rejected, match="refused to answer: no status for you"):
            await left.transport.ask(right.peer, STATUS, 5.0)

        def of_another(question: Question) -> bytes:
            raise Unreachable("a third peer")

        right.handler.answering = of_another
        with pytest.raises(Rejected, match="a third peer"):  # which is no reason to give up this one
            await left.transport.ask(right.peer, STATUS, 5.0)
        right.handler.answer_gate = asyncio.Event()
        with pytest.raises(Stalled, match="did not answer within"):
            await left.transport.ask(right.peer, STATUS, 0.01)


async def test_the_end_of_a_module_is_the_end_of_its_links() -> None:
    async with two_modules() as (left, right):
        left.transport.unlink_locally(right.transport)
        assert ([*left.handler.downs], [peer for peer, _ in right.handler.downs]) == ([], [left.peer])
        for own, other in ((left, right), (right, left)):
            with pytest.raises(Unreachable, match="unknown"):
                await own.transport.send_control(other.peer, close_of(own.peer))


async def test_a_stream_that_was_there_first_gives_way() -> None:
    async with node() as left, node() as right:
        introduce(left, right)
        await left.transport.send_control(right.peer, close_of(left.peer, 1))
        await right.handler.until(lambda: right.handler.messages)
        left.transport.link_locally(right.transport)
        assert left.transport.figures() == right.transport.figures() == {}
        assert (left.handler.downs, right.handler.downs) == ([], [])
        await send_pattern(left, right, 2)
        assert right.handler.tensors


async def test_a_stranger_with_the_key_of_a_peer_of_this_process_is_refused() -> None:
    thief = Persona()
    async with node() as left, node(thief) as right:
        left.transport.link_locally(right.transport)
        for persona, greeting in ((thief, hello_of(thief)), (left.persona, hello_of(left.persona))):
            async with bare_stream(persona, left, introduced=False) as stream:
                await stream.say(greeting)
                assert await stream.hear() == Farewell(FarewellReason.UNSPECIFIED, "this peer is in our own process")
        assert left.handler.ups == [right.peer]
        assert not left.handler.downs
        assert left.transport.is_linked(right.peer)
