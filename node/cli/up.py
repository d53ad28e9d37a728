"""`skipstone up` and `solo`: a run on this machine, by a swarm of processes or in one without a network."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.cli.manifests import ManifestChanges, chosen_manifest, router_of
from node.cli.options import RunOptions, VisitedPerPath, VisitRatio, keep_run, with_options
from node.cli.views.interrupts import Interrupts, leave_at_once
from node.cli.views.output import announce, event_sink, join_lines, run_loop
from node.cli.views.text import counted
from node.context.options import default_identity_path
from node.observability.events import Event, InnerStep, LastPeer, NodeSummary, Note, PeerChange, Resumed, Waiting
from node.web.server import WHERE, RunPage, served

if TYPE_CHECKING:
    from rich.console import RenderableType

    from node.local_swarm.local_swarm import LocalSwarm
    from node.local_swarm.setup import LocalSwarmOptions
    from node.local_swarm.swarm_progress import SwarmProgress
    from protocol.manifest.manifest import Manifest

SHARED_RUN = "To share a run, begin it with `skipstone new`."
STATE_LOST = "the swarm has ended and its state is lost; use --checkpoint-dir FOLDER to keep it next time"


@with_options(RunOptions)
def up(
    peers: Annotated[int | None, typer.Option(help="Nodes to start [default: one per module]")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Inner steps to train [default: the schedule's]")] = None,
    stages_per_path: Annotated[int | None, VisitedPerPath] = None,
    visit_ratio: Annotated[float | None, VisitRatio] = None,
    log_dir: Annotated[Path | None, typer.Option(envvar="SKIPSTONE_LOG_DIR", help="Folder for event logs")] = None,
    listen: Annotated[str, typer.Option(help="Address to bind to; with 0.0.0.0 or :: others can join")] = "127.0.0.1",
    port_base: Annotated[int | None, typer.Option(min=1, max=65535, help="First port of the nodes")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads per node [default: an equal share]")] = None,
    memory_limit: Annotated[str | None, typer.Option(metavar="SIZE[,SIZE...]", help="Memory of each node.")] = None,
    dashboard: Annotated[
        int | None, typer.Option(min=0, max=65535, metavar="[PORT]", help="Show the run in the browser, at 8420")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    **settings: Any,
) -> None:
    """Train with a swarm of processes on this machine. Ctrl-C stops it cleanly, a second Ctrl-C at once."""
    announce("skipstone up: starting a local swarm", as_json=json)
    run = RunOptions(**settings)

    changes = ManifestChanges(seed=run.seed, source=run.data, stages_per_path=stages_per_path, visit_ratio=visit_ratio)
    chosen = chosen_manifest(run.file, changes)
    if chosen.data.is_of_files:
        from node.data.local_paths import as_written
        from node.data.sources import open_source

        open_source(chosen.data, as_written(chosen.data).text)  # report a missing folder here once, not in every node
    from node.context.options import parse_size
    from node.local_swarm.setup import LocalSwarmOptions

    router = router_of(run.file, chosen)
    options = LocalSwarmOptions(
        peers=len(chosen.modules()) if peers is None else peers,
        steps=steps or chosen.training.scheduled_steps,
        threads=threads,
        checkpoint_dir=run.checkpoint_dir,
        checkpoint_every_s=run.checkpoint_every,
        log_dir=log_dir,
        port_base=port_base,
        memory_limits=() if memory_limit is None else tuple(parse_size(each) for each in memory_limit.split(",")),
        moments=run.moments,
        model=run.model,
        router=b"" if router is None else router.to_bytes(),
        # `eval` opens the text paths of a checkpoint only if this machine signed its manifest.
        author_path=None if run.checkpoint_dir is None else default_identity_path(),
    )
    raise typer.Exit(run_loop(_up(chosen, options, listen, as_json=json, dashboard=dashboard)))


async def _up(
    manifest: Manifest, options: LocalSwarmOptions, listen: str, *, as_json: bool, dashboard: int | None
) -> int:
    """Runs the swarm to its end. Returns 128 + the stopping signal, else the first failing node's exit code."""
    from node.local_swarm.local_swarm import LocalSwarm
    from node.local_swarm.setup import LINK_PEERS, Deployment
    from node.local_swarm.swarm_progress import summarize
    from node.network.client import statuses
    from node.network.session import Whereabouts
    from protocol.manifest.join_link import short_link
    from protocol.transport.settings import joined

    where = Whereabouts(listen.strip("[]"))
    deployment = Deployment(host=where.listen, advertise=where.advertised_hosts()[0])
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(LocalSwarm(manifest, options, deployments=lambda _: deployment))
        loop = asyncio.get_running_loop()
        sink = event_sink(as_json=as_json, on_closed=swarm.request_stop)
        keep_run(str(swarm.link))

        def kill(_: int) -> None:
            swarm.signal_all(signal.SIGKILL)  # works even if the event loop hangs
            loop.call_soon_threadsafe(swarm.kill_all)

        first = (joined(peer.deployment.advertised_host, peer.port) for peer in swarm.peers[:LINK_PEERS])
        link = str(short_link(swarm.link.run, tuple(first)))
        if not as_json:
            modules = f" of {len(manifest.modules())} modules" if manifest.stages.has_experts else ""
            stages = f"{counted(manifest.stages.count, 'stage')}{modules}"
            typer.echo(f"run {manifest.name}: {counted(options.peers, 'node')}, {stages}. ", nl=False)
            typer.echo(f"{join_lines(link, SHARED_RUN)}\n")
            if options.checkpoint_dir is not None:
                typer.echo(f"Checkpoints go to {options.checkpoint_dir}; the same command resumes from them.\n")
        if dashboard is not None:
            page = RunPage(lambda: link, stop=swarm.request_stop)
            at = await stack.enter_async_context(served(page, dashboard, partial(statuses, swarm.link)))
            typer.echo(WHERE.format(at), err=as_json)
        with Interrupts(lambda: loop.call_soon_threadsafe(swarm.request_stop), kill) as interrupts:
            if as_json:
                await _follow(swarm, sink.emit)
            elif not sys.stdout.isatty():
                await _follow(swarm, lambda event: sink.emit(event) if _is_of_all(event, swarm.progress) else None)
            else:
                await _show(swarm, manifest.name)
    if swarm.progress.lost:
        sink.emit(Note("warning", STATE_LOST))
    sink.emit(summarize(swarm.progress))
    failures = (end.exit_code for end in swarm.ends.values() if end.exit_code)
    return interrupts.exit_code or next(failures, 0)


def _is_of_all(event: Event, progress: SwarmProgress) -> bool:
    """Whether an event is worth a line in a log; one per event of a peer would bury the steps."""
    if isinstance(event, Waiting | Resumed) and progress.starting:
        return False
    return not isinstance(event, InnerStep | LastPeer | NodeSummary | PeerChange)


async def _follow(swarm: LocalSwarm, emit: Callable[[Event], None]) -> None:
    async for event in swarm.events():
        emit(event)
        if swarm.progress.is_over:
            swarm.request_stop()


async def _show(swarm: LocalSwarm, title: str) -> None:
    from rich.console import Console

    from node.cli.views.live import draw, render

    began = time.monotonic()

    def picture() -> RenderableType:
        now = time.monotonic()
        return render(swarm.progress, title, now - began, now)

    async with asyncio.TaskGroup() as tasks:
        drawing = tasks.create_task(draw(Console(), picture))
        await _follow(swarm, lambda event: None)
        drawing.cancel()


@with_options(RunOptions)
def solo(
    steps: Annotated[int | None, typer.Option(min=0, help="Inner steps; 0 only loads and saves")] = None,
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
