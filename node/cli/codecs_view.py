"""How microbatches are encoded on each link, as a table: which codec, how fast the link is, and why this one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from node.cli.text import count, harmless, number_in, peer_name

MOST_ROWS: Final = 48
KINDS: Final = ("activations", "gradients")


def codecs_views(answer: Mapping[str, Any]) -> Iterator[RenderableType]:
    """A table, if the run allows any compression; `answer` is what `query_status` returns. What a peer says of itself may be anything."""
    rows = [row for peer in answer["peers"] for row in _rows(peer)]
    if not rows:
        return
    yield Text("\ncodecs", style="dim").append(" (chosen by the sender, for each link)", style="dim")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("from", "to", "link", *KINDS, "why"):
        table.add_column(heading, justify="right" if heading == "link" else "left", overflow="fold")
    for row in rows[:MOST_ROWS]:
        table.add_row(*map(Text, row))
    yield table
    if len(rows) > MOST_ROWS:
        yield Text(f"and {len(rows) - MOST_ROWS} more links", style="dim")


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
