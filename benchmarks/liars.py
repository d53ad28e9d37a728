"""What one replica that lies costs the others: the same run with each kind of lie (`tests.security.liar`), and without.

`contributions`: one of four replicas contributes something else than its update; the held-out loss after so many
tokens, the median over the repeats, over that of the other three without it (`nobody`) and over that of four honest
ones. `rounds`: one of three replicas is honest or lies in messages and results; at the last step it is killed, and the
held-out loss of what the others are left with is measured through the swarm.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import medians, tell
from benchmarks.soak import verdict
from node.local_swarm.default_manifest import default_manifest
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place
from node.network.client import query_evaluation
from node.observability.events import Event, Note, ReplicaAccused, RoundCommitted, Step
from protocol.manifest.manifest import Manifest, manifest_from_table
from tests.e2e.lying import Company, keep_company
from tests.e2e.small_run import small_run, write_text
from tests.security.liar import LIES

HONEST = "honest"
LIAR = 3
LIMIT_S = 300.0
"""Timeout of one run, in seconds."""
HELD_OUT = 64
"""Microbatches."""
SETTLES_S = 2.0
"""After the liar was killed, so that what was under way through it is done."""
SCHEDULE = {"kind": "cosine", "warmup_steps": 5, "total_steps": 5000, "final_ratio": 0.0}
NOBODY: Final = "nobody"
CONTRIBUTIONS: Final = (HONEST, "nan", "million", "million-declared", "shapes", "round", "garbage")
ROUNDS: Final = tuple(sorted(set(LIES) - {HONEST}))


# ---- lies in rounds --------------------------------------------------------------------------------------------------


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
        text = write_text(Path(folder) / "text")
        manifest = small_run(text, blocks=(0, 2), inner_steps=5, staleness=1, schedule=SCHEDULE)
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
    losses = [event.loss for event in seen if isinstance(event, Step)]
    commits = [event for event in seen if isinstance(event, RoundCommitted)]
    rounds = [{event.round for event in commits if event.peer == peer} for peer in honest]
    accused = [event for event in seen if isinstance(event, ReplicaAccused) and event.accused == liar]
    return Outcome(
        kind,
        held_out=float(answer["loss"]),
        training=statistics.median(losses[-len(losses) // 4 :]),
        seconds=seconds,
        rounds=len(set.intersection(*rounds)),
        accusers=len({event.peer for event in accused} & honest),
        left_out=sum(isinstance(event, Note) and "excluded from paths" in event.message for event in seen),
    )


async def in_rounds(options: Any) -> dict[str, Any]:
    """Kinds in turn, honest runs between them."""
    runs: list[Outcome] = []
    kinds = [kind for _ in range(options.repeats) for kind in (*options.lies, HONEST)]
    for kind in [HONEST, *kinds]:
        runs.append(await one_run(kind, options.steps))
        tell(asdict(runs[-1]))
    figures = ("held_out", "training", "seconds")
    middle = {kind: medians([asdict(run) for run in runs if run.kind == kind], figures) for kind in (HONEST, *kinds)}
    ratios = {kind: {figure: of[figure] / middle[HONEST][figure] for figure in figures} for kind, of in middle.items()}
    return {"steps": options.steps, "over_honest": ratios, "runs": [asdict(run) for run in runs]}


# ---- lies in contributions -------------------------------------------------------------------------------------------


def liars_run() -> Manifest:
    """The demo model in two stages, on the standard library's source."""
    table = default_manifest(1, "liars").model_dump(mode="json", exclude_none=True)
    table["stages"]["blocks"] = [0, 2]
    table["training"] |= {"staleness": 1, "inner_steps": 5, "outer": {"learning_rate": 0.7, "momentum": 0.5}}
    table["training"] |= {"inner_tokens": 1024}
    table["training"]["schedule"] |= {"kind": "constant", "total_steps": 1_000_000}
    return manifest_from_table(table)


async def in_contributions(options: Any, folder: Path) -> dict[str, Any]:
    seen: dict[str, list[Company]] = {kind: [] for kind in (NOBODY, *options.contributions)}
    checks: dict[str, list[dict[str, object]]] = {kind: [] for kind in seen}
    for number in range(options.repeats):
        for kind, companies in seen.items():
            logs, lie = folder / f"{kind}-{number}", None if kind == NOBODY else kind
            companies.append(await keep_company(liars_run(), logs, 1000 * options.kilotokens, lie, EVALUATED))
            checks[kind].append(verdict(logs))
            tell(f"{kind}: loss {companies[-1].loss:.4f}, {companies[-1].rounds} rounds")
    losses = {kind: statistics.median(one.loss for one in companies) for kind, companies in seen.items()}
    return {kind: row_of(companies, losses, kind) | {"checks": checks[kind]} for kind, companies in seen.items()}


def row_of(companies: list[Company], losses: dict[str, float], kind: str) -> dict[str, Any]:
    """What the honest replicas went through with one kind of liar, over all repeats."""
    return {
        "losses": [company.loss for company in companies],
        "ratio": losses[kind] / losses[NOBODY],
        "ratio_to_four_honest": losses[kind] / losses[HONEST] if HONEST in losses else None,
        "rounds": [company.rounds for company in companies],
        "with_its_update": sum(company.with_liar for company in companies),
        "attempts_a_round": statistics.mean(company.attempts for company in companies),
        "rounds_with_several_digests": sum(len(h) > 1 for company in companies for h in company.digests.values()),
        "exits": sum(code != 0 for company in companies for code in company.ends.values()),
    }


async def measure(options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"repeats": options.repeats, "target_ratio": 1.01}
    with tempfile.TemporaryDirectory(prefix="skipstone-liars-") as folder:
        if "contributions" in options.parts:
            found["contributions"] = await in_contributions(options, Path(folder))
    if "rounds" in options.parts:
        found["rounds"] = await in_rounds(options)
    return found


def main() -> None:
    quick = {"parts": ["rounds"], "lies": ["million"], "steps": 20}
    usual = {"parts": ("contributions", "rounds"), "contributions": CONTRIBUTIONS, "lies": ROUNDS}
    kit.run(__doc__, measure, quick, repeats=1, kilotokens=800, steps=400, **usual)


if __name__ == "__main__":
    main()


EVALUATED = 32
