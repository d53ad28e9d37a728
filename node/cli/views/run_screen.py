"""The live view of `skipstone join`: the run, its stages, this node, and the latest messages."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from node.cli.views import text
from node.cli.views.live import CURVE_WIDTH, NOTE_STYLES, download_cell, draw, module_table
from node.cli.views.output import plain_line
from node.cli.views.status_view import status_headline
from node.concurrency.task_groups import background
from node.network.client import Statuses
from node.observability import events
from node.observability.events import Event, EventSink
from node.observability.status import PeerStatus, SwarmStatus

_SILENT: Final = events.InnerStep | events.Step | events.RoundCommitted | events.CatchingUp | events.Abandoned


class RunScreen:
    """Shows events as lines of `before` until the node is in the run, and then as a view that is drawn again."""

    def __init__(self, console: Console, before: EventSink) -> None:
        self._console, self._before = console, before
        self._began = time.monotonic()
        self._messages: deque[tuple[float, str, str]] = deque(maxlen=6)
        self._own: Callable[[], tuple[str, ...]] = tuple
        self._status: SwarmStatus | None = None
        self._drawing = False
        self._standing: Callable[[], Any] = lambda: None

    def emit(self, event: Event) -> None:
        if not self._drawing or isinstance(event, events.NodeSummary):
            self._before.emit(event)
        elif not isinstance(event, _SILENT) and (line := plain_line(event)) is not None:
            level = event.level if isinstance(event, events.Note) else "info"
            self._messages.append((time.monotonic(), level, line))

    async def follow(self, statuses: Statuses, own: Callable[[], tuple[str, ...]], standing: Callable[[], Any]) -> None:
        """Draws the view until cancelled."""
        self._own, self._standing, self._drawing = own, standing, True
        try:
            async with background(draw(self._console, self.render)), aclosing(statuses()) as seen:
                async for status in seen:
                    self._status = status
        finally:
            self._drawing = False

    def render(self) -> RenderableType:
        """Renders the view, at most 80 columns wide. Text from peers is escaped."""
        if self._status is None:
            return Text("asking the run's peers", style="dim")
        own = [peer for peer in self._status.peers if peer.peer in self._own()]
        parts: list[RenderableType] = [status_headline(self._status)]
        if self._status.curve is not None:
            losses = [loss for _, _, loss, _ in self._status.curve.points]
            line = Text("loss ").append(text.sparkline(losses, CURVE_WIDTH), style="cyan")
            parts.append(line.append(f"  from {text.loss_text(losses[0])}", style="dim"))
        parts.append(_modules(self._status, {peer.peer for peer in own}))
        for peer in own:
            parts.extend(_own_lines(peer))
        if (limits := self._standing()) is not None:
            pace = "at full speed" if limits.share >= 1 else f"at {limits.share:.0%} of its speed: {limits.reason}"
            pace = f"paused: {limits.reason}" if not limits.share else pace
            since = text.duration(time.monotonic() - self._began)
            parts.append(Text(f"here for {since}, {pace}; {limits.used_gb:.2f} GB this month", style="dim"))
        for at, level, message in self._messages:
            ago = f"  {text.duration(time.monotonic() - at)} ago"
            parts.append(Text(text.harmless(message, 240), style=NOTE_STYLES.get(level, "")).append(ago, style="dim"))
        return Group(*parts)


def _modules(status: SwarmStatus, own: set[str]) -> Table:
    names = status.modules or [str(stage) for stage in range(status.stages)]
    named = [(str(p.module) if status.modules else str(p.module).partition(".")[0], p) for p in status.peers]
    hosted = [(name, peer.state, peer.tokens_per_s, peer.round) for name, peer in named]
    return module_table(hosted, names, {name for name, peer in named if peer.peer in own})


def _own_lines(peer: PeerStatus) -> Iterator[RenderableType]:
    """Yields lines about this node's work in one of its modules: totals, busy time, and a running download."""
    said, traffic = peer.said, (peer.said.traffic or {}).values()
    sent, received = (sum(getattr(each, way) for each in traffic) for way in ("sent_bytes", "received_bytes"))
    done = f"{text.counted(said.steps, 'step')}, {text.counted(said.accumulated, 'microbatch')}"
    moved = f"{text.megabytes(sent)} sent, {text.megabytes(received)} received"
    yield Text(f"module {text.harmless(peer.module or '-')} {peer.state}: {done}, {moved}")
    line = f"  credit for {text.counted(said.credited or 0, 'token')}"
    if (compute := said.compute) is not None:
        busy = compute.busy_s + compute.idle_work_s
        line += f"; computes {busy / max(1e-9, busy + compute.idle_s):.0%} of the time; {said.rounds}"
    yield Text(text.harmless(line, 160), style="dim")
    if said.catching_up is not None:
        yield download_cell(said.catching_up.bytes, said.catching_up.total_bytes)
