"""Lanes by shares of each data node's own: what they visit, that trades keep it, and how a data node moves to others
while the talk goes on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from swarm.routing.cost_model import Costs
from swarm.routing.negotiation.negotiation_events import SwarmChanged
from swarm.routing.negotiation.negotiator import BETWEEN_DEALS_S
from swarm.routing.stage_balance import visits
from swarm.routing.visit_shares import VisitShares, capacities_of, share_period
from swarm.vocabulary.types import PeerId
from tests.swarm.routing.negotiation.talkers import Party, Weather
from tests.swarm.routing.small_swarms import RULES, swarm

UNEQUAL = replace(RULES, visit_ratio=1.5)
WEAK = {"2.0": 3.0, "2.1": 3.0, "2.2": 3.0}
CALM, STORM = Weather(), Weather(lost=0.25, doubled=0.25, slowest_s=2.5)
LONG = 3000.0


def party(weather: Weather, seed: int, microbatches: int | None = None, data_nodes: int = 3) -> Party:
    return Party(swarm([data_nodes, 3, 3, 3, 3, 3], WEAK), UNEQUAL, microbatches, weather, seed)


def shares_of(talkers: Party, peer: PeerId) -> VisitShares:
    shares = talkers.machines[peer].shares
    assert shares is not None
    return shares.value


def assert_visits_are_what_was_dealt(talkers: Party) -> None:
    """All lanes together visit what each data node has dealt to itself: trades change nothing of it."""
    held = visits(stages for machine in talkers.machines.values() for stages in machine.stages)
    dealt = Counter[int]()
    for peer in talkers.machines:
        dealt.update(dict(enumerate(shares_of(talkers, peer).visits, start=1)))
    assert held == dealt
    stage_of = talkers.costs.stage_of()
    for machine in talkers.machines.values():
        driven = [[stage_of[peer] for peer in route] for route in machine.launches]
        assert visits(driven) == visits(machine.stages)
        assert all(UNEQUAL.fault(order) is None for order in driven)


def moved(talkers: Party, weak_stage: int) -> Costs:
    """Another stage is the weakest from now on."""
    slow = {peer: 3.0 if stage == weak_stage else 1.0 for peer, stage in talkers.costs.stage_of().items()}
    return replace(talkers.costs, forward_s=slow)


@pytest.mark.parametrize("weather", [CALM, STORM], ids=["calm", "storm"])
@pytest.mark.parametrize("seed", range(4))
def test_the_talk_ends_and_the_weak_stage_is_visited_less(weather: Weather, seed: int) -> None:
    talkers = party(weather, seed)
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_offers_keep_the_sum()
    assert_visits_are_what_was_dealt(talkers)
    for peer in talkers.machines:
        assert shares_of(talkers, peer).visits == (16, 11, 16, 16, 16)
        assert len(talkers.machines[peer].launches) == share_period(UNEQUAL) == 25


@pytest.mark.parametrize("seed", range(10))
def test_shares_change_at_any_step_and_nothing_is_lost_or_doubled(seed: int) -> None:
    talkers = party(STORM, seed)
    talkers.run(BETWEEN_DEALS_S)
    for _ in range(talkers.rng.randrange(5, 200)):
        talkers.step()
    talkers.announce_members(within_s=4.0, costs=moved(talkers, 4))
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_offers_keep_the_sum()
    assert_visits_are_what_was_dealt(talkers)
    for peer in talkers.machines:
        shares = talkers.machines[peer].shares
        assert shares is not None
        assert shares.value.visits[3] == min(shares.value.visits) == 11
        assert shares.reason.startswith("stage 4 is full first, with 11 visits in 25 microbatches")


@pytest.mark.parametrize("seed", range(4))
def test_each_goes_by_its_own_figures(seed: int) -> None:
    """One data node finds another stage weak than the others do; they agree on lanes all the same."""
    talkers = party(STORM, seed)
    talkers.run(LONG)
    other = next(iter(talkers.machines))
    talkers.push(talkers.now, other, SwarmChanged(talkers.members(), moved(talkers, 4)))
    talkers.run(LONG)
    talkers.assert_settled()
    assert_visits_are_what_was_dealt(talkers)
    weakest = {peer: shares_of(talkers, peer).visits.index(11) + 1 for peer in talkers.machines}
    assert weakest == {peer: 4 if peer == other else 2 for peer in talkers.machines}


def test_small_changes_and_early_ones_change_nothing() -> None:
    talkers = party(CALM, 0)
    talkers.run(BETWEEN_DEALS_S / 2)
    before = {peer: shares_of(talkers, peer) for peer in talkers.machines}
    talkers.announce_members(costs=moved(talkers, 4))
    talkers.run(0.01)
    assert {peer: shares_of(talkers, peer) for peer in talkers.machines} == before, "too early"
    talkers.announce_members()
    talkers.run(LONG)
    scaled = {peer: 1.02 * seconds for peer, seconds in talkers.costs.forward_s.items()}
    visited = visits(stages for machine in talkers.machines.values() for stages in machine.stages)
    talkers.announce_members(costs=replace(talkers.costs, forward_s=scaled))
    talkers.run(LONG)
    assert {peer: shares_of(talkers, peer) for peer in talkers.machines} == before
    assert visits(stages for machine in talkers.machines.values() for stages in machine.stages) == visited


def test_only_some_lanes_change_with_the_shares() -> None:
    talkers = party(CALM, 0, data_nodes=1)
    talkers.run(LONG)
    (machine,) = talkers.machines.values()
    stages, before = machine.stages, machine.shares
    costs = replace(talkers.costs, forward_s={**talkers.costs.forward_s, "1.0": 2.5, "1.1": 2.5, "1.2": 2.5})
    talkers.now += BETWEEN_DEALS_S
    talkers.announce_members(costs=costs)
    talkers.run(0.01)
    assert before is not None
    after = shares_of(talkers, PeerId("0.0"))
    assert after != before.value
    assert after.rate(capacities_of(costs)) > before.value.rate(capacities_of(costs))
    exchanged = sum(max(0, new - old) for old, new in zip(before.value.visits, after.visits, strict=True))
    changed = sum(new != old for old, new in zip(stages, machine.stages, strict=True))
    assert 0 < changed <= 2 * exchanged < len(stages)


@pytest.mark.parametrize("microbatches", [6, 10])
def test_iterations_may_have_unequal_visits_too(microbatches: int) -> None:
    talkers = party(STORM, microbatches, microbatches)
    talkers.run(LONG)
    talkers.assert_settled()
    assert_visits_are_what_was_dealt(talkers)
    for peer in talkers.machines:
        shares = shares_of(talkers, peer)
        assert shares.of == microbatches
        assert shares.visits[1] < max(shares.visits) <= 1.5 * min(shares.visits)
