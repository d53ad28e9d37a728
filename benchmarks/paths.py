"""Paths planned by the data nodes: what each part of the plan is worth, what planning costs, and what churn leaves of
it. Pure simulation, on one core.

    python benchmarks/paths.py [--instances FILE...] [--regions FILE] [--seeds 3] [--sizes 100 1000]
        [--attempts 1000] [--minutes 5]

`arms`: each instance, and one like it whose peers compute up to three times slower, by every contender of
`benchmarks.paths_arms`: makespan, and the median over 20 worlds with every cost off by up to 5 %. `planning`: CPU time
of this process. `deaths`: each peer but the data nodes dies in turn. `churn`: that share of all peers dies every
minute. Without `--instances` and `--regions` it takes the small ones of the tests.

Prints one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.paths_arms import decompose
from benchmarks.paths_planning import after_each_death, growth_in_replicas, small_swarms, swarm_of_size, whole_plans
from node.lab.simulation.simulate import read_instance
from swarm.simulation.churn import run_churn, share_of_ideal
from swarm.simulation.generate import Regions, regions_from_json
from swarm.simulation.instance import Instance

SMALL_DATA: Final = Path(__file__).resolve().parent.parent / "tests" / "swarm" / "simulation"
CHURN: Final = (0.1, 0.2, 0.5)
SLOWEST: Final = 3.0
UNEVEN_SEED: Final = 1


def uneven(instance: Instance, seed: int) -> Instance:
    """The same swarm with peers that compute up to SLOWEST times slower, each by chance."""
    rng = random.Random(seed)
    forward = {peer: seconds * rng.uniform(1, SLOWEST) for peer, seconds in instance.costs.forward_s.items()}
    return replace(instance, name=f"{instance.name}, uneven", costs=replace(instance.costs, forward_s=forward))


def churn(instance: Instance, minutes: float, seeds: Iterable[int]) -> dict[str, Any]:
    """Completed microbatches as a share of what the compute that was alive does without churn; medians over seeds."""
    seconds = 60 * minutes
    rows = {}
    calm = {seed: run_churn(instance, seconds, 0.0, seed) for seed in seeds}
    for share in CHURN:
        done = {seed: run_churn(instance, seconds, share, seed) for seed in calm}
        visits = [max(one.accumulated.values()) / max(1, min(one.accumulated.values())) for one in done.values()]
        rows[f"{share:.0%} a minute"] = {
            "share_of_ideal": round(statistics.median(share_of_ideal(done[seed], calm[seed]) for seed in calm), 3),
            "share_of_ideal_worst": round(min(share_of_ideal(done[seed], calm[seed]) for seed in calm), 3),
            "alive": round(statistics.median(one.alive_share for one in done.values()), 3),
            "completed": sum(one.completed for one in done.values()),
            "abandoned": sum(one.abandoned for one in done.values()),
            "repaired": sum(one.repaired for one in done.values()),
            "duplicated": sum(one.duplicated for one in done.values()),
            "most_over_least_visits": round(statistics.median(visits), 3),
        }
    calm_completed = sum(one.completed for one in calm.values())
    return {"instance": instance.name, "minutes": minutes, "calm_completed": calm_completed, "rows": rows}


def planning(
    instances: Iterable[Instance], regions: Regions, sizes: Iterable[int], seeds: Iterable[int]
) -> dict[str, Any]:
    """All CPU times; an instance from a file is planned as often as there are seeds."""
    report("planning")
    small = {instance.name: whole_plans([instance for _ in seeds]) for instance in instances}
    small |= small_swarms(regions, seeds)
    by_size = []
    for size in sizes:
        report(f"planning for {size} peers")
        by_size.append(swarm_of_size(size, regions, seeds))
    return {"whole_plans": small, "by_size": by_size, "growth_in_replicas": growth_in_replicas(regions, seeds)}


def report(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--instances", type=Path, nargs="+", default=[SMALL_DATA / "twenty_peers.json"])
    parser.add_argument("--regions", type=Path, default=SMALL_DATA / "four_regions.json")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds medians are over")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--attempts", type=int, default=1000, help="changes that the central search tries")
    parser.add_argument("--minutes", type=float, default=5.0, help="virtual minutes of churn")
    options = parser.parse_args()
    instances = [read_instance(path) for path in options.instances]
    regions = regions_from_json(json.loads(options.regions.read_text(encoding="utf-8")))
    seeds = range(1, options.seeds + 1)
    everyone = [*instances, *(uneven(instance, UNEVEN_SEED) for instance in instances)]
    result = {
        "arms": [decompose(instance, options.attempts, report) for instance in everyone],
        "planning": planning(instances, regions, options.sizes, seeds),
        "deaths": [after_each_death(instance, seeds) for instance in everyone],
        "churn": [churn(instance, options.minutes, seeds) for instance in everyone],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
