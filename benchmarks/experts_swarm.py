"""Tokens per second and bytes a token of a swarm of 2x2 experts, over those of a dense run with two replicas a stage on
as many peers.

    python benchmarks/experts_swarm.py [--rounds 3] [--seconds 20] [--json]

Five real nodes on this machine, one thread each, behind links of 20 ms (`lab`). Arms in turns, from the first step
on; medians over the rounds. Bytes are all that the peers send: hidden states, gradients, rounds and the directory.

How even the experts' work is, is counted from the data node's log: of any 32 microbatches in a row, the most visits of
a module over the mean of its stage. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lab.run import Run
from lab.scenario import scenario_from_table
from node.observability.event_json import event_from_json
from node.observability.events import Completed

ARMS: Final = {"dense": ("", ""), "experts": ('route_from = "python-stdlib"', "experts = 2")}
"""What the scenario and its stages say."""
BARS: Final = {"tokens_per_s": 0.9, "bytes_a_token": 1.02, "unevenness": 1.25}
"""Of experts over dense: at least, at most; of a module's visits over the mean: at most."""
WINDOW: Final = 32
SCENARIO: Final = """
name = "{arm}"
seed = {seed}
duration = {seconds}
held_out = 0
{routing}

[manifest.model]
hidden = 64
heads = 4
kv_heads = 4
feed_forward = 128
sequence = 128

[manifest.stages]
blocks = [0, 1, 1]
{experts}

[manifest.training]
rows = 4
inner_tokens = 4096
inner_steps = 16
staleness = 1

[[group]]
name = "peers"
peers = 5
profile = "none"
latency_ms = 20
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="The last line alone.")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for number in range(arguments.rounds):
        for arm in list(ARMS)[:: 1 if number % 2 == 0 else -1]:
            found[arm].append(measured(arm, number + 1, arguments.seconds))
            if not arguments.json:
                print(f"{arm}, round {number + 1}: {found[arm][-1]}", flush=True)
    print(json.dumps(summed_up(found)))


def measured(arm: str, seed: int, seconds: int) -> dict[str, float]:
    """One run of one arm."""
    with tempfile.TemporaryDirectory(prefix="experts-") as path:
        routing, experts = ARMS[arm]
        table = tomllib.loads(SCENARIO.format(arm=arm, seed=seed, seconds=seconds, routing=routing, experts=experts))
        run = Run(scenario_from_table(table), Path(path), lambda line: None, asyncio.Event())
        outcome = asyncio.run(run.to_the_end())
        if outcome.objections:
            raise SystemExit(f"{arm}: {outcome.objections}")
        return {
            "tokens_per_s": round(outcome.tokens_per_s, 1),
            "bytes_a_token": round(sum(outcome.traffic("up").values()) / outcome.tokens, 2),
            "unevenness": round(unevenness(modules_of(run.logs)), 3),
        }


def modules_of(logs: Path) -> list[tuple[str, ...]]:
    """The modules that each completed microbatch has visited, in the order of completion."""
    events = (event_from_json(line) for path in sorted(logs.glob("*.jsonl")) for line in path.read_bytes().splitlines())
    return [tuple(hop.partition("@")[0] for hop in event.hops) for event in events if isinstance(event, Completed)]


def unevenness(visited: Sequence[tuple[str, ...]]) -> float:
    """Over all stages and all WINDOW microbatches in a row, the largest of the most visits of a module over the mean of
    its stage's modules. 1 where each stage has one module, or there were too few microbatches."""
    every = sorted({module for modules in visited for module in modules})
    stages = {module.partition(".")[0] for module in every}
    ratios = []
    for start in range(len(visited) - WINDOW + 1):
        counts = Counter(module for modules in visited[start : start + WINDOW] for module in modules)
        for stage in stages:
            of_stage = [counts[module] for module in every if module.partition(".")[0] == stage]
            ratios.append(max(of_stage) * len(of_stage) / max(1, sum(of_stage)))
    return max(ratios, default=1.0)


def summed_up(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of each arm, and the figures that the bars are for."""
    arms = {arm: {key: statistics.median(run[key] for run in runs) for key in BARS} for arm, runs in found.items()}
    ratios = {key: round(arms["experts"][key] / arms["dense"][key], 3) for key in ("tokens_per_s", "bytes_a_token")}
    ratios["unevenness"] = arms["experts"]["unevenness"]
    return {"rounds": len(found["dense"]), "arms": arms, "figures": ratios, "bars": BARS}


if __name__ == "__main__":
    main()
