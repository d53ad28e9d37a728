"""Tokens per second of a swarm against one process: same manifest, same cores, in turn.

    python benchmarks/throughput.py [--steps N] [--rounds N]

The model is large enough that computing dominates. Both sides get all cores: one process as torch's threads, the swarm
as one process a stage. Rates are between the first and the last step, so that neither start-up counts. Prints one JSON
object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import NodeSummary, Step
from protocol.manifest.manifest import Manifest, manifest_from_table

TARGET = 0.8


def large_run() -> Manifest:
    """Eight blocks of 512 in two stages behind a data node that has only embedding and head."""
    return manifest_from_table(
        {
            "protocol": 2,
            "name": "throughput",
            "seed": 5,
            "model": {
                "vocabulary": 257,
                "hidden": 512,
                "heads": 8,
                "kv_heads": 4,
                "feed_forward": 1408,
                "sequence": 256,
            },
            "stages": {"blocks": (0, 4, 4)},
            "training": {"rows": 4, "inner_tokens": 16384, "staleness": 1},
        }
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one side."""

    tokens_per_s: float
    split: dict[str, float]
    """Of the swarm: each kind of time as a share of the peers' wall time."""


def rate(times: list[tuple[float, int]]) -> float:
    """Tokens per second between the first and the last step."""
    (began, before), (ended, after) = times[0], times[-1]
    return (after - before) / (ended - began)


def solo(manifest: Manifest, steps: int) -> Measured:
    """In a process of its own, so that it finds the machine as the swarm does."""
    import subprocess

    script = (
        "import sys, json, time, torch\n"
        "from benchmarks_throughput import large_run\n"
        "from node.observability.event_json import event_to_json\n"
        "from node.solo.trainer import train_solo\n"
        f"torch.set_num_threads({os.cpu_count()})\n"
        f"train_solo(large_run(), steps={steps}, device=torch.device('cpu'),"
        " on_event=lambda e: print(json.dumps([time.perf_counter(), json.loads(event_to_json(e))]), flush=True))\n"
    ).replace("benchmarks_throughput", Path(__file__).stem)
    folder = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(folder.parent)))}
    output = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, stdout=subprocess.PIPE, check=True
    ).stdout
    lines = [json.loads(line) for line in output.splitlines()]
    return Measured(rate([(at, event["tokens"]) for at, event in lines if event["event"] == "step"]), {})


async def swarm(manifest: Manifest, steps: int) -> Measured:
    """One process a stage on this machine; the cores are shared as `skipstone up` shares them."""
    times: list[tuple[float, int]] = []
    summaries: list[NodeSummary] = []
    options = LocalSwarmOptions(peers=manifest.stages.count, steps=steps, threads=1)
    async with LocalSwarm(manifest, options) as nodes:
        async for event in nodes.events():
            if isinstance(event, Step):
                times.append((time.perf_counter(), event.tokens))
            elif isinstance(event, NodeSummary):
                summaries.append(event)
            if nodes.progress.is_over:
                nodes.request_stop()
    return Measured(rate(times), _split(summaries))


def _split(summaries: list[NodeSummary]) -> dict[str, float]:
    """Of the peers that compute blocks: sending overlaps with computing, so the shares may add up to more than 1."""
    busy = [summary.busy_s for summary in summaries if summary.module != "0.0"]
    whole = sum(b.compute + b.idle_work + b.wait for b in busy)
    kinds = ("compute", "idle_work", "codec", "wire", "wait")
    return {kind: round(sum(getattr(b, kind) for b in busy) / whole, 4) for kind in kinds}


def main() -> None:
    """Alternates the two sides and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    manifest = large_run()
    alone: list[Measured] = []
    together: list[Measured] = []
    for number in range(chosen.rounds):
        alone.append(solo(manifest, chosen.steps))
        together.append(asyncio.run(swarm(manifest, chosen.steps)))
        print(
            f"round {number + 1} of {chosen.rounds}: solo {alone[-1].tokens_per_s:.0f},"
            f" swarm {together[-1].tokens_per_s:.0f} tokens/s",
            file=sys.stderr,
        )
    middle = sorted(together, key=lambda m: m.tokens_per_s)[len(together) // 2]
    ratio = statistics.median(t.tokens_per_s / a.tokens_per_s for t, a in zip(together, alone, strict=True))
    report = {
        "solo_tokens_per_s": statistics.median(m.tokens_per_s for m in alone),
        "swarm_tokens_per_s": middle.tokens_per_s,
        "ratio": ratio,
        "target": TARGET,
        "split": middle.split,
        "peers": manifest.stages.count,
        "steps": chosen.steps,
        "rounds": chosen.rounds,
        "cores": os.cpu_count(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
