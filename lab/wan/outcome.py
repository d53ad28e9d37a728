"""The outcome of a run, as figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lab.audit import Report
from lab.experiment.metrics import Mark, Row
from lab.experiment.run import Run
from node.local_swarm.swarm_progress import SwarmProgress
from protocol.manifest.manifest import Manifest

LAST_SHARE = 0.1
"""Of the tokens: over so many at the end the training loss is averaged."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The tokens per second that the stages could compute, by the speeds that their peers announced at the end."""

    tokens_per_s: tuple[float, ...]
    """Of each stage, all its replicas together."""
    slowest: int | None
    """The stage that bounds the swarm; None when nobody has said anything."""

    @property
    def bound(self) -> float | None:
        return None if self.slowest is None else self.tokens_per_s[self.slowest]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one run, from its first step to the end of its time."""

    name: str
    started_after_s: float
    """From the start of the processes to the first step."""
    seconds: float
    """From there on."""
    steps: int
    tokens: int
    tokens_per_s: float
    capacity: Capacity
    utilization: float | None
    """Share of their time that the peers after stage 0 have computed, by their own account; None when nobody left
    one."""
    loss_first: float | None
    loss_last: float | None
    """Training loss, mean over the last tenth of the tokens."""
    held_out_loss: float | None
    """Through the swarm as it was at the end, over an ideal network; None when it was not measured."""
    up_bytes: dict[str, int]
    """Sent by each peer."""
    down_bytes: dict[str, int]
    failures: dict[int, int]
    """Exit codes of nodes that ended neither in good order nor by our hand."""
    diary: tuple[Mark, ...]
    check: Report

    @property
    def share_of_compute(self) -> float | None:
        """The tokens per second over what the slowest stage could compute."""
        bound = self.capacity.bound
        return self.tokens_per_s / bound if bound else None

    def as_json(self) -> dict[str, Any]:
        """The JSON object for `--json`."""
        return {
            "name": self.name,
            "started_after_s": self.started_after_s,
            "seconds": self.seconds,
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "compute_tokens_per_s": self.capacity.bound,
            "share_of_compute": self.share_of_compute,
            "utilization": self.utilization,
            "loss": {"first": self.loss_first, "last": self.loss_last, "held_out": self.held_out_loss},
            "bytes": {"up": self.up_bytes, "down": self.down_bytes},
            "failures": {str(peer): code for peer, code in self.failures.items()},
            "events": [{"at": round(mark.at_s, 2), "what": mark.what} for mark in self.diary],
            "check": {
                "ok": not self.check.violations,
                "counts": self.check.counts,
                "violations": len(self.check.violations),
            },
        }


def outcome_of(run: Run) -> Outcome:
    """The outcome of a run that has ended."""
    progress, manifest = run.progress, run.scenario.manifest
    announced = () if run.status is None else run.status.peers
    return Outcome(
        name=run.scenario.name,
        started_after_s=run.started_after_s,
        seconds=run.seconds,
        steps=progress.step,
        tokens=progress.tokens,
        tokens_per_s=(progress.tokens - run.tokens_before) / max(1e-9, run.seconds),
        capacity=capacity_of(((_stage(peer.module), peer.tokens_per_s) for peer in announced), manifest),
        utilization=utilization_of(run.lab.swarm.progress),
        loss_first=progress.loss_first,
        loss_last=last_loss(run.rows),
        held_out_loss=run.held_out_loss,
        up_bytes=totals(run.rows, "up"),
        down_bytes=totals(run.rows, "down"),
        failures=run.failures,
        diary=tuple(run.marks),
        check=run.report,
    )


def _stage(module: object) -> int:
    number = str(module).partition(".")[0]
    return int(number) if number.isdecimal() else -1


def capacity_of(speeds: Iterable[tuple[int, float]], manifest: Manifest) -> Capacity:
    """The capacity from (stage, announced tokens per second) of each replica. Where paths skip stages, a stage is
    visited by some of them only; all equally often, though a run may allow unequal visits and then more.
    """
    count = manifest.stages.count
    visited = manifest.stages.visited_per_path
    sums = [0.0] * count
    for stage, speed in speeds:
        if 0 <= stage < count and math.isfinite(speed):
            sums[stage] += speed * ((count - 1) / visited if stage and visited else 1.0)
    known = [stage for stage in range(count) if sums[stage] > 0]
    return Capacity(tuple(sums), min(known, key=lambda stage: sums[stage], default=None))


def utilization_of(progress: SwarmProgress) -> float | None:
    """The utilization of the peers after stage 0 that left an account: their computing, in idle time too, over that and
    their waiting.
    """
    busy = [peer.summary.busy_s for peer in progress.peers.values() if peer.summary is not None and peer.stage > 0]
    computed_s = sum(each.compute + each.idle_work for each in busy)
    lived_s = computed_s + sum(each.wait for each in busy)
    return computed_s / lived_s if lived_s else None


def last_loss(rows: Sequence[Row]) -> float | None:
    """The mean training loss over the last tenth of the tokens."""
    last = [row.loss for row in rows if row.loss is not None and row.tokens >= rows[-1].tokens * (1 - LAST_SHARE)]
    return statistics.fmean(last) if last else None


def totals(rows: Iterable[Row], direction: str) -> dict[str, int]:
    """The bytes of each peer over all rows; `direction` is `up` or `down`."""
    found: dict[str, int] = {}
    for row in rows:
        for peer, size in getattr(row, direction).items():
            if peer != "-":
                found[peer] = found.get(peer, 0) + size
    return dict(sorted(found.items(), key=lambda item: int(item[0])))
