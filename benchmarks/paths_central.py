"""A central search for `benchmarks.paths`: what somebody who knows everything might still gain on a plan, by trying
small changes one after another.

It stands beside the decentralized plans as a yardstick, above all for the full pipeline, so that what skipping gains is
not what a search left lying there.
"""

from __future__ import annotations

import random
from typing import Final

from swarm.routing.cost_model import PeerRoute
from swarm.simulation.forecast import Unit, forecast
from swarm.simulation.instance import Instance, Plan
from swarm.vocabulary.types import PeerId

MEAN_SHARE: Final = 0.03
"""How much the mean finish counts beside the last one, so that the search sees a slope where the last one does not
move."""

_Routes = dict[PeerId, list[PeerRoute]]


def improved(instance: Instance, plan: Plan, attempts: int, seed: int = 1) -> Plan:
    """The plan after so many attempts at a change, each kept if it does not make the iteration longer; no stage is
    visited more or less often."""
    rng = random.Random(seed)
    routes: _Routes = {peer: list(own) for peer, own in plan.items()}
    best = _worth(instance, routes)
    for _ in range(attempts):
        before = {peer: list(own) for peer, own in routes.items()}
        rng.choice((_replace_one, _replace_all, _swap_two))(instance, routes, rng)
        worth = _worth(instance, routes)
        if worth > best:
            routes = before
        else:
            best = worth
    return {peer: tuple(own) for peer, own in routes.items()}


def _worth(instance: Instance, routes: _Routes) -> float:
    expected = forecast(instance.costs, routes)
    return expected.makespan_s + MEAN_SHARE * sum(expected.finish_s.values()) / len(expected.finish_s)


def _replace_one(instance: Instance, routes: _Routes, rng: random.Random) -> None:
    """Another replica for one visit."""
    data_node, number = _some_unit(routes, rng)
    route = routes[data_node][number]
    old, new = _some_replacement(instance, route, rng)
    routes[data_node][number] = tuple(new if peer == old else peer for peer in route)


def _replace_all(instance: Instance, routes: _Routes, rng: random.Random) -> None:
    """Another replica for all visits of one data node to a peer."""
    data_node, number = _some_unit(routes, rng)
    old, new = _some_replacement(instance, routes[data_node][number], rng)
    routes[data_node] = [tuple(new if peer == old else peer for peer in route) for route in routes[data_node]]


def _swap_two(_: Instance, routes: _Routes, rng: random.Random) -> None:
    """Two microbatches take each other's route."""
    (here, one), (there, other) = _some_unit(routes, rng), _some_unit(routes, rng)
    routes[here][one], routes[there][other] = routes[there][other], routes[here][one]


def _some_unit(routes: _Routes, rng: random.Random) -> Unit:
    data_node = rng.choice(list(routes))
    return data_node, rng.randrange(len(routes[data_node]))


def _some_replacement(instance: Instance, route: PeerRoute, rng: random.Random) -> tuple[PeerId, PeerId]:
    old = rng.choice(route)
    stage = next(peers for peers in instance.costs.stages if old in peers)
    return old, rng.choice(stage)
