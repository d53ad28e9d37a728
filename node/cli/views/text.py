"""Text for people: untrusted text escaped, figures shortened."""

import itertools
import math
import unicodedata
from collections.abc import Sequence

from rich.table import Table

from swarm.vocabulary.types import PeerId, short
from swarm.workload.microbatch_sizes import SizeSummary

MAX_FOREIGN_CHARACTERS = 160
MAX_OWN_CHARACTERS = 1000  # Limit for our own sentences that may quote others
_BARS = "▁▂▃▄▅▆▇█"


def harmless(text: str, limit: int = MAX_FOREIGN_CHARACTERS) -> str:
    """Escapes text from another machine to one printable line of at most `limit` characters."""
    # Control, format and surrogate characters could move the cursor, or change colours or writing direction.
    cut = text[: limit + 1]
    clean = "".join(" " if unicodedata.category(character)[0] in "CZ" else character for character in cut)
    return clean if len(text) <= limit else clean[: limit - 1] + "…"


def plain_table(*headings: str, right: Sequence[str] = ()) -> Table:
    """Builds an empty table without lines, with the columns `headings` and the right-aligned columns `right`."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in (*headings, *right):
        table.add_column(heading, justify="right" if heading in right else "left")
    return table


def harmless_lines(text: str) -> str:
    """Escapes a model's text but keeps its line breaks and tabs."""
    return "".join(" " if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in text)


def peer_name(peer: str) -> str:
    return harmless(short(PeerId(peer)))


def count(number: float) -> str:
    """Formats the number with separators, as in `12,345`."""
    return f"{number:,.0f}" if math.isfinite(number) else "-"


def counted(number: float, thing: str) -> str:
    """Formats a number of things, as in `1 file` or `1,200 batches`."""
    several = "es" if thing.endswith("ch") else "s"
    return f"{count(number)} {thing}{'' if number == 1 else several}"


def path_text(stages: Sequence[int]) -> str:
    """Describes a path, as in `through stages 0, 2 and 4`; `stages` leaves out stage 0."""
    *others, last = (0, *stages)
    return f"through stages {', '.join(map(str, others))} and {last}" if others else "through stage 0"


def loss_text(loss: float | None) -> str:
    """Formats the loss with four decimals; `-` if None."""
    return "-" if loss is None else f"{loss:.4f}"


def sizes_text(sizes: SizeSummary) -> str:
    """Describes a microbatch, as in `8,190 tokens ±1.2% in 17 documents, cost 12,300 ±0.4%, 1.3% padding`."""
    figures = (sizes.tokens, sizes.tokens_spread), (sizes.cost, sizes.cost_spread)
    tokens, cost = (f"{count(mean)} ±{spread:.1%}" for mean, spread in figures)
    return f"{tokens} tokens in {counted(sizes.documents, 'document')}, cost {cost}, {sizes.padding:.1%} padding"


def megabytes(amount: float) -> str:
    """Formats bytes in units of 10^6, as in `12.3 MB`."""
    return f"{amount / 1e6:,.1f} MB" if math.isfinite(amount) else "-"


def duration(seconds: float) -> str:
    """Formats seconds, as in `42s`, `3m07s`, `2h05m`; `-` if not finite."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def sparkline(points: Sequence[float], width: int) -> str:
    """Draws the points as at most `width` bars. Points that share a bar are averaged."""
    if not points or width < 1:
        return ""
    columns = min(width, len(points))
    edges = [round(column * len(points) / columns) for column in range(columns + 1)]
    means = [sum(points[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    lowest, span = min(means), max(means) - min(means)
    return "".join(_BARS[round((mean - lowest) / span * (len(_BARS) - 1)) if span else 0] for mean in means)
