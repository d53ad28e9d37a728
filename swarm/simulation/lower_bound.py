"""What no schedule can beat."""

from __future__ import annotations

import heapq
from dataclasses import replace

from swarm.routing.cost_model import Costs
from swarm.routing.path_rules import order_tree
from swarm.routing.route_search import cheapest_by_set
from swarm.simulation.instance import Instance
from swarm.vocabulary.types import PeerId

MAX_STAGES_SEARCHED = 12
MAX_REPLICAS_SEARCHED = 40
"""With more skippable stages, or replicas of a stage, the shortest round trip is not searched for: the bound is that of
the work alone."""


def lower_bound_s(instance: Instance) -> float:
    """Seconds that the iteration takes at least: the largest of three bounds.

    Each data node has so many slots, and none comes back sooner than its shortest legal round trip when nobody waits;
    it has its own work to do; and the stages have all visits to serve, and each its own, shared out over the replicas
    as well as can be.
    """
    if _is_searched(instance):
        instance = replace(instance, costs=_both_ways(instance.costs))
    waves = max(_slots_bound(instance, data_node) for data_node in instance.costs.data_nodes)
    work = max(_own_work_bound(instance, data_node) for data_node in instance.costs.data_nodes)
    return max(waves, work, _stage_bound(instance))


def _shortest_round_trip_s(instance: Instance, data_node: PeerId) -> float:
    """Over all legal routes, over links that are as slow one way as the other; 0 when there are too many to search."""
    costs, rules = instance.costs, instance.rules
    if not _is_searched(instance):
        return 0.0
    price = {peer: (1 + costs.backward_factor) * seconds for peer, seconds in costs.forward_s.items()}
    tree = order_tree(rules, frozenset(), frozenset(range(1, rules.stages)))
    found = cheapest_by_set(costs, data_node, price, tree, nearest=MAX_REPLICAS_SEARCHED)
    return min((way.price for way in found.values()), default=0.0) + costs.own_work_s(data_node)


def _both_ways(costs: Costs) -> Costs:
    """The same swarm with links as slow one way as the other, in the mean: a round trip takes each of them both ways,
    and the search counts one way twice. Data nodes have no links to each other in it."""
    message = costs.message_s
    hops = [peer for stage in costs.stages[1:] for peer in stage]
    everyone = [*costs.data_nodes, *hops]
    mean = {here: {there: (message[here][there] + message[there][here]) / 2 for there in hops} for here in everyone}
    for hop in hops:
        mean[hop].update((data_node, mean[data_node][hop]) for data_node in costs.data_nodes)
    return replace(costs, message_s=mean)


def _is_searched(instance: Instance) -> bool:
    replicas = max((len(peers) for peers in instance.costs.stages[1:]), default=1)
    return instance.rules.skippable <= MAX_STAGES_SEARCHED and replicas <= MAX_REPLICAS_SEARCHED


def _slots_bound(instance: Instance, data_node: PeerId) -> float:
    costs = instance.costs
    trip = _shortest_round_trip_s(instance, data_node)
    apart = costs.forward_s[data_node] + costs.task_overhead_s
    free = [0.0] * costs.slots[data_node]
    server, end = 0.0, 0.0
    for _ in range(instance.microbatches):
        start = max(server, heapq.heappop(free))
        server, end = start + apart, start + trip
        heapq.heappush(free, end + costs.task_overhead_s)
    return end


def _own_work_bound(instance: Instance, data_node: PeerId) -> float:
    costs = instance.costs
    each = costs.own_work_s(data_node) + 3 * costs.task_overhead_s
    return instance.microbatches * each - costs.task_overhead_s


def _stage_bound(instance: Instance) -> float:
    costs, rules = instance.costs, instance.rules
    if not rules.skippable:
        return 0.0
    all_visits = instance.total * rules.per_path
    rates = [sum(1 / max(costs.service_s(peer), 1e-9) for peer in peers) for peers in costs.stages[1:]]
    # A stage is visited least when all others are visited `visit_ratio` times as often.
    fewest = all_visits / (1 + (rules.skippable - 1) * rules.visit_ratio)
    return max(all_visits / sum(rates), *(fewest / rate for rate in rates))
