"""Text for people: what other peers wrote made harmless, and figures made short."""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections.abc import Iterable, Sequence

from rich.console import OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from swarm.vocabulary.types import PeerId, short
from swarm.workload.microbatch_sizes import SizeSummary

MAX_FOREIGN_CHARACTERS = 160
_BARS = "▁▂▃▄▅▆▇█"


def harmless(text: str, limit: int = MAX_FOREIGN_CHARACTERS) -> str:
    """Text from another machine as one printable line of at most `limit` characters."""
    # Control, format and surrogate characters could move the cursor, change colours or the writing direction.
    cut = text[: limit + 1]
    clean = "".join(" " if unicodedata.category(character)[0] in "CZ" else character for character in cut)
    return clean if len(text) <= limit else clean[: limit - 1] + "…"


def plain_table(
    *headings: str,
    right: Sequence[str] = (),
    rows: Iterable[Sequence[RenderableType]] = (),
    overflow: OverflowMethod = "ellipsis",
) -> Table:
    """A table without lines, with columns for `headings` and `right`, which is right-justified. Cells are no markup."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in dict.fromkeys((*headings, *right)):
        table.add_column(heading, justify="right" if heading in right else "left", overflow=overflow)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def harmless_lines(text: str) -> str:
    """A model's text made harmless, with its lines kept."""
    return "".join(
        " " if character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs") else character
        for character in text
    )


def peer_name(peer: str) -> str:
    return harmless(short(PeerId(peer)))


def count(number: float) -> str:
    """The number with separators, as in `12,345`."""
    return f"{number:,.0f}" if math.isfinite(number) else "-"


def path_text(stages: Sequence[int]) -> str:
    """A path in words, as in `through stages 0, 2 and 4`; `stages` are those after stage 0."""
    *others, last = (0, *stages)
    return f"through stages {', '.join(map(str, others))} and {last}" if others else "through stage 0"


def loss_text(loss: float | None) -> str:
    """The loss with four digits after the point, or `-` when there is none."""
    return "-" if loss is None else f"{loss:.4f}"


def sizes_text(sizes: SizeSummary) -> str:
    """A microbatch, as in `8,190 tokens ±1.2% in 17 documents, cost 12,300 ±0.4%, 1.3% padding`."""
    tokens, cost = (
        f"{count(mean)} ±{spread:.1%}"
        for mean, spread in ((sizes.tokens, sizes.tokens_spread), (sizes.cost, sizes.cost_spread))
    )
    return f"{tokens} tokens in {count(sizes.documents)} documents, cost {cost}, {sizes.padding:.1%} padding"


def megabytes(amount: float) -> str:
    """Bytes in units of 10^6, as in `12.3 MB`."""
    return f"{amount / 1e6:,.1f} MB" if math.isfinite(amount) else "-"


def round_text(number: float, members: float, seconds_ago: float | None) -> str:
    """A peer's last round, as in `12 3 peers 4s ago`, if it had a part in one."""
    if seconds_ago is None:
        return count(number)
    company = "alone" if members == 1 else f"{count(members)} peers"
    return f"{count(number)}  {company}  {duration(seconds_ago)} ago"


def duration(seconds: float) -> str:
    """Seconds in short, as in `42s`, `3m07s`, `2h05m`; `-` when not finite."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def sparkline(points: Sequence[float], width: int) -> str:
    """The points as at most `width` bars, lowest to highest; several points that share a bar are averaged."""
    if not points or width < 1:
        return ""
    columns = min(width, len(points))
    edges = [round(column * len(points) / columns) for column in range(columns + 1)]
    means = [sum(points[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    lowest, span = min(means), max(means) - min(means)
    return "".join(_BARS[round((mean - lowest) / span * (len(_BARS) - 1)) if span else 0] for mean in means)
