"""Data nodes of real processes agree on lanes."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.network.client import query_status
from node.observability.status import LaneStatus
from tests.e2e.small_run import PATIENCE_S, Watch, small_run, write_text

pytestmark = pytest.mark.e2e

DATA_NODES, STAGES, PER_PATH = 2, 4, 2
REPLICATED = 1

Lanes = tuple[LaneStatus, ...]


async def lanes_when(swarm: LocalSwarm, good: Callable[[list[Lanes]], bool]) -> list[Lanes]:
    """The lanes of the data nodes as they say when asked, as soon as they are so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await query_status(swarm.link)
            paths = [peer.answered.paths for peer in status.peers if peer.answered is not None and peer.hosts(0)]
            lanes = [each.lanes for each in paths if each is not None and each.lanes]
            if len(lanes) == DATA_NODES and good(lanes):
                return lanes


def equal(lanes: list[Lanes]) -> bool:
    """While a trade is decided and not yet known to the other side they are not, for a moment."""
    visits = Counter(stage for each in lanes for lane in each for stage in lane.stages)
    return len(visits) == STAGES - 1 and len(set(visits.values())) == 1


def peers_of(lanes: list[Lanes]) -> set[str]:
    return {peer for each in lanes for lane in each for peer in lane.peers}


async def test_data_nodes_skip_equally_and_leave_the_dead_out(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), per_path=PER_PATH, staleness=1)
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=5, threads=1)) as swarm:
        watch = Watch(swarm)
        await watch.step(2)
        swarm.start_peer(0)
        lanes = await lanes_when(swarm, equal)
        assert all(len(lane.stages) == PER_PATH for each in lanes for lane in each)
        victim = next(p for p in swarm.peers if p.stage == REPLICATED and p.peer in peers_of(lanes))
        swarm.kill(victim.index)
        lanes = await lanes_when(swarm, lambda now: equal(now) and victim.peer not in peers_of(now))
        status = await query_status(swarm.link)
        assert status.step is not None
        seen = status.step
        await watch.step(seen + 3)
        await swarm.stop()
    assert {index: end.exit_code for index, end in swarm.ends.items() if end.exit_code} == {
        victim.index: 128 + signal.SIGKILL
    }


async def test_the_stage_with_more_peers_is_visited_more_where_the_run_allows_it(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), per_path=PER_PATH, visit_ratio=1.5, staleness=1)
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=5, threads=1)) as swarm:
        watch = Watch(swarm)
        await watch.step(2)
        swarm.start_peer(0)
        lanes = await lanes_when(swarm, lambda now: visited_most(now) == REPLICATED)
        visits = Counter(stage for each in lanes for lane in each for stage in lane.stages)
        assert max(visits.values()) <= 1.5 * min(visits.values())
        assert all(len(lane.stages) == PER_PATH for each in lanes for lane in each)
        status = await query_status(swarm.link)
        paths = next(peer.said.paths for peer in status.peers if peer.hosts(0))
        assert paths is not None
        assert paths.shares is not None
        assert sum(paths.shares.wanted.values()) == pytest.approx(PER_PATH, abs=1e-3)
        assert sum(paths.shares.made.values()) == pytest.approx(PER_PATH, abs=1e-3)
        await swarm.stop()
    assert not any(end.exit_code for end in swarm.ends.values())


def visited_most(lanes: list[Lanes]) -> int | None:
    """The stage that the lanes visit more often than any other."""
    visits = Counter(stage for each in lanes for lane in each for stage in lane.stages).most_common(2)
    return visits[0][0] if visits[0][1] > visits[1][1] else None
