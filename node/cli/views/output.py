"""The output that every command shares: its first line, its JSON, its log and its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import typer

from node.cli.views.plain import PlainSink
from node.observability.event_json import JsonLinesSink
from node.observability.events import EventSink

Result = TypeVar("Result")


def announce(line: str, *, as_json: bool) -> None:
    """Prints the first line, before anything heavy is loaded; on standard error with JSON."""
    typer.echo(line, err=as_json)


def tell(line: str) -> None:
    """Prints a line for whoever sits at the terminal, who may have closed it."""
    with contextlib.suppress(OSError, ValueError):
        typer.echo(line, err=True)


def event_sink(*, as_json: bool, on_closed: Callable[[], None]) -> EventSink:
    """The event sink of standard output, as JSON lines or as plain ones."""
    return JsonLinesSink(sys.stdout, on_closed) if as_json else PlainSink(sys.stdout)


def print_json(value: dict[str, Any]) -> None:
    """Prints one JSON object on one line."""
    typer.echo(json.dumps(value, separators=(",", ":")))


def start_log(level: str) -> None:
    """Sends the log from `debug`, `info`, `warning` or `error` on to standard error."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def run_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs the coroutine on uvloop's event loop where there is one (everywhere but on Windows)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a whole file atomically, or leaves what was there. Raises OSError."""
    # An unguessable fresh name: in a shared folder, a link laid beforehand would lead the writing to a file of ours.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with partial.open("xb") as file:
        file.write(data)
    try:
        os.replace(partial, path)
    except OSError:
        partial.unlink()
        raise
