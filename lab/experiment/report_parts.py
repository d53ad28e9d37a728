"""The parts of all reports and pictures.

It stands alone because nothing of it is about one kind of experiment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lab.audit import Report
from swarm.vocabulary.errors import ConfigError


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table's lines from lines of cells, without an end."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def number_text(value: float | None, digits: int) -> str:
    """A number as text; `-` for what is not known."""
    return "-" if value is None else f"{value:.{digits}f}"


def counts_text(check: Report) -> str:
    """The counts of `skipstone check` as text."""
    return ", ".join(f"{what} {number}" for what, number in sorted(check.counts.items()))


def new_figure(width: float, height: float) -> Any:
    """An empty picture, sizes in inches. Raises ConfigError when matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "there are no plots: drawing needs matplotlib, which is not installed",
            hint='Run `pip install "skipstone[plot]"`.',
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Saves the picture. Raises ConfigError when the file cannot be written."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
