"""The exchange of a run's tokenizer file: whoever has it gives it piece by piece, and whoever needs it asks the peers
until one has given the file that the manifest names.

A piece proves nothing by itself; the whole is hashed, and nothing of it is looked at before its SHA-256 is the
manifest's. It stands alone because a router fits into one answer.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from node.concurrency.task_groups import task_scope
from node.network.session import ASK_TIMEOUT_S, NetworkSession
from protocol.interfaces.transport import MAX_TOKENIZER_PIECES, TOKENIZER_PIECE_BYTES, Question, QuestionAbout
from swarm.vocabulary.errors import ProtocolViolation, Stalled
from swarm.vocabulary.types import PeerId

PEERS_AT_ONCE: Final = 2
"""One that gives slowly, or gives something else, holds up nobody; of an honest one half of the bytes are in vain."""
PIECES_AT_ONCE: Final = 4
"""Half of the questions that may be open to a peer."""
WHOLE_S: Final = 300.0
"""For the whole file from one peer: 20 MB, as large as those of today's models are, at 70 kB/s."""


async def fetch_tokenizer(session: NetworkSession, sha256: str, patience_s: float) -> bytes:
    """Asks the peers that are seen for the tokenizer's file; who has given another one is asked no more.

    Raises:
        Unreachable: no peer gave it within `patience_s` seconds (and the time that the last ones asked took).
    """
    liars = set[PeerId]()

    async def ask(peer: PeerId) -> bytes:
        try:
            async with asyncio.timeout(WHOLE_S):
                content = await _pieces(session, peer)
        except TimeoutError:
            raise Stalled(f"it has not given the tokenizer's file within {WHOLE_S:g} s") from None
        if hashlib.sha256(content).hexdigest() != sha256:
            liars.add(peer)
            raise ProtocolViolation("it has given another tokenizer than the run's")
        return content

    what = "has given this run's tokenizer"
    return await session.first_answer(ask, lambda peer: peer not in liars, patience_s, what, PEERS_AT_ONCE)


def tokenizer_given(session: NetworkSession, content: bytes | None) -> AbstractContextManager[None]:
    """Within it, whoever asks for the tokenizer's file gets it. `content` is what the manifest names: what is read
    from a file here is checked before it is given away."""
    if content is None:
        return nullcontext()

    async def answer(asker: PeerId, question: Question) -> bytes:
        first = question.piece * TOKENIZER_PIECE_BYTES
        return content[first : first + TOKENIZER_PIECE_BYTES]

    return session.dispatcher.registered(answers={QuestionAbout.TOKENIZER: answer})


async def _pieces(session: NetworkSession, peer: PeerId) -> bytes:
    """All that the peer gives up to the first piece that is not full; at most MAX_TOKENIZER_PIECES."""
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
