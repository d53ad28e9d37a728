"""Unequal visits in virtual time: where some stages are weaker than others, more microbatches come through."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random
from statistics import geometric_mean

from swarm.routing.cost_model import Costs
from swarm.routing.negotiation.negotiation_events import TalkRules
from swarm.routing.path_rules import PathRules
from swarm.simulation.churn import run_churn
from swarm.simulation.forecast import forecast
from swarm.simulation.instance import Instance, launched
from swarm.simulation.iteration import Conduct, run_iterations
from swarm.simulation.lower_bound import lower_bound_s
from swarm.simulation.negotiation_world import Network, Talking
from swarm.vocabulary.types import PeerId

EQUAL = PathRules(stages=9, per_path=6)
UNEQUAL = replace(EQUAL, visit_ratio=1.5)
EACH = 48


def no_clock() -> float:
    return 0.0


def ground(seed: int, data_nodes: int = 2, replicas: int = 2, slots: int = 16) -> Costs:
    """Replicas whose speeds are up to four times apart, with room for all that comes; data nodes are quick."""
    random = Random(seed)
    stages = [
        tuple(PeerId(f"{stage}.{k}") for k in range(replicas if stage else data_nodes)) for stage in range(EQUAL.stages)
    ]
    peers = [peer for stage in stages for peer in stage]
    forward_s = {peer: 4 ** random.random() for peer in peers} | dict.fromkeys(stages[0], 0.05)
    place = {peer: (random.random(), random.random()) for peer in peers}
    message_s = {here: {there: 0.05 + math.dist(place[here], place[there]) for there in peers} for here in peers}
    return Costs(tuple(stages), forward_s, message_s, dict.fromkeys(peers, slots), task_overhead_s=0.02)


@cache
def rate(seed: int, rules: PathRules) -> float:
    """Microbatches per second of data nodes that launch as fast as they can, along the lanes that they have agreed
    on."""
    costs = ground(seed)
    beliefs = dict.fromkeys(costs.data_nodes, costs)
    talk = Talking(rules, TalkRules(None), beliefs, Network(), Random(0), no_clock)
    talk.run(60.0)
    lanes = {peer: [tuple(hop.peer for hop in lane) for lane in talk.machines[peer].lanes] for peer in beliefs}
    plan = {peer: launched(tuple(routes), EACH) for peer, routes in lanes.items()}
    return EACH * len(plan) / forecast(costs, plan).makespan_s


def test_weak_stages_hold_the_others_up_less() -> None:
    gains = [rate(seed, UNEQUAL) / rate(seed, EQUAL) for seed in range(4)]
    assert min(gains) > 1.0
    assert geometric_mean(gains) > 1.1


def test_what_is_measured_on_the_way_makes_the_shares() -> None:
    """The node's own machines: planner, custody, receipts and the talk, with steps too long to wait for each other."""
    costs, done = ground(2, slots=24), {}
    for rules in (EQUAL, UNEQUAL):
        found = run_churn(Instance("unequal", costs, rules, 1000), 200.0, 0.0, seed=1)
        done[rules] = found
        assert found.duplicated == found.abandoned == 0
    assert done[UNEQUAL].completed > 1.05 * done[EQUAL].completed
    visits = done[UNEQUAL].accumulated
    assert max(visits.values()) <= 1.5 * 1.15 * min(visits.values()), "some have only begun a period"


def test_an_iteration_takes_unequal_visits_only_where_the_instance_asks_for_them() -> None:
    costs = ground(2)
    equal, unequal = Instance("equal", costs, EQUAL, 24), Instance("unequal", costs, UNEQUAL, 24)
    plain, played = (run_iterations(each, Conduct(), no_clock)[-1] for each in (equal, unequal))
    assert set(plain.visits.values()) == {36}
    assert sum(played.visits.values()) == sum(plain.visits.values())
    assert min(played.visits.values()) < 36 < max(played.visits.values()) <= 1.5 * min(played.visits.values())
    assert lower_bound_s(unequal) <= played.played.makespan_s
    assert lower_bound_s(unequal) <= lower_bound_s(equal)
    routes = Counter(len(route) for routes in played.plan.values() for route in routes)
    assert routes == {EQUAL.per_path: 48}
