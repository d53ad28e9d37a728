"""Output that all commands share: first line, JSON, log and event loop."""

import asyncio
import contextlib
import ipaddress
import json
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

import typer

from node.cli.views.text import MAX_OWN_CHARACTERS, count, counted, duration, harmless, loss_text, megabytes, peer_name
from node.observability import events
from node.observability.event_json import LineSink
from protocol.transport.settings import host_of
from swarm.vocabulary.errors import LEAVING
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
            figures = f"{counted(event.visits, 'visit')}  gradient norm {event.gradient_norm:.3g}"
            return f"{replica}  inner step {event.step}  {figures}"
        case events.RoundCommitted():
            figures = f"{count(event.tokens)} tokens  {duration(event.seconds)}"
            return f"{replica}  round {event.round} of {counted(len(event.members), 'peer')}  {figures}"
        case events.ReplicaAccused():
            what = f"{peer_name(event.accused)} is excluded from rounds: {harmless(event.why, 400)}"
            return f"warning: {replica}  round {event.round}: {what}"
        case events.CatchingUp():
            done = f"{megabytes(event.bytes)} of {megabytes(event.total_bytes)}"
            return f"{replica}  catching up with round {event.round}: {done}"
        case events.CaughtUp():
            return f"{replica}  caught up with round {event.round} from {counted(len(event.donors), 'peer')}"
        case events.Restored():
            return f"{replica}  restored at round {event.round}"
        case events.Waiting():
            return f"waiting: {harmless(event.reason)}"
        case events.Resumed():
            return f"module {module} is served now"
        case events.PeerChange(reason=reason) if reason == LEAVING:
            return None  # nobody is down: this node ends its links
        case events.PeerChange():
            return f"peer {peer} is {event.change}{f': {harmless(event.reason)}' if event.reason else ''}"
        case events.Abandoned():
            return f"microbatch {harmless(event.microbatch)} abandoned: {harmless(event.reason)}"
        case events.Note():
            return f"{event.level}: {harmless(event.message, MAX_OWN_CHARACTERS)}".removeprefix("info: ") or None
        case events.LastPeer():
            line = f"this was the last peer of module {module}; its state is"
            if event.saved_in is not None:
                return f"{line} saved in {harmless(event.saved_in, 400)}"
            return f"warning: {line} lost; a folder that can be written keeps it: --checkpoint-dir DIR"
        case events.NodeSummary():
            busy, first, last = event.busy_s, loss_text(event.loss_first), loss_text(event.loss_last)
            loss = "" if event.loss_last is None else f"  loss {first} -> {last}"
            times = f"compute {duration(busy.compute)}, in idle time {duration(busy.idle_work)}"
            times = f"{times}, codec {duration(busy.codec)}, wire {duration(busy.wire)}, wait {duration(busy.wait)}"
            return f"{replica}  inner step {event.steps}{loss}  ({times})"
        case events.Summary():
            return summary_lines(event)


class NodeLog(logging.StreamHandler[TextIO]):
    """Log handler that turns warnings into notes, so that a person reads one channel; the rest is for developers."""

    def __init__(self, sink: events.EventSink, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._sink, self._loop = sink, loop

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING or record.exc_info is not None:
            super().emit(record)
            return
        note = events.Note("error" if record.levelno >= logging.ERROR else "warning", record.getMessage())
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._sink.emit, note)


class NodeLines:
    """Formats events for the person at one node. Adds the link of a new run and, at the end, what the node has done."""

    def __init__(self, *, tells_link: bool, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._tells_link, self._link = tells_link, ""
        self._monotonic, self._began = monotonic, monotonic()
        self._rounds, self._moves, self._is_resumed = 0, False, False

    def __call__(self, event: events.Event) -> str | None:
        line = plain_line(event)
        match event:
            case events.NodeStatus(state="serving"):
                self._moves = False
                if self._tells_link and event.link != self._link:
                    self._link = event.link
                    return f"{line}\n{join_lines(event.link)}"
            case events.Move():
                self._moves = True
            case events.RoundCommitted():
                self._rounds += 1
            case events.Restored():
                self._is_resumed = True
            case events.NodeSummary() if not self._moves:
                done = f"{counted(event.accumulated, 'microbatch')}, {counted(event.tokens, 'token')}"
                here = f"{counted(self._rounds, 'round')} in {duration(self._monotonic() - self._began)}"
                both = f"{here}; since its first start {done}" if self._is_resumed else f"{done}, {here}"
                return f"left in good order: {both}\n  {line}"
        return line


def join_lines(link: str, advice: str = "Advertise another address: --advertise HOST.") -> str:
    """Formats the command that others type to join. Names the addresses in it that not everybody can reach."""
    from protocol.manifest.join_link import MAX_LINK_CHARACTERS

    said = f"Others join with:\n\n  skipstone join {harmless(link, MAX_LINK_CHARACTERS)}\n"
    addresses = link.partition("@")[2].partition("?")[0].split(",")
    hosts = dict.fromkeys(
        each.split("/")[2] if each.startswith("/") and each.count("/") > 2 else host_of(each) for each in addresses
    )
    narrow = {host: where for host in hosts if (where := _who_reaches(host))}
    if narrow:
        listed = "; ".join(f"{harmless(host)} can be reached only {where}" for host, where in narrow.items())
        said = f"{said}\n{listed}.{f' {advice}' if len(narrow) == len(hosts) else ''}"
    return said


def _who_reaches(host: str) -> str:
    """Says who reaches an address; empty for everybody, and for a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    return "on this machine" if address.is_loopback else "" if address.is_global else "in its own network"


def _at(address: str) -> str:
    return f" at {harmless(address)}" if address else ""


def summary_lines(event: events.Summary) -> str:
    """Formats a finished run's summary: figures first, then one line per peer."""
    counts = event.microbatches
    lines = [
        f"{counted(event.steps, 'step')}  loss {loss_text(event.loss_first)} -> {loss_text(event.loss_last)}"
        f"  {count(event.tokens)} tokens  {count(event.tokens_per_s)} tokens/s",
        f"microbatches: {counts.started} started, {counts.completed} completed, {counts.abandoned} abandoned,"
        f" {counts.duplicated} counted twice",
    ]
    for peer in event.peers:
        code = "" if peer.exit_code is None else f", exit code {peer.exit_code}"
        module = harmless(peer.module or "-")
        done = f"{counted(peer.steps, 'inner step')}, {counted(peer.accumulated, 'gradient')}"
        lines.append(f"{module}  {peer_name(peer.peer)}  {done}{code}")
    return "\n".join(lines)


Result = TypeVar("Result")


def announce(line: str, *, as_json: bool) -> None:
    """Prints a command's first line, before slow imports; on standard error with --json."""
    typer.echo(line, err=as_json)


def tell(line: str) -> None:
    """Prints a line on standard error. The terminal may be closed."""
    with contextlib.suppress(OSError, ValueError):
        typer.echo(line, err=True)


def event_sink(
    *, as_json: bool, on_closed: Callable[[], None], line_of: Callable[[events.Event], str | None] = plain_line
) -> events.EventSink:
    """Returns the event sink of standard output, as JSON lines or plain ones."""
    return LineSink(sys.stdout, on_closed) if as_json else LineSink(sys.stdout, lambda: None, line_of)


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
