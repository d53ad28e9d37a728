"""What one replica of three that lies costs the others: the same run to the same step with each kind of lie, and
without.

    python -m benchmarks.liars --kinds million mean-elsewhere forged-rosters tokens steps last-number spoils

Four nodes on loopback: a data node, two honest replicas of stage 1, and one more that is honest or plays a part of
`tests.security.liar`. At the last step it is killed, and the held-out loss of what the others are left with is measured
through the swarm. Arms take turns, `honest` first and last, and their medians are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place
from node.network.client import query_evaluation
from node.observability.events import Event, Note, ReplicaAccused, RoundCommitted, Step
from tests.e2e.small_run import small_run, write_text
from tests.security.liar import LIES

HONEST = "honest"
LIAR = 3
LIMIT_S = 300.0
"""For one run: what a lie stalls for so long, it has ended."""
HELD_OUT = 64
"""Microbatches."""
SETTLES_S = 2.0
"""After the liar was killed, so that what was under way through it is done."""
SCHEDULE = {"kind": "cosine", "warmup_steps": 5, "total_steps": 5000, "final_ratio": 0.0}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run. Losses in nats per token; `training` is the median of the last quarter of all steps, the liar's
    microbatches included."""

    kind: str
    held_out: float
    training: float
    seconds: float
    rounds: int
    """Held by both honest replicas."""
    accusers: int
    """Honest replicas that accused the liar."""
    left_out: int
    """How often the data node planned without it for a while."""


async def one_run(kind: str, steps: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        manifest = small_run(
            write_text(Path(folder) / "text"), blocks=(0, 2), inner_steps=5, staleness=1, schedule=SCHEDULE
        )
        place = Place(command=(sys.executable, "-P", "-m", "tests.security.liar", kind))
        options = LocalSwarmOptions(peers=LIAR + 1, threads=1)
        async with LocalSwarm(manifest, options, places=lambda index: place if index == LIAR else Place()) as swarm:
            honest = {peer.peer for peer in swarm.peers if peer.stage == 1 and peer.index != LIAR}
            liar = next(peer.peer for peer in swarm.peers if peer.index == LIAR)
            began, seen = time.monotonic(), list[Event]()
            async with asyncio.timeout(LIMIT_S):
                async for event in swarm.events():
                    seen.append(event)
                    if isinstance(event, Step) and event.step >= steps:
                        break
            seconds = time.monotonic() - began
            swarm.kill(LIAR)
            await asyncio.sleep(SETTLES_S)
            answer = await query_evaluation(swarm.link, HELD_OUT)
            await swarm.stop()
    return _outcome(kind, seen, honest, liar, Outcome(kind, float(answer["loss"]), 0.0, seconds, 0, 0, 0))


def _outcome(kind: str, seen: list[Event], honest: set[str], liar: str, outcome: Outcome) -> Outcome:
    losses = [event.loss for event in seen if isinstance(event, Step)]
    rounds = [
        {event.round for event in seen if isinstance(event, RoundCommitted) and event.peer == peer} for peer in honest
    ]
    accusers = {
        event.peer
        for event in seen
        if isinstance(event, ReplicaAccused) and event.accused == liar and event.peer in honest
    }
    left_out = sum(isinstance(event, Note) and "left out of paths" in event.message for event in seen)
    training = median(losses[-len(losses) // 4 :])
    return replace(
        outcome, training=training, rounds=len(set.intersection(*rounds)), accusers=len(accusers), left_out=left_out
    )


def median_of(outcomes: list[Outcome], kind: str, figure: str) -> float:
    return median(getattr(outcome, figure) for outcome in outcomes if outcome.kind == kind)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=sorted(set(LIES) - {HONEST}), required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each kind")
    chosen = parser.parse_args()
    outcomes: list[Outcome] = []
    for kind in [HONEST, *(kind for _ in range(chosen.rounds) for kind in [*chosen.kinds, HONEST])]:
        outcomes.append(await one_run(kind, chosen.steps))
        print(json.dumps(asdict(outcomes[-1])), file=sys.stderr, flush=True)
    ratios = {
        kind: {
            figure: median_of(outcomes, kind, figure) / median_of(outcomes, HONEST, figure)
            for figure in ("held_out", "training", "seconds")
        }
        for kind in chosen.kinds
    }
    print(json.dumps({"steps": chosen.steps, "runs": [asdict(one) for one in outcomes], "over_honest": ratios}))


if __name__ == "__main__":
    asyncio.run(main())
