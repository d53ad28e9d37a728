"""Several are asked at once: who is silent or lies holds up nobody, and whoever is still being asked is let go."""

from __future__ import annotations

import asyncio

from node.network.asking import Answered, first_good
from swarm.vocabulary.errors import ManifestError, Rejected
from swarm.vocabulary.types import PeerId

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
