"""All trials in one picture: microbatches a second, and a line where something was broken."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node.chaos.bench import Kind
from node.chaos.trial import Trial

NAME = "chaos.png"
ACROSS = 4
_COLOURS = {Kind.FAULT: "tab:red", Kind.END: "tab:green"}


def draw(folder: Path, trials: Sequence[Trial]) -> str | None:
    """Writes the picture and returns its name; None where matplotlib is not installed or there is nothing to draw."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not trials:
        return None
    down = math.ceil(len(trials) / ACROSS)
    figure = Figure(figsize=(4 * ACROSS, 2.2 * down), layout="constrained")
    grid = figure.subplots(down, ACROSS, squeeze=False)
    for axes in grid.flat[len(trials) :]:
        axes.set_axis_off()
    for axes, trial in zip(grid.flat, trials, strict=False):
        _draw_one(axes, trial)
    figure.savefig(folder / NAME)
    return NAME


def _draw_one(axes: Any, trial: Trial) -> None:
    counts = Counter(int(at) for at in trial.completed)
    seconds = range(int(trial.seconds))
    axes.step(list(seconds), [counts[second] for second in seconds], where="post", linewidth=1)
    for mark in trial.marks:
        if mark.kind in _COLOURS:
            axes.axvline(mark.at_s, color=_COLOURS[mark.kind], linewidth=0.8)
    axes.set_title(trial.plan.name, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
