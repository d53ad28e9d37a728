"""Holding on, with the links in a test's hands."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from node.network.local_peer import LocalPeer
from node.reachability.reverse_calls import AVOIDED_S, CONNECT_S, MAX_TRIED, WANTED, Attachments
from protocol.identity.keys import Identity
from swarm.membership.membership import Membership
from swarm.vocabulary.errors import Unreachable
from swarm.vocabulary.types import PeerId, PeerState
from tests.node.network.small_swarm import LONG_S, ManualClock
from tests.protocol.dht.running import MODULE, RUN, announced


@dataclass
class Links:
    broken: set[PeerId] = field(default_factory=set)
    asked: list[PeerId] = field(default_factory=list)

    async def connect(self, peer: PeerId) -> None:
        self.asked.append(peer)
        if peer in self.broken:
            raise Unreachable("nobody is there")


class Bench:
    def __init__(self, count: int, connect_s: float = CONNECT_S) -> None:
        own = Identity.generate().peer
        self.membership, self.links, self.clock = Membership(RUN, own), Links(), ManualClock()
        state = LocalPeer(RUN, own, b"", self.clock, state=PeerState.SERVING, module=MODULE)
        self.attachments = Attachments(state, self.membership, self.links, connect_s)
        for _ in range(count):
            announcement = announced(Identity.generate())
            self.membership.observe(announcement, now=0.0, wall=announcement.expires_at - 60)


async def test_three_are_held_and_kept() -> None:
    bench = Bench(12)
    held = await bench.attachments.hold()
    assert len(held) == WANTED
    assert bench.links.asked == list(held)
    assert await bench.attachments.hold() == held


async def test_who_is_lost_is_replaced_and_the_others_stay() -> None:
    bench = Bench(12)
    held = await bench.attachments.hold()
    bench.links.broken.add(held[1])
    now = await bench.attachments.hold()
    assert len(now) == WANTED
    assert {held[0], held[2]} < set(now)
    assert held[1] not in now


async def test_who_could_not_be_had_is_tried_last_for_a_minute() -> None:
    bench = Bench(WANTED + 2)
    best = (await bench.attachments.hold())[0]
    bench.links.broken = {best}
    held = await bench.attachments.hold()
    assert best not in held
    bench.links.broken = {held[0]}
    bench.links.asked.clear()
    held = await bench.attachments.hold()
    assert len(held) == WANTED
    assert best not in bench.links.asked, "there was another one"
    bench.clock.now += AVOIDED_S + 1
    bench.links.broken = {held[-1]}
    assert best in await bench.attachments.hold()


async def test_who_was_given_up_is_not_tried() -> None:
    bench = Bench(12)
    held = await bench.attachments.hold()
    bench.membership.give_up(held[0], bench.clock.now)
    bench.links.asked.clear()
    assert held[0] not in await bench.attachments.hold()
    assert held[0] not in bench.links.asked


async def test_not_everybody_is_tried() -> None:
    bench = Bench(12)
    bench.links.broken = {announcement.peer for announcement in bench.membership.peers()}
    assert await bench.attachments.hold() == ()
    assert len(bench.links.asked) == MAX_TRIED


async def test_where_nobody_is_there_is_nobody_to_hold() -> None:
    assert await Bench(0).attachments.hold() == ()


async def test_a_peer_that_does_not_answer_holds_nothing_up_for_ever() -> None:
    bench = Bench(1, connect_s=0.01)
    asked = asyncio.Event()

    async def hang(peer: PeerId) -> None:
        asked.set()
        await asyncio.Event().wait()

    bench.links.connect = hang  # type: ignore[method-assign]
    holding = asyncio.create_task(bench.attachments.hold())
    await asked.wait()
    async with asyncio.timeout(LONG_S):
        assert await holding == ()
