"""What a standing changes about a node, and when the ladder is climbed again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from node.events import Event, Reach
from node.own_state import OwnState
from node.reach.keeper import AGAIN_S, Adoption, watch
from node.reach.port_mapping import Mapping, NotMapped
from node.reach.standing import ReachStep, Standing
from swarm.vocabulary import PeerId, RunId
from tests.node.reach.test_ladder import MadeUp, Waits, mapping
from tests.node.small_swarm import ManualClock, until

BEFORE = ("192.168.1.10:4002",)
DIRECT = Standing(ReachStep.DIRECT, "reached", "25.0.0.1:4002")
MAPPED = Standing(ReachStep.MAPPED, "mapped", "25.0.0.1:50000")
UNREACHABLE = Standing(ReachStep.UNREACHABLE, "silent", fix="forward it")
UNKNOWN = Standing(ReachStep.UNKNOWN, "nobody")


@dataclass
class Told:
    events: list[Event] = field(default_factory=list)
    announced: int = 0

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def announce(self) -> None:
        self.announced += 1


def adoption() -> tuple[Adoption, Told]:
    told = Told()
    own = OwnState(RunId("7" * 64), PeerId("me"), b"", ManualClock(), BEFORE)
    return Adoption(own, told, told.announce, BEFORE), told


def test_the_address_follows_from_the_step() -> None:
    taken, told = adoption()
    taken.adopt(UNKNOWN)
    assert told.events == [], "that nothing is known is no news"
    for standing, address in ((DIRECT, "25.0.0.1:4002"), (MAPPED, "25.0.0.1:50000"), (UNREACHABLE, BEFORE[0])):
        taken.adopt(standing)
        assert taken.own.addresses == (address,)
        assert taken.own.reach is standing
        assert told.events[-1] == Reach("me", standing.step.value, address, standing.reason, standing.fix)
    assert told.announced == len(told.events) == 3


def test_what_stays_the_same_is_told_once_and_what_cannot_be_tested_stays() -> None:
    taken, told = adoption()
    for standing in (MAPPED, MAPPED, UNKNOWN):
        taken.adopt(standing)
    assert len(told.events) == 1
    assert taken.own.reach is MAPPED
    assert taken.own.addresses == ("25.0.0.1:50000",)


async def test_the_ladder_is_climbed_again_sooner_where_it_may_help() -> None:
    answers = [UNKNOWN, UNKNOWN, UNREACHABLE, DIRECT]
    waits = Waits(4)

    async def climbing() -> Standing:
        return answers.pop(0) if answers else DIRECT

    taken, _ = adoption()
    watching = asyncio.create_task(watch(climbing, taken, None, waits))
    await until(lambda: len(waits.waited) == 4)
    watching.cancel()
    assert waits.waited == [2.0, 4.0, AGAIN_S[ReachStep.UNREACHABLE], AGAIN_S[ReachStep.DIRECT]]


@pytest.mark.parametrize("renewed", [NotMapped("restarted"), mapping(50_001)])
async def test_a_lost_mapping_has_the_ladder_climbed_at_once(renewed: Mapping | NotMapped) -> None:
    router = Waits(2).router(MadeUp([mapping(50_000), renewed]))
    climbs = 0

    async def climbing() -> Standing:
        nonlocal climbs
        climbs += 1
        if router.mapping is None:
            await router.open(4002)
        return MAPPED if climbs == 1 else DIRECT

    taken, _ = adoption()
    waits = Waits(0)
    watching = asyncio.create_task(watch(climbing, taken, router, waits))
    await until(lambda: climbs == 2)
    watching.cancel()
    assert taken.own.reach is DIRECT
