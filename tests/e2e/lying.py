"""Swarms with replicas that lie in every round (`tests/security/liar.py`)."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import Deployment, Deployments, LocalSwarmOptions
from protocol.manifest.manifest import Manifest


@asynccontextmanager
async def with_liars(
    manifest: Manifest, kind: str, logs: Path, honest: int = 2, liars: int = 1
) -> AsyncIterator[tuple[LocalSwarm, frozenset[str], frozenset[str]]]:
    """Runs a data node, honest replicas and liars (a kind of `tests.security.liar`); yields the liars first."""
    lying = Deployment(command=(sys.executable, "-P", "-m", "tests.security.liar", kind))
    options = LocalSwarmOptions(peers=1 + honest + liars, threads=1, log_dir=logs)
    deployments: Deployments = lambda index: lying if index > honest else Deployment()  # noqa: E731
    async with LocalSwarm(manifest, options, deployments=deployments) as swarm:
        _, *replicas = (peer.peer for peer in swarm.peers)
        yield swarm, frozenset(replicas[honest:]), frozenset(replicas[:honest])
