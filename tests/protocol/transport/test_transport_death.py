"""A peer's process is killed or stopped in the middle: nothing hangs, and everything under way is reported."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from protocol.interfaces.directory import Contact
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.vocabulary.errors import Stalled, Unreachable
from swarm.vocabulary.pipeline_messages import Close
from swarm.vocabulary.types import MicrobatchId
from tests.protocol.transport.link_peers import Node, forward, node, with_settings
from tests.protocol.transport.peer_process import contact_from_json, contact_to_json

pytestmark = pytest.mark.e2e

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
