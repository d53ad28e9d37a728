"""Exchange of the run's files between peers: expert router and tokenizer."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from node.concurrency.task_groups import task_scope
from node.experts.router import Router, read_router
from node.network.session import ASK_TIMEOUT_S, ASKED_AT_ONCE, NetworkSession
from protocol.interfaces.transport import MAX_TOKENIZER_PIECES, TOKENIZER_PIECE_BYTES, Question, QuestionAbout
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ProtocolViolation, Stalled, StateError
from swarm.vocabulary.types import PeerId

PEERS_AT_ONCE: Final = 2  # So that one slow or lying peer delays nothing; half of the bytes are wasted
PIECES_AT_ONCE: Final = 4  # Half of the questions that a peer allows at a time
WHOLE_S: Final = 300.0  # A file of 20 MB at 70 kB/s


async def fetch_router(session: NetworkSession, manifest: Manifest, patience_s: float) -> Router | None:
    """Downloads the expert router from a peer; None if the run has none. Raises Unreachable after `patience_s`."""
    if manifest.routing is None:
        return None

    async def ask(peer: PeerId) -> Router:
        data = await session.transport.ask(peer, Question(QuestionAbout.ROUTER), ASK_TIMEOUT_S)
        try:
            return read_router(data, manifest)
        except StateError as error:
            raise ProtocolViolation(str(error)) from None

    return await session.first_answer(ask, lambda peer: True, patience_s, "gave this run's router", ASKED_AT_ONCE)


async def fetch_tokenizer(session: NetworkSession, sha256: str, patience_s: float) -> bytes:
    """Downloads the tokenizer's file; never asks a peer again that sent a wrong file. Raises Unreachable."""
    liars = set[PeerId]()

    async def ask(peer: PeerId) -> bytes:
        try:
            async with asyncio.timeout(WHOLE_S):
                content = await _pieces(session, peer)
        except TimeoutError:
            raise Stalled(f"it did not send the tokenizer's file within {WHOLE_S:g} s") from None
        # A single piece cannot be checked, so parse nothing before the whole file matches the manifest's hash.
        if hashlib.sha256(content).hexdigest() != sha256:
            liars.add(peer)
            raise ProtocolViolation("it sent a tokenizer other than the run's")
        return content

    what = "gave this run's tokenizer"
    return await session.first_answer(ask, lambda peer: peer not in liars, patience_s, what, PEERS_AT_ONCE)


def router_given(session: NetworkSession, router: Router | None) -> AbstractContextManager[None]:
    """Serves the expert router to peers within the block."""
    return _given(session, QuestionAbout.ROUTER, None if router is None else router.to_bytes())


def tokenizer_given(session: NetworkSession, content: bytes | None) -> AbstractContextManager[None]:
    """Serves the tokenizer's file to peers within the block. `content` already matches the manifest's hash."""
    return _given(session, QuestionAbout.TOKENIZER, content)


def _given(session: NetworkSession, about: QuestionAbout, content: bytes | None) -> AbstractContextManager[None]:
    if content is None:
        return nullcontext()

    async def answer(asker: PeerId, question: Question) -> bytes:
        if about is QuestionAbout.ROUTER:
            return content
        first = question.piece * TOKENIZER_PIECE_BYTES
        return content[first : first + TOKENIZER_PIECE_BYTES]

    return session.dispatcher.registered(answers={about: answer})


async def _pieces(session: NetworkSession, peer: PeerId) -> bytes:
    """Downloads a peer's tokenizer file in pieces, until a short piece; at most MAX_TOKENIZER_PIECES."""
    found = bytearray()
    for first in range(0, MAX_TOKENIZER_PIECES, PIECES_AT_ONCE):
        async with task_scope() as tasks:
            asked = [
                tasks.create_task(
                    session.transport.ask(peer, Question(QuestionAbout.TOKENIZER, piece=piece), ASK_TIMEOUT_S)
                )
                for piece in range(first, first + PIECES_AT_ONCE)
            ]
        for task in asked:
            piece = task.result()
            if len(piece) > TOKENIZER_PIECE_BYTES:
                raise ProtocolViolation(f"a piece of {len(piece)} bytes is longer than {TOKENIZER_PIECE_BYTES}")
            found += piece
            if len(piece) < TOKENIZER_PIECE_BYTES:
                return bytes(found)
    return bytes(found)
