"""`skipstone join`: one node in the foreground, until it is told to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.cli.options import LinkFile, link_in, with_options
from node.cli.views.interrupts import STOP_LIMIT_S, Interrupts, end_by, leave_at_once, stop_on_end_of_input
from node.cli.views.output import announce, event_sink, run_loop, start_log
from node.context.options import NodeOptions, variable
from swarm.vocabulary.errors import ConfigError

if TYPE_CHECKING:
    from protocol.manifest.join_link import JoinLink


@with_options(NodeOptions)
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
    **settings: Any,
) -> None:
    """Run one node of a swarm. Ctrl-C or `skipstone leave` stops it in good order, a second Ctrl-C at once.

    Variables can say the same: SKIPSTONE_LINK the link, SKIPSTONE_DHT_PORT what --dht-port says, and so on.
    """
    if not settings["as_json"]:
        announce("skipstone join: starting a node", as_json=False)
    start_log(settings["log_level"].value)
    link, manifest_path = _parse_target(target)
    given = {name: value for name, value in settings.items() if value is not None}
    raise typer.Exit(run_loop(_join(NodeOptions(link=link, manifest_path=manifest_path, **given))))


async def _join(options: NodeOptions) -> int:
    """Runs the node and returns the exit code: leaving in good order is how a node ends, whoever asked for it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if options.stop_on_eof:
        stop_on_end_of_input(stop.set)
    with Interrupts(lambda: _ask_politely(loop, stop), leave_at_once):
        from node.cli.consent import Consent
        from node.runtime.node import run_node

        events = event_sink(as_json=options.as_json, on_closed=stop.set)
        if options.link_file is not None:
            events = LinkFile(options.link_file, events)
        await run_node(options, events, stop, consent=Consent(options))
        return 0


def _ask_politely(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    end_by(STOP_LIMIT_S)
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
