"""Whoever comes to a run, or looks at it, meets the adversary's peers first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from node.network.client import query_status
from node.network.session import NetworkSession, visit
from protocol.interfaces.directory import Contact
from protocol.interfaces.transport import Question
from protocol.manifest.join_link import JoinLink
from protocol.manifest.signing import sign_manifest
from swarm.vocabulary.errors import Unreachable
from swarm.vocabulary.pipeline_messages import Close
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId, RunId
from tests.e2e.small_run import small_run
from tests.protocol.transport.link_peers import SETTINGS, Node, Persona, Recorder, node
from tests.security.adversary import Targets
from tests.security.siege import BESIEGED, Siege

pytestmark = BESIEGED

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
    """Never answers."""
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
