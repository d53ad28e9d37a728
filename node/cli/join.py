"""`skipstone join`: one node in the foreground, until it is told to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli.interrupts import STOP_LIMIT_S, Interrupts, end_by, leave_at_once, stop_on_end_of_input
from node.cli.output import LogLevel, announce, event_sink, run_loop, start_log, tell
from node.reach.standing import ReachMode
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from node.options import NodeOptions
    from protocol.join_link import JoinLink


def join(
    target: Annotated[str, typer.Argument(metavar="LINK|MANIFEST", help="A join link, or a manifest to begin with.")],
    stage: Annotated[int | None, typer.Option(help="The stage to host [default: the one that needs it most]")] = None,
    move: Annotated[
        bool | None, typer.Option("--move/--stay", help="Change stages when needed [default: unless --stage is given]")
    ] = None,
    data: Annotated[bool, typer.Option("--data/--no-data", help="May take stage 0, which reads the text.")] = True,
    identity: Annotated[Path | None, typer.Option(help="The node's key file; made when it is not there.")] = None,
    listen: Annotated[str, typer.Option(help="Local address to bind to.")] = "0.0.0.0",  # noqa: S104 - see NodeOptions
    advertise: Annotated[str | None, typer.Option(help="Host that others reach this node at.")] = None,
    port: Annotated[int, typer.Option(help="Port of the node; 0 for any.")] = 0,
    dht_port: Annotated[int, typer.Option(help="Port of its DHT; 0 for any.")] = 0,
    reach: Annotated[ReachMode, typer.Option(help="auto asks the router for a port if need be.")] = ReachMode.AUTO,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, mps or auto.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads for computing.")] = None,
    slots: Annotated[int | None, typer.Option(help="Microbatches held at a time.")] = None,
    window: Annotated[int | None, typer.Option(help="Microbatches a data node has under way.")] = None,
    memory: Annotated[str | None, typer.Option(help="For kept graphs, such as 512MiB; 0 recomputes always.")] = None,
    steps: Annotated[int | None, typer.Option(help="A data node stops after so many steps.")] = None,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="Folder to save to, and to go on from.")] = None,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between two saves.")] = 300.0,
    log_dir: Annotated[
        Path | None, typer.Option(envvar="SKIPSTONE_LOG_DIR", help="Folder for the event log that `check` reads.")
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds to wait for the link's peers at the start.")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    stop_on_eof: Annotated[bool, typer.Option("--stop-on-eof", help="Stop when standard input ends.")] = False,
    log_level: Annotated[LogLevel, typer.Option(help="Of the log on standard error.")] = LogLevel.WARNING,
) -> None:
    """Run one node of a swarm. Ctrl-C or `skipstone leave` stops it in good order, a second Ctrl-C at once."""
    if not json:
        announce("skipstone join: starting a node", as_json=False)
    start_log(log_level)
    from node.options import NodeOptions, default_identity_path, parse_size

    link, manifest_path = _parse_target(target)
    options = NodeOptions(
        link=link,
        manifest_path=manifest_path,
        identity_path=identity or default_identity_path(),
        stage=stage,
        moving=move,
        reads_text=data,
        listen=listen,
        advertise=advertise,
        port=port,
        dht_port=dht_port,
        reach=reach,
        device=device,
        threads=threads,
        slots=slots,
        window=window,
        memory=None if memory is None else parse_size(memory),
        steps=steps,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every_s=checkpoint_every,
        log_dir=log_dir,
        patience_s=patience,
    )
    raise typer.Exit(run_loop(_join(options, as_json=json, stop_on_eof=stop_on_eof)))


async def _join(options: NodeOptions, *, as_json: bool, stop_on_eof: bool) -> int:
    """Runs the node and returns the exit code: leaving in good order is how a node ends, whoever asked for it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if stop_on_eof:
        stop_on_end_of_input(stop.set)
    with Interrupts(lambda: _ask_politely(loop, stop), leave_at_once):
        from node.process import run_node

        await run_node(options, event_sink(as_json=as_json, on_closed=stop.set), stop)
        return 0


def _ask_politely(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    end_by(STOP_LIMIT_S)
    tell("stopping in good order; once more to stop at once")
    loop.call_soon_threadsafe(stop.set)


def _parse_target(target: str) -> tuple[JoinLink | None, Path | None]:
    from protocol.join_link import is_link, parse_link

    if is_link(target):
        return parse_link(target), None
    path = Path(target)
    if not path.is_file():
        raise ConfigError(
            f"{target!r} is neither a join link nor a manifest file",
            hint="A link begins with `skipstone:`; a manifest is written by `skipstone new FILE`.",
        )
    return None, path
