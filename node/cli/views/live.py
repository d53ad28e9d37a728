"""The live view of a swarm on a terminal: `render` builds the view, `draw` shows and refreshes it."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable
from itertools import islice

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from node.cli.views import text
from node.local_swarm.swarm_progress import SwarmProgress

Hosted = tuple[str, str, float, int]  # Stage or module of a peer, its state, tokens per second and round

REFRESH_S = 0.25
NOTE_S = 30.0  # Time for which a note is shown, in seconds; an error is shown until others replace it
CURVE_WIDTH = 32
MOST_ROWS = 24
_SHOWN_NOTES = 4
NOTE_STYLES = {"info": "dim", "warning": "yellow", "error": "red"}


def render(state: SwarmProgress, title: str, elapsed_s: float, now: float) -> RenderableType:
    """Renders the view at `now` (monotonic seconds). Text from peers is escaped."""
    parts: list[RenderableType] = [_headline(state, title, elapsed_s)]
    if state.target is not None:
        bar = Table.grid()  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=state.target, completed=state.step, width=CURVE_WIDTH))
        parts.append(bar)
    parts.append(_loss_line(state))
    living = [peer for peer in state.peers.values() if peer.exit_code is None]
    names = state.modules or [str(stage) for stage in range(state.stages)]
    hosted = [(str(peer.stage) if not state.modules else peer.module or "", peer) for peer in living]
    parts.append(module_table([(name, p.state, p.tokens_per_s or 0.0, p.round) for name, p in hosted], names))
    for peer in [each for each in state.peers.values() if each.exit_code][-_SHOWN_NOTES:]:
        who = f"{text.peer_name(peer.peer)} of {text.harmless(peer.module or str(peer.stage))}"
        parts.append(Text(f"{who} failed ({peer.exit_code})", style="red"))
    waiting = [state.starting] if state.starting else [reason for _, reason in sorted(state.waiting.items())]
    parts += [Text(text.harmless(line), style="bold yellow") for line in waiting]
    notes = [(now - at, note) for at, note in state.notes if note.level == "error" or now - at < NOTE_S]
    for age, note in notes[-_SHOWN_NOTES:]:
        line = Text(text.harmless(note.message, text.MAX_OWN_CHARACTERS), style=NOTE_STYLES[note.level])
        parts.append(line.append(f"  {text.duration(age)} ago", style="dim"))
    return Group(*parts)


def remaining_s(state: SwarmProgress) -> float | None:
    """Estimates the seconds to the target step from the latest steps; None without a target or enough steps."""
    if state.target is None or len(state.recent) < 2:
        return None
    pace = (state.recent[-1].at - state.recent[0].at) / (len(state.recent) - 1)
    return max(0, state.target - state.step) * pace


def _headline(state: SwarmProgress, title: str, elapsed_s: float) -> Text:
    line = Text(text.harmless(title), style="bold")
    goal = "" if state.target is None else f" of {state.target}"
    line.append(f"   step {state.step}{goal}   {text.duration(elapsed_s)}", style="not bold")
    if (left := remaining_s(state)) is not None:
        line.append(f"   {text.duration(left)} left", style="not bold dim")
    return line


def _loss_line(state: SwarmProgress) -> Text:
    line = Text("loss ").append(text.loss_text(state.loss_last), style="bold").append("  ")
    line.append(text.sparkline([loss for _, _, loss, _ in state.curve.points], CURVE_WIDTH), style="cyan")
    line.append(f"  from {text.loss_text(state.loss_first)}   {text.count(state.tokens_per_s)} tokens/s", style="dim")
    return line


def module_table(hosted: Iterable[Hosted], names: Iterable[str], own: Collection[str] = ()) -> Table:
    """Builds a table with one row per stage or module in `names`. Rows of this node are bold."""
    by_name: dict[str, list[Hosted]] = {}
    for each in hosted:
        by_name.setdefault(each[0], []).append(each)
    table = text.plain_table("stage", right=("peers", "serving", "tokens/s", "round"))
    for name in islice(names, MOST_ROWS):
        peers = by_name.get(name, [])
        serving = sum(state == "serving" for _, state, _, _ in peers)
        rate, last = sum(rate for _, _, rate, _ in peers), max((number for *_, number in peers), default=0)
        shown = f"{text.harmless(name, 16)}{' (here)' if name in own else ''}"
        style = "bold" if name in own else "" if serving else "red"
        figures = (shown, str(len(peers) or "none"), str(serving), text.count(rate), text.count(last))
        table.add_row(*(Text(each, style=style) for each in figures))
    return table


def download_cell(done: float, total: float) -> RenderableType:
    """Renders a table cell for a download: a progress bar above its figures."""
    rows = Table.grid()  # a bar alone does not end its line
    rows.add_row(ProgressBar(total=max(1.0, total), completed=done, width=12))
    rows.add_row(Text(f"{text.megabytes(done)} of {text.megabytes(total)}"))
    return rows


async def draw(console: Console, view: Callable[[], RenderableType]) -> None:
    """Draws `view()` every `REFRESH_S` seconds until cancelled. Returns if the terminal closes."""
    with contextlib.suppress(OSError), Live(view(), console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(view(), refresh=True)
                await asyncio.sleep(REFRESH_S)
        finally:
            live.update(view(), refresh=True)
