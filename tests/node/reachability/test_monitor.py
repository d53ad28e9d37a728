"""What a standing changes about a node, and when the ladder is climbed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from node.network.local_peer import LocalPeer
from node.network.reach_status import ReachStep, Standing
from node.observability.events import Event, Reach
from node.reachability.monitor import AGAIN_S, CONFIRM_S, FIRST_PAUSE_S, HOLD_S, Adoption, watch
from node.reachability.port_mapping import Mapping, NotMapped, Router
from swarm.vocabulary.types import PeerId, RunId
from tests.node.network.small_swarm import ManualClock, until
from tests.node.reachability.test_ladder import MadeUp, Waits, mapping

BEFORE = ("192.168.1.10:4002",)
DIRECT = Standing(ReachStep.DIRECT, "reached", "25.0.0.1:4002")
MAPPED = Standing(ReachStep.MAPPED, "mapped", "25.0.0.1:50000")
UNREACHABLE = Standing(ReachStep.UNREACHABLE, "silent", fix="forward it")
HELD = (PeerId("a"), PeerId("b"))
UNKNOWN = Standing(ReachStep.UNKNOWN, "nobody")


@dataclass
class Told:
    events: list[Event] = field(default_factory=list)
    announced: int = 0

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def reaches(self) -> list[Reach]:
        return [event for event in self.events if isinstance(event, Reach)]

    def announce(self) -> None:
        self.announced += 1


def adoption() -> tuple[Adoption, Told]:
    told = Told()
    own = LocalPeer(RunId("7" * 64), PeerId("me"), b"", ManualClock(), BEFORE)
    return Adoption(own, told, told.announce, BEFORE), told


@dataclass
class Holding:
    """Whom a node would hold on to, in a test's hands; the last answer stays."""

    answers: list[tuple[PeerId, ...]] = field(default_factory=lambda: [()])
    asked: int = 0

    async def __call__(self) -> tuple[PeerId, ...]:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@dataclass
class Climbing:
    """What the ladder says, in order; the last answer stays."""

    answers: list[Standing]
    climbs: int = 0

    async def __call__(self) -> Standing:
        self.climbs += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@asynccontextmanager
async def watched(
    climbing: Climbing, hold: Holding, waits: Waits, router: Router | None = None
) -> AsyncIterator[tuple[Adoption, Told]]:
    taken, told = adoption()
    watching = asyncio.create_task(watch(climbing, hold, taken, router, waits))
    try:
        yield taken, told
    finally:
        watching.cancel()
        await asyncio.wait((watching,))
        assert watching.cancelled()


def test_the_address_follows_from_the_step() -> None:
    taken, told = adoption()
    taken.adopt(UNKNOWN)
    assert told.events == [], "that nothing is known is no news"
    for standing, address in ((DIRECT, "25.0.0.1:4002"), (MAPPED, "25.0.0.1:50000"), (UNREACHABLE, "")):
        taken.adopt(standing)
        assert ", ".join(taken.own.addresses) == address
        assert taken.own.reach is standing
        assert told.events[-1] == Reach("me", standing.step.value, address, standing.reason, standing.fix)
    assert told.announced == len(told.events) == 3


def test_who_is_held_on_to_is_announced_in_place_of_addresses_until_there_are_some() -> None:
    taken, told = adoption()
    taken.adopt(UNREACHABLE, HELD)
    assert (taken.own.addresses, taken.own.via) == ((), HELD)
    assert taken.own.reach.step is ReachStep.REVERSE
    assert taken.own.reach.fix == UNREACHABLE.fix
    assert [(event.step, event.address) for event in told.reaches()] == [("reverse", "")]
    taken.adopt(UNREACHABLE, HELD[:1])
    assert taken.own.via == HELD[:1]
    assert (told.announced, len(told.events)) == (2, 1), "others hear of it, nobody watching has to"
    taken.adopt(UNREACHABLE, HELD[:1])
    assert told.announced == 2
    taken.adopt(MAPPED)
    assert (taken.own.addresses, taken.own.via) == (("25.0.0.1:50000",), ())
    taken.adopt(UNREACHABLE)
    assert (taken.own.addresses, taken.own.via, taken.own.reach.step) == ((), (), ReachStep.UNREACHABLE)
    assert [event.step for event in told.reaches()] == ["reverse", "mapped", "unreachable"]


def test_what_stays_the_same_is_told_once() -> None:
    taken, told = adoption()
    for _ in range(2):
        taken.adopt(MAPPED)
    assert (len(told.events), told.announced) == (1, 1)


async def test_what_cannot_be_tested_stays() -> None:
    waits = Waits(2)
    async with watched(Climbing([MAPPED, UNKNOWN]), Holding(), waits) as (taken, told):
        await until(lambda: len(waits.waited) == 2 and waits.waited_for)
        assert taken.own.reach is MAPPED
        assert taken.own.addresses == ("25.0.0.1:50000",)
        assert len(told.events) == 1
        assert waits.waited == [AGAIN_S[ReachStep.MAPPED], FIRST_PAUSE_S]


async def test_the_ladder_is_climbed_again_sooner_where_it_may_help() -> None:
    rounds = round(AGAIN_S[ReachStep.UNREACHABLE] / HOLD_S)
    waits, holding = Waits(2 + 1 + rounds + 1), Holding([HELD])
    async with watched(Climbing([UNKNOWN, UNKNOWN, UNREACHABLE, UNREACHABLE, DIRECT]), holding, waits) as (taken, _):
        await until(lambda: taken.own.reach is DIRECT)
    assert waits.waited[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, CONFIRM_S]
    assert waits.waited[3 : 3 + rounds] == [HOLD_S] * rounds
    assert waits.waited[3 + rounds :] == [AGAIN_S[ReachStep.DIRECT]]
    assert holding.asked == rounds


async def test_addresses_are_given_up_only_when_nobody_got_through_twice() -> None:
    waits, holding = Waits(3), Holding([HELD])
    async with watched(Climbing([DIRECT, UNREACHABLE, DIRECT]), holding, waits) as (taken, told):
        await until(lambda: len(waits.waited) == 3)
        assert waits.waited == [AGAIN_S[ReachStep.DIRECT], CONFIRM_S, AGAIN_S[ReachStep.DIRECT]]
        assert taken.own.reach is DIRECT
        assert (holding.asked, len(told.events)) == (0, 1)


async def test_who_is_lost_is_replaced_and_while_nobody_can_be_asked_the_node_holds_on() -> None:
    rounds = round(AGAIN_S[ReachStep.UNREACHABLE] / HOLD_S)
    waits = Waits(1 + rounds)
    holding = Holding([HELD, HELD[:1], (), (PeerId("c"),)])
    async with watched(Climbing([UNREACHABLE, UNREACHABLE, UNKNOWN]), holding, waits) as (taken, told):
        await until(lambda: holding.asked > rounds)
        assert taken.own.via == (PeerId("c"),)
        assert [event.step for event in told.reaches()] == ["reverse", "unreachable", "reverse"]
        assert told.announced == 4


@pytest.mark.parametrize("renewed", [NotMapped("restarted"), mapping(50_001)])
async def test_a_lost_mapping_has_the_ladder_climbed_at_once(renewed: Mapping | NotMapped) -> None:
    router = Waits(2).router(MadeUp([mapping(50_000), renewed]))
    await router.open(4002)
    climbing = Climbing([MAPPED, DIRECT])
    async with watched(climbing, Holding(), Waits(0), router) as (taken, _):
        await until(lambda: taken.own.reach is DIRECT)
    assert climbing.climbs == 2
