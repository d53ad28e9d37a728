"""The exchange of a run's router: whoever has it gives it, and whoever needs it asks the peers until one gives the one
that the manifest names.

It stands alone because only runs with experts have one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from node.experts.router import Router, read_router
from node.network.session import ASK_TIMEOUT_S, ASKED_AT_ONCE, NetworkSession
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ProtocolViolation, StateError
from swarm.vocabulary.types import PeerId


async def fetch_router(session: NetworkSession, manifest: Manifest, patience_s: float) -> Router | None:
    """Asks the peers that are seen for the router, several at once; None when the run has none.

    Raises:
        Unreachable: no peer gave it within `patience_s` seconds.
    """
    if manifest.routing is None:
        return None

    async def ask(peer: PeerId) -> Router:
        data = await session.transport.ask(peer, Question(QuestionAbout.ROUTER), ASK_TIMEOUT_S)
        try:
            return read_router(data, manifest)
        except StateError as error:
            raise ProtocolViolation(str(error)) from None

    return await session.first_answer(ask, lambda peer: True, patience_s, "has given this run's router", ASKED_AT_ONCE)


def router_given(session: NetworkSession, router: Router | None) -> AbstractContextManager[None]:
    """Within it, whoever asks for the router gets it."""
    if router is None:
        return nullcontext()
    data = router.to_bytes()

    async def answer(asker: PeerId, question: Question) -> bytes:
        return data

    return session.dispatcher.registered(answers={QuestionAbout.ROUTER: answer})
