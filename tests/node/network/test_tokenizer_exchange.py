"""A tokenizer's file is put together of pieces, and taken only when its hash is the manifest's."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from node.data.tokenizers import MAX_TOKENIZER_BYTES
from node.network.session import NetworkSession
from node.network.tokenizer_exchange import PIECES_AT_ONCE, fetch_tokenizer, tokenizer_given
from protocol.interfaces.transport import MAX_TOKENIZER_PIECES, TOKENIZER_PIECE_BYTES, Question, QuestionAbout
from swarm.vocabulary.errors import Rejected, Unreachable
from swarm.vocabulary.types import PeerId
from tests.node.network.test_router_exchange import Seen

FILE = random.Random(1).randbytes(6 * TOKENIZER_PIECE_BYTES + 1000)
SHA256 = hashlib.sha256(FILE).hexdigest()


class Peers:
    """A session whose peers give these files; None has none, and a number is the length of each of its pieces."""

    introduced: frozenset[PeerId] = frozenset()
    first_answer = NetworkSession.first_answer

    def __init__(self, files: Mapping[str, bytes | int | None]) -> None:
        self._files = files
        self.asked = Counter[str]()
        self.open = self.most_open = 0
        self.answers: dict[QuestionAbout, Any] = {}
        self.transport = self.dispatcher = self

    def others(self) -> list[Seen]:
        return [Seen(PeerId(peer)) for peer in self._files]

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        assert question.about is QuestionAbout.TOKENIZER
        self.asked[peer] += 1
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        await asyncio.sleep(0)
        self.open -= 1
        file = self._files[peer]
        if file is None:
            raise Rejected("it has none")
        if isinstance(file, int):
            return bytes(file)
        giving = Peers({})
        with tokenizer_given(giving, file):
            answer: bytes = await giving.answers[QuestionAbout.TOKENIZER](PeerId("asker"), question)
        return answer

    @contextmanager
    def registered(self, answers: dict[QuestionAbout, Any]) -> Iterator[None]:
        self.answers |= answers
        yield
        self.answers.clear()


@pytest.mark.parametrize("length", [0, 1, TOKENIZER_PIECE_BYTES, 4 * TOKENIZER_PIECE_BYTES, len(FILE)])
async def test_a_file_of_any_length_arrives_whole(length: int) -> None:
    file = FILE[:length]
    peers = Peers({"good": file})
    assert await fetch_tokenizer(peers, hashlib.sha256(file).hexdigest(), 0.0) == file
    assert peers.most_open <= PIECES_AT_ONCE


async def test_the_one_whose_hash_is_right_is_taken_and_who_lies_is_asked_once() -> None:
    lie = FILE[:-1] + b"?"
    peers = Peers({"none": None, "lie": lie, "too long": TOKENIZER_PIECE_BYTES + 1, "shorter": FILE[:-1]})
    with pytest.raises(Unreachable, match="no peer has given this run's tokenizer"):
        await fetch_tokenizer(peers, SHA256, 0.4)
    assert peers.asked["none"] > PIECES_AT_ONCE, "it may have it later"
    assert peers.asked["lie"] == peers.asked["shorter"] == 2 * PIECES_AT_ONCE
    honest = Peers({"none": None, "lie": lie, "other": b"", "good": FILE})
    assert await fetch_tokenizer(honest, SHA256, 0.0) == FILE


async def test_a_file_without_an_end_is_not_read_for_ever() -> None:
    peers = Peers({"endless": TOKENIZER_PIECE_BYTES})
    with pytest.raises(Unreachable, match="another tokenizer"):
        await fetch_tokenizer(peers, SHA256, 0.0)
    assert peers.asked["endless"] == MAX_TOKENIZER_PIECES


def test_as_much_travels_as_a_file_may_have() -> None:
    assert MAX_TOKENIZER_PIECES * TOKENIZER_PIECE_BYTES == MAX_TOKENIZER_BYTES


async def test_without_a_tokenizer_nothing_is_given() -> None:
    peers = Peers({})
    with tokenizer_given(peers, None):
        assert peers.answers == {}
