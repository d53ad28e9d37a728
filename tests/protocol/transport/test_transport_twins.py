"""Two processes with one key, as a machine's copy or a restored backup makes them."""

from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from protocol.frames.frames import Farewell, Hello
from protocol.transport.dialer import MOST_REPLACED, REPLACED_WITHIN_S, Turnover
from swarm.vocabulary.errors import Rejected
from swarm.vocabulary.types import PeerId
from tests.node.network.small_swarm import ManualClock
from tests.protocol.transport.link_peers import Node, Persona, bare_stream, hello_of, introduce, node
from tests.protocol.transport.test_transport import close_of

pytestmark = pytest.mark.e2e


async def linked(peer: Node, server: Node, number: int) -> None:
    await peer.transport.send_control(server.peer, close_of(peer.peer, number))
    await server.handler.until(lambda: len(server.handler.messages) == number)


async def test_the_newcomer_is_told_with_the_older_ones_record() -> None:
    persona = Persona()
    async with node() as server, node(persona, record=b"of the older") as older:
        introduce(server, older)
        await linked(older, server, 1)
        async with node(persona, record=b"of the newcomer") as newcomer:
            for _ in range(3):
                with pytest.raises(Rejected, match="another process with this key has run for"):
                    await newcomer.transport.send_control(server.peer, close_of(persona.peer))
            assert set(newcomer.handler.records) == {(server.peer, b"of the older")}
        assert server.handler.ups == [persona.peer]
        assert not server.handler.downs
        await linked(older, server, 2)


async def test_the_older_one_is_kept_though_the_newcomer_was_linked_first() -> None:
    persona = Persona()
    async with node() as server, node(persona, record=b"of the newcomer") as newcomer:
        introduce(server, newcomer)
        await linked(newcomer, server, 1)
        older = replace(hello_of(persona), incarnation=1, age_ms=100_000, announcement=b"of the older")
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
