"""Exchange of the run's files between peers: expert router and tokenizer."""

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeVar

from node.concurrency.task_groups import task_scope
from node.experts.router import Router, read_router, router_bytes
from node.network.session import ASK_TIMEOUT_S, NetworkSession
from protocol.interfaces.transport import (
    MAX_TOKENIZER_PIECES,
    ROUTER_PIECE_BYTES,
    TOKENIZER_PIECE_BYTES,
    Question,
    QuestionAbout,
)
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ProtocolViolation, Stalled, StateError
from swarm.vocabulary.types import PeerId

File = TypeVar("File")

PEERS_AT_ONCE: Final = 2  # So that one slow or lying peer delays nothing; half of the bytes are wasted
PIECES_AT_ONCE: Final = 4  # Half of the questions that a peer allows at a time
WHOLE_S: Final = 300.0  # A file of 20 MB at 70 kB/s
PIECE_BYTES: Final = {QuestionAbout.ROUTER: ROUTER_PIECE_BYTES, QuestionAbout.TOKENIZER: TOKENIZER_PIECE_BYTES}


async def fetch_router(session: NetworkSession, manifest: Manifest, patience_s: float) -> Router | None:
    """Downloads the expert router; None if the run has none. Raises Unreachable, StateError if it is too large."""
    if manifest.routing is None:
        return None
    pieces = -(-router_bytes(manifest.stages.experts_of_each) // ROUTER_PIECE_BYTES)
    return await _fetched(
        session, QuestionAbout.ROUTER, pieces, lambda content: read_router(content, manifest), patience_s
    )


async def fetch_tokenizer(session: NetworkSession, sha256: str, patience_s: float) -> bytes:
    """Downloads the tokenizer's file. Raises Unreachable after `patience_s`."""

    def checked(content: bytes) -> bytes:
        if hashlib.sha256(content).hexdigest() != sha256:
            raise StateError("it sent a tokenizer other than the run's")
        return content

    return await _fetched(session, QuestionAbout.TOKENIZER, MAX_TOKENIZER_PIECES, checked, patience_s)


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
        first = question.piece * PIECE_BYTES[about]
        return content[first : first + PIECE_BYTES[about]]

    return session.dispatcher.registered(answers={about: answer})


async def _fetched(
    session: NetworkSession, about: QuestionAbout, pieces: int, checked: Callable[[bytes], File], patience_s: float
) -> File:
    """Downloads a file of at most `pieces` pieces, `checked` (StateError); asks no peer again that sent a wrong one."""
    liars = set[PeerId]()

    async def ask(peer: PeerId) -> File:
        try:
            async with asyncio.timeout(WHOLE_S):
                content = await _pieces(session, peer, about, pieces)
        except TimeoutError:
            raise Stalled(f"it did not send the {about.value}'s file within {WHOLE_S:g} s") from None
        # A single piece cannot be checked, so parse nothing before the whole file matches the manifest's hash.
        try:
            return checked(content)
        except StateError as error:
            liars.add(peer)
            raise ProtocolViolation(str(error)) from None

    what = f"gave this run's {about.value}"
    return await session.first_answer(ask, lambda peer: peer not in liars, patience_s, what, PEERS_AT_ONCE)


async def _pieces(session: NetworkSession, peer: PeerId, about: QuestionAbout, pieces: int) -> bytes:
    """Downloads a peer's file until a short piece, or all `pieces`."""
    found, most = bytearray(), PIECE_BYTES[about]
    for first in range(0, pieces, PIECES_AT_ONCE):
        async with task_scope() as tasks:
            asked = [
                tasks.create_task(session.transport.ask(peer, Question(about, piece=piece), ASK_TIMEOUT_S))
                for piece in range(first, min(first + PIECES_AT_ONCE, pieces))
            ]
        for task in asked:
            piece = task.result()
            if len(piece) > most:
                raise ProtocolViolation(f"a piece of {len(piece)} bytes is longer than {most}")
            found += piece
            if len(piece) < most:
                return bytes(found)
    return bytes(found)
