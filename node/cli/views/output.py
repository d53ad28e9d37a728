"""Output that all commands share: first line, JSON, log and event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer

from node.cli.views.text import count, duration, harmless, loss_text, megabytes, peer_name
from node.observability import events
from node.observability.event_json import LineSink
from swarm.vocabulary.types import ModuleId


def plain_line(event: events.Event) -> str | None:
    """Describes the event in one line; None if only the live view shows it."""
    if isinstance(event, events.Load | events.LogEvent):
        return None
    peer, module = peer_name(getattr(event, "peer", "")), harmless(getattr(event, "module", None) or "-")
    replica = f"{module} {peer}"
    match event:
        case events.Step():
            return f"step {event.step}  loss {loss_text(event.loss)}  {count(event.tokens_per_s)} tokens/s"
        case events.NodeStatus():
            hosted = f" module {module}" if event.module else ""
            return f"node {peer} {harmless(event.state)}{hosted}{_at(event.address)}"
        case events.Reach():
            line = f"node {peer} reach {harmless(event.step)}{_at(event.address)}: {harmless(event.reason, 400)}"
            return f"{line}\n  {harmless(event.fix, 400)}" if event.fix else line
        case events.Move():
            return f"node {peer} moves from module {module} to {harmless(event.target)}: {harmless(event.reason)}"
        case events.InnerStep():
            figures = f"{event.visits} visits  gradient norm {event.gradient_norm:.3g}"
            return f"{replica}  inner step {event.step}  {figures}"
        case events.RoundCommitted():
            figures = f"{count(event.tokens)} tokens  {duration(event.seconds)}"
            return f"{replica}  round {event.round} of {len(event.members)} peers  {figures}"
        case events.ReplicaAccused():
            what = f"{peer_name(event.accused)} is excluded from rounds: {harmless(event.why, 400)}"
            return f"warning: {replica}  round {event.round}: {what}"
        case events.CatchingUp():
            done = f"{megabytes(event.bytes)} of {megabytes(event.total_bytes)}"
            return f"{replica}  catching up with round {event.round}: {done}"
        case events.CaughtUp():
            return f"{replica}  caught up with round {event.round} from {len(event.donors)} peers"
        case events.Restored():
            return f"{replica}  restored at round {event.round}"
        case events.Waiting():
            return f"waiting: {harmless(event.reason)}"
        case events.Resumed():
            return f"module {module} is served again"
        case events.PeerChange():
            return f"peer {peer} is {event.change}{f': {harmless(event.reason)}' if event.reason else ''}"
        case events.Abandoned():
            return f"microbatch {harmless(event.microbatch)} abandoned: {harmless(event.reason)}"
        case events.Note():
            return f"{event.level}: {harmless(event.message)}".removeprefix("info: ") or None
        case events.LastPeer():
            line = f"this was the last peer of module {module}; its state is"
            if event.saved_in is not None:
                return f"{line} saved in {harmless(event.saved_in, 400)}"
            return f"warning: {line} lost; use --checkpoint-dir FOLDER to keep it next time"
        case events.NodeSummary():
            return f"{replica}  {_node_figures(event)}"
        case events.Summary():
            return summary_lines(event)


def _at(address: str) -> str:
    return f" at {harmless(address)}" if address else ""


def summary_lines(event: events.Summary) -> str:
    """Formats a finished run's summary: figures first, then one line per peer."""
    counts = event.microbatches
    lines = [
        f"{event.steps} steps  loss {loss_text(event.loss_first)} -> {loss_text(event.loss_last)}"
        f"  {count(event.tokens)} tokens  {count(event.tokens_per_s)} tokens/s",
        f"microbatches: {counts.started} started, {counts.completed} completed, {counts.abandoned} abandoned,"
        f" {counts.duplicated} counted twice",
    ]
    for peer in event.peers:
        code = "" if peer.exit_code is None else f", exit code {peer.exit_code}"
        module = harmless(peer.module or "-")
        lines.append(f"{module}  {peer_name(peer.peer)}  {peer.steps} inner steps, {peer.accumulated} gradients{code}")
    return "\n".join(lines)


def _node_figures(event: events.NodeSummary) -> str:
    busy = event.busy_s
    loss = "" if event.loss_last is None else f"  loss {loss_text(event.loss_first)} -> {loss_text(event.loss_last)}"
    times = f"compute {duration(busy.compute)}, in idle time {duration(busy.idle_work)}"
    times = f"{times}, codec {duration(busy.codec)}, wire {duration(busy.wire)}, wait {duration(busy.wait)}"
    done = f"{event.steps} inner steps  {event.accumulated} gradients"
    return f"{done}{loss}  {count(event.tokens)} tokens  ({times})"


Result = TypeVar("Result")


def announce(line: str, *, as_json: bool) -> None:
    """Prints a command's first line, before slow imports; on standard error with --json."""
    typer.echo(line, err=as_json)


def tell(line: str) -> None:
    """Prints a line on standard error. The terminal may be closed."""
    with contextlib.suppress(OSError, ValueError):
        typer.echo(line, err=True)


def event_sink(*, as_json: bool, on_closed: Callable[[], None]) -> events.EventSink:
    """Returns the event sink of standard output, as JSON lines or plain ones."""
    return LineSink(sys.stdout, on_closed) if as_json else LineSink(sys.stdout, lambda: None, plain_line)


def print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, separators=(",", ":")))


def run_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs the coroutine on uvloop if it is installed, else on asyncio's loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically, or leaves the old one. Raises OSError."""
    # An unguessable name: in a shared folder, another user could plant a symlink at a known one.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with partial.open("xb") as file:
        file.write(data)
    try:
        os.replace(partial, path)
    except OSError:
        partial.unlink()
        raise


@contextmanager
def download_bar(*, silent: bool) -> Iterator[Callable[[ModuleId, int, int], None]]:
    """Shows a progress bar on a terminal. Yields its callback: module, bytes done, total bytes."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (progress.TextColumn("module {task.description}"), progress.BarColumn(), progress.DownloadColumn())
    times = progress.TransferSpeedColumn(), progress.TimeRemainingColumn()
    with progress.Progress(*columns, *times, console=console, disable=silent or not console.is_terminal) as shown:
        bar = shown.add_task("", visible=False)

        def show(module: ModuleId, done: int, total: int) -> None:
            shown.update(bar, description=str(module), completed=done, total=total, visible=True)

        yield show
