"""The run as pictures: loss over time and over tokens, throughput, traffic of each link."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from node.lab.wan.metrics import Row
from node.lab.wan.outcome import Happened
from swarm.vocabulary.errors import ConfigError

MAX_LINES = 12
"""Links in the picture of traffic; the busiest ones."""
_SIZE = (9, 4.5)
Runs = Mapping[str, Sequence[Row]]


def draw_all(folder: Path, runs: Runs, diary: Sequence[Happened]) -> tuple[str, ...]:
    """Writes the pictures and returns their names. The first of `runs` (rows by name) is the one that the diary tells
    of.

    Raises:
        ConfigError: matplotlib is missing, or a file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "there are no plots: drawing needs matplotlib, which is not installed",
            hint='Run `pip install "skipstone[plot]"`.',
        ) from None
    rows = next(iter(runs.values()))
    pictures: dict[str, Callable[[Any], None]] = {
        "loss_over_time.png": lambda axes: _lines(
            axes, runs, lambda row: row.at, lambda row: row.loss, "seconds", "loss"
        ),
        "loss_over_tokens.png": lambda axes: _lines(
            axes, runs, lambda row: row.tokens, lambda row: row.loss, "tokens", "loss"
        ),
        "throughput.png": lambda axes: _lines(
            axes, runs, lambda row: row.at, lambda row: row.tokens_per_s, "seconds", "tokens per second"
        ),
        "traffic.png": lambda axes: _traffic(axes, rows),
    }
    for name, draw in pictures.items():
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        if name != "loss_over_tokens.png":
            for happened in diary:
                axes.axvline(happened.at_s, color="0.75", linewidth=0.8, zorder=0)
        try:
            figure.savefig(folder / name)
        except OSError as error:
            raise ConfigError(f"{folder / name} cannot be written: {error.strerror or error}") from None
    return tuple(pictures)


def _lines(
    axes: Any, runs: Runs, across: Callable[[Row], float], up: Callable[[Row], float | None], x: str, y: str
) -> None:
    for name, rows in runs.items():
        points = [(across(row), value) for row in rows if (value := up(row)) is not None]
        axes.plot([point[0] for point in points], [point[1] for point in points], label=name)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend()


def _traffic(axes: Any, rows: Sequence[Row]) -> None:
    sums: dict[str, int] = {}
    for row in rows:
        for link, size in row.links.items():
            sums[link] = sums.get(link, 0) + size
    for link in sorted(sums, key=lambda link: -sums[link])[:MAX_LINES]:
        axes.plot([row.at for row in rows], [row.links.get(link, 0) / 1e6 for row in rows], label=link, linewidth=1)
    axes.set_xlabel("seconds")
    axes.set_ylabel("MB per second, by link (from>to)")
    if sums:
        axes.legend(fontsize=7, ncols=2)
