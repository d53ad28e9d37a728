"""`skipstone solo`: the same run in one process without a network, as the baseline for a swarm."""

import threading
from typing import Annotated, Any

import typer

from node.cli.manifests import ManifestChanges, chosen_manifest, router_of
from node.cli.options import RunOptions, with_options
from node.cli.views.interrupts import Interrupts, leave_at_once
from node.cli.views.output import announce, event_sink
from node.context.options import default_identity_path


@with_options(RunOptions)
def solo(
    steps: Annotated[
        int | None,
        typer.Option(min=0, help="Inner steps to train; 0 only loads and saves [default: the manifest's schedule]"),
    ] = None,
    device: Annotated[str, typer.Option(help="Compute device: cpu, cuda, cuda:N, mps or auto.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads [default: all]")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    **settings: Any,
) -> None:
    """Train a run in one process, without a network."""
    announce("skipstone solo: training in one process", as_json=json)
    run = RunOptions(**settings)

    chosen = chosen_manifest(run.file, ManifestChanges(seed=run.seed, source=run.data))
    stop = threading.Event()
    sink = event_sink(as_json=json, on_closed=stop.set)

    with Interrupts(stop.set, leave_at_once) as interrupts:
        from node.checkpoint.folder import CheckpointFolder
        from node.model.device import choose_device, use_cores
        from node.solo.trainer import CheckpointPlan, train_solo
        from node.start.cut_model import open_start
        from protocol.identity.keys import Identity
        from protocol.manifest.signing import sign_manifest

        use_cores(threads)
        router = router_of(run.file, chosen)
        folder = None
        if run.checkpoint_dir is not None:
            # `eval` opens the text paths of a checkpoint only if this machine signed its manifest.
            signed = sign_manifest(chosen, Identity.load_or_create(default_identity_path()))
            saved_router = b"" if router is None else router.to_bytes()
            folder = CheckpointFolder(run.checkpoint_dir, signed.run, signed.text, router=saved_router)
        train_solo(
            chosen,
            steps=chosen.training.scheduled_steps if steps is None else steps,
            device=choose_device(device).value,
            on_event=sink.emit,
            saves=None if folder is None else CheckpointPlan(folder, run.checkpoint_every),
            router=router,
            start=open_start(chosen, run.model),
            moments=run.moments,
            should_stop=stop.is_set,
        )
    raise typer.Exit(interrupts.exit_code)
