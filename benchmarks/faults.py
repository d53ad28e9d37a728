"""What rounds do when peers die or freeze, and when the network falls apart: real processes, sockets and TLS.

`blows`: a plain member, the leader and the reducer of most is killed (SIGKILL) or frozen (SIGSTOP) when it has received
a percentage of an exchange. `commit_s`: time until all survivors have committed that round, against 5 s plus an
undisturbed round. A frozen replica is woken two rounds later and has to take part again. `partitions`: 2+2 and 3+1
replicas in network namespaces (root and iproute2), apart for five rounds; counts the rounds from the first link across
until all commit one together. `changes`: 8 nodes, two a stage. One is killed, one frozen (longest pause between
microbatches), one joins (until it is used), a stage loses both and gets one (until a microbatch completes), in seconds.
Liars: `python -m tests.security.attack`.
"""

import asyncio
import dataclasses
import itertools
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import median, tell, verdict
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import RoundProgress
from protocol.manifest.manifest import Manifest
from tests.e2e.home_network import split_network, why_no_namespaces
from tests.e2e.parting import THREE_AND_ONE, TWO_AND_TWO, part, parted_run
from tests.e2e.round_watch import LogTail, RoundWatch, watching
from tests.e2e.small_run import small_run, write_text
from tests.e2e.striking import MODULE, STAGE, Blow, Role, Striker, heavy_run, replicas_of, see_it_through

LIMIT_S: Final = 5.0
ROLES: tuple[Role, ...] = ("member", "convener", "reducer")
SIGNALS: Final = (signal.SIGKILL, signal.SIGSTOP)
PARTED_INNER_STEPS: Final = 30  # rounds of seconds, so that their count does not depend on who finds whom first


async def blows(options: Any) -> dict[str, object]:
    """Strikes one swarm, blow after blow; a killed replica is replaced."""
    with kit.folder(options.keep, "blows") as folder:
        return await struck(options, folder)


async def struck(options: Any, folder: Path) -> dict[str, object]:
    manifest = heavy_run(write_text(folder / "text"), blocks=options.blocks)
    swarm_options = LocalSwarmOptions(peers=1 + options.replicas, threads=1, log_dir=folder / "logs")
    found: list[dict[str, Any]] = []
    async with LocalSwarm(manifest, swarm_options) as swarm, watching(swarm, MODULE) as watch:
        tail = LogTail(folder / "logs", RoundProgress)
        striker = Striker(swarm, tail)
        calm = await undisturbed(swarm, watch)
        for role, percent, number in itertools.product(options.roles, options.percents, SIGNALS):
            blow = await striker.strike(role, percent, number)
            found.append(await follow(swarm, watch, blow, number) | {"role": role, "asked_percent": percent})
            tell(f"{role} {percent} % {number.name}: {found[-1]}")
        tail.close()
        digests = watch.digests(frozenset(peer.peer for peer in swarm.peers if peer.stage == STAGE))
        await swarm.stop()
        ends = {index: end.exit_code for index, end in swarm.ends.items()}
    limit, times = LIMIT_S + calm, [row["commit_s"] for row in found]
    return {
        "replicas": options.replicas,
        "exchanged_mb": 4e-6 * parameters(manifest),
        "undisturbed_round_s": calm,
        "limit_s": limit,
        "commit_s": {"median": median(times), "largest": max(times)},
        "within_limit": [sum(time <= limit for time in times), len(times)],
        "by_role": {role: median(row["commit_s"] for row in found if row["role"] == role) for role in options.roles},
        "rounds_with_several_digests": sum(len(held) > 1 for held in digests.values()),
        "exits": sum(code not in (0, 128 + signal.SIGKILL) for code in ends.values()),
        "blows": found,
        "check": verdict(folder / "logs"),
    }


async def undisturbed(swarm: LocalSwarm, watch: RoundWatch) -> float:
    """Median duration of a few rounds of all replicas, in seconds."""
    everybody = frozenset(replicas_of(swarm))
    first = await watch.all_together(everybody, 0)
    await watch.all_together(everybody, first.round + 3)
    return median(c.seconds for p in everybody for c in watch.commits_of(p) if c.round > first.round) or 0.0


async def follow(swarm: LocalSwarm, watch: RoundWatch, blow: Blow, number: signal.Signals) -> dict[str, object]:
    aftermath = await see_it_through(swarm, watch, blow, frozen=number is signal.SIGSTOP)
    if number is signal.SIGKILL:
        index = swarm.start_peer(STAGE)
        newcomer = swarm.peers[index].peer
        await watch.all_together(aftermath.survivors | {newcomer}, blow.round)
    return {
        "signal": number.name,
        "round": blow.round,
        "percent": blow.percent,
        "commit_s": max(aftermath.commits_s.values()),
        "attempts": aftermath.attempts,
        "back_s": aftermath.back_s,
        "caught_up": aftermath.caught_up,
    }


def parameters(manifest: Manifest) -> int:
    """Number of parameters of a module of stage 1, without its norms."""
    model = manifest.model
    attention = model.hidden * model.hidden * 2 * (1 + model.kv_heads / model.heads)
    return int(manifest.stages.blocks[STAGE] * (attention + 3 * model.hidden * model.feed_forward))


async def partitions(options: Any) -> dict[str, object]:
    reason, found = why_no_namespaces(), dict[str, object]()
    for name, sides in (("2+2", TWO_AND_TWO), ("3+1", THREE_AND_ONE)) if reason is None else ():
        with kit.folder(options.keep, name) as folder:
            found[name] = await parted(folder, sides)
    return found or {"skipped": reason}


async def parted(folder: Path, sides: str) -> dict[str, object]:
    manifest = parted_run(write_text(folder / "text"), inner_steps=PARTED_INNER_STEPS)
    options = LocalSwarmOptions(peers=len(sides), threads=1, log_dir=folder / "logs")
    with split_network(sides) as network:
        async with (
            LocalSwarm(manifest, options, deployments=network.deployment) as swarm,
            watching(swarm, MODULE) as watch,
        ):
            found = await part(swarm, watch, network, folder / "logs")
            await swarm.stop()
            exits = sum(end.exit_code != 0 for end in swarm.ends.values())
    table = dataclasses.asdict(found) | {"sides": [len(side) for side in found.sides]}
    tell(f"{sides}: {table}")
    return table | {"target_rounds_after": 2, "exits": exits, "check": verdict(folder / "logs")}


async def changes(options: Any) -> dict[str, object]:
    with kit.folder(options.keep, "changes") as folder:
        swarm_options = LocalSwarmOptions(peers=8, threads=1, log_dir=folder / "logs")
        async with LocalSwarm(small_run(write_text(folder / "text"), inner_steps=10), swarm_options) as swarm:

            async def after(seconds: float, stage: int, number: signal.Signals | None = None, peers: int = 1) -> float:
                await asyncio.sleep(seconds)
                begun = time.time()
                for peer in [peer for peer in swarm.peers if peer.stage == stage][:peers]:
                    if number is None:
                        swarm.start_peer(stage)
                    else:
                        swarm.kill(peer.index, number)
                return begun

            killed = await after(options.seconds, 1, signal.SIGKILL)
            frozen = await after(options.seconds, 3, signal.SIGSTOP)
            joined = await after(options.seconds, 1)
            await after(options.seconds, 2, signal.SIGKILL, peers=2)
            served = await after(5, 2)
            await asyncio.sleep(options.seconds)
            newcomer = [peer.peer for peer in swarm.peers if peer.stage == 1][-1]
        done = sorted(completed(folder / "logs"))

    def pause(begun: float, end: float) -> float:
        times = [begun, *(at for at, _ in done if begun < at < end), end]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    return {
        "killed_pause_s": pause(killed, frozen),
        "frozen_pause_s": pause(frozen, joined),
        "newcomer_used_s": min(at for at, hops in done if f"1.0@{newcomer}" in hops) - joined,
        "lost_stage_served_s": min(at for at, _ in done if at > served) - served,
    }


def completed(logs: Path) -> Iterator[tuple[float, list[str]]]:
    """Unix time and hops of each completed microbatch."""
    for path in logs.iterdir():
        events = [json.loads(line) for line in path.read_bytes().splitlines()]
        for event in events:
            if event["event"] == "completed":
                yield (events[0]["unix_ms"] + event["ms"]) / 1000, event["hops"]


if __name__ == "__main__":
    quick = {"parts": ["blows"], "roles": ["member"], "percents": [50], "replicas": 3, "blocks": 1}
    blow = {"roles": ROLES, "percents": [10, 50, 90], "replicas": 4, "blocks": 3}
    parts = {"blows": blows, "partitions": partitions, "changes": changes}
    kit.run(__doc__, parts, quick, keep=Path, seconds=20.0, **blow)
