"""`skipstone solo`: the same run in one process without any network, the baseline for a swarm."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli.manifests import ManifestChanges, chosen_manifest, router_of
from node.cli.options import MomentsChoice
from node.cli.views.interrupts import Interrupts, leave_at_once
from node.cli.views.output import announce, event_sink
from node.model.moments import MomentType

if TYPE_CHECKING:
    from node.checkpoint.folder import CheckpointFolder
    from node.experts.router import Router
    from protocol.manifest.manifest import Manifest


def solo(
    manifest: Annotated[Path | None, typer.Option(help="The run [default: a small demo]")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train [default: the manifest's schedule]")] = None,
    data: Annotated[str | None, typer.Option(help="Another source of text than the manifest's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed than the manifest's.")] = None,
    model: Annotated[Path | None, typer.Option(help="Folder of the model that the run starts from.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, mps or auto.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for computing.")] = None,
    moments: Annotated[MomentType, MomentsChoice] = MomentType.FLOAT32,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="Folder to save to, and to go on from.")] = None,
    checkpoint_every: Annotated[float, typer.Option(min=0.1, help="Seconds between two saves.")] = 300.0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Train the same run in one process, without any network."""
    announce("skipstone solo: training in one process", as_json=json)
    chosen = chosen_manifest(manifest, ManifestChanges(seed=seed, source=data))
    stop = threading.Event()
    sink = event_sink(as_json=json, on_closed=stop.set)

    with Interrupts(stop.set, leave_at_once) as interrupts:
        import torch

        from node.model.device import choose_device
        from node.solo.trainer import CheckpointPlan, train_solo
        from node.start.cut_model import open_start

        if threads is not None:
            torch.set_num_threads(threads)
        router = router_of(manifest, chosen)
        folder = None if checkpoint_dir is None else _checkpoint_folder(checkpoint_dir, chosen, router)
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


def _checkpoint_folder(path: Path, manifest: Manifest, router: Router | None) -> CheckpointFolder:
    """A folder whose manifest this machine has signed, so that `eval` opens the text that it names."""
    from node.checkpoint.folder import CheckpointFolder
    from node.context.options import default_identity_path
    from protocol.identity.keys import Identity
    from protocol.manifest.signing import sign_manifest

    signed = sign_manifest(manifest, Identity.load_or_create(default_identity_path()))
    return CheckpointFolder(path, signed.run, signed.text, router=b"" if router is None else router.to_bytes())
