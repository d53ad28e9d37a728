"""Swarms with a replica that lies in every round (`tests/security/liar.py`)."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import Deployment, Deployments, LocalSwarmOptions
from protocol.manifest.manifest import Manifest


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
