"""How microbatches are encoded on each link, and pseudo-gradients in each module's last round, as tables: which codec,
and why this one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from node.cli.views.text import count, harmless, number_in, peer_name
from swarm.compression.microbatch_codecs import NO_CHOICE

MOST_ROWS: Final = 48
KINDS: Final = ("activations", "gradients")


def codecs_views(answer: Mapping[str, Any]) -> Iterator[RenderableType]:
    """One table each, if the run leaves a choice; `answer` is what `query_status` returns. What a peer says of itself
    may be anything."""
    links = [row for peer in answer["peers"] for row in _rows(peer)]
    yield from _table("codecs (chosen by the sender, for each link)", ("from", "to", "link", *KINDS, "why"), links)
    rounds = [row for row in (_round_row(peer) for peer in answer["peers"]) if row is not None]
    newest = {row.module: row for row in sorted(rounds, key=lambda row: -row.seconds_ago)}
    cells = [(row.module, row.codec, row.why) for _, row in sorted(newest.items())]
    yield from _table("codecs of rounds (chosen by the convener)", ("module", "updates", "why"), cells)


def _table(title: str, headings: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Iterator[RenderableType]:
    if not rows:
        return
    yield Text(f"\n{title}", style="dim")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, justify="right" if heading == "link" else "left", overflow="fold")
    for row in rows[:MOST_ROWS]:
        table.add_row(*map(Text, row))
    yield table
    if len(rows) > MOST_ROWS:
        yield Text(f"and {len(rows) - MOST_ROWS} more", style="dim")


@dataclass(frozen=True, slots=True)
class _RoundRow:
    module: str
    codec: str
    why: str
    seconds_ago: float


def _round_row(peer: Mapping[str, Any]) -> _RoundRow | None:
    """What the peer says of its last round; None where there was none, or nothing to choose."""
    said = peer["answered"]
    last = said.get("last_round") if isinstance(said, dict) else None
    if not isinstance(last, dict) or not last.get("codec_reason") or last["codec_reason"] == NO_CHOICE:
        return None
    codec, why = harmless(str(last.get("codec", "")), 12), harmless(str(last["codec_reason"]), 120)
    return _RoundRow(harmless(str(peer["module"]), 12), codec, why, number_in(last, "seconds_ago"))


def _rows(peer: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    said = peer["answered"]
    codecs = said.get("codecs") if isinstance(said, dict) else None
    if not isinstance(codecs, dict) or not _allows_any(codecs.get("allowed")):
        return
    links = codecs.get("links")
    for to, link in links.items() if isinstance(links, dict) else ():
        if isinstance(link, dict):
            chosen = [link[kind] for kind in KINDS if isinstance(link.get(kind), dict)]
            why = "; ".join(dict.fromkeys(harmless(str(choice.get("why", "")), 120) for choice in chosen))
            names = [_codec(link.get(kind)) for kind in KINDS]
            rate = number_in(link, "bytes_per_s") * 8 / 1e6
            speed = f"{count(rate)} Mbit/s" if rate else "-"
            yield (peer_name(str(peer["peer"])), harmless(str(to), 16), speed, *names, why)


def _allows_any(allowed: Any) -> bool:
    return isinstance(allowed, dict) and any(isinstance(names, list) and len(names) > 1 for names in allowed.values())


def _codec(choice: Any) -> str:
    return harmless(str(choice.get("codec", "")), 12) if isinstance(choice, dict) else "-"
