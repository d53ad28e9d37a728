"""Held-out microbatches: several under way at once, sent again when they get stuck, and nothing left behind."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
import torch

from node.data.packing import Microbatch
from node.pipeline.runner import MicrobatchRunner
from node.pipeline.worker import DataWorker, Launches
from node.routing import launcher
from node.routing.launcher import EVALUATED_AT_ONCE, Evaluator
from protocol.interfaces.clock import SystemClock
from swarm.membership.membership import Membership
from swarm.pipeline.custody import Started
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.path_rules import PathRules
from swarm.routing.planner import Planner
from swarm.vocabulary.errors import Unreachable
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId
from tests.swarm.membership.announcements import RUN, announcement

OWN = PeerId("own")


@dataclass
class Road:
    """Stands where the runner of microbatches does: what sets out, and what has been given up."""

    texts: dict[MicrobatchId, Microbatch] = field(default_factory=dict)
    visited: list[str] = field(default_factory=list)
    away: list[MicrobatchId] = field(default_factory=list)
    most_away: int = 0
    meets: Callable[[MicrobatchId], None] = lambda microbatch: None

    def handle(self, event: Started) -> None:
        assert event.purpose is Purpose.EVALUATE
        assert event.microbatch in self.texts
        self.away.append(event.microbatch)
        self.visited += [str(hop.module) for hop in event.path.hops]
        self.most_away = max(self.most_away, len(self.away))
        asyncio.get_running_loop().call_soon(self.meets, event.microbatch)

    def abandon(self, microbatch: MicrobatchId, detail: str) -> None:
        self.away.remove(microbatch)


def evaluator_on(road: Road, served: Sequence[ModuleId] = (ModuleId(1),), experts: int = 1) -> Evaluator:
    members = Membership(RUN, OWN)
    for module in served:
        members.observe(announcement(str(module), module), now=0, wall=0)
    planner = Planner(PathRules(2, 1, experts=(1, experts)), members, MeasuredTimes(OWN, 1000))
    launches = Launches(cast(DataWorker, road), cast(MicrobatchRunner, road), lambda _, path, *rest: path)
    return Evaluator(OWN, planner, launches, SystemClock(), 2**47)


def texts(count: int) -> list[Microbatch]:
    return [Microbatch(torch.full((1, 2), number), torch.zeros(1, 2), 1.0) for number in range(count)]


async def test_losses_come_in_the_order_of_the_texts_and_only_so_many_are_under_way() -> None:
    road = Road()
    evaluator = evaluator_on(road)

    def arrives_out_of_turn(microbatch: MicrobatchId) -> None:
        number = int(road.texts[microbatch].tokens[0, 0])
        asyncio.get_running_loop().call_later(0.001 * (number % 3), evaluator.loss_known, microbatch, float(number))

    road.meets = arrives_out_of_turn
    assert await evaluator.evaluate(texts(3 * EVALUATED_AT_ONCE), (1,)) == [*range(3 * EVALUATED_AT_ONCE)]
    assert road.most_away == EVALUATED_AT_ONCE
    assert not road.away
    assert not road.texts


async def test_what_gets_stuck_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "PAUSE_S", 0.0)
    road, stuck = Road(), set[int]()
    evaluator = evaluator_on(road)

    def meets(microbatch: MicrobatchId) -> None:
        text = int(road.texts[microbatch].tokens[0, 0])
        if text % 2 and text not in stuck:
            stuck.add(text)
            evaluator.lost(microbatch, "a hop died")
        else:
            evaluator.loss_known(microbatch, float(text))

    road.meets = meets
    assert (await evaluator.evaluate(texts(5), (1,)), stuck) == ([0.0, 1.0, 2.0, 3.0, 4.0], {1, 3})


async def test_what_never_comes_back_is_given_up_and_nothing_of_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "PAUSE_S", 0.0)
    monkeypatch.setattr(launcher, "LIFETIMES_S", (0.01, 0.02))
    road = Road()
    with pytest.raises(Unreachable, match="could evaluate the held-out text: no loss returned"):
        await evaluator_on(road).evaluate(texts(20), (1,))
    assert not road.away
    assert not road.texts


async def test_a_stage_that_nobody_serves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "PAUSE_S", 0.0)
    with pytest.raises(Unreachable, match=r"module 1\.0 has no peer left"):
        await evaluator_on(Road(), served=()).evaluate(texts(1), (1,))


async def test_each_text_goes_by_its_route_or_to_the_expert_that_is_served() -> None:
    routed = [
        replace(text, route=(number % 2,), affinity=((9, 1) if number % 2 == 0 else (1, 9),))
        for number, text in enumerate(texts(4))
    ]
    for served, expected in (((0, 1), ["1.0", "1.1", "1.0", "1.1"]), ((0,), ["1.0"] * 4)):
        road = Road()
        evaluator = evaluator_on(road, [ModuleId(1, expert) for expert in served], experts=2)
        road.meets = lambda microbatch, evaluator=evaluator: evaluator.loss_known(microbatch, 1.0)  # type: ignore[misc]
        assert (await evaluator.evaluate(routed, (1,)), road.visited) == ([1.0] * 4, expected)
