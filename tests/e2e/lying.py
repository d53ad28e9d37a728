"""One replica of four lies in every round (`tests/security/liar.py`): what the others make of it."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import Deployment, Deployments, LocalSwarmOptions, all_local
from protocol.manifest.manifest import Manifest
from tests.e2e.round_watch import watching
from tests.e2e.striking import MODULE, STAGE

HONEST = 3
LIAR = 1 + HONEST
EVAL_S = 120.0
TRAINING_S = 900.0
FEWEST = 3


@dataclass(frozen=True, slots=True)
class Company:
    rounds: int
    with_liar: int
    attempts: float
    digests: dict[int, set[str]]
    loss: float
    ends: dict[int, int]


def liar_among(kind: str) -> Deployments:
    """The last node contributes a lie of this kind (`tests.security.liar.LIES`)."""
    deployment = Deployment(command=(sys.executable, "-P", "-m", "tests.security.liar", kind))
    return lambda index: deployment if index == LIAR else Deployment()


async def keep_company(manifest: Manifest, logs: Path, tokens: int, kind: str | None, evaluated: int) -> Company:
    """A data node, honest replicas and, if a kind is given, a liar, until so many tokens have been trained and some
    rounds held."""
    deployments = all_local if kind is None else liar_among(kind)
    options = LocalSwarmOptions(peers=1 + HONEST + (kind is not None), threads=1, log_dir=logs)
    async with LocalSwarm(manifest, options, deployments=deployments) as swarm, watching(swarm, MODULE) as watch:
        honest = frozenset(p.peer for p in swarm.peers if p.stage == STAGE and p.index != LIAR)
        liar = next((p.peer for p in swarm.peers if p.index == LIAR), None)
        await watch.all_together(honest, 0)
        begun = await watch.until(lambda: liar_at_work(swarm) and max(map(watch.round_of, honest)))
        await watch.all_at(honest, begun + FEWEST)
        await watch.until(lambda: swarm.progress.tokens >= tokens or None, TRAINING_S)
        loss = await held_out_loss(str(swarm.link), evaluated)
        await swarm.stop()
        commits = {c.round: c for peer in honest for c in watch.commits_of(peer) if c.round > begun + 1}
        return Company(
            len(commits),
            sum(liar in commit.contributors for commit in commits.values()),
            sum(commit.attempts for commit in commits.values()) / len(commits),
            watch.digests(honest),
            loss,
            {index: end.exit_code for index, end in swarm.ends.items()},
        )


def liar_at_work(swarm: LocalSwarm) -> bool | None:
    """Whether it has something to contribute, or there is none."""
    return LIAR not in swarm.progress.peers or swarm.progress.peers[LIAR].inner_steps > 0 or None


async def held_out_loss(link: str, microbatches: int) -> float:
    arguments = ("-m", "node", "eval", link, "--microbatches", str(microbatches), "--json")
    asked = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(EVAL_S):
        answer, _ = await asked.communicate()
    return float(json.loads(answer)["loss"])
