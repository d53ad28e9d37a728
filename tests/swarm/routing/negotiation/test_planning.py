"""Plans that data nodes make for all: what they are worth, what the others believe of them, and what a death leaves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from swarm.routing.negotiation.groups import group_of
from swarm.routing.negotiation.lane_view import View
from swarm.routing.negotiation.negotiation_events import Member, SwarmChanged, TalkRules, Tick
from swarm.routing.negotiation.negotiator import Negotiator
from swarm.routing.path_rules import PathRules
from swarm.simulation.forecast import forecast
from swarm.vocabulary.routing_messages import Lane, Standing
from swarm.vocabulary.types import PeerId
from tests.swarm.routing.negotiation.talkers import Party, Weather
from tests.swarm.routing.small_swarms import RULES, names, swarm

FIVE = [5, 3, 3, 3, 3, 3]
SLOW = {"1.0": 3.0, "2.1": 2.0, "0.4": 2.5, "4.2": 3.0, "3.0": 2.0}
LONG = 3000.0
SIX = TalkRules(6)


def talked(seed: int) -> Party:
    party = Party(swarm(FIVE, SLOW), RULES, 6, Weather(), seed)
    party.run(LONG)
    return party


def finish_s(party: Party) -> tuple[float, float]:
    """Of the last data node, and all together."""
    plan = {}
    for peer, machine in party.machines.items():
        plan[peer] = tuple(machine.launches[k % len(machine.launches)] for k in range(6))
    finish = forecast(party.costs, plan).finish_s.values()
    return max(finish), sum(finish)


def view_of(own: PeerId) -> View:
    costs = swarm(FIVE, SLOW)
    members = frozenset(map(Member, costs.data_nodes))
    return View(own, group_of(own, members), costs, RULES, SIX)


@pytest.mark.parametrize("seed", range(6))
def test_plans_are_agreed_on_and_all_are_done_sooner(seed: int) -> None:
    party, alone = talked(seed), Party(swarm(FIVE, SLOW), RULES, 6, Weather(lost=1.0), seed)
    alone.run(0.01)
    party.assert_equal_visits()
    party.assert_offers_keep_the_sum()
    party.assert_settled()
    assert finish_s(party)[0] < 0.85 * finish_s(alone)[0]


@pytest.mark.parametrize("seed", range(4))
def test_exchanges_between_data_nodes_make_the_last_one_come_home_sooner(seed: int) -> None:
    """One data node holds one microbatch at a time, and one of its stages is far: only others can take that."""
    costs = swarm(FIVE, SLOW)
    last = costs.data_nodes[0]
    stage = min(view_of(last).sets_of(last)[0])
    far = {peer: 4.0 if peer in costs.stages[stage] else seconds for peer, seconds in costs.message_s[last].items()}
    costs = replace(costs, slots={**costs.slots, last: 1}, message_s={**costs.message_s, last: far})
    party = Party(costs, RULES, 6, Weather(), seed)
    party.run(0.01)
    assert all(stage in visited for visited in party.machines[last].stages)
    party.run(LONG)
    party.assert_equal_visits()
    party.assert_offers_keep_the_sum()
    stages = party.machines[last].stages
    assert sum(stage in visited for visited in stages) <= len(stages) / 2


def test_work_and_messages_are_bounded_and_shared() -> None:
    party = talked(0)
    data_nodes, offers = len(party.machines), TalkRules(6).offers
    assert len({sender for _, sender, _ in party.decided}) > 1, "nobody plans for all"
    assert party.said.total() <= 3 * offers * data_nodes
    for machine in party.machines.values():
        assert machine._planning is not None
        assert machine._planning._search is not None
        assert machine._planning._search.tasks < 1.25 * TalkRules(6).tasks_each


def test_what_all_agreed_to_is_what_each_launches() -> None:
    party = talked(1)
    assert party.decided
    latest: dict[PeerId, Standing] = {}
    for offer in party.decided.values():
        for standing in offer.standings:
            if standing.peer not in latest or standing.version > latest[standing.peer].version:
                latest[standing.peer] = standing
    for peer, machine in party.machines.items():
        assert [set(lane.route) for lane in latest[peer].lanes] == [set(route) for route in machine.launches]


def test_a_standing_has_as_many_lanes_as_there_are_lanes_or_microbatches() -> None:
    own, other = names("0.0", "0.1")
    view, plain = view_of(own), view_of(other).standing()
    lane = plain.lanes[0]
    assert view.singles > len(plain.lanes)
    assert not view.take_in(Standing(other, 2, (lane,) * (view.singles - 1)))
    assert other not in view.planned
    assert view.take_in(Standing(other, 2, (lane,) * view.singles))
    assert view.sets_of(other) == (lane.stages,) * view.singles


def test_all_take_each_other_to_begin_as_each_does() -> None:
    """Where all believe the same, nobody need tell how it begins."""
    views = {peer: view_of(peer) for peer in swarm(FIVE).data_nodes}
    standings = {peer: view.standing() for peer, view in views.items()}
    for view in views.values():
        assert {peer: view.standing_of(peer) for peer in views} == standings
        assert view.plan() is not None


def test_an_empty_route_is_no_plan() -> None:
    own, other = names("0.0", "0.1")
    view = view_of(own)
    assert view.take_in(Standing(other, 2, tuple(Lane((), stages, 0.0) for stages in view.sets_of(other)[:1])))
    assert view.plan() is None


@pytest.mark.parametrize("seed", range(4))
def test_of_agreed_routes_only_those_through_a_dead_peer_change_at_once(seed: int) -> None:
    party = talked(seed)
    before = {peer: machine.launches for peer, machine in party.machines.items()}
    gone = Counter(peer for routes in before.values() for route in routes for peer in route).most_common(1)[0][0]
    party.announce_members(costs=party.costs.without(frozenset({gone})))
    party.run(0.01)
    stage_of = party.costs.stage_of()
    for peer, machine in party.machines.items():
        assert not any(gone in route for route in machine.launches)
        if len(before[peer]) != len(machine.stages):
            assert len(machine.launches) == len(before[peer])
            for old, new in zip(before[peer], machine.launches, strict=True):
                assert {stage_of[hop] for hop in old} == {stage_of[hop] for hop in new}
    party.run(LONG)
    party.assert_settled()


def test_an_unequal_swarm_is_planned_alike_by_whoever_is_told_the_same() -> None:
    """The node's negotiator and the simulator's are one; the same costs, members and rules give the same lanes."""
    costs = swarm([1, 3, 3], {"0.0": 0.05, "1.0": 0.6, "1.1": 1.0, "1.2": 2.0, "2.0": 0.5, "2.2": 2.0})
    costs = replace(costs, slots={**costs.slots, PeerId("0.0"): 8})
    own, rules = costs.data_nodes[0], PathRules(3, 2)
    lanes = []
    for _ in range(2):
        machine = Negotiator(own, rules, TalkRules(None))
        now = 0.0
        machine.handle(SwarmChanged(frozenset({Member(own)}), costs), now)
        while machine.wakes_at < LONG:
            now = machine.wakes_at
            machine.handle(Tick(), now)
        lanes.append(machine.lanes)
    assert lanes[0] == lanes[1]
    assert len(lanes[0]) == 24
    counted = Counter(hop.peer for lane in lanes[0] for hop in lane)
    assert counted[PeerId("1.0")] > counted[PeerId("1.1")] > 0, "the fast replica has more"


@pytest.mark.parametrize("change", [0.0, 0.02])
def test_figures_that_come_every_two_seconds_do_not_put_planning_off(change: float) -> None:
    """As a node looks at the swarm, whatever it sees."""
    party = Party(swarm(FIVE, SLOW), RULES, 6, Weather(), seed=1)
    for _ in range(30):
        party.run(2.0)
        factors = {peer: party.rng.uniform(1 - change, 1 + change) for peer in party.costs.forward_s}
        forward_s = {peer: factors[peer] * seconds for peer, seconds in party.costs.forward_s.items()}
        party.announce_members(within_s=0.5, costs=replace(party.costs, forward_s=forward_s))
    assert party.decided
    party.assert_equal_visits()
