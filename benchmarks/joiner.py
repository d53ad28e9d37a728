"""What a newcomer costs the others, and how soon it contributes: one more replica of a stage.

A local swarm of real processes: a data node, and replicas of one stage with a state of some tens of MB. The swarm has
the first half of the machine's cores and newcomers have the rest (with one core, or without `taskset`, all share). The
cost is what the others lose of their tokens per second while the state is in flight (`transfer`) and while the newcomer
starts (`starting`), over the window before. A transfer takes less than a second here: `transfer_steps` says how many
steps the figure is made of.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import Found, run_of, tell
from node.averaging.anchor.shared_vector import layout_of
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import Deployment, Deployments, LocalSwarmOptions, all_local
from node.model.shapes import parameter_shapes
from node.observability.events import CatchingUp, CaughtUp, Event, NodeStatus, RoundCommitted, Step
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.types import ModuleId

STAGE = 1
ROUNDS_BEFORE = 3
PATIENCE_S = 240.0
TARGETS = {"slower_while_transfer": 0.10, "rounds_until_member": 2}


def joiner_run(hidden: int, blocks: int) -> Manifest:
    """Steps of one small microbatch, so that even a short transfer has several."""
    size = {"hidden": hidden, "sequence": 64, "heads": 8, "feed_forward": hidden * 11 // 4}
    own = {"rows": 1, "microbatches": 1, "staleness": 4, "inner_steps": 30}
    return run_of("joiner", [0, blocks], seed=3, model={"kv_heads": 4}, **size, **own)


@dataclass(slots=True)
class Watch:
    """All events of a swarm, with their times of arrival."""

    swarm: LocalSwarm
    seen: list[tuple[float, Event]] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def start_one(self) -> str:
        """Starts one more replica of the stage and returns its peer id."""
        index = self.swarm.start_peer(STAGE)
        return self.swarm.peers[index].peer

    async def run(self) -> None:
        async for event in self.swarm.events():
            async with self.changed:
                self.seen.append((time.perf_counter(), event))
                self.changed.notify_all()

    async def until(self, what: str, met: Callable[[], bool]) -> None:
        tell(f"waiting for {what}")
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(met)

    def steps(self, begin: float, end: float) -> list[float]:
        """Tokens per second of each step that ended between two times."""
        found = [(at, event.tokens) for at, event in self.seen if isinstance(event, Step)]
        pairs = itertools.pairwise(found)
        return [(later[1] - now[1]) / (later[0] - now[0]) for now, later in pairs if begin < later[0] <= end > now[0]]

    def tokens_per_s(self, begin: float, end: float) -> float:
        return statistics.median(self.steps(begin, end) or [0.0])

    def first(self, peer: str, kind: type[Found]) -> tuple[float, Found] | None:
        """The first event of a kind from a peer, and its time."""
        return next(((at, e) for at, e in self.seen if isinstance(e, kind) and getattr(e, "peer", "") == peer), None)

    def rounds(self) -> dict[int, tuple[float, tuple[str, ...]]]:
        """When each round of the stage was first known to be committed, and its contributors."""
        found: dict[int, tuple[float, tuple[str, ...]]] = {}
        for at, event in self.seen:
            if isinstance(event, RoundCommitted) and event.module == str(ModuleId(STAGE)):
                found.setdefault(event.round, (at, event.contributors))
        return found

    def contributes(self, peer: str) -> bool:
        return any(peer in members for _, members in self.rounds().values())


async def join_one(watch: Watch, window_s: float) -> dict[str, Any]:
    """One newcomer, from the start of its process to some time after its first round."""
    await asyncio.sleep(window_s)
    started = time.perf_counter()
    peer = watch.start_one()
    await watch.until("the newcomer's first round", lambda: watch.contributes(peer))
    in_round = time.perf_counter()
    await asyncio.sleep(window_s)
    begun, caught_up, joined = (watch.first(peer, kind) for kind in (CatchingUp, CaughtUp, NodeStatus))
    assert begun
    assert caught_up
    assert joined
    transfer = watch.steps(begun[0], caught_up[0])
    spans = {
        "before": (started - window_s, started),
        "starting": (started, begun[0]),
        "whole": (started, in_round),
        "after": (in_round, in_round + window_s),
    }
    rates = {name: watch.tokens_per_s(*span) for name, span in spans.items()}
    rates["transfer"] = statistics.median(transfer) if transfer else 0.0
    after = [members for at, members in watch.rounds().values() if at > caught_up[0]]
    return {
        "joining_to_caught_up_s": round(caught_up[0] - joined[0], 2),
        "transfer_s": round(caught_up[1].seconds, 3),
        "transfer_bytes": sum(caught_up[1].donor_bytes),
        "donors": sum(amount > 0 for amount in caught_up[1].donor_bytes),
        "caught_up_to_round_s": round(in_round - caught_up[0], 2),
        "rounds_until_member": 1 + next(number for number, members in enumerate(after) if peer in members),
        "tokens_per_s": {name: round(rate) for name, rate in rates.items()},
        "transfer_steps": len(transfer),
        "slower_while_transfer": round(1 - rates["transfer"] / rates["before"], 3),
        "slower_while_starting": round(1 - rates["starting"] / rates["before"], 3),
    }


def part_cores(swarm: int) -> Deployments:
    """Binds this process, and with it the swarm's first nodes, to half of the cores, and later nodes to the others."""
    taskset = shutil.which("taskset")
    cores = sorted(os.sched_getaffinity(0)) if taskset is not None else []
    if len(cores) < 2:
        return all_local
    os.sched_setaffinity(0, cores[: len(cores) // 2])
    others = ",".join(map(str, cores[len(cores) // 2 :]))
    newcomer = Deployment(command=(str(taskset), "-c", others, sys.executable, "-P", "-m", "node"))
    return lambda index: Deployment() if index < swarm else newcomer


async def measure(options: Any) -> dict[str, Any]:
    manifest = joiner_run(options.hidden, options.blocks)
    swarm_options = LocalSwarmOptions(peers=1 + options.replicas, threads=1)
    async with LocalSwarm(manifest, swarm_options, deployments=part_cores(swarm_options.peers)) as swarm:
        watch = Watch(swarm)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch.run())
            await watch.until(f"{ROUNDS_BEFORE} rounds", lambda: len(watch.rounds()) >= ROUNDS_BEFORE)
            one = await join_one(watch, options.window)
            swarm.request_stop()
    layout = layout_of(parameter_shapes(manifest, ModuleId(STAGE)), manifest.training.fragments)
    state_mb = round(8 * layout.elements / 1e6, 1)
    return {"state_mb": state_mb, "replicas": options.replicas, "one": one, "targets": TARGETS}


if __name__ == "__main__":
    quick = {"replicas": 2, "hidden": 256, "blocks": 2, "window": 5.0}
    kit.run(__doc__, measure, quick, replicas=3, hidden=512, blocks=2, window=15.0)
