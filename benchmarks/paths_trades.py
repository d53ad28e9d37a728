"""What plans that all agree on are worth: the negotiation with its offers, and without a single one.

    python benchmarks/paths_trades.py [--instances FILE...] [--regions FILE] [--seeds 3] [--minutes 10]

`iterations`: data nodes talk for a minute of virtual time, then every one that is no data node dies in turn, and every
data node, and they talk for another minute; all look at the swarm every 2 seconds, as nodes do, and then move lanes by
themselves where that saves 5 %. With the same costs for all, and exact. Makespans are medians of an iteration that
begins at one of five moments of the last ten seconds. In it each data node sends as many microbatches as the instance
says, which mostly makes one lane for each; with the node's lanes, of which each has several, one along each of them.
`off_over_on` is the makespan without offers by that with them.
`machines`: the node's machines on the same instances but those of 42 peers, by what they measure themselves
(`swarm.simulation.churn`): microbatches completed, and CPU time of this process.

Without `--instances` and `--regions` it takes the small ones of the tests. Prints one JSON object; progress goes to
stderr.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.paths import SMALL_DATA, UNEVEN_SEED, report, uneven
from node.lab.simulation.simulate import read_instance
from swarm.routing.cost_model import Costs
from swarm.routing.negotiation.negotiation_events import Member, TalkRules
from swarm.simulation.churn import run_churn
from swarm.simulation.forecast import forecast
from swarm.simulation.generate import Shape, generate, regions_from_json
from swarm.simulation.instance import Instance, launched
from swarm.simulation.iteration import Conduct, run_iterations
from swarm.simulation.negotiation_world import Network, Talking
from swarm.vocabulary.types import PeerId

ARMS: Final[dict[str, dict[str, Any]]] = {"on": {}, "off": {"offers": 0}}
"""Limits of the talk: the usual ones, or not a single offer."""
LOOK_S: Final = 2.0
TALK_S: Final = 60.0
MOMENTS: Final = 5
CONDUCTS: Final = {"freely": (0.0, 1), "step by step": (0.0, 0), "20% die a minute": (0.2, 1)}
"""Share of the peers that die a minute, and the staleness."""
SHAPES: Final = (Shape(), Shape(peers=42, stages=8, per_path=5, forward_s=0.165, bytes_each=16.0 * 2**20))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one minute of talk."""

    makespan_s: float
    messages: int


class Party:
    """The data nodes of an instance."""

    def __init__(self, instance: Instance, talk: TalkRules, seed: int) -> None:
        self._talk, self._costs = talk, instance.costs
        beliefs = dict.fromkeys(instance.costs.data_nodes, instance.costs)
        rng = random.Random(seed)
        self._talking = Talking(instance.rules, talk, beliefs, Network(), rng, time.process_time)
        self._now = 0.0

    def talk(self) -> Outcome:
        """A minute, with a look at the swarm every LOOK_S."""
        before, makespans = self._talking.so_far().messages, []
        looks = round(TALK_S / LOOK_S)
        for look in range(looks):
            self._look(self._costs)
            self._now += LOOK_S
            self._talking.run(self._now)
            if look >= looks - MOMENTS:
                makespans.append(self._makespan_s())
        return Outcome(statistics.median(makespans), self._talking.so_far().messages - before)

    def lose(self, peer: PeerId) -> None:
        """It dies; the others see it at their next look."""
        self._costs = self._costs.without(frozenset({peer}))
        if peer in self._talking.machines:
            self._talking.die(peer)

    def _look(self, costs: Costs) -> None:
        members = [Member(peer) for peer in costs.data_nodes]
        self._talking.tell_of_change(members, dict.fromkeys(costs.data_nodes, costs), LOOK_S)

    def _makespan_s(self) -> float:
        lanes = {peer: self._talking.lanes_at(peer, self._now) for peer in self._costs.data_nodes}
        plan = {peer: launched(own, self._talk.microbatches or len(own)) for peer, own in lanes.items()}
        return forecast(self._costs, plan).makespan_s


def after_a_cold_start(instance: Instance, microbatches: int | None, seed: int) -> dict[str, Outcome]:
    return {arm: Party(instance, TalkRules(microbatches, **limits), seed).talk() for arm, limits in ARMS.items()}


def after_a_death(instance: Instance, peer: PeerId, seed: int) -> dict[str, Outcome]:
    outcomes = {}
    for arm, limits in ARMS.items():
        party = Party(instance, TalkRules(instance.microbatches, **limits), seed)
        party.talk()
        party.lose(peer)
        outcomes[arm] = party.talk()
    return outcomes


def compared(outcomes: Iterable[dict[str, Outcome]]) -> dict[str, Any]:
    """Medians over cases, and the best and the worst one for offers."""
    cases = list(outcomes)
    ratios = [case["off"].makespan_s / case["on"].makespan_s for case in cases]
    return {
        "cases": len(cases),
        "off_over_on": round(statistics.geometric_mean(ratios), 3),
        "off_over_on_from_to": [round(min(ratios), 3), round(max(ratios), 3)],
        "makespan_s": {arm: round(statistics.median(case[arm].makespan_s for case in cases), 2) for arm in ARMS},
        "messages": {arm: statistics.median(case[arm].messages for case in cases) for arm in ARMS},
    }


def iterations(instance: Instance, seeds: Iterable[int]) -> dict[str, Any]:
    """One instance, from a cold start and after every death that leaves every stage a peer."""
    seeds = list(seeds)
    data_nodes, *others = (peers for peers in instance.costs.stages)
    hops = [peer for peers in others for peer in peers if len(peers) > 1]
    unheard = run_iterations(instance, Conduct(cold=True), time.process_time)[0].played.makespan_s
    report(f"{instance.name}: iterations")
    return {
        "instance": instance.name,
        "nobody_heard_s": round(unheard, 2),
        "cold_start": compared(after_a_cold_start(instance, instance.microbatches, seed) for seed in seeds),
        "cold_start_with_the_nodes_lanes": compared(after_a_cold_start(instance, None, seed) for seed in seeds),
        "a_peer_died": compared(after_a_death(instance, peer, seeds[0]) for peer in hops),
        "a_data_node_died": compared(after_a_death(instance, peer, seeds[0]) for peer in data_nodes),
    }


def by_machines(instance: Instance, minutes: float, seeds: Iterable[int]) -> dict[str, Any]:
    """One instance by the node's machines."""
    seeds, rows = list(seeds), {}
    for name, (share, staleness) in CONDUCTS.items():
        completed, cpu_s = {}, {}
        for arm, limits in ARMS.items():
            report(f"{instance.name}: {name}, trades {arm}")
            talk, began = TalkRules(microbatches=None, **limits), time.process_time()
            done = [run_churn(instance, 60 * minutes, share, seed, talk=talk, staleness=staleness) for seed in seeds]
            completed[arm] = sum(one.completed for one in done)
            cpu_s[arm] = round(time.process_time() - began, 1)
        off_over_on = round(completed["off"] / completed["on"], 3)
        rows[name] = {"completed": completed, "off_over_on": off_over_on, "cpu_s": cpu_s}
    return {"instance": instance.name, "minutes": minutes, "seeds": len(seeds), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--instances", type=Path, nargs="+", default=[SMALL_DATA / "twenty_peers.json"])
    parser.add_argument("--regions", type=Path, default=SMALL_DATA / "four_regions.json")
    parser.add_argument("--seeds", type=int, default=3, help="of messages' delays, of made-up swarms, of churn")
    parser.add_argument("--minutes", type=float, default=10.0, help="virtual minutes of the machines; 0 for none")
    options = parser.parse_args()
    regions = regions_from_json(json.loads(options.regions.read_text(encoding="utf-8")))
    seeds = range(1, options.seeds + 1)
    given = [read_instance(path) for path in options.instances]
    given += [uneven(instance, UNEVEN_SEED) for instance in given]
    made = [generate(shape, regions, seed) for shape in SHAPES for seed in seeds]
    result = {
        "iterations": [iterations(instance, seeds) for instance in (*given, *made)],
        "machines": [by_machines(instance, options.minutes, seeds) for instance in given if options.minutes]
        + [by_machines(instance, options.minutes, seeds[:1]) for instance in made[: len(seeds)] if options.minutes],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
