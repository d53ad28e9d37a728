"""Peers that die or freeze in the middle: the others go on, or wait for a newcomer, and the account adds up."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from node.events import MicrobatchCounts, Resumed, Waiting
from node.local_setup import LocalSwarmOptions
from node.local_swarm import LocalSwarm
from tests.e2e.small_run import Watch, small_run, write_text

pytestmark = pytest.mark.e2e

REPLICATED = 1
"""The stage that has a second peer, the fifth of the swarm."""


def _account(watch: Watch) -> MicrobatchCounts:
    counts = [summary.microbatches for summary in watch.summaries() if summary.module == "0.0"]
    assert len(counts) == 1
    return counts[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_work_goes_to_the_other_replica(tmp_path: Path, number: signal.Signals) -> None:
    manifest = small_run(write_text(tmp_path / "text"))
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=5, steps=40, threads=1)) as swarm:
        watch = Watch(swarm)
        await watch.step(5)
        victim = next(peer.index for peer in swarm.peers if peer.stage == REPLICATED)
        swarm.kill(victim, number)
        await watch.step(40)
        swarm.kill(victim, signal.SIGKILL)
        await watch.to_the_end(swarm)
    counts = _account(watch)
    assert counts.completed == 40 * manifest.microbatches_per_step
    assert counts.started == counts.completed + counts.abandoned
    assert counts.duplicated == 0
    assert not any(isinstance(event, Waiting) for event in watch.seen if watch.seen.index(event) > 200)


async def test_a_stage_without_peers_is_named_waited_for_and_goes_on(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"))
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=4, steps=30, threads=1)) as swarm:
        watch = Watch(swarm)
        await watch.step(5)
        swarm.kill(2, signal.SIGKILL)
        waiting = await watch.until(lambda event: isinstance(event, Waiting))
        assert isinstance(waiting, Waiting)
        assert waiting.module == "2.0"
        assert "no peer left" in waiting.reason
        swarm.start_peer(2)
        await watch.until(lambda event: isinstance(event, Resumed) and event.module == "2.0")
        await watch.to_the_end(swarm)
    counts = _account(watch)
    assert counts.completed == 30 * manifest.microbatches_per_step
    assert counts.started == counts.completed + counts.abandoned
    assert counts.duplicated == 0
