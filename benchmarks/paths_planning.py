"""What planning costs in `benchmarks.paths`: CPU time of whole plans, of one launch, of larger swarms, and after a
death."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from benchmarks.paths_ours import talked
from swarm.membership.membership import Membership
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.planner import Planner
from swarm.routing.stage_balance import spread
from swarm.simulation.deaths import after_death
from swarm.simulation.generate import Regions, Shape, generate
from swarm.simulation.instance import Instance, Plan
from swarm.simulation.negotiation_world import Network
from swarm.vocabulary.types import Hop, ModuleId
from tests.swarm.membership.announcements import RUN, announcement

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
TOKENS: Final = 1000


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
        watch.ms.append(1e3 * talked(instance).planning_cpu_s)
    return watch.summary()


def small_swarms(regions: Regions, seeds: Iterable[int]) -> dict[str, Any]:
    """The published sizes, generated."""
    return {name: whole_plans(generate(shape, regions, seed) for seed in seeds) for name, shape in SMALL.items()}


def swarm_of_size(peers: int, regions: Regions, seeds: Iterable[int]) -> dict[str, Any]:
    """CPU per microbatch of a swarm with so many peers: of the plan agreed on beforehand, and of planning a launch."""
    whole, set_up, launch = Stopwatch(), Stopwatch(), Stopwatch()
    for seed in seeds:
        instance = generate(replace(LARGE, peers=peers), regions, seed)
        iteration = talked(instance)
        whole.ms.append(1e3 * iteration.planning_cpu_s)
        _time_launches(instance, iteration.plan, set_up, launch)
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
    """As in a data node: its view of the costs made anew, and the next microbatch of its lanes, by the peers that
    bring it home soonest (which lanes that may step back do not choose)."""
    stages = [[announcement(peer, stage) for peer in peers] for stage, peers in enumerate(instance.costs.stages)]
    rules = replace(instance.rules, max_back_stops=0, max_back_distance=0)
    stage_of = instance.costs.stage_of()
    for data_node in instance.costs.data_nodes[:LAUNCHES]:
        members = Membership(RUN, data_node)
        for one in itertools.chain.from_iterable(stages):
            members.observe(one, now=0.0, wall=0.0)
        with set_up.sample():
            times = MeasuredTimes(data_node, TOKENS)
            costs = times.costs(stages, instance.microbatches)
        lanes = spread([tuple(Hop(ModuleId(stage_of[peer]), peer) for peer in route) for route in plan[data_node]])
        planner = Planner(rules, members, times, lambda lanes=lanes: lanes, lambda costs=costs: costs)
        with launch.sample():
            planner.plan(1, (), {}, 0.0)


def growth_in_replicas(regions: Regions, seeds: Iterable[int]) -> list[dict[str, Any]]:
    """The same few data nodes, before stages with more and more replicas."""
    rows = []
    for replicas in REPLICAS:
        watch = Stopwatch()
        for seed in seeds:
            instance = _with_replicas(replicas, regions, seed)
            watch.ms.append(1e3 * talked(instance).planning_cpu_s)
        row = {"replicas_of_a_stage": replicas, "peers": len(instance.costs.stage_of()), "microbatches": instance.total}
        rows.append({**row, **watch.summary()})
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


def after_each_death(instance: Instance, seeds: Iterable[int]) -> dict[str, Any]:
    """Each peer that is no data node dies in turn, after the talk: CPU of the talk that follows, and makespans against
    a plan made anew."""
    watch, of_one = Stopwatch(), Stopwatch()
    at_once, settled = [], []
    for peers in instance.costs.stages[1:]:
        for peer in peers if len(peers) > 1 else ():
            for seed in seeds:
                after = after_death(instance, peer, Network(), time.process_time, seed)
                watch.ms.append(1e3 * after.replanning_cpu)
                of_one.ms.append(1e3 * after.replanning_cpu_each)
                at_once.append(after.at_once / after.anew - 1)
                settled.append(after.settled / after.anew - 1)
    lost = {"at_once": _lost(at_once), "settled": _lost(settled)}
    return {
        "instance": instance.name,
        "deaths": len(settled),
        **watch.summary(),
        "of_one": of_one.summary(),
        "makespan_lost": lost,
    }


def _lost(shares: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(shares), 3),
        "largest": round(max(shares), 3),
        "within_10_percent": sum(share < 0.1 for share in shares),
    }
