"""Codecs over links of 20, 100 and 1000 Mbit/s: every fixed one and the choice for each link, in real swarms.

    python benchmarks/codecs_live.py [--mbit 20 100 1000] [--seconds 40] [--rounds 1] [--policies none bf16 int8
    int4 adaptive]

Real processes, sockets and TLS; computing and links take the time that they would take on emulated machines
(`tests/e2e/emulated.py`): here all alike, four of them in a row with a data node, each link with this rate both ways
and 10 ms of delay. The model is computed truly, with the codec in it. A policy is a codec for all hidden states and
their gradients, or `adaptive`: what the node chooses within the run's limits (INT4 for both). Policies take turns; each
has a swarm of its own. `bytes_per_token` counts all that the nodes send meanwhile. Prints one JSON object; progress
goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.live_swarm import all_serve, events_in, tell
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place
from node.observability.events import Completed
from protocol.manifest.manifest import Manifest, manifest_from_table
from tests.e2e.emulated import Network, Spec, status_of
from tests.e2e.small_run import write_text

PEERS: Final = 4
"""A data node and three stages."""
ONE_WAY_S: Final = 0.01
FORWARD_S: Final = 0.15
"""So a visit takes 0.45 s: on two cores, the four peers really compute in less."""
ROWS, TOKENS, HIDDEN = 8, 256, 256
PER_STEP: Final = 6
LIMIT: Final = "int4"
ADAPTIVE: Final = "adaptive"
POLICIES: Final = ("none", "bf16", "int8", "int4", ADAPTIVE)


@dataclass(slots=True)
class StepClock:
    """When each data node was first seen to have ended which step, by index."""

    ended: dict[int, list[tuple[float, int]]] = field(default_factory=dict)

    def look(self, swarm: LocalSwarm) -> None:
        now = time.perf_counter()
        for index, peer in swarm.progress.peers.items():
            if peer.stage == 0 and peer.reported_steps:
                seen = self.ended.setdefault(index, [])
                if not seen or seen[-1][1] < peer.reported_steps:
                    seen.append((now, peer.reported_steps))

    def steps_per_s(self) -> float:
        """From the first end of a step to the last, each data node by its own."""
        spans = [(seen[1], seen[-1]) for seen in self.ended.values() if len(seen) > 2]
        return sum((last - first) / (later - before) for (before, first), (later, last) in spans)


@dataclass(slots=True)
class Result:
    """Of one policy on links of one rate."""

    tokens_per_s: list[float] = field(default_factory=list)
    bytes_per_token: list[float] = field(default_factory=list)
    chosen: set[str] = field(default_factory=set)
    failures: int = 0

    def table(self) -> dict[str, Any]:
        return {
            "tokens_per_s": round(statistics.median(self.tokens_per_s), 1),
            "bytes_per_token": round(statistics.median(self.bytes_per_token), 1),
            "chosen": sorted(self.chosen),
            "failures": self.failures,
        }


def run_of(text: Path, limit: str) -> Manifest:
    """Hidden states of 2 MiB; every peer has one block."""
    tokens = ROWS * TOKENS
    return manifest_from_table(
        {
            "protocol": 2,
            "name": "links",
            "seed": 5,
            "model": {
                "vocabulary": 257,
                "hidden": HIDDEN,
                "heads": 4,
                "kv_heads": 4,
                "feed_forward": HIDDEN,
                "sequence": TOKENS,
            },
            "stages": {"blocks": (0, 1, 1, 1)},
            "data": {"source": f"path:{text}", "held_out": 0.1},
            "training": {
                "rows": ROWS,
                "inner_tokens": PER_STEP * tokens,
                "inner_steps": 1_000_000,
                "round_seconds": 1e6,
                "staleness": 2,
            },
            "codecs": {"activations": limit, "gradients": limit},
        }
    )


async def observe(policy: str, mbit: float, options: argparse.Namespace, folder: Path, result: Result) -> None:
    """One swarm, from its start to its end."""
    limit = LIMIT if policy == ADAPTIVE else policy
    manifest, network = run_of(write_text(folder / "text"), limit), folder / "network.json"

    def place(index: int) -> Place:
        codec = None if policy == ADAPTIVE else policy
        counts = str(folder / f"sent-{index}")
        spec = Spec(FORWARD_S, str(network), bytes_per_s=mbit * 1e6 / 8, codec=codec, counts=counts)
        return Place(command=(sys.executable, "-P", "-m", "tests.e2e.emulated", spec.to_json()))

    told = LocalSwarmOptions(peers=PEERS, threads=1, log_dir=folder)
    clock = StepClock()
    async with LocalSwarm(manifest, told, places=place) as swarm:
        Network({peer.peer: "here" for peer in swarm.peers}, {"here": {"here": ONE_WAY_S}}).write(network)
        await all_serve(swarm)
        await asyncio.sleep(options.settle)
        sent, done = sent_bytes(folder), completed(folder)
        await watch(swarm, clock, options.seconds)
        tokens = (completed(folder) - done) * manifest.microbatch_tokens
        result.bytes_per_token.append((sent_bytes(folder) - sent) / max(1, tokens))
        result.chosen |= chosen_in(await status_of(str(swarm.link), network))
        await swarm.stop()
    result.failures += sum(end.exit_code != 0 for end in swarm.ends.values())
    result.tokens_per_s.append(clock.steps_per_s() * PER_STEP * manifest.microbatch_tokens)


def sent_bytes(folder: Path) -> int:
    """By all nodes, so far."""
    return sum(int(file.read_text()) for file in folder.glob("sent-*") if file.suffix != ".part")


def completed(folder: Path) -> int:
    """Microbatches that have come home so far."""
    return sum(isinstance(event, Completed) for event in events_in(sorted(folder.glob("*.jsonl"))))


async def watch(swarm: LocalSwarm, clock: StepClock, seconds: float) -> None:
    """Looks at the ends of steps for so long."""
    until = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until:
        clock.look(swarm)
        await asyncio.sleep(0.01)


def chosen_in(status: dict[str, Any]) -> set[str]:
    """Kind of traffic and codec of all links, as the nodes say."""
    links = [
        link for peer in status["peers"] if peer["answered"] for link in peer["answered"]["codecs"]["links"].values()
    ]
    kinds = ("activations", "gradients")
    return {f"{kind}: {link[kind]['codec']}" for link in links for kind in kinds if kind in link}


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All policies in turn on links of each rate, as many rounds as asked for."""
    results = {mbit: {policy: Result() for policy in options.policies} for mbit in options.mbit}
    for number in range(1, options.rounds + 1):
        for mbit, policies in results.items():
            for policy, result in policies.items():
                here = folder / f"{number}-{mbit:g}-{policy}"
                here.mkdir()
                await observe(policy, mbit, options, here, result)
                now = result.table()
                tell(
                    f"round {number}, {mbit:g} Mbit/s, {policy}: {result.tokens_per_s[-1]:.0f} tokens/s,"
                    f" {now['bytes_per_token']:.0f} bytes/token {now['chosen'] if policy == ADAPTIVE else ''}"
                )
    links = [
        {"mbit_per_s": mbit, "policies": {p: r.table() for p, r in policies.items()}, **compared(policies)}
        for mbit, policies in results.items()
    ]
    return {
        "benchmark": "codecs_live",
        "hidden_state_bytes": 4 * ROWS * TOKENS * HIDDEN,
        "visit_s": 3 * FORWARD_S,
        "links": links,
    }


def compared(policies: dict[str, Result]) -> dict[str, Any]:
    """The adaptive policy against the best fixed one."""
    fixed = {name: statistics.median(r.tokens_per_s) for name, r in policies.items() if name != ADAPTIVE}
    if ADAPTIVE not in policies or not fixed:
        return {}
    best = max(fixed, key=fixed.__getitem__)
    ratio = statistics.median(policies[ADAPTIVE].tokens_per_s) / fixed[best]
    return {"best_fixed": best, "adaptive_over_best_fixed": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[20.0, 100.0, 1000.0], help="of each link, each way")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=40.0, help="that each swarm is measured")
    parser.add_argument("--settle", type=float, default=15.0, help="seconds before that, after all nodes serve")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(options, Path(folder)))))


if __name__ == "__main__":
    main()
