"""What rounds do when peers die, freeze or lie, and when the network falls apart: real processes, sockets and TLS.

`blows`: a plain member, the leader and the reducer of most is killed (SIGKILL) or frozen (SIGSTOP) when it has received
a percentage of an exchange. `commit_s`: time until all survivors have committed that round, against 5 s plus an
undisturbed round. A frozen replica is woken two rounds later and has to take part again. `partitions`: 2+2 and 3+1
replicas in network namespaces (root and iproute2), apart for five rounds; counts the rounds from the first link across
until all commit one together. `liars`: one of four replicas lies (`tests/security/liar.py`). `ratio`: held-out loss
after `--kilotokens`, over that of the other three without it (`nobody`); medians over the repeats.
"""

from __future__ import annotations

import dataclasses
import itertools
import signal
import statistics
import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import demo_run, median, tell, verdict
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import RoundProgress
from protocol.manifest.manifest import Manifest
from tests.e2e.home_network import split_network, why_no_namespaces
from tests.e2e.lying import Company, keep_company
from tests.e2e.parting import THREE_AND_ONE, TWO_AND_TWO, part, parted_run
from tests.e2e.round_watch import LogTail, RoundWatch, watching
from tests.e2e.small_run import write_text
from tests.e2e.striking import MODULE, STAGE, Blow, Role, Striker, heavy_run, replicas_of, see_it_through
from tests.security.liar import LIES

LIMIT_S: Final = 5.0
ROLES: tuple[Role, ...] = ("member", "convener", "reducer")
SIGNALS: Final = (signal.SIGKILL, signal.SIGSTOP)
PARTED_INNER_STEPS: Final = 30  # rounds of seconds, so that their count does not depend on who finds whom first
HONEST, NOBODY = "honest", "nobody"
EVALUATED: Final = 32


# ---- blows -----------------------------------------------------------------------------------------------------------


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


# ---- partitions ------------------------------------------------------------------------------------------------------


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
        async with LocalSwarm(manifest, options, places=network.place) as swarm, watching(swarm, MODULE) as watch:
            found = await part(swarm, watch, network, folder / "logs")
            await swarm.stop()
            exits = sum(end.exit_code != 0 for end in swarm.ends.values())
    table = dataclasses.asdict(found) | {"sides": [len(side) for side in found.sides]}
    tell(f"{sides}: {table}")
    return table | {"target_rounds_after": 2, "exits": exits, "check": verdict(folder / "logs")}


# ---- liars -----------------------------------------------------------------------------------------------------------


def liars_run() -> Manifest:
    inner = {"staleness": 1, "inner_steps": 5, "inner_tokens": 1024, "outer": {"learning_rate": 0.7, "momentum": 0.5}}
    return demo_run("liars", [0, 2], seed=1, **inner)


async def liars(options: Any) -> dict[str, Any]:
    seen: dict[str, list[Company]] = {kind: [] for kind in (NOBODY, *options.kinds)}
    checks: dict[str, list[dict[str, object]]] = {kind: [] for kind in seen}
    for number, (kind, companies) in itertools.product(range(options.repeats), seen.items()):
        lie = None if kind == NOBODY else kind
        with kit.folder(options.keep, f"{kind}-{number}") as logs:
            companies.append(await keep_company(liars_run(), logs, 1000 * options.kilotokens, lie, EVALUATED))
            checks[kind].append(verdict(logs))
        tell(f"{kind}: loss {companies[-1].loss:.4f}, {companies[-1].rounds} rounds")
    losses = {kind: statistics.median(one.loss for one in companies) for kind, companies in seen.items()}
    rows = {
        kind: {
            "losses": [company.loss for company in companies],
            "ratio": losses[kind] / losses[NOBODY],
            "ratio_to_four_honest": losses[kind] / losses[HONEST] if HONEST in losses else None,
            "rounds": [company.rounds for company in companies],
            "with_its_update": sum(company.with_liar for company in companies),
            "attempts_a_round": statistics.mean(company.attempts for company in companies),
            "rounds_with_several_digests": sum(len(h) > 1 for company in companies for h in company.digests.values()),
            "exits": sum(code != 0 for company in companies for code in company.ends.values()),
            "checks": checks[kind],
        }
        for kind, companies in seen.items()
    }
    return {"repeats": options.repeats, "target_ratio": 1.01, "kinds": rows}


if __name__ == "__main__":
    quick = {"parts": ["blows"], "roles": ["member"], "percents": [50], "replicas": 3, "blocks": 1}
    quick |= {"kinds": ["million"], "kilotokens": 20}
    blow = {"roles": ROLES, "percents": [10, 50, 90], "replicas": 4, "blocks": 3}
    lie = {"kinds": tuple(LIES), "repeats": 1, "kilotokens": 800}
    parts = {"blows": blows, "partitions": partitions, "liars": liars}
    kit.run(__doc__, parts, quick, keep=Path, **blow, **lie)
