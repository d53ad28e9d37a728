"""The same run in one process, and what a swarm must have in common with it."""

from __future__ import annotations

from pathlib import Path

import torch

from node.checkpoint.folder import CheckpointFolder, gather_modules
from node.experts.router import Router
from node.observability.events import Step
from node.solo.solo_checkpoint import CheckpointPlan
from node.solo.trainer import train_solo
from node.start.cut_model import CutModel
from protocol.identity.keys import Identity
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import sign_manifest


def solo_losses(
    manifest: Manifest, folder: Path, steps: int, *, router: Router | None = None, start: CutModel | None = None
) -> list[float]:
    """The losses of so many steps, after which the state is saved in the folder."""
    losses: list[float] = []
    signed = sign_manifest(manifest, Identity.generate())
    torch.set_num_threads(1)
    train_solo(
        manifest,
        steps=steps,
        device=torch.device("cpu"),
        on_event=lambda event: losses.append(event.loss) if isinstance(event, Step) else None,
        router=router,
        start=start,
        saves=CheckpointPlan(CheckpointFolder(folder, signed.run, signed.text)),
    )
    return losses


def assert_same_parameters(manifest: Manifest, one: Path, other: Path) -> None:
    """Of the checkpoints in two folders."""
    swarms, solos = gather_modules(one).modules, gather_modules(other).modules
    for module in manifest.modules():
        ours, theirs = swarms[module], solos[module]
        assert ours.keys() == theirs.keys()
        for parameter, value in ours.items():
            torch.testing.assert_close(
                value, theirs[parameter], rtol=0, atol=1e-5, msg=lambda why, name=parameter: f"{name}: {why}"
            )
