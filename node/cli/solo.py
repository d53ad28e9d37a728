"""`skipstone solo`: the same run in one process without a network, as the baseline for a swarm."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer

from node.cli.manifests import ManifestChanges, chosen_manifest, router_of
from node.cli.options import DataChoice, ManifestChoice, MomentsChoice, SeedChoice, StepsChoice, require_writable
from node.cli.views.interrupts import Interrupts, leave_at_once
from node.cli.views.output import announce, event_sink
from node.model.moments import MomentType


def solo(
    manifest: Annotated[Path | None, ManifestChoice] = None,
    steps: Annotated[int | None, StepsChoice] = None,
    data: Annotated[str | None, DataChoice] = None,
    seed: Annotated[int | None, SeedChoice] = None,
    model: Annotated[Path | None, typer.Option(help="Folder of the model that the run starts from.")] = None,
    device: Annotated[str, typer.Option(help="Compute device: cpu, cuda, cuda:N, mps or auto.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads [default: all]")] = None,
    moments: Annotated[MomentType, MomentsChoice] = MomentType.FLOAT32,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Folder to save to and to resume from [default: save nothing]")
    ] = None,
    checkpoint_every: Annotated[float, typer.Option(min=0.1, help="Interval between checkpoints, in seconds.")] = 300.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Train a run in one process, without a network."""
    announce("skipstone solo: training in one process", as_json=json)
    require_writable(checkpoint_dir)
    chosen = chosen_manifest(manifest, ManifestChanges(seed=seed, source=data))
    stop = threading.Event()
    sink = event_sink(as_json=json, on_closed=stop.set)

    with Interrupts(stop.set, leave_at_once) as interrupts:
        import torch

        from node.checkpoint.folder import CheckpointFolder
        from node.context.options import default_identity_path
        from node.model.device import choose_device
        from node.solo.trainer import CheckpointPlan, train_solo
        from node.start.cut_model import open_start
        from protocol.identity.keys import Identity
        from protocol.manifest.signing import sign_manifest

        if threads is not None:
            torch.set_num_threads(threads)
        router = router_of(manifest, chosen)
        folder = None
        if checkpoint_dir is not None:
            # `eval` opens the text paths of a checkpoint only if this machine signed its manifest.
            signed = sign_manifest(chosen, Identity.load_or_create(default_identity_path()))
            saved_router = b"" if router is None else router.to_bytes()
            folder = CheckpointFolder(checkpoint_dir, signed.run, signed.text, router=saved_router)
        train_solo(
            chosen,
            steps=steps or chosen.training.scheduled_steps,
            device=choose_device(device).value,
            on_event=sink.emit,
            saves=None if folder is None else CheckpointPlan(folder, checkpoint_every),
            router=router,
            start=open_start(chosen, model),
            moments=moments,
            should_stop=stop.is_set,
        )
    raise typer.Exit(interrupts.exit_code)
