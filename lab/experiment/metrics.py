"""The measurements of a run: one row of figures a second, written at once, so that a run that breaks off leaves them
too; and the diary of what happened.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import statistics
from dataclasses import dataclass

from lab.emulation.emulation import Way
from node.local_swarm.swarm_progress import SwarmProgress
from node.observability.events import Step


class Kind(enum.Enum):
    """What a line of the diary means for the recovery."""

    FAULT = "fault"
    END = "end"
    """Of a fault that lasted."""
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Mark:
    """A line of the diary."""

    at_s: float
    kind: Kind
    what: str
    lasts: bool = False
    """A fault with an end, from which recovery is counted."""


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of the swarm at a moment."""

    at: float
    """Seconds since its first step."""
    step: int
    tokens: int
    tokens_per_s: float
    """Over the last steps."""
    loss: float | None
    """Mean over the steps since the last row; None when there was none."""
    alive: int
    """Processes that run."""
    serving: int
    """Those of them whose node says that it serves."""
    waiting: tuple[str, ...]
    """Modules that nobody serves."""
    links: dict[str, int]
    """Bytes delivered since the last row, by way: `0>3` is from peer 0 to peer 3, `-` whoever is no peer."""
    up: dict[str, int]
    """The same added up: what each peer sent."""
    down: dict[str, int]
    """And what each got."""


class Meter:
    """Makes rows: remembers what had passed at the last one."""

    def __init__(self, passed: dict[Way, int]) -> None:
        """`passed` is what had passed before the first row's time."""
        self._passed = passed
        self._losses: list[float] = []

    def step(self, step: Step) -> None:
        """Counts a finished step of the swarm."""
        if math.isfinite(step.loss):
            self._losses.append(step.loss)

    def row(self, at_s: float, progress: SwarmProgress, passed: dict[Way, int]) -> Row:
        """The next row; `passed` is `Emulation.passed()`."""
        new = {way: size for way, total in passed.items() if (size := total - self._passed.get(way, 0))}
        self._passed = passed
        losses, self._losses = self._losses, []
        up: dict[str, int] = {}
        down: dict[str, int] = {}
        for (source, target), size in new.items():
            up[_name(source)] = up.get(_name(source), 0) + size
            down[_name(target)] = down.get(_name(target), 0) + size
        living = [peer for peer in progress.peers.values() if peer.exit_code is None]
        return Row(
            at=round(at_s, 3),
            step=progress.step,
            tokens=progress.tokens,
            tokens_per_s=round(progress.tokens_per_s, 3),
            loss=statistics.fmean(losses) if losses else None,
            alive=len(living),
            serving=sum(peer.state == "serving" for peer in living),
            waiting=tuple(sorted(progress.waiting)),
            links={f"{_name(source)}>{_name(target)}": size for (source, target), size in sorted(new.items(), key=str)},
            up=up,
            down=down,
        )


def row_line(row: Row) -> str:
    """A row as a line of metrics.jsonl, without its end."""
    return json.dumps(dataclasses.asdict(row), separators=(",", ":"))


def _name(member: int | None) -> str:
    return "-" if member is None else str(member)
