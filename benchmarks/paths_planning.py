"""What planning costs in `benchmarks.paths`: CPU time of whole plans, of one launch, of larger swarms, and after a death."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from swarm.paths.balance import lanes_for
from swarm.paths.costs import Route
from swarm.paths.forecast import forecast
from swarm.paths.lanes import LaneId, LaneMarket
from swarm.paths.planner import Launch, MicrobatchPlanner
from swarm.paths.revision import Revision
from swarm.simulation.generate import Regions, Shape, generate
from swarm.simulation.instances import Instance
from swarm.simulation.iteration import LANE_TURNS_EACH, Plan, agreed_plan

SMALL: Final = {
    "20 peers, 6 stages": Shape(),
    "42 peers, 8 stages": Shape(peers=42, stages=8, per_path=5, forward_s=0.165, bytes_each=16.0 * 2**20),
}
"""The sizes that SkipPipe published, with peers up to three times slower than others."""
LARGE: Final = Shape(stages=8, per_path=5, bytes_each=16.0 * 2**20)
REPLICAS: Final = (10, 40, 160)
DATA_NODES: Final = 8
"""Of the swarms that differ only in the replicas of a stage."""
LAUNCHES: Final = 40
TRADES_AFTER_DEATH: Final = 6
REVISION_TURNS_AFTER_DEATH: Final = 2


@dataclass(slots=True)
class Stopwatch:
    """CPU time of this process, in milliseconds, sample by sample."""

    ms: list[float] = field(default_factory=list)

    @contextmanager
    def sample(self) -> Iterator[None]:
        began = time.process_time()
        yield
        self.ms.append(1e3 * (time.process_time() - began))

    def summary(self) -> dict[str, float]:
        return {"median_ms": round(statistics.median(self.ms), 2), "largest_ms": round(max(self.ms), 2)}


def whole_plans(instances: Iterable[Instance]) -> dict[str, Any]:
    """CPU of one iteration's plan, all data nodes together, over instances of one size."""
    watch = Stopwatch()
    for instance in instances:
        with watch.sample():
            agreed_plan(instance)
    return watch.summary()


def small_swarms(regions: Regions, seeds: Iterable[int]) -> dict[str, Any]:
    """The published sizes, generated."""
    return {name: whole_plans(generate(shape, regions, seed) for seed in seeds) for name, shape in SMALL.items()}


def swarm_of_size(peers: int, regions: Regions, seeds: Iterable[int]) -> dict[str, Any]:
    """CPU per microbatch of a swarm with so many peers: of the plan agreed on beforehand, and of planning a launch."""
    whole, set_up, launch = Stopwatch(), Stopwatch(), Stopwatch()
    for seed in seeds:
        instance = generate(replace(LARGE, peers=peers), regions, seed)
        with whole.sample():
            plan, _ = agreed_plan(instance)
        _time_launches(instance, plan, set_up, launch)
    microbatches = instance.total
    return {
        "peers": peers,
        "replicas_of_a_stage": len(instance.costs.stages[1]),
        "data_nodes": len(instance.costs.data_nodes),
        "microbatches": microbatches,
        "plan_ms_each_microbatch": round(statistics.median(whole.ms) / microbatches, 3),
        "plan_ms_each_microbatch_largest": round(max(whole.ms) / microbatches, 3),
        "launch": launch.summary(),
        "planner_for_new_costs": set_up.summary(),
    }


def _time_launches(instance: Instance, plan: Plan, set_up: Stopwatch, launch: Stopwatch) -> None:
    stage_of = instance.costs.stage_of()
    with set_up.sample():
        planner = MicrobatchPlanner(instance.costs, instance.rules, {})
    for data_node in instance.costs.data_nodes[:LAUNCHES]:  # each its first: the one that has to look at every replica
        lane = plan[data_node][0]
        with launch.sample():
            planner.plan(Launch(data_node, lane, 0.0), frozenset(stage_of[peer] for peer in lane))


def growth_in_replicas(regions: Regions, seeds: Iterable[int]) -> list[dict[str, Any]]:
    """The same few data nodes, before stages with more and more replicas: the lanes alone, and the whole plan with its revision."""
    rows = []
    for replicas in REPLICAS:
        lanes, whole = Stopwatch(), Stopwatch()
        for seed in seeds:
            instance = _with_replicas(replicas, regions, seed)
            with lanes.sample():
                _settled_lanes(instance)
            with whole.sample():
                agreed_plan(instance)
        row = {"replicas_of_a_stage": replicas, "peers": len(instance.costs.stage_of()), "microbatches": instance.total}
        rows.append({**row, "lanes": lanes.summary(), "whole_plan": whole.summary()})
    return rows


def _with_replicas(replicas: int, regions: Regions, seed: int) -> Instance:
    most = Shape(peers=12 * max(REPLICAS))
    whole = generate(most, regions, seed)
    first, *others = whole.costs.stages
    stages = (first[:DATA_NODES], *(peers[:replicas] for peers in others))
    kept = [peer for peers in stages for peer in peers]
    links = {here: {there: whole.costs.message_s[here][there] for there in kept} for here in kept}
    return replace(whole, costs=replace(whole.costs, stages=stages, message_s=links))


# ---- after a death ---------------------------------------------------------------------------------------------------


def after_each_death(instance: Instance) -> dict[str, Any]:
    """For each peer that is no data node: what going on without it costs, and the makespan against a plan made from scratch without it."""
    standing = _settled_lanes(instance)
    resumed, revised = _Replanned(), _Replanned()
    for peers in instance.costs.stages[1:]:
        for peer in peers if len(peers) > 1 else ():
            left = replace(instance, costs=instance.costs.without(frozenset({peer})))
            from_scratch = forecast(left.costs, agreed_plan(left)[0]).makespan_s
            resumed.add(left, standing, from_scratch, turns=0)
            revised.add(left, standing, from_scratch, turns=REVISION_TURNS_AFTER_DEATH)
    return {
        "instance": instance.name,
        "deaths": len(resumed.losses),
        "lanes": resumed.summary(),
        "lanes_and_revision": revised.summary(),
    }


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Lanes as they stand before anybody dies."""

    number: int
    routes: Mapping[LaneId, Route]
    stages: Mapping[LaneId, frozenset[int]]


def _settled_lanes(instance: Instance) -> _Lanes:
    data_nodes = len(instance.costs.data_nodes)
    number = lanes_for(instance.rules, data_nodes, instance.microbatches)
    market = LaneMarket(instance.costs, instance.rules, number)
    market.open()
    market.settle(LANE_TURNS_EACH * data_nodes)
    stage_of = instance.costs.stage_of()
    stages = {lane: frozenset(stage_of[peer] for peer in route) for lane, route in market.routes.items()}
    return _Lanes(number, dict(market.routes), stages)


@dataclass(slots=True)
class _Replanned:
    """One way of going on, death by death."""

    watch: Stopwatch = field(default_factory=Stopwatch)
    losses: list[float] = field(default_factory=list)

    def add(self, left: Instance, standing: _Lanes, from_scratch_s: float, turns: int) -> None:
        with self.watch.sample():
            plan = resumed_plan(left, standing, turns)
        self.losses.append(forecast(left.costs, plan).makespan_s / from_scratch_s - 1)

    def summary(self) -> dict[str, Any]:
        return {
            **self.watch.summary(),
            "makespan_lost_median": round(statistics.median(self.losses), 3),
            "makespan_lost_largest": round(max(self.losses), 3),
            "within_10_percent": sum(loss < 0.1 for loss in self.losses),
        }


def resumed_plan(left: Instance, standing: _Lanes, turns: int) -> Plan:
    """The standing lanes without the peers that are gone: those broken get others, then some trades, and some turns of revision."""
    market = LaneMarket(left.costs, left.rules, standing.number)
    market.resume(standing.stages, standing.routes)
    market.settle(TRADES_AFTER_DEATH)
    plan = {peer: _launches(market.of(peer), left.microbatches) for peer in left.costs.data_nodes}
    if not turns:
        return plan
    revision = Revision(left.costs, left.rules, plan)
    revision.run(turns)
    return {peer: tuple(routes) for peer, routes in revision.plan.items()}


def _launches(lanes: tuple[Route, ...], microbatches: int) -> tuple[Route, ...]:
    return tuple(lanes[number % len(lanes)] for number in range(microbatches))
