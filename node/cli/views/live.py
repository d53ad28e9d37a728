"""The live view of a swarm on a terminal: `render` builds the view, `draw` shows and refreshes it."""

import asyncio
import contextlib
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from node.cli.views import text
from node.local_swarm.swarm_progress import PeerProgress, SwarmProgress

REFRESH_S = 0.25
NOTE_S = 30.0  # Time for which a note is shown, in seconds; an error is shown until others replace it
CURVE_WIDTH = 32
_DOWNLOAD_WIDTH = 12
_STATE_STYLES = {"serving": "green", "failed": "red", "finished": "dim", "draining": "yellow"}
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
    packed = (peer.sizes for peer in state.peers.values() if peer.sizes is not None and peer.sizes.documents)
    if (sizes := next(packed, None)) is not None:  # all data nodes pack the same way, so one line is enough
        parts.append(Text(f"microbatch {text.sizes_text(sizes)}", style="dim"))
    parts.append(_peer_table(state, now))
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
    left = remaining_s(state)
    if left is not None:
        line.append(f"   {text.duration(left)} left", style="not bold dim")
    return line


def _loss_line(state: SwarmProgress) -> Text:
    line = Text("loss ")
    line.append(text.loss_text(state.loss_last), style="bold")
    line.append("  ")
    line.append(text.sparkline([loss for _, _, loss, _ in state.curve.points], CURVE_WIDTH), style="cyan")
    line.append(f"  from {text.loss_text(state.loss_first)}   {text.count(state.tokens_per_s)} tokens/s", style="dim")
    return line


def _peer_table(state: SwarmProgress, now: float) -> Table:
    table = text.plain_table("module", "peer", "state", right=("steps", "tokens/s", "slots"))
    table.add_column("round")
    for column in table.columns:
        column.no_wrap = True
    everyone = (*state.peers.values(), *state.guests)
    by_stage = sorted(everyone, key=lambda peer: (peer.stage, _expert(peer), peer.peer))
    living = [peer for peer in by_stage if peer.exit_code is None]
    hosted = {peer.stage for peer in living}
    for peer in by_stage:
        table.add_row(*_peer_row(peer, now, is_guest=peer in state.guests))
    if all(peer.module is not None for peer in living):  # otherwise a node is still starting
        for module in sorted(set(state.modules) - {peer.module for peer in living}) if living else ():
            table.add_row(Text(module, style="red"), Text("none", style="red"))
        hosted |= set(range(state.stages)) if state.modules else set()
    for stage in sorted(set(range(state.stages)) - hosted) if hosted else ():
        table.add_row(Text(f"stage {stage}", style="red"), Text("none", style="red"))
    return table


def _expert(peer: PeerProgress) -> int:
    expert = (peer.module or "").partition(".")[2]
    return int(expert) if expert.isdecimal() else 0


def _peer_row(peer: PeerProgress, now: float, *, is_guest: bool) -> tuple[RenderableType, ...]:
    state = peer.state if peer.exit_code in (None, 0) else f"{peer.state} ({peer.exit_code})"
    state_cell = Text(text.harmless(state, 24), style=_STATE_STYLES.get(peer.state, ""))
    figures = (
        str(peer.inner_steps),
        "-" if peer.tokens_per_s is None else text.count(peer.tokens_per_s),
        "-" if peer.slots is None else f"{peer.busy_slots}/{peer.slots}",
    )
    module = peer.module or f"stage {peer.stage}"
    names = text.harmless(module), f"{text.peer_name(peer.peer)}{' (guest)' if is_guest else ''}"
    return *map(Text, names), state_cell, *map(Text, figures), _round_cell(peer, now)


def _round_cell(peer: PeerProgress, now: float) -> RenderableType:
    if peer.catching_up is not None and peer.exit_code is None:
        return download_cell(peer.catching_up.bytes, peer.catching_up.total_bytes)
    since = None if peer.round_at is None else now - peer.round_at
    return Text(text.round_text(peer.round, peer.members, since))


def download_cell(done: float, total: float) -> RenderableType:
    """Renders a table cell for a download: a progress bar above its figures."""
    rows = Table.grid()  # a bar alone does not end its line
    rows.add_row(ProgressBar(total=max(1.0, total), completed=done, width=_DOWNLOAD_WIDTH))
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
