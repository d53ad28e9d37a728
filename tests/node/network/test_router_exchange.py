"""A router is taken from whoever gives the one that the manifest names, and from nobody else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from node.network.router_exchange import fetch_router, router_given
from node.network.session import NetworkSession
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.vocabulary.errors import Rejected, Unreachable
from swarm.vocabulary.types import PeerId
from tests.node.experts.routed import manifest_with, some_router
from tests.node.small_manifest import small_manifest

ROUTER = some_router()
MANIFEST = manifest_with(ROUTER)


class Seen:
    """An announcement, as far as asking goes."""

    is_reachable = True

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer


class StandIn:
    """A session whose peers answer what they are said to."""

    introduced: frozenset[PeerId] = frozenset()
    first_answer = NetworkSession.first_answer

    def __init__(self, answers: Mapping[str, bytes | None]) -> None:
        self._answers = answers
        self.asked: list[PeerId] = []
        self.given: dict[QuestionAbout, Any] = {}
        self.transport = self.dispatcher = self

    def others(self) -> list[Seen]:
        return [Seen(PeerId(peer)) for peer in self._answers]

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        assert question.about is QuestionAbout.ROUTER
        self.asked.append(peer)
        answer = self._answers[peer]
        if answer is None:
            raise Rejected("it has none")
        return answer

    @contextmanager
    def registered(self, answers: dict[QuestionAbout, Any]) -> Iterator[None]:
        self.given |= answers
        yield
        self.given.clear()


async def fetched(answers: Mapping[str, bytes | None]) -> bytes:
    found = await fetch_router(StandIn(answers), MANIFEST, 0.0)
    assert found is not None
    return found.to_bytes()


async def test_the_one_whose_hash_is_right_is_taken() -> None:
    answers = {"none": None, "other": some_router(seed=4).to_bytes(), "long": bytes(10**5), "good": ROUTER.to_bytes()}
    assert await fetched(answers) == ROUTER.to_bytes()


async def test_when_nobody_has_it_that_is_said() -> None:
    with pytest.raises(Unreachable, match="no peer has given this run's router"):
        await fetched({"none": None, "other": some_router(seed=4).to_bytes()})


async def test_a_run_without_a_router_asks_nobody() -> None:
    session = StandIn({"good": ROUTER.to_bytes()})
    assert await fetch_router(session, small_manifest(), 1.0) is None
    assert session.asked == []
    with router_given(session, None):
        assert session.given == {}


async def test_whoever_has_it_gives_it() -> None:
    session = StandIn({})
    with router_given(session, ROUTER):
        answer = session.given[QuestionAbout.ROUTER]
        assert await answer(PeerId("asker"), Question(QuestionAbout.ROUTER)) == ROUTER.to_bytes()
    assert session.given == {}
