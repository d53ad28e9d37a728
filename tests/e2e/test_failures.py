"""Peers that die or freeze in the middle: the others go on, or wait for a newcomer, and the account adds up."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from node.__main__ import app
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import MicrobatchCounts, PeerChange, Resumed, Waiting
from tests.e2e.small_run import Watch, small_run, write_text

pytestmark = pytest.mark.e2e

REPLICATED = 1


def _account(watch: Watch) -> MicrobatchCounts:
    counts = [summary.microbatches for summary in watch.summaries() if summary.module == "0.0"]
    assert len(counts) == 1
    return counts[0]


def _verdict(folder: Path) -> dict[str, Any]:
    """What `skipstone check` says of the logs: nothing counts twice, and nothing is missing but with a killed peer."""
    report: dict[str, Any] = json.loads(CliRunner().invoke(app, ["check", str(folder), "--json"]).stdout)
    assert report["ok"], report["violations"]
    return report


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen and back"])
async def test_gradients_count_exactly_once_when_a_replica_is_lost_under_way(
    tmp_path: Path, number: signal.Signals
) -> None:
    manifest = small_run(write_text(tmp_path / "text"))
    options = LocalSwarmOptions(peers=5, threads=1, log_dir=tmp_path / "logs")
    async with LocalSwarm(manifest, options) as swarm:
        watch = Watch(swarm)
        await watch.under_way(swarm)
        victim = next(peer for peer in swarm.peers if peer.stage == REPLICATED)
        swarm.kill(victim.index, number)
        await watch.until(lambda event: event == PeerChange(victim.peer, "down", getattr(event, "reason", "")))
        await watch.step(swarm.progress.step + 3)
        if number is signal.SIGSTOP:
            swarm.kill(victim.index, signal.SIGCONT)
            await watch.until(lambda event: isinstance(event, PeerChange) and event.change == "up")
            await watch.step(swarm.progress.step + 3)
        swarm.request_stop()
        await watch.to_the_end(swarm)
    counts, report = _account(watch), _verdict(tmp_path / "logs")
    assert counts.completed == report["completed"] > 0
    assert counts.duplicated == 0
    assert counts.abandoned == report.get("abandoned", 0) <= 2
    assert (report["logs"], report["ended_well"]) == (5, 4 if number is signal.SIGKILL else 5)
    # Each of the three stages after 0, and the data node's own, count every completed microbatch.
    lost = report.get("lost with a killed peer", 0)
    assert report["visits"] == 4 * counts.completed - lost
    assert number is signal.SIGKILL or lost == 0
    events = {event.NAME for event in watch.seen}
    assert not events & {"visit", "completed", "retracted"}, "they are for the log only"


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="frozen", marks=pytest.mark.long)],
)
async def test_work_goes_to_the_other_replica(tmp_path: Path, number: signal.Signals) -> None:
    manifest = small_run(write_text(tmp_path / "text"))
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=5, steps=40, threads=1)) as swarm:
        watch = Watch(swarm)
        await watch.under_way(swarm)
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


async def test_a_run_that_skips_stages_goes_round_one_that_has_lost_its_last_peer(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 1, 1, 1), per_path=2)
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=5, threads=1, log_dir=tmp_path / "logs")) as swarm:
        watch = Watch(swarm)
        await watch.step(5)
        swarm.kill(2, signal.SIGKILL)
        waiting = await watch.until(lambda event: isinstance(event, Waiting))
        assert isinstance(waiting, Waiting)
        assert waiting.reason == "stage 2 has no peer left; skipping it until one joins"
        await watch.step(swarm.progress.step + 5)
        assert not any(
            isinstance(event, Resumed) and event.module == "2.0" for event in watch.seen[watch.seen.index(waiting) :]
        )
        swarm.start_peer(2)
        await watch.until(lambda event: isinstance(event, Resumed) and event.module == "2.0")
        await watch.step(swarm.progress.step + 3)
        swarm.request_stop()
        await watch.to_the_end(swarm)
    counts, report = _account(watch), _verdict(tmp_path / "logs")
    assert counts.completed == report["completed"] > 0
    assert (counts.duplicated, counts.abandoned) == (0, report.get("abandoned", 0))
    # Two stages after 0 and the data node's own, but for those that went round stage 2.
    assert report["visits"] < 3 * counts.completed - report.get("lost with a killed peer", 0)


async def test_a_stage_without_peers_is_named_waited_for_and_goes_on(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"))
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=4, steps=30, threads=1)) as swarm:
        watch = Watch(swarm)
        await watch.step(5)
        swarm.kill(2, signal.SIGKILL)
        waiting = await watch.until(lambda event: isinstance(event, Waiting))
        assert isinstance(waiting, Waiting)
        assert waiting.module == "2.0"
        assert "stage 2 has no peer left" in waiting.reason
        swarm.start_peer(2)
        await watch.until(lambda event: isinstance(event, Resumed) and event.module == "2.0")
        await watch.to_the_end(swarm)
    counts = _account(watch)
    assert counts.completed == 30 * manifest.microbatches_per_step
    assert counts.started == counts.completed + counts.abandoned
    assert counts.duplicated == 0
