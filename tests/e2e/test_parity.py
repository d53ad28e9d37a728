"""A swarm with one replica a stage computes what one process computes: the same losses, the same parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from node.checkpoint.folder import CheckpointFolder
from node.checkpoint.gather import gather_modules
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place, Places, everywhere_here
from node.observability.events import Step
from node.pipeline.admission import path_rules
from node.solo.solo_checkpoint import CheckpointPlan
from node.solo.trainer import train_solo
from protocol.identity.keys import Identity
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import sign_manifest
from swarm.routing.planner import visited_stages
from tests.e2e.small_run import Watch, small_run, write_text

pytestmark = pytest.mark.e2e

STEPS = 20


@pytest.mark.parametrize(
    "inner_steps",
    [pytest.param(50, id="without a round", marks=pytest.mark.long), pytest.param(4, id="with five rounds")],
)
async def test_a_swarm_equals_one_process(tmp_path: Path, inner_steps: int) -> None:
    await _compare(small_run(write_text(tmp_path / "text"), inner_steps=inner_steps), tmp_path)


async def test_a_swarm_that_skips_equals_one_process(tmp_path: Path) -> None:
    """Each of four stages sees every second microbatch. With four in a step of stage 0, every second such step ends one
    of all the others, and none of them steps while others of its microbatches are under way: what they see does not
    depend on who is faster.

    A data node's numbers begin anywhere, solo's at 0: for their choices to be the same, this data node begins at 0 too
    and takes no lanes.
    """
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 1, 1, 1), per_path=2, inner_steps=4)
    visited = [visited_stages(path_rules(manifest), number) for number in range(manifest.microbatches_per_step)]
    assert all(sum(stage in stages for stages in visited) == 2 for stage in range(1, 5))
    ring_only = Place(command=(sys.executable, "-P", "-m", "tests.e2e.ring_only"))
    await _compare(manifest, tmp_path, lambda index: ring_only)


async def _compare(manifest: Manifest, tmp_path: Path, places: Places = everywhere_here) -> None:
    solo = _solo_losses(manifest, tmp_path / "solo")
    peers = manifest.stages.count
    options = LocalSwarmOptions(peers=peers, steps=STEPS, threads=1, checkpoint_dir=tmp_path / "swarm")
    async with LocalSwarm(manifest, options, places=places) as swarm:
        watch = Watch(swarm)
        await watch.to_the_end(swarm)
    assert watch.losses() == pytest.approx(solo, abs=1e-4)
    assert solo[-1] < solo[0] - 0.5, "nothing was learnt, so that equal losses would show nothing"
    swarms, solos = gather_modules(tmp_path / "swarm").modules, gather_modules(tmp_path / "solo").modules
    for module in manifest.modules():
        ours, theirs = swarms[module], solos[module]
        assert ours.keys() == theirs.keys()
        for parameter, value in ours.items():
            torch.testing.assert_close(
                value, theirs[parameter], rtol=0, atol=1e-5, msg=lambda why, name=parameter: f"{name}: {why}"
            )
    completed = STEPS * manifest.microbatches_per_step
    visits = completed * manifest.stages.visited_per_path // (peers - 1)
    assert sorted(summary.accumulated for summary in watch.summaries()) == sorted([completed, *[visits] * (peers - 1)])


def _solo_losses(manifest: Manifest, folder: Path) -> list[float]:
    losses: list[float] = []
    signed = sign_manifest(manifest, Identity.generate())
    torch.set_num_threads(1)
    train_solo(
        manifest,
        steps=STEPS,
        device=torch.device("cpu"),
        on_event=lambda event: losses.append(event.loss) if isinstance(event, Step) else None,
        saves=CheckpointPlan(CheckpointFolder(folder, signed.run, signed.text)),
    )
    return losses
