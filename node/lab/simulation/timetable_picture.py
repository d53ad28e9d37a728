"""Timetables of iterations as a picture, one under another: one row a peer, one bar a task, one colour a data node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.simulation.instance import Instance
from swarm.simulation.iteration import Iteration
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import PeerId

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_ROWS = 200
_ROW_INCHES = 0.22
_FORWARD, _HEAD, _BACKWARD = 1.0, 0.35, 0.65


def draw(instance: Instance, iterations: Mapping[str, Iteration], path: Path) -> None:
    """Writes the picture; its format follows from the file's ending (png, svg, pdf).

    Args:
        iterations: of the same instance, each with a name; they are drawn over the same seconds.

    Raises:
        ConfigError: matplotlib is missing, the file cannot be written, or there are too many peers to see anything.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "drawing needs matplotlib, which is not installed", hint='Run `pip install "skipstone[plot]"`.'
        ) from None
    rows = sum(len(peers) for peers in instance.costs.stages)
    if rows > MAX_ROWS:
        raise ConfigError(f"a picture of {rows} peers shows nothing; up to {MAX_ROWS} can be drawn")
    figure = Figure(figsize=(14, len(iterations) * (1.5 + _ROW_INCHES * rows)), layout="constrained")
    every = figure.subplots(len(iterations), sharex=True, squeeze=False)[:, 0]
    for axes, (name, iteration) in zip(every, iterations.items(), strict=True):
        _draw_one(axes, instance, iteration)
        makespan = f"{iteration.played.makespan_s:.2f} s, bound {iteration.bound_s:.2f} s"
        axes.set_title(f"{instance.name}, {name}: {makespan}")
    every[-1].set_xlabel("seconds; forwards strong, backwards paler, the head palest; one colour a data node")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None


def _draw_one(axes: Axes, instance: Instance, iteration: Iteration) -> None:
    peers = [peer for stage in instance.costs.stages for peer in stage]
    stage_of, row_of = instance.costs.stage_of(), {peer: row for row, peer in enumerate(peers)}
    for colour, data_node in enumerate(instance.costs.data_nodes):
        for kind, bars in _bars(iteration, data_node, row_of).items():
            for row, spans in bars.items():
                axes.broken_barh(spans, (row - 0.4, 0.8), color=f"C{colour % 10}", alpha=kind, linewidth=0)
    axes.set_yticks(range(len(peers)), [f"stage {stage_of[peer]}, peer {int(peer)}" for peer in peers], fontsize=7)
    axes.invert_yaxis()


def _bars(
    iteration: Iteration, data_node: PeerId, row_of: dict[PeerId, int]
) -> dict[float, dict[int, list[tuple[float, float]]]]:
    """Start and length of each task of a data node's microbatches, by kind and row."""
    bars: dict[float, dict[int, list[tuple[float, float]]]] = {}
    for (owner, _), tasks in iteration.played.tasks.items():
        if owner != data_node:
            continue
        head = len(tasks) // 2
        for position, task in enumerate(tasks):
            kind = _FORWARD if position < head else _HEAD if position == head else _BACKWARD
            spans = bars.setdefault(kind, {}).setdefault(row_of[task.peer], [])
            spans.append((task.start, task.end - task.start))
    return bars
