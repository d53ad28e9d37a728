"""Peers that die or freeze in the middle: the others go on, or wait for a newcomer, and the account adds up."""

import asyncio
import signal
from pathlib import Path

import pytest

from node.context.options import NodeOptions
from node.local_swarm.local_swarm import STOP_LIMIT_S, LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import (
    Abandoned,
    LastPeer,
    MicrobatchCounts,
    Move,
    NodeStatus,
    NodeSummary,
    PeerChange,
    Resumed,
    Waiting,
)
from node.routing.launcher import STRAGGLER
from node.runtime.leave_socket import ask_to_leave, endpoint_path
from node.runtime.module_choice import NextModule
from node.runtime.node import run_node
from protocol.identity.keys import Identity
from protocol.manifest.signing import sign_manifest
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import ModuleId, Reasoned
from tests.e2e.small_run import PATIENCE_S, Watch, checked, small_run, write_text
from tests.kit.events import KeptEvents

pytestmark = pytest.mark.e2e

BLOCKS = (0, 1, 1)
REPLICATED = 1


def _account(watch: Watch) -> MicrobatchCounts:
    """The data node's counts, in which nothing is missing and nothing counts twice."""
    [counts] = [summary.microbatches for summary in watch.summaries() if summary.module == "0.0"]
    assert (counts.started, counts.duplicated) == (counts.completed + counts.abandoned, 0)
    return counts


@pytest.mark.parametrize(
    ("number", "residual"),
    [
        pytest.param(signal.SIGKILL, 0, id="killed", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, 12, id="killed, with a narrow residual stream"),
        pytest.param(signal.SIGSTOP, 0, id="frozen and back"),
    ],
)
async def test_gradients_count_exactly_once_when_a_replica_is_lost_under_way(
    tmp_path: Path, number: signal.Signals, residual: int
) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=BLOCKS, residual=residual)
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=4, threads=1, log_dir=tmp_path / "logs")) as swarm:
        watch = Watch(swarm)
        await watch.under_way(swarm)
        victim = next(peer for peer in swarm.peers if peer.stage == REPLICATED)
        swarm.kill(victim.index, number)
        steps = swarm.progress.step
        await watch.until(lambda event: event == PeerChange(victim.peer, "down", getattr(event, "reason", "")))
        assert number is signal.SIGKILL or swarm.progress.step > steps + 1, "nobody waits for a frozen peer"
        await watch.step(swarm.progress.step + 3)
        if number is signal.SIGSTOP:
            swarm.kill(victim.index, signal.SIGCONT)
            await watch.until(lambda event: isinstance(event, PeerChange) and event.change == "up")
            await watch.step(swarm.progress.step + 3)
        swarm.request_stop()
        await watch.to_the_end(swarm)
    counts, report = _account(watch), checked(tmp_path / "logs")
    assert counts.completed == report["completed"] > 0
    reasons = [event.reason for event in watch.seen if isinstance(event, Abandoned)]
    assert counts.abandoned == report.get("abandoned", 0) == len(reasons)
    # What the lost replica holds is launched again by design.
    assert sum(reason != STRAGGLER for reason in reasons) <= 2, reasons
    assert (report["logs"], report["ended_well"]) == (4, 3 if number is signal.SIGKILL else 4)
    # Each of the two stages after 0, and the data node's own, count every completed microbatch.
    lost = report.get("lost with a killed peer", 0)
    assert report["visits"] == 3 * counts.completed - lost
    assert number is signal.SIGKILL or lost == 0
    assert not {event.NAME for event in watch.seen} & {"visit", "completed", "retracted"}, "they are for the log only"


async def test_a_run_that_skips_stages_goes_round_one_that_has_lost_its_last_peer(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 1, 1), per_path=2)
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=4, threads=1, log_dir=tmp_path / "logs")) as swarm:
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
    counts, report = _account(watch), checked(tmp_path / "logs")
    assert counts.completed == report["completed"] > 0
    assert counts.abandoned == report.get("abandoned", 0)
    # Two stages after 0 and the data node's own. Those in flight when stage 2 was lost may have visited one less.
    assert 2 * counts.completed < report["visits"] <= 3 * counts.completed - report.get("lost with a killed peer", 0)


def assert_nothing_lost(watch: Watch, completed: int, *, abandoned: bool = False) -> None:
    """Everything that was started is complete, and every stage has learnt from each microbatch once."""
    counts = _account(watch)
    assert counts.completed == completed
    assert abandoned or not counts.abandoned
    if not counts.abandoned:
        for stage in (1, 2):
            replicas = [summary for summary in watch.summaries() if summary.module == f"{stage}.0"]
            assert sum(summary.accumulated for summary in replicas) == completed, f"stage {stage}"


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("leave", marks=pytest.mark.long)])
async def test_a_replica_leaves_and_nothing_is_abandoned(tmp_path: Path, how: str) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=BLOCKS)
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=4, steps=40, threads=1)) as swarm:
        watch = Watch(swarm)
        await watch.under_way(swarm)
        leaver = [peer for peer in swarm.peers if peer.stage == REPLICATED][-1]
        if how == "leave":
            await ask_to_leave(leaver.identity_path, STOP_LIMIT_S)
        else:
            swarm.terminate(leaver.index)
        await watch.until(lambda event: isinstance(event, NodeSummary) and event.peer == leaver.peer)
        async with asyncio.timeout(STOP_LIMIT_S):
            while leaver.index not in swarm.ends:
                await asyncio.sleep(0.05)
        assert swarm.ends[leaver.index].exit_code == 0
        assert not endpoint_path(leaver.identity_path).exists()
        await watch.to_the_end(swarm)
    assert watch.states(leaver.peer)[-2:] == ["serving", "draining"]
    assert_nothing_lost(watch, 40 * manifest.microbatches_per_step)


@pytest.mark.long
async def test_a_second_signal_ends_a_draining_node_at_once(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=BLOCKS)
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=4, steps=20, threads=1)) as swarm:
        watch = Watch(swarm)
        await watch.under_way(swarm)
        leaver = [peer for peer in swarm.peers if peer.stage == REPLICATED][-1]
        swarm.terminate(leaver.index)
        await watch.until(
            lambda event: isinstance(event, NodeStatus) and event.peer == leaver.peer and event.state == "draining"
        )
        swarm.terminate(leaver.index)
        await watch.to_the_end(swarm)
    assert swarm.ends[leaver.index].exit_code == 128 + signal.SIGTERM
    assert leaver.peer not in [summary.peer for summary in watch.summaries()]


async def test_the_last_peer_of_a_module_is_told_so(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=BLOCKS)
    options = LocalSwarmOptions(peers=3, threads=1, checkpoint_dir=tmp_path / "saved")
    async with LocalSwarm(manifest, options) as swarm:
        watch = Watch(swarm)
        await watch.step(3)
        swarm.terminate(2)
        said = await watch.until(lambda event: isinstance(event, LastPeer))
        assert said == LastPeer(swarm.peers[2].peer, "2.0", str(tmp_path / "saved"))
        await watch.until(lambda event: isinstance(event, NodeSummary) and event.module == "2.0")
        assert any((tmp_path / "saved" / swarm.peers[2].peer).glob("state-*.json"))


async def test_a_peer_moves_to_a_stage_that_has_lost_its_last_one(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=BLOCKS)
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=4, threads=1, moving=True)) as swarm:
        watch = Watch(swarm)
        await watch.under_way(swarm)
        swarm.kill(2, signal.SIGKILL)
        await watch.until(lambda event: isinstance(event, Resumed) and event.module == "2.0")
        moves = [event for event in watch.seen if isinstance(event, Move)]
        assert [(move.module, move.target) for move in moves] == [("1.0", "2.0")]
        assert "has no peer" in moves[0].reason
        before = len(watch.losses())
        await watch.until(lambda event: len(watch.losses()) > before + 3)
        swarm.request_stop()
        await watch.to_the_end(swarm)
    assert watch.states(moves[0].peer)[-5:] == ["serving", "draining", "joining", "serving", "draining"]
    assert [e.exit_code for index, e in sorted(swarm.ends.items()) if index != 2] == [0, 0, 0]
    assert_nothing_lost(watch, _account(watch).completed, abandoned=True)


async def test_a_node_that_is_the_only_one_in_its_module_calls_its_move_off(tmp_path: Path) -> None:
    """Whatever decides that it should move: it asks for other replicas, finds none, and goes on serving."""
    path, identity = tmp_path / "run.toml", tmp_path / "identity.key"
    path.write_bytes(
        sign_manifest(small_run(write_text(tmp_path / "text"), blocks=BLOCKS), Identity.create(identity)).text
    )
    options = NodeOptions(
        link=None, manifest_path=path, identity_path=identity, stage="1", listen="127.0.0.1", device="cpu"
    )
    told, stop, asked = KeptEvents(), asyncio.Event(), asyncio.Event()

    async def elsewhere() -> Reasoned[ModuleId]:
        if asked.is_set():
            await asyncio.Event().wait()
        asked.set()
        return Reasoned(ModuleId(2), "a test says so")

    def moving(context: object) -> NextModule:
        return elsewhere

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_node(options, told, stop, moving))
        async with asyncio.timeout(PATIENCE_S):
            await asked.wait()  # for another module, when it serves
        await ask_to_leave(identity, STOP_LIMIT_S)
    assert stop.is_set()
    assert not [event for event in told.events if isinstance(event, Move)]
    assert [e.state for e in told.events if isinstance(e, NodeStatus)] == ["joining", "serving", "serving", "draining"]


async def test_leave_without_a_node_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no node runs here"):
        await ask_to_leave(tmp_path / "identity.key", 1.0)
    endpoint_path(tmp_path / "identity.key").write_text('{"port": 1, "secret": "of a node that was killed"}')
    with pytest.raises(ConfigError, match="no node runs here"):
        await ask_to_leave(tmp_path / "identity.key", 1.0)
