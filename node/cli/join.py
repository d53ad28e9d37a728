"""`skipstone join`: one node in the foreground, until it is told to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli.options import AllowHub, LinkFile, TextPlace, TokenizerPlace, link_in, setting
from node.cli.views.interrupts import STOP_LIMIT_S, Interrupts, end_by, leave_at_once, stop_on_end_of_input
from node.cli.views.output import LogLevel, announce, event_sink, run_loop, start_log, tell
from node.context.options import variable
from node.network.reach_status import ReachMode
from swarm.vocabulary.errors import ConfigError

if TYPE_CHECKING:
    from node.context.options import NodeOptions
    from protocol.manifest.join_link import JoinLink

MEGABYTE = 10**6
MAX_MEGABYTES = 10**9
"""In an hour; more than any line carries."""


def join(
    target: Annotated[
        str,
        typer.Argument(
            metavar="LINK|FILE",
            envvar=variable("link"),
            show_envvar=False,
            help="A join link or a file with one, or a manifest to begin with.",
        ),
    ],
    stage: Annotated[int | None, setting("stage", "The stage to host [default: the one that needs it most]")] = None,
    move: Annotated[
        bool | None, setting("move", "Change stages when needed [default: unless --stage is given]", off="stay")
    ] = None,
    data: Annotated[bool, setting("data", "May take stage 0, which reads the text.", off="no-data")] = True,
    text: Annotated[Path | None, TextPlace] = None,
    tokenizer: Annotated[Path | None, TokenizerPlace] = None,
    allow_hub: Annotated[bool, AllowHub] = False,
    yes: Annotated[bool, setting("yes", "Join without being asked.")] = False,
    identity: Annotated[Path | None, setting("identity", "The node's key file; made when it is not there.")] = None,
    listen: Annotated[str, setting("listen", "Local address to bind to.")] = "0.0.0.0",  # noqa: S104 - see NodeOptions
    advertise: Annotated[str | None, setting("advertise", "Host that others reach this node at.")] = None,
    port: Annotated[int, setting("port", "Port of the node; 0 for any.")] = 0,
    dht_port: Annotated[int, setting("dht-port", "Port of its DHT; 0 for any.")] = 0,
    reach: Annotated[ReachMode, setting("reach", "auto asks the router for a port if need be.")] = ReachMode.AUTO,
    serve_relay: Annotated[
        int,
        typer.Option(
            "--serve-relay",
            envvar=variable("serve-relay"),
            show_envvar=False,
            metavar="MEGABYTES_PER_HOUR",
            min=0,
            max=MAX_MEGABYTES,
            help="Carry so much in an hour for peers that cannot dial each other; 0 carries nothing.",
        ),
    ] = 0,
    device: Annotated[str, setting("device", "cpu, cuda, cuda:N, mps or auto.")] = "auto",
    threads: Annotated[int | None, setting("threads", "CPU threads for computing.")] = None,
    slots: Annotated[int | None, setting("slots", "Microbatches held at a time.")] = None,
    window: Annotated[int | None, setting("window", "Microbatches a data node has under way.")] = None,
    memory: Annotated[str | None, setting("memory", "For kept graphs, such as 512MiB; 0 recomputes always.")] = None,
    steps: Annotated[int | None, setting("steps", "A data node stops after so many steps.")] = None,
    checkpoint_dir: Annotated[Path | None, setting("checkpoint-dir", "Folder to save to, and to go on from.")] = None,
    checkpoint_every: Annotated[float, setting("checkpoint-every", "Seconds between two saves.")] = 300.0,
    log_dir: Annotated[Path | None, setting("log-dir", "Folder for the event log that `check` reads.")] = None,
    link_file: Annotated[Path | None, setting("link-file", "File to write the link to that others join with.")] = None,
    patience: Annotated[float, setting("patience", "Seconds to wait for the link's peers at the start.")] = 60.0,
    json: Annotated[bool, setting("json", "One JSON object a line.")] = False,
    stop_on_eof: Annotated[bool, typer.Option("--stop-on-eof", help="Stop when standard input ends.")] = False,
    log_level: Annotated[LogLevel, setting("log-level", "Of the log on standard error.")] = LogLevel.WARNING,
) -> None:
    """Run one node of a swarm. Ctrl-C or `skipstone leave` stops it in good order, a second Ctrl-C at once.

    Variables can say the same: SKIPSTONE_LINK the link, SKIPSTONE_DHT_PORT what --dht-port says, and so on.
    """
    if not json:
        announce("skipstone join: starting a node", as_json=False)
    start_log(log_level)
    from node.context.options import NodeOptions, default_identity_path, parse_size
    from node.data.places import ToldPlaces

    link, manifest_path = _parse_target(target)
    options = NodeOptions(
        link=link,
        manifest_path=manifest_path,
        identity_path=identity or default_identity_path(),
        stage=stage,
        moving=move,
        reads_text=data,
        told=ToldPlaces(text=text, tokenizer=tokenizer, hub=allow_hub),
        listen=listen,
        advertise=advertise,
        port=port,
        dht_port=dht_port,
        reach=reach,
        relay_bytes_per_hour=serve_relay * MEGABYTE,
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
    raise typer.Exit(run_loop(_join(options, link_file, yes=yes, as_json=json, stop_on_eof=stop_on_eof)))


async def _join(options: NodeOptions, link_file: Path | None, *, yes: bool, as_json: bool, stop_on_eof: bool) -> int:
    """Runs the node and returns the exit code: leaving in good order is how a node ends, whoever asked for it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if stop_on_eof:
        stop_on_end_of_input(stop.set)
    with Interrupts(lambda: _ask_politely(loop, stop), leave_at_once):
        from node.cli.consent import Consent
        from node.runtime.node import run_node

        consent = Consent(options, yes=yes or stop_on_eof, as_json=as_json)  # else two would read standard input
        events = event_sink(as_json=as_json, on_closed=stop.set)
        await run_node(options, events if link_file is None else LinkFile(link_file, events), stop, consent=consent)
        return 0


def _ask_politely(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    end_by(STOP_LIMIT_S)
    tell("stopping in good order; once more to stop at once")
    loop.call_soon_threadsafe(stop.set)


def _parse_target(target: str) -> tuple[JoinLink | None, Path | None]:
    if (link := link_in(target)) is not None:
        return link, None
    path = Path(target)
    if not path.is_file():
        raise ConfigError(
            f"{target!r} is neither a join link nor a manifest file",
            hint="A link begins with `skipstone:`; a manifest is written by `skipstone new FILE`.",
        )
    return None, path
