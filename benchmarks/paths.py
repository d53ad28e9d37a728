"""Path choice in virtual time: the node's planner against other rules, over unlike problems.

    python benchmarks/paths.py [--problems 22] [--instances FILE...] [--seeds 1] [--seconds 300]
        [--arms ours swarm greedy] [--kill 0.2]

Each run is `skipstone simulate`: the node's own machines on the computers and links of a problem, in both regimes
(staleness 0: steps wait for each other; 1: data nodes launch freely). Prints one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lab.simulate import Simulated, read_instance, simulated
from lab.world.arms import OURS, RULES
from lab.world.problems import problem

REGIMES: Final = (0, 1)


def spread(run: Simulated) -> float:
    """The most visited stage's visits less the least visited one's, over the mean."""
    return (run.visits_most - run.visits_least) / max(1e-9, statistics.fmean(run.visits.values()))


def compared(runs: Sequence[Simulated]) -> dict[str, Any]:
    """Our pace over each other arm's: geometric mean and least, by regime; and the mean spread of visits."""
    found: dict[str, Any] = {}
    for arm in dict.fromkeys(run.arm for run in runs):
        for regime in REGIMES:
            mine = {(r.instance, r.seed): r for r in runs if (r.arm, r.staleness) == (OURS, regime)}
            theirs = {(r.instance, r.seed): r for r in runs if (r.arm, r.staleness) == (arm, regime)}
            ratios = [mine[key].completed / max(1, theirs[key].completed) for key in mine.keys() & theirs.keys()]
            if ratios:
                found[f"{arm}, staleness {regime}"] = {
                    "ours_over_it": round(statistics.geometric_mean(max(1e-9, ratio) for ratio in ratios), 4),
                    "least": round(min(ratios), 4),
                    "spread": round(statistics.fmean(spread(run) for run in theirs.values()), 4),
                }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=22, help="generated problems: 1 to so many")
    parser.add_argument("--instances", type=Path, nargs="*", default=[], help="problems as JSON")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300.0, help="virtual seconds of each run")
    parser.add_argument("--arms", nargs="+", default=list(RULES))
    parser.add_argument("--kill", type=float, default=0.0, help="share of the peers that die each minute")
    options = parser.parse_args()
    everything = [*map(read_instance, options.instances), *map(problem, range(1, options.problems + 1))]
    runs = []
    for one in everything:
        for seed in range(1, options.seeds + 1):
            for regime in REGIMES:
                for arm in options.arms:
                    runs.append(simulated(one, arm, options.seconds, seed, regime, options.kill))
                    print(f"{one.name}, {arm}, staleness {regime}: {runs[-1].completed}", file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "paths", "compared": compared(runs), "runs": [asdict(run) for run in runs]}))


if __name__ == "__main__":
    main()
