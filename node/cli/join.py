"""`skipstone join` runs one node in the foreground after its owner agrees; others ask it to leave or rest."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import re
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from node.cli.options import NewLinks, keep_link, keep_run, manifest_file, require_writable, run_link, with_options
from node.cli.service import watchdog
from node.cli.views.interrupts import STOP_LIMIT_S, Interrupts, end_by, leave_at_once, stop_on_end_of_input
from node.cli.views.output import NodeLines, NodeLog, announce, event_sink, print_json, run_loop
from node.cli.views.text import count, counted, harmless
from node.concurrency.task_groups import aside, background
from node.context.options import NodeOptions, setting, variable
from node.observability.typed_json import to_json
from swarm.vocabulary.errors import ConfigError
from swarm.workload.limits import Limits

if TYPE_CHECKING:
    from node.data.local_paths import LocalPaths
    from protocol.manifest.join_link import Link
    from protocol.manifest.manifest import Manifest, StagesSection
    from protocol.manifest.signing import SignedManifest
    from swarm.vocabulary.types import Reasoned


_LINE_WIDTH: Final = 80  # Columns of a plain terminal


async def ask_consent(
    options: NodeOptions,
    signed: SignedManifest,
    text: Reasoned[LocalPaths | None],
    fits: Reasoned[tuple[int, ...]],
    own: bool,
) -> bool:
    """Asks the machine's owner for consent to join, unless --yes is set or this machine signed the run."""
    stream = sys.stderr if options.as_json else sys.stdout  # with --json, standard output is for programs
    with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
        for line in description(signed, options, text, fits, own=own):
            indent = " " * len("may use   ")  # only people read at a terminal; programs get one line per item
            wrapped = textwrap.fill(line, _LINE_WIDTH, subsequent_indent=indent, break_on_hyphens=False)
            typer.echo(wrapped if stream.isatty() else line, file=stream)
    # With --stop-on-eof another thread reads standard input. A service has no terminal to ask at.
    unasked = options.yes or options.stop_on_eof or own
    if unasked or not (sys.stdin.isatty() and stream.isatty()):
        return True
    typer.echo("Join this run? [y/N] ", file=stream, nl=False)
    return (await aside(_line_typed, None)).strip().lower() in ("y", "yes")


def description(
    signed: SignedManifest,
    options: NodeOptions,
    text: Reasoned[LocalPaths | None],
    fits: Reasoned[tuple[int, ...]],
    *,
    own: bool,
) -> tuple[str, ...]:
    """Describes the run and its use of this machine, one terminal-safe line per item."""
    manifest = signed.manifest
    readable = "the peer with the next stage can turn hidden states back into text"
    if manifest.model.residual:
        readable = "hidden states have the text's token numbers, so every peer with a stage reads the text"
    lines = (
        f"run       {manifest.name}, {signed.run}",
        f"author    {signed.author}{' (this machine)' if own else ''}",
        f"model     {count(_parameters(manifest))} parameters in {counted(manifest.stages.count, 'stage')}"
        f"{_experts(manifest.stages)}",
        f"reads     {_reading(manifest, options, text)}",
        f"sends     hidden states of the run's text, gradients and parameters to peers of this run; {readable}",
        f"fits      {fits.reason}",
        f"may use   {_use(options)}",
    )
    return tuple(harmless(line, 400) for line in lines)


def _experts(stages: StagesSection) -> str:
    if not stages.has_experts:
        return ""
    of_each = stages.experts
    return f" of {of_each if isinstance(of_each, int) else ', '.join(map(str, of_each))} experts"


def _parameters(manifest: Manifest) -> int:
    """Counts the parameters of all modules without building them: the model may be too large for this machine."""
    from protocol.manifest.manifest import block_parameters

    model, blocks = manifest.model, manifest.stages.blocks
    apart = sum(own * experts for own, experts in zip(blocks, manifest.stages.experts_of_each, strict=True))
    norms, embedding = 2 * model.hidden, model.vocabulary * model.stream
    return apart * (block_parameters(model) + norms) + (model.vocabulary + 1) * model.hidden + embedding


def _reading(manifest: Manifest, options: NodeOptions, text: Reasoned[LocalPaths | None]) -> str:
    if not options.reads_text or (options.asked_stage or 0) > 0:
        return "no text"
    if text.value is None:
        return f"no text: {text.reason}"
    place, tokenizer = text.value.text, text.value.tokenizer
    said = [f"{place.absolute()}, {text.reason}" if place is not None else text.reason]
    if manifest.data.files is not None:
        files = manifest.data.files
        said.append(f"if it matches the run's text ({counted(files.count, 'file')}, {count(files.bytes)} bytes)")
    if tokenizer is not None:
        said.append(f"and {tokenizer.absolute()}")
    elif manifest.data.tokenizer_sha256 is not None:
        said.append("and the run's tokenizer, fetched from peers")
    return f"{', '.join(said)}; only as a data node"


def _use(options: NodeOptions) -> str:
    from node.network.reach_status import ReachMode

    threads = "all CPU threads" if options.threads is None else counted(options.threads, "CPU thread")
    saved = "no disk" if options.checkpoint_dir is None else f"disk below {options.checkpoint_dir}"
    ports = " and ".join("any" if port == 0 else str(port) for port in (options.port, options.dht_port))
    router = ", and may ask the router to open one" if options.reach is ReachMode.AUTO else ""
    graphs = options.graph_bytes
    kept = "memory for its stage" if graphs is None else f"memory for its stage and {count(graphs)} bytes"
    most = options.relay_bytes_per_hour
    relays = f"; relays up to {count(most)} bytes per hour" if most else ""
    return f"device {options.device}, {threads}, {kept}, {saved}; ports {ports} at {options.listen}{router}{relays}"


def _line_typed() -> str:
    with contextlib.suppress(OSError):
        return os.read(sys.stdin.fileno(), 4096).decode(errors="replace")
    return ""


@with_options(NodeOptions)
def join(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="LINK|RUN",
            envvar=variable("link"),
            show_envvar=False,
            help="Join link or its file, or the manifest of a new run [default: the run joined last]",
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Run one node of a swarm. Ctrl-C or `skipstone leave` stops it cleanly, a second Ctrl-C at once.

    Every option can be an environment variable: SKIPSTONE_LINK, SKIPSTONE_DHT_PORT for --dht-port, and so on.
    """
    if not settings["as_json"]:  # print first: the imports below take a second
        announce("skipstone join: starting a node", as_json=False)
    link, manifest_path = (run_link(None), None) if target is None else _parse_target(target)
    require_writable(settings["checkpoint_dir"])
    given = {name: value for name, value in settings.items() if value is not None}
    raise typer.Exit(run_loop(_join(NodeOptions(link=link, manifest_path=manifest_path, **given))))


async def _join(options: NodeOptions) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask() -> None:
        end_by(STOP_LIMIT_S)  # a hung event loop must not keep the process alive
        loop.call_soon_threadsafe(stop.set)

    if options.stop_on_eof:
        stop_on_end_of_input(stop.set)
    with Interrupts(ask, leave_at_once):
        gc.disable()  # imports leave no garbage, and searching for it takes a tenth of their time
        from node.runtime.node import run_node

        gc.freeze()  # later collections skip torch's objects
        gc.enable()
        lines = NodeLines(tells_link=options.link is None)
        events = event_sink(as_json=options.as_json, on_closed=stop.set, line_of=lines)
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=options.log_level.name, format=form, handlers=[NodeLog(events, loop)])
        if options.link_file is not None:
            events = NewLinks(partial(keep_link, options.link_file), events)
        if not options.stop_on_eof:  # with it, the node is a part of a local swarm
            events = NewLinks(keep_run, events)
        try:
            show = None
            if sys.stdout.isatty() and not options.as_json and not options.stop_on_eof:
                from rich.console import Console

                from node.cli.views.run_screen import RunScreen

                events = screen = RunScreen(Console(), events)
                show = screen.follow
            async with background(watchdog()):
                await run_node(options, events, stop, consent=partial(ask_consent, options), show=show)
        finally:
            if options.link is not None and not options.stop_on_eof:  # this node's own link is dead now
                keep_run(str(dataclasses.replace(options.link, invitation=None)))
        return 0


def _parse_target(target: str) -> tuple[Link | None, Path | None]:
    from protocol.manifest.join_link import link_in

    if (link := link_in(target)) is not None:
        return link, None
    path = manifest_file(Path(target))
    if path is None or not path.is_file():
        raise ConfigError(
            f"{target!r} is neither a join link nor a manifest file{'' if Path(target).exists() else ': no such file'}",
            hint="A link begins with `skipstone:`. `skipstone new FILE` writes a manifest.",
        )
    return None, path


OfNode: Final[Any] = setting("identity", "Key file of the node [default: this machine's key]")
AsJson: Final[Any] = typer.Option("--json", help="Print one JSON object.")


def _ask(identity: Path | None, request: str, done: str, said: str, *, as_json: bool) -> None:
    """Sends a request to this machine's node, and says that it is `done`."""
    from node.context.options import default_identity_path
    from node.runtime.leave_socket import ask_to_leave

    path = identity or default_identity_path()
    run_loop(ask_to_leave(path, STOP_LIMIT_S + 5, request))
    if as_json:
        print_json({done: str(path)})
    else:
        typer.echo(said)


def leave(identity: Annotated[Path | None, OfNode] = None, json: Annotated[bool, AsJson] = False) -> None:
    """Ask this machine's node to leave cleanly, and wait until it has."""
    announce("skipstone leave: asking the node to leave", as_json=json)
    _ask(identity, "leave", "left", "the node has left", as_json=json)


def pause(
    duration: Annotated[str, typer.Argument(help="As 90s, 45m or 8h [default: until `skipstone resume`]")] = "",
    identity: Annotated[Path | None, OfNode] = None,
    json: Annotated[bool, AsJson] = False,
) -> None:
    """Let this machine's node rest: it finishes its work, frees its memory and keeps its state."""
    announce("skipstone pause: asking the node to pause", as_json=json)
    match = re.fullmatch(r"([0-9]{1,6})([smh])", duration)
    if duration and match is None:
        raise ConfigError(f"{duration!r} is not a duration", hint="Write it as 90s, 45m or 8h.")
    seconds = "" if match is None else str(int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]])
    until = f"for {duration}" if duration else "until `skipstone resume`"
    _ask(identity, f"pause {seconds}", "paused", f"the node pauses {until}", as_json=json)


def resume(identity: Annotated[Path | None, OfNode] = None, json: Annotated[bool, AsJson] = False) -> None:
    """Let this machine's paused node go on where it was."""
    announce("skipstone resume: asking the node to go on", as_json=json)
    _ask(identity, "resume", "resumed", "the node goes on", as_json=json)


# Unit and meaning of each limit
MEANINGS: Final = {
    "upload": ("Mbit/s", "most bytes sent"),
    "download": ("Mbit/s", "most bytes received"),
    "month": ("GB", "most bytes a month, both ways; then the node pauses"),
    "temperature": ("°C", "above it the node computes less, and far above it pauses"),
    "power": ("W", "above it the node computes less"),
    "hours": ("", "hours of the week, as mon-fri 22:00-07:00, sat, sun"),
    "idle": ("min", "minutes without a key or the mouse before the node computes"),
    "battery": ("", "yes or no: whether to compute on battery"),
    "programs": ("", "names of programs beside which the node pauses, as steam,obs"),
}
YES, NO = ("yes", "true", "on"), ("no", "false", "off")


def limits(
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="As upload=8 or battery=no; NAME= removes it.")
    ] = None,
    settings: Annotated[Path | None, setting("settings", "File to read and write [default: that of this user]")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show or change what this machine's nodes may use. Running nodes follow within seconds."""
    from node.runtime.limits import changed, read_limits, settings_path, write_limits  # the sensors are slow to import

    path = settings or settings_path()
    announce(f"skipstone limits: {path}", as_json=json)
    current = read_limits(path)
    if changes:
        current = changed(current, dict(map(_change, changes)))
        write_limits(path, current)
    if json:
        print_json(to_json(current))
        return
    for name, (unit, meaning) in MEANINGS.items():
        typer.echo(f"  {name:12} {shown(getattr(current, name), unit):16} {meaning}")


def shown(value: Any, unit: str) -> str:
    if isinstance(value, bool):
        return YES[0] if value else NO[0]
    if isinstance(value, tuple):
        return ",".join(value) or "-"
    return f"{value:g} {unit}" if isinstance(value, float | int) and value else value or "-"


def _change(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE. Raises ConfigError."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise ConfigError(f"{text!r} is not NAME=VALUE", hint="As in: skipstone limits upload=8 battery=no")
    default = next((each.default for each in dataclasses.fields(Limits) if each.name == name), "")
    if not value:
        return name, None
    if isinstance(default, bool):
        if value not in YES + NO:
            raise ConfigError(f"{name}={value}: say yes or no")
        return name, value in YES
    if isinstance(default, str | tuple):
        return name, value if isinstance(default, str) else [each.strip() for each in value.split(",")]
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(.*)", value)
    unit = MEANINGS[name][0]
    if match is None or match[2].lower() not in ("", unit.lower(), unit.lower().removesuffix("/s")):
        raise ConfigError(f"{name}={value} is not a number of {unit}")
    return name, float(match[1])
