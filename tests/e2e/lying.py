"""One replica of four lies in every round (`tests/security/liar.py`): what the others make of it."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import Deployment, Deployments, LocalSwarmOptions
from protocol.manifest.manifest import Manifest
from tests.e2e.round_watch import watching
from tests.e2e.small_run import skipstone
from tests.e2e.striking import MODULE

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


@asynccontextmanager
async def with_liar(
    manifest: Manifest, kind: str | None, logs: Path, honest: int = 2
) -> AsyncIterator[tuple[LocalSwarm, str, frozenset[str]]]:
    """A data node, honest replicas and, if a kind of `tests.security.liar.LIES` is given, a liar ("" if not)."""
    lying = Deployment(command=(sys.executable, "-P", "-m", "tests.security.liar", str(kind)))
    options = LocalSwarmOptions(peers=1 + honest + (kind is not None), threads=1, log_dir=logs)
    deployments: Deployments = lambda index: lying if index > honest else Deployment()  # noqa: E731
    async with LocalSwarm(manifest, options, deployments=deployments) as swarm:
        _, *replicas = (peer.peer for peer in swarm.peers)
        yield swarm, "".join(replicas[honest:]), frozenset(replicas[:honest])


async def keep_company(manifest: Manifest, logs: Path, tokens: int, kind: str | None, evaluated: int) -> Company:
    """A data node, honest replicas and, if a kind is given, a liar, until so many tokens have been trained and some
    rounds held."""
    async with with_liar(manifest, kind, logs, HONEST) as (swarm, liar, honest), watching(swarm, MODULE) as watch:
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
    _, answer, _ = await skipstone("eval", link, "--microbatches", str(microbatches), "--json", within_s=EVAL_S)
    return float(json.loads(answer)["loss"])
