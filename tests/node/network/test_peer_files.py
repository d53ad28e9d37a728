"""A run's files are taken from any peer that gives the ones that the manifest names, and from nobody else."""

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
from node.network.peer_files import PIECES_AT_ONCE, fetch_router, fetch_tokenizer, router_given, tokenizer_given
from node.network.session import Answered, NetworkSession, first_good
from protocol.interfaces.transport import MAX_TOKENIZER_PIECES, TOKENIZER_PIECE_BYTES, Question, QuestionAbout
from swarm.vocabulary.errors import ManifestError, Rejected, Unreachable
from swarm.vocabulary.types import PeerId
from tests.node.experts.routed import manifest_with, some_router
from tests.node.small_manifest import small_manifest

FILE = random.Random(1).randbytes(6 * TOKENIZER_PIECE_BYTES + 1000)
ROUTER = some_router()
MANIFEST = manifest_with(ROUTER)
SHA256 = hashlib.sha256(FILE).hexdigest()


class Seen:
    """An announcement, as far as asking goes."""

    is_reachable = True

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer


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
        if question.about is QuestionAbout.ROUTER:
            return file
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


async def fetched(answers: Mapping[str, bytes | None]) -> bytes:
    found = await fetch_router(Peers(answers), MANIFEST, 0.0)
    assert found is not None
    return found.to_bytes()


async def test_the_one_whose_hash_is_right_is_taken() -> None:
    answers = {"none": None, "other": some_router(seed=4).to_bytes(), "long": bytes(10**5), "good": ROUTER.to_bytes()}
    assert await fetched(answers) == ROUTER.to_bytes()


async def test_when_nobody_has_it_that_is_said() -> None:
    with pytest.raises(Unreachable, match="no peer has given this run's router"):
        await fetched({"none": None, "other": some_router(seed=4).to_bytes()})


async def test_a_run_without_a_router_asks_nobody() -> None:
    session = Peers({"good": ROUTER.to_bytes()})
    assert await fetch_router(session, small_manifest(), 1.0) is None
    assert not session.asked
    with router_given(session, None):
        assert session.answers == {}


async def test_whoever_has_it_gives_it() -> None:
    session = Peers({})
    with router_given(session, ROUTER):
        answer = session.answers[QuestionAbout.ROUTER]
        assert await answer(PeerId("asker"), Question(QuestionAbout.ROUTER)) == ROUTER.to_bytes()
    assert session.answers == {}


SILENT, LIAR, REFUSING, HONEST = PeerId("silent"), PeerId("a-liar"), PeerId("refusing"), PeerId("honest")


class Asked:
    """Answers by who is asked."""

    def __init__(self) -> None:
        self.let_go: list[PeerId] = []

    async def __call__(self, peer: PeerId) -> str:
        if peer == LIAR:
            raise ManifestError("another run's manifest")
        if peer == REFUSING:
            raise Rejected("no")
        if peer == SILENT:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.let_go.append(peer)
        return "the manifest"


async def test_one_honest_peer_is_enough() -> None:
    ask = Asked()
    assert await first_good((SILENT, LIAR, REFUSING, HONEST), ask) == Answered("the manifest")
    assert ask.let_go == [SILENT]


async def test_without_a_good_answer_one_is_told_why() -> None:
    assert await first_good((LIAR,), Asked()) == "a-liar: another run's manifest"
    assert await first_good((), Asked()) == "nobody was asked"
