"""What rounds do when peers die, freeze or lie in them, and when the network falls apart: real processes, sockets and
TLS.

    python benchmarks/faults.py [--parts blows partitions liars] [--replicas 4] [--blocks 3] [--percents 10 50 90]
    [--kilotokens 800] [--repeats 3] [--keep DIR]

* blows: a plain member, the convener and the reducer of most is killed (SIGKILL) or frozen (SIGSTOP) when 10, 50 and 90
  % of what it takes in of an exchange is there. How long until all survivors have committed that round, in seconds
  after the blow, against 5 s plus an undisturbed round of the same run; a frozen one is woken two rounds later and has
  to take part again.
* partitions: 2+2 and 3+1 replicas in network namespaces, apart for five rounds. How many rounds after the first link
  across all have committed one together. Needs root and iproute2.
* liars: one replica of four contributes something else than its update. The held-out loss after so many tokens over
  that of the run of the other three without it (`nobody`), and over that of four honest ones (`honest`), which share
  the same tokens among more replicas.

Prints one JSON object; for each part also what `skipstone check` says of the event logs. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from node.local_swarm.default_manifest import default_manifest
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import RoundProgress
from protocol.manifest.manifest import Manifest, manifest_from_table
from tests.e2e.lying import Company, keep_company
from tests.e2e.parting import THREE_AND_ONE, TWO_AND_TWO, part, parted_run
from tests.e2e.round_watch import LogTail, RoundWatch, watching
from tests.e2e.small_run import write_text
from tests.e2e.split_network import split_network, why_no_namespaces
from tests.e2e.striking import MODULE, STAGE, Blow, Role, Striker, heavy_run, replicas_of, see_it_through

LIMIT_S = 5.0
ROLES: tuple[Role, ...] = ("member", "convener", "reducer")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
PARTS = ("blows", "partitions", "liars")
NOBODY_AGAIN = "nobody-again"
HONEST = "honest"
KINDS = (NOBODY_AGAIN, HONEST, "nan", "million", "million-declared", "shapes", "round", "garbage")
EVALUATED = 32
UNHURRIED = 30
"""Inner steps of a round of two parted groups: it takes seconds, so that what is due after two rounds does not depend
on who finds whom first."""
LOSS_RATIO = 1.01


# ---- blows -----------------------------------------------------------------------------------------------------------


async def blows(arguments: argparse.Namespace, folder: pathlib.Path) -> dict[str, object]:
    """All of them in one swarm, one after the other; who was killed is replaced."""
    manifest = heavy_run(write_text(folder / "text"), blocks=arguments.blocks)
    options = LocalSwarmOptions(peers=1 + arguments.replicas, threads=1, log_dir=folder / "logs")
    found = []
    async with LocalSwarm(manifest, options) as swarm, watching(swarm, MODULE) as watch:
        tail = LogTail(folder / "logs", RoundProgress)
        striker = Striker(swarm, tail)
        calm = await undisturbed(swarm, watch)
        for role, percent, number in itertools.product(ROLES, arguments.percents, SIGNALS):
            blow = await striker.strike(role, percent, number)
            found.append(await follow(swarm, watch, blow, number) | {"role": role, "asked_percent": percent})
            tell(f"{role} {percent} % {number.name}: {found[-1]}")
        tail.close()
        digests = watch.digests(frozenset(peer.peer for peer in swarm.peers if peer.stage == STAGE))
        await swarm.stop()
        ends = {index: end.exit_code for index, end in swarm.ends.items()}
    limit = LIMIT_S + calm
    times = [float(row["commit_s"]) for row in found]  # type: ignore[arg-type]
    return {
        "replicas": arguments.replicas,
        "exchanged_mb": 4e-6 * parameters(manifest),
        "undisturbed_round_s": calm,
        "limit_s": limit,
        "commit_s": {"median": median(times), "largest": max(times)},
        "within_limit": [sum(time <= limit for time in times), len(times)],
        "by_role": {role: median(row["commit_s"] for row in found if row["role"] == role) for role in ROLES},
        "rounds_with_several_digests": sum(len(held) > 1 for held in digests.values()),
        "exits": sum(code not in (0, 128 + signal.SIGKILL) for code in ends.values()),
        "blows": found,
        "check": verdict(folder / "logs"),
    }


async def undisturbed(swarm: LocalSwarm, watch: RoundWatch) -> float:
    """The median of a few rounds of all."""
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
    """Of a module of stage 1, but for its norms."""
    model = manifest.model
    attention = model.hidden * model.hidden * 2 * (1 + model.kv_heads / model.heads)
    return int(manifest.stages.blocks[STAGE] * (attention + 3 * model.hidden * model.feed_forward))


# ---- partitions ------------------------------------------------------------------------------------------------------


async def partitions(folder: pathlib.Path) -> dict[str, object]:
    reason = why_no_namespaces()
    if reason is not None:
        return {"skipped": reason}
    return {
        name: await parted(made(folder / name), sides) for name, sides in (("2+2", TWO_AND_TWO), ("3+1", THREE_AND_ONE))
    }


async def parted(folder: pathlib.Path, sides: str) -> dict[str, object]:
    manifest = parted_run(write_text(folder / "text"), inner_steps=UNHURRIED)
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
    """The demo model in two stages, on the standard library's source."""
    table = default_manifest(1, "liars").model_dump(mode="json", exclude_none=True)
    table["stages"]["blocks"] = [0, 2]
    table["training"] |= {"staleness": 1, "inner_steps": 5, "outer": {"learning_rate": 0.7, "momentum": 0.5}}
    table["training"] |= {"inner_tokens": 1024}
    table["training"]["schedule"] |= {"kind": "constant", "total_steps": 1_000_000}
    return manifest_from_table(table)


async def liars(arguments: argparse.Namespace, folder: pathlib.Path) -> dict[str, object]:
    """Kinds in turn, as often as asked for: a single run's loss is off by more than a percent."""
    kinds = ("nobody", *arguments.kinds)
    seen: dict[str, list[Company]] = {kind: [] for kind in kinds}
    checks: dict[str, list[dict[str, object]]] = {kind: [] for kind in kinds}
    for number in range(arguments.repeats):
        for kind in kinds:
            logs = folder / f"{kind}-{number}"
            lie = None if kind in ("nobody", NOBODY_AGAIN) else kind
            seen[kind].append(await keep_company(liars_run(), logs, 1000 * arguments.kilotokens, lie, EVALUATED))
            checks[kind].append(verdict(logs))
            tell(f"{kind}: loss {seen[kind][-1].loss:.4f}, {seen[kind][-1].rounds} rounds")
    losses = {kind: statistics.median(company.loss for company in companies) for kind, companies in seen.items()}
    rows = {kind: row_of(companies, losses, losses[kind], checks[kind]) for kind, companies in seen.items()}
    return {"target_ratio": LOSS_RATIO, "repeats": arguments.repeats, "kinds": rows}


def row_of(
    companies: list[Company], losses: dict[str, float], loss: float, checks: list[dict[str, object]]
) -> dict[str, object]:
    """What the honest ones went through with one kind of liar, over all repeats."""
    return {
        "loss": loss,
        "losses": [company.loss for company in companies],
        "ratio": loss / losses["nobody"],
        "ratio_to_four_honest": loss / losses[HONEST] if HONEST in losses else None,
        "rounds": [company.rounds for company in companies],
        "with_its_update": sum(company.with_liar for company in companies),
        "attempts_a_round": statistics.mean(company.attempts for company in companies),
        "rounds_with_several_digests": sum(len(h) > 1 for company in companies for h in company.digests.values()),
        "exits": sum(code != 0 for company in companies for code in company.ends.values()),
        "checks": checks,
    }


# ---- all -------------------------------------------------------------------------------------------------------------


def verdict(logs: pathlib.Path) -> dict[str, object]:
    """What `skipstone check` says of the logs."""
    command = [sys.executable, "-m", "node", "check", str(logs), "--json"]
    root = pathlib.Path(__file__).resolve().parent.parent
    checked = subprocess.run(command, capture_output=True, cwd=root, timeout=600)
    return dict(json.loads(checked.stdout))


def median(values: Iterable[object]) -> float | None:
    found = [value for value in values if isinstance(value, float)]
    return statistics.median(found) if found else None


def made(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(parents=True)
    return folder


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def measure(arguments: argparse.Namespace, folder: pathlib.Path) -> dict[str, object]:
    result: dict[str, object] = {"benchmark": "faults"}
    for part_name in arguments.parts:
        here = made(folder / part_name)
        match part_name:
            case "blows":
                result["blows"] = await blows(arguments, here)
            case "partitions":
                result["partitions"] = await partitions(here)
            case "liars":
                result["liars"] = await liars(arguments, here)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=3, help="of the module that is exchanged: 13 MB each")
    parser.add_argument("--percents", type=int, nargs="+", default=[10, 50, 90])
    parser.add_argument("--repeats", type=int, default=1, help="of each kind of liar; the ratios are of medians")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--kilotokens", type=int, default=800, help="after which the losses with and without a liar are compared"
    )
    parser.add_argument("--keep", type=pathlib.Path, help="folder for the event logs; a temporary one when absent")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="skipstone-faults-") as temporary:
        folder = arguments.keep or pathlib.Path(temporary)
        print(json.dumps(asyncio.run(measure(arguments, folder))))


if __name__ == "__main__":
    main()
