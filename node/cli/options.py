"""Options that several commands have, and those of a node.

Join links on the command line: given as they are or in a file, and written to a file for whoever starts the other
nodes.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from node.cli.views.output import write_whole
from node.observability.events import Event, EventSink, NodeStatus
from swarm.vocabulary.types import MAX_VISIT_RATIO

if TYPE_CHECKING:
    from protocol.manifest.join_link import JoinLink


VisitedPerPath: Final[Any] = typer.Option(
    min=1, help="Train along paths that visit only so many of the stages after stage 0 [default: the manifest's]"
)
VisitRatio: Final[Any] = typer.Option(
    min=1.0,
    max=MAX_VISIT_RATIO,
    help="Let stages be visited so many times as often as others [default: the manifest's]",
)
StagesPerPath: Final[Any] = typer.Option(
    min=1, help="Run only so many of the stages after stage 0, evenly spread over the depth [default: all]"
)

PathChoice: Final[Any] = typer.Option(
    "--path", metavar="S.E,...", help="Of a run with experts one path: a module of each stage, such as 1.0,2.1."
)

MomentsChoice: Final[Any] = typer.Option("--moments", help="Of AdamW: 8bit takes a quarter of float32's memory.")

log = logging.getLogger(__name__)

_LONGEST_BYTES: Final = 10_000
"""Of a file that may hold a link: the longest link and some white space."""


def with_options(*tables: type) -> Callable[[Any], Any]:
    """Adds an option to a command for each annotated field of the dataclasses; their values arrive in `**settings`."""

    def added(command: Any) -> Any:
        own = inspect.signature(command, eval_str=True)
        rows = [
            row.replace(default=None) if made[name] is dataclasses.MISSING else row
            for table in tables
            for made in ({field.name: field.default for field in dataclasses.fields(table)},)
            for name, row in inspect.signature(table, eval_str=True).parameters.items()
            if typing.get_origin(row.annotation) is Annotated
        ]
        given = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        command.__signature__ = own.replace(parameters=[*given, *rows])
        return command

    return added


def link_in(text: str) -> JoinLink | None:
    """Parses the join link that `text` is, or that is in the file it names; None when it is neither. Raises
    ConfigError: it is meant to be a link, and malformed.
    """
    from protocol.manifest.join_link import is_link, parse_link

    if is_link(text):
        return parse_link(text)
    try:
        with Path(text).open("rb") as file:
            inside = file.read(_LONGEST_BYTES).decode(errors="replace")
    except (OSError, ValueError):  # ValueError: no path at all, such as one with a zero byte
        return None
    return parse_link(inside) if is_link(inside) else None


class LinkFile:
    """Keeps the node's newest join link in a file: `EventSink` in front of another.

    The file appears whole, or is replaced whole, so that whoever waits for it never reads half a link. One that cannot
    be written is warned of, and the node goes on: those that have joined need the file no more.
    """

    def __init__(self, path: Path, behind: EventSink) -> None:
        self._path = path
        self._behind = behind
        self._written: str | None = None

    def emit(self, event: Event) -> None:
        """Hands it on; writes the link if this event tells a new one."""
        self._behind.emit(event)
        if isinstance(event, NodeStatus) and event.link != self._written:
            self._written = event.link
            try:
                write_whole(self._path, f"{event.link}\n".encode())
            except OSError as error:
                log.warning("the join link cannot be written to %s: %s", self._path, error.strerror or error)
