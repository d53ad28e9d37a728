"""A swarm killed as a whole goes on from its checkpoint: same peers, same modules, steps and text where they were."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from node.checkpoint.folder import CheckpointFolder, Header, load_newest, read_manifest
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import Note, Step
from swarm.vocabulary.types import PeerId
from tests.e2e.small_run import Watch, small_run, write_text

pytestmark = pytest.mark.e2e

STEPS = 60


def newest(path: Path, peer: str) -> Header:
    signed = read_manifest(path)
    found = load_newest(CheckpointFolder(path, signed.run, signed.text), PeerId(peer))
    assert found is not None
    assert found.problems == ()
    return found.header


async def test_a_swarm_killed_as_a_whole_goes_on(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"))
    folder = tmp_path / "checkpoint"
    options = LocalSwarmOptions(peers=4, steps=STEPS, threads=1, checkpoint_dir=folder, checkpoint_every_s=0.5)
    async with LocalSwarm(manifest, options) as swarm:
        first = Watch(swarm)
        await first.step(12)
        await first.until(lambda event: all(list((folder / peer.peer).glob("*.json")) for peer in swarm.peers))
        await first.step(30)
        swarm.signal_all(signal.SIGKILL)
        peers = [peer.peer for peer in swarm.peers]
        await first.to_the_end(swarm)
    saved = [newest(folder, peer) for peer in peers]
    position = saved[0].data
    assert position is not None
    assert 0 < saved[0].steps <= len(first.losses()) + 1

    async with LocalSwarm(manifest, options) as swarm:
        assert [peer.peer for peer in swarm.peers] == peers
        second = Watch(swarm)
        await second.to_the_end(swarm)
        assert {end.exit_code for end in swarm.ends.values()} == {0}

    notes = [event.message for event in second.seen if isinstance(event, Note)]
    for header in saved:
        told = f"resumes module {header.owner.module} from snapshot {header.number}: inner step {header.steps},"
        assert any(note.startswith(told) for note in notes), told
    steps = [event for event in second.seen if isinstance(event, Step)]
    assert [event.step for event in steps] == list(range(saved[0].steps + 1, STEPS + 1))
    assert steps[-1].tokens == STEPS * manifest.training.inner_tokens
    before = first.losses()
    assert steps[0].loss < before[0] - 0.5, "it began with untrained weights"
    assert steps[0].loss < before[saved[0].steps - 1] + 0.3
    assert steps[-1].loss < before[-1]

    end = newest(folder, peers[0])
    assert end.data is not None
    assert end.steps == STEPS
    assert end.data.cursor > position.cursor
    assert end.data.completed == STEPS * manifest.microbatches_per_step
    assert abs(end.data.next_number - position.next_number) > 2**20, "numbers of the life before are used again"
    (summary,) = (event for event in second.summaries() if event.module == "0.0")
    assert summary.microbatches.completed == end.data.completed
    assert summary.microbatches.duplicated == 0

    async with LocalSwarm(manifest, options) as swarm:  # all its steps are done already
        third = Watch(swarm)
        await third.to_the_end(swarm)
        assert {end.exit_code for end in swarm.ends.values()} == {0}, swarm.ends
    assert third.losses() == []
    assert newest(folder, peers[0]).steps == STEPS
