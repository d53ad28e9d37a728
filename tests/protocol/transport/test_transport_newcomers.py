"""Who gets a link and who does not: anybody of the run, as the peer that the certificate proves and as nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.frames.frames import FarewellReason
from swarm.vocabulary.errors import Rejected, Unreachable
from swarm.vocabulary.pipeline_messages import Close
from swarm.vocabulary.types import MicrobatchId, PeerId
from tests.protocol.identity.minting import OTHER_RUN, certificate, credentials_for, extension_for, new_key
from tests.protocol.transport.link_peers import Persona, bare_stream, hello_of, introduce, node

pytestmark = pytest.mark.e2e


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
