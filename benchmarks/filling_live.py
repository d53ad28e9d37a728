"""Weight gradients that are put off against those computed at once, in real swarms of nodes with emulated devices.

    python benchmarks/filling_live.py [--latencies 0 20 50 100] [--steps 24] [--part-ms 30]

Real processes, sockets and TLS on this machine, but every node is `tests/e2e/emulated.py`: a data node, and four stages
of one peer each, whose forward, input's gradient and weights' gradients take 30 ms each; links so many ms one way;
steps of 8 microbatches that wait for each other (staleness 0). The two arms run side by side, so that what else the
machine does is the same for both. `ratio` is tokens a second of one over the other, between the first steps and the
last, and `idle_work` the share of the stages' time that went into work that was put off. `benchmarks/filling.py` has
the same without the machine's noise, in virtual time.

Prints one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place
from node.observability.events import NodeSummary, Step
from protocol.manifest.manifest import Manifest
from tests.e2e.emulated import Network, Spec
from tests.e2e.small_run import small_run, write_text

BLOCKS: Final = (0, 1, 1, 1, 1)
PER_STEP: Final = 8
WARM_STEPS: Final = 4
DATA_FORWARD_S: Final = 0.003
PATIENCE_S: Final = 400.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One arm of one setting."""

    tokens_per_s: float
    idle_work: float


def manifest_of(text: Path) -> Manifest:
    """A model so small that computing it costs nothing next to what is emulated, and no rounds."""
    step = small_run(text).microbatch_tokens * PER_STEP
    return small_run(text, blocks=BLOCKS, inner_tokens=step, inner_steps=1_000_000, round_seconds=1e6)


async def arm(folder: Path, text: Path, one_way_s: float, part_s: float, *, puts_off: bool, steps: int) -> Measured:
    """Runs one swarm to its end.

    Raises:
        TimeoutError: it hangs.
    """
    network = folder / f"network {puts_off}.json"

    def place(index: int) -> Place:
        own = {"window": PER_STEP} if index == 0 else {}
        forward_s = part_s if index else DATA_FORWARD_S
        spec = Spec(forward_s, str(network), weights_factor=1.0, puts_off=puts_off, **own)
        return Place(command=(sys.executable, "-P", "-m", "tests.e2e.emulated", spec.to_json()))

    times: list[tuple[float, int]] = []
    summaries: list[NodeSummary] = []
    options = LocalSwarmOptions(peers=len(BLOCKS), steps=steps, threads=1)
    async with asyncio.timeout(PATIENCE_S), LocalSwarm(manifest_of(text), options, places=place) as swarm:
        names = {peer.peer: f"region {peer.index}" for peer in swarm.peers}
        apart = {one: dict.fromkeys(names.values(), one_way_s) for one in names.values()}
        Network({str(peer): name for peer, name in names.items()}, apart).write(network)
        async for event in swarm.events():
            if isinstance(event, Step):
                times.append((time.perf_counter(), event.tokens))
            elif isinstance(event, NodeSummary) and event.module != "0.0":
                summaries.append(event)
            if swarm.progress.is_over:
                swarm.request_stop()
    (begun, before), (ended, after) = times[WARM_STEPS], times[-1]
    shares = [each.busy_s.idle_work / max(1e-9, _whole(each)) for each in summaries]
    return Measured((after - before) / (ended - begun), statistics.mean(shares))


def _whole(summary: NodeSummary) -> float:
    return summary.busy_s.compute + summary.busy_s.idle_work + summary.busy_s.wait


async def compare(one_way_ms: int, part_s: float, steps: int) -> dict[str, Any]:
    """Both arms of one setting, side by side."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_text(folder / "text")
        at_once, later = await asyncio.gather(
            *(arm(folder, text, one_way_ms / 1e3, part_s, puts_off=puts_off, steps=steps) for puts_off in (False, True))
        )
    return {
        "ratio": later.tokens_per_s / at_once.tokens_per_s,
        "tokens_per_s": [at_once.tokens_per_s, later.tokens_per_s],
        "idle_work": [at_once.idle_work, later.idle_work],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--latencies", type=int, nargs="+", default=[0, 20, 50, 100])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--part-ms", type=float, default=30.0)
    chosen = parser.parse_args()
    found = {}
    for one_way_ms in chosen.latencies:
        found[str(one_way_ms)] = asyncio.run(compare(one_way_ms, chosen.part_ms / 1e3, chosen.steps))
        print(f"{one_way_ms} ms: {found[str(one_way_ms)]}", file=sys.stderr, flush=True)
    print(json.dumps({"live": found, "steps": chosen.steps, "part_ms": chosen.part_ms}))


if __name__ == "__main__":
    main()
