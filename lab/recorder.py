"""The measurements of a run: a row of figures each second, and the nodes' largest use of their machine."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lab.emulation.emulation import Way
from node.local_swarm.swarm_progress import SwarmProgress
from node.observability.events import Step


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of the swarm at one moment: a line of metrics.jsonl."""

    at: float
    step: int
    tokens: int
    tokens_per_s: float
    """Rate over the last steps."""
    loss: float | None
    """Mean over the steps since the last row; None without one."""
    alive: int
    serving: int
    waiting: tuple[str, ...]
    links: dict[str, int]
    """Bytes delivered since the last row, by way: `0>3` is from peer 0 to peer 3, `-` is a caller from outside."""
    up: dict[str, int]
    down: dict[str, int]


@dataclass(frozen=True, slots=True)
class Peaks:
    memory_bytes: int = 0
    descriptors: int = 0
    threads: int = 0


class Recorder:
    """Makes rows. `passed` is what the emulation has delivered before the first row."""

    def __init__(self, passed: dict[Way, int]) -> None:
        self.peaks = Peaks()
        self._passed = passed
        self._losses: list[float] = []

    def step(self, step: Step) -> None:
        if math.isfinite(step.loss):
            self._losses.append(step.loss)

    def row(self, at_s: float, progress: SwarmProgress, passed: dict[Way, int]) -> Row:
        new = {way: size for way, total in passed.items() if (size := total - self._passed.get(way, 0))}
        self._passed = passed
        losses, self._losses = self._losses, []
        up: Counter[str] = Counter()
        down: Counter[str] = Counter()
        for (source, target), size in new.items():
            up[_name(source)] += size
            down[_name(target)] += size
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
            up=dict(up),
            down=dict(down),
        )

    def sample(self, pids: Iterable[int]) -> None:
        for pid in pids:
            try:
                status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:  # it has ended
                continue
            self.peaks = Peaks(
                max(self.peaks.memory_bytes, 1024 * int(status.get("VmRSS", "0 kB").split()[0])),
                max(self.peaks.descriptors, descriptors),
                max(self.peaks.threads, int(status.get("Threads", "0"))),
            )


def _name(member: int | None) -> str:
    return "-" if member is None else str(member)
