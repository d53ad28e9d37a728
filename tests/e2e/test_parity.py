"""A swarm with one replica a stage computes what one process computes: the same losses, the same parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from node.checkpoint.folder import CheckpointFolder
from node.checkpoint.gather import gather_modules
from node.local_setup import LocalSwarmOptions
from node.local_swarm import LocalSwarm
from node.solo import train_solo
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.signed_manifest import sign_manifest
from tests.e2e.small_run import Watch, small_run, write_text

pytestmark = pytest.mark.e2e

STEPS = 20


@pytest.mark.parametrize("inner_steps", [50, 4], ids=["without a round", "with five rounds"])
async def test_a_swarm_equals_one_process(tmp_path: Path, inner_steps: int) -> None:
    manifest = small_run(write_text(tmp_path / "text"), inner_steps=inner_steps)
    solo = _solo_losses(manifest, tmp_path / "solo")
    options = LocalSwarmOptions(peers=4, steps=STEPS, threads=1, checkpoint_dir=tmp_path / "swarm")
    async with LocalSwarm(manifest, options) as swarm:
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
    completed = {summary.accumulated for summary in watch.summaries()}
    assert completed == {STEPS * manifest.microbatches_per_step}


def _solo_losses(manifest: Manifest, folder: Path) -> list[float]:
    losses: list[float] = []
    signed = sign_manifest(manifest, Identity.generate())
    train_solo(
        manifest,
        steps=STEPS,
        device=torch.device("cpu"),
        threads=1,
        on_event=lambda event: losses.append(event["loss"]) if event["event"] == "step" else None,
        checkpoint=CheckpointFolder(folder, signed.run, signed.text),
    )
    return losses
