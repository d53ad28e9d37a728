"""The plots of a run: loss over time and over tokens, throughput, traffic of each link."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.experiment.metrics import Mark, Row
from lab.experiment.report_parts import new_figure, save_figure

MAX_LINES = 12
"""Links in the picture of traffic; the busiest ones."""
_SIZE = (9, 4.5)
Runs = Mapping[str, Sequence[Row]]


def draw_all(folder: Path, runs: Runs, diary: Sequence[Mark]) -> tuple[str, ...]:
    """Writes the pictures and returns their names. The first of `runs` (rows by name) is the one that the diary tells
    of.

    Raises:
        ConfigError: matplotlib is missing, or a file cannot be written.
    """
    rows = next(iter(runs.values()))
    pictures: dict[str, Callable[[Any], None]] = {
        "loss_over_time.png": lambda axes: _lines(axes, runs, "at", "loss", "seconds", "loss"),
        "loss_over_tokens.png": lambda axes: _lines(axes, runs, "tokens", "loss", "tokens", "loss"),
        "throughput.png": lambda axes: _lines(axes, runs, "at", "tokens_per_s", "seconds", "tokens per second"),
        "traffic.png": lambda axes: _traffic(axes, rows),
    }
    for name, draw in pictures.items():
        figure = new_figure(*_SIZE)
        axes = figure.subplots()
        draw(axes)
        if name != "loss_over_tokens.png":
            for mark in diary:
                axes.axvline(mark.at_s, color="0.75", linewidth=0.8, zorder=0)
        save_figure(figure, folder / name)
    return tuple(pictures)


def _lines(axes: Any, runs: Runs, across: str, up: str, x: str, y: str) -> None:
    """One field of the rows over another one."""
    for name, rows in runs.items():
        points = [(getattr(row, across), getattr(row, up)) for row in rows if getattr(row, up) is not None]
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
