"""Training's pace during rounds over its pace between them, in a real swarm of nodes with emulated devices.

    python benchmarks/rounds_live.py [--seconds 150] [--inner-steps 6] [--codec int8] [--forward-ms 200]

Real processes, sockets and TLS on this machine, but every node is `tests/e2e/emulated.py`: a data node, and four
replicas of one stage of ten million parameters (40 MB), whose visit takes `--forward-ms` out and twice that back; each
link carries 100 Mbit/s each way. Rounds are real: agreement, snapshot, exchange, outer step, carrying over.

A round lasts from the moment the first replica has its snapshot until the last one stands on the new anchor, and a
visit longer, for what came home late because of it. Counted are microbatches that come home to the data node.
`pace_ratio` is their rate during rounds over that between rounds, all rounds together after the first, `ratios` that of
each round over the time between it and the next. `of_the_emulated` is the pace over that of four devices which never
wait: where it is far below 1, the machine had no time for five nodes, and the ratio says little.

Prints one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place
from node.observability.events import RoundCommitted
from protocol.manifest.manifest import Manifest, manifest_from_table
from tests.e2e.emulated import Network, Spec
from tests.e2e.flight_record import HOME, read_flights
from tests.e2e.small_run import write_text

REPLICAS: Final = 4
BLOCKS: Final = (0, 3)
ROW: Final = 32
PER_STEP: Final = 4
WINDOW: Final = 12
BYTES_PER_S: Final = 12.5e6
DATA_FORWARD_S: Final = 0.003
BACKWARD_FACTOR: Final = 2.0
STARTING_S: Final = 300.0

Span = tuple[float, float]


def manifest_of(text: Path, inner_steps: int, codec: str) -> Manifest:
    """A stage of ten million parameters, and microbatches so short that computing them takes little here."""
    return manifest_from_table(
        {
            "protocol": 2,
            "name": "rounds",
            "seed": 11,
            "model": {
                "vocabulary": 257,
                "hidden": 512,
                "heads": 8,
                "kv_heads": 8,
                "feed_forward": 1536,
                "sequence": ROW,
            },
            "stages": {"blocks": BLOCKS},
            "data": {"source": f"path:{text}", "held_out": 0.1},
            "codecs": {"pseudo_gradients": codec},
            "training": {
                "rows": 1,
                "inner_tokens": ROW * PER_STEP,
                "inner_steps": inner_steps,
                "round_seconds": 1e6,
                "staleness": 4,
                "inner": {"learning_rate": 1e-4},
                "schedule": {"kind": "constant", "warmup_steps": 5, "total_steps": 100_000},
            },
        }
    )


async def run(folder: Path, manifest: Manifest, forward_s: float, seconds: float) -> tuple[list[float], list[Span]]:
    """When microbatches came home, and when rounds were, by the monotonic clock.

    Raises:
        TimeoutError: no round has been held.
    """
    network, flights = folder / "network.json", folder / "flights.json"

    def place(index: int) -> Place:
        own: dict[str, Any] = {"flights": str(flights), "window": WINDOW} if index == 0 else {}
        spec = Spec(
            forward_s if index else DATA_FORWARD_S,
            str(network),
            backward_factor=BACKWARD_FACTOR,
            bytes_per_s=BYTES_PER_S,
            **own,
        )
        return Place(command=(sys.executable, "-P", "-m", "tests.e2e.emulated", spec.to_json()))

    found: dict[int, Span] = {}
    end: float | None = None
    options = LocalSwarmOptions(peers=1 + REPLICAS, threads=1)
    async with asyncio.timeout(STARTING_S + seconds), LocalSwarm(manifest, options, places=place) as swarm:
        names = {peer.peer: "here" for peer in swarm.peers}
        Network({str(peer): name for peer, name in names.items()}, {"here": {"here": 0.0}}).write(network)
        async for event in swarm.events():
            now = time.monotonic()
            if isinstance(event, RoundCommitted) and event.module != "0.0" and len(event.members) == REPLICAS:
                begun, _ = found.get(event.round, (now, now))
                found[event.round] = min(begun, now - event.seconds), now
                end = now + seconds if end is None else end
                print(f"round {event.round}: {event.seconds:.2f} s, {event.sent_bytes} bytes", file=sys.stderr)
            if end is not None and now >= end:
                swarm.request_stop()
    homes = sorted(mark.at for mark in read_flights(flights) if mark.kind == HOME)
    return homes, [found[number] for number in sorted(found)]


def compare(homes: list[float], rounds: list[Span], visit_s: float) -> dict[str, Any]:
    """The paces. The first round is left out: until then the swarm has not found its pace."""

    def count(begin: float, end: float) -> int:
        return bisect.bisect(homes, end) - bisect.bisect(homes, begin)

    pairs = []
    for (begun, ended), (following, _) in itertools.pairwise(rounds[1:]):
        if following > ended + visit_s:
            late = ended + visit_s
            pairs.append((count(begun, late), late - begun, count(late, following), following - late))
    if not pairs:
        raise RuntimeError("fewer than three rounds, or no time between them: give it more seconds or inner steps")
    within, within_s, between, between_s = (sum(column) for column in zip(*pairs, strict=True))
    full = REPLICAS / visit_s
    return {
        "pace_ratio": round((within / within_s) / (between / between_s), 4),
        "ratios": [round((a / a_s) / (b / b_s), 3) for a, a_s, b, b_s in pairs if b],
        "rounds": len(pairs),
        "median_round_s": round(statistics.median(ended - begun for begun, ended in rounds), 2),
        "share_in_rounds": round(within_s / (within_s + between_s), 3),
        "of_the_emulated": [round(within / within_s / full, 3), round(between / between_s / full, 3)],
        "microbatches": [within, between],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--inner-steps", type=int, default=6)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--forward-ms", type=float, default=200.0)
    chosen = parser.parse_args()
    forward_s = chosen.forward_ms / 1e3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = manifest_of(write_text(folder / "text"), chosen.inner_steps, chosen.codec)
        homes, rounds = asyncio.run(run(folder, manifest, forward_s, chosen.seconds))
    figures = compare(homes, rounds, (1 + BACKWARD_FACTOR) * forward_s)
    print(json.dumps({**figures, "codec": chosen.codec, "forward_ms": chosen.forward_ms}))


if __name__ == "__main__":
    main()
