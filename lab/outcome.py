"""The outcome of a run: its figures, the recovery from each fault, and objections.

The swarm has recovered once, for WINDOW_S, it completes a share of the microbatches of a median window before the first
fault, and every module has a serving replica. A recovery counts from the fault, or from the fault's end.
"""

from __future__ import annotations

import math
import os
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from lab.audit import AuditReport
from lab.emulation.emulation import Way
from lab.laboratory import Accused, Held, Mark
from lab.scenario import PACE_SHARE, Expectations, Scenario
from node.local_swarm.swarm_progress import SwarmProgress
from node.observability.events import Step
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.types import PeerId, short


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of the swarm at one moment: a line of metrics.jsonl."""

    at: float
    step: int
    tokens: int
    tokens_per_s: float
    loss: float | None
    alive: int
    serving: int
    waiting: tuple[str, ...]
    links: dict[str, int]
    """Bytes delivered since the last row, by way such as `0>3`; `-` is a caller outside the swarm."""
    up: dict[str, int]
    down: dict[str, int]


@dataclass(frozen=True, slots=True)
class Peaks:
    memory_bytes: int = 0
    descriptors: int = 0
    threads: int = 0


class Recorder:
    """Maker of a run's `Row`s and peaks of memory and threads. `passed`: bytes delivered before the first row."""

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
        # The kernel forgets these figures when a process ends.
        for pid in pids:
            try:
                status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:  # the process has ended
                continue
            self.peaks = Peaks(
                max(self.peaks.memory_bytes, 1024 * int(status.get("VmRSS", "0 kB").split()[0])),
                max(self.peaks.descriptors, descriptors),
                max(self.peaks.threads, int(status.get("Threads", "0"))),
            )


def _name(member: int | None) -> str:
    return "-" if member is None else str(member)


WINDOW_S: Final = 3.0
# A node notices an unserved module a moment later.
NOTICED_S: Final = 1.0
LAST_SHARE: Final = 0.1
# Bounds of one node; beyond them it leaks.
MAX_DESCRIPTORS: Final = 512
MAX_THREADS: Final = 256
MAX_MEMORY_BYTES: Final = 2 * 2**30
# Below this many microbatches per second a recovery cannot be measured.
LEAST_PACE: Final = 0.5
REFUSALS: Final = frozenset(range(65, 79)) - {70}
"""Exit codes of nodes that gave up; 70 would be a bug."""
# Share of rounds that may still include a liar after it was accused.
COMPANY: Final = 0.25
_STEP_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from a fault or its end (`mark`) until pace and service are restored; infinite if they never are."""

    mark: Mark
    pace_s: float
    served_s: float

    @property
    def counts(self) -> bool:
        """Whether the scenario's recovery limit applies: for a fault that lasts, only from its end."""
        return not self.mark.lasts

    @property
    def seconds(self) -> float:
        return max(self.pace_s, self.served_s)

    def as_json(self) -> dict[str, Any]:
        return {
            "at": round(self.mark.at_s, 2),
            "what": self.mark.what,
            "from": self.mark.kind.value,
            "limited": self.counts,
            "pace_s": _finite(self.pace_s),
            "served_s": _finite(self.served_s),
        }


def pace_before(times: Sequence[float], until_s: float) -> float:
    """Returns the median of microbatches completed (at `times`, sorted) per second before `until_s`; 0 if too early."""
    # The median ignores a slow start and pauses of the machine.
    starts = [start * _STEP_S for start in range(math.ceil(max(0.0, until_s - WINDOW_S) / _STEP_S))]
    return statistics.median(_in_window(times, start) / WINDOW_S for start in starts) if starts else 0.0


def pace_back_after(
    times: Sequence[float], since_s: float, pace: float, end_s: float, share: float = PACE_SHARE
) -> float:
    """Returns the seconds after `since_s` until `times` reach `share` of the earlier rate `pace`; infinite if never."""
    needed = share * pace * WINDOW_S
    first = bisect_left(times, since_s)
    for start in (since_s, *times[first:]):
        if start + WINDOW_S > end_s:
            break
        if _in_window(times, start) >= max(1.0, needed):
            return start - since_s
    return math.inf


def served_after(changes: Sequence[tuple[float, bool]], since_s: float) -> float:
    """Returns the seconds from `since_s` until all modules are served. `changes`: (time, whether all are served)."""
    for at, (gap_s, served) in enumerate(changes):
        if served or gap_s > since_s + NOTICED_S:
            continue
        ends_s = next((later_s for later_s, again in changes[at:] if again), math.inf)
        if ends_s > since_s:
            return ends_s - since_s
    return 0.0


def rerouted_after(changes: Sequence[tuple[float, bool]], rerouted: Sequence[float]) -> float | None:
    """Returns the seconds from when all modules were served again to the last rerouted microbatch; None if never."""
    if not changes or not changes[-1][1]:
        return None
    return max(0.0, rerouted[-1] - changes[-1][0]) if rerouted else 0.0


def _in_window(times: Sequence[float], start: float) -> int:
    return bisect_left(times, start + WINDOW_S) - bisect_left(times, start)


def agree(replicas: Iterable[Sequence[Held]]) -> bool:
    """Whether the replicas of each module hold the newest anchor or the one before it."""
    by_module: defaultdict[str, list[Sequence[Held]]] = defaultdict(list)
    for anchors in replicas:
        by_module[anchors[-1].module].append(anchors)
    return all(_module_agrees(histories) for histories in by_module.values())


def _module_agrees(histories: list[Sequence[Held]]) -> bool:
    # Replicas that are behind must hold the anchor that the others held before.
    newest = max(anchors[-1].round for anchors in histories)
    ahead = [anchors for anchors in histories if anchors[-1].round == newest]
    behind = {anchors[-1] for anchors in histories if anchors[-1].round != newest}
    before = {held for anchors in ahead for held in anchors[:-1] if held.round == newest - 1}
    return len({anchors[-1] for anchors in ahead}) == 1 and behind <= before


def capacity_of(speeds: Iterable[tuple[int, float]], manifest: Manifest) -> tuple[float, ...]:
    """Sums the announced speeds (stage, tokens per second) of all replicas into the capacity of each stage."""
    count = manifest.stages.count
    visited = manifest.stages.visited_per_path
    sums = [0.0] * count
    for stage, speed in speeds:
        if 0 <= stage < count and math.isfinite(speed):
            # If paths skip stages, a stage sees only a share of the microbatches.
            sums[stage] += speed * ((count - 1) / visited if stage and visited else 1.0)
    return tuple(sums)


def utilization_of(progress: SwarmProgress) -> float | None:
    """Returns the share of time that peers after stage 0 spent computing, by their own summaries."""
    busy = [peer.summary.busy_s for peer in progress.peers.values() if peer.summary is not None and peer.stage > 0]
    computed_s = sum(each.compute + each.idle_work for each in busy)
    lived_s = computed_s + sum(each.wait for each in busy)
    return computed_s / lived_s if lived_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results of one run of a scenario, for the report and for its objections."""

    scenario: Scenario
    started_after_s: float
    seconds: float
    steps: int
    tokens: int
    tokens_per_s: float
    capacity: tuple[float, ...]
    utilization: float | None
    loss_first: float | None
    held_out_loss: float | None
    rows: tuple[Row, ...]
    marks: tuple[Mark, ...]
    report: AuditReport
    failures: Mapping[int, int]
    missed: tuple[str, ...]
    cut_short: bool
    pace: float
    recoveries: tuple[Recovery, ...]
    rerouted_for_s: float | None
    peaks: Peaks
    odd: Mapping[int, tuple[bool, int]] = field(default_factory=dict)
    liars: frozenset[str] = frozenset()
    accused: Mapping[str, Accused] = field(default_factory=dict)
    undisturbed: Outcome | None = None

    @property
    def slowest(self) -> tuple[float, int] | None:
        """Capacity, in tokens per second, and number of the slowest stage; None if no speed is known."""
        return min(((speed, stage) for stage, speed in enumerate(self.capacity) if speed > 0), default=None)

    @property
    def share_of_compute(self) -> float | None:
        return None if self.slowest is None else self.tokens_per_s / self.slowest[0]

    @property
    def loss_last(self) -> float | None:
        """Mean training loss over the last tenth of the tokens."""
        least = self.rows[-1].tokens * (1 - LAST_SHARE) if self.rows else 0
        last = [row.loss for row in self.rows if row.loss is not None and row.tokens >= least]
        return statistics.fmean(last) if last else None

    @property
    def loss_ratio(self) -> float | None:
        """Ratio of the held-out (else training) loss to that loss of the undisturbed run; None without such a run."""
        if self.undisturbed is None:
            return None
        other = self.undisturbed
        for ours, theirs in ((self.held_out_loss, other.held_out_loss), (self.loss_last, other.loss_last)):
            if ours is not None and theirs:
                return ours / theirs
        return None

    @property
    def counted(self) -> tuple[Recovery, ...]:
        """Recoveries to which the scenario's recovery limit applies."""
        return tuple(each for each in self.recoveries if each.counts)

    @property
    def recovery_s(self) -> float:
        return max((each.seconds for each in self.counted), default=math.nan)

    @property
    def lost(self) -> dict[str, int]:
        names = ("abandoned", "lost with a killed peer", "retracted")
        return {name: self.report.counts[name] for name in names if self.report.counts.get(name)}

    def traffic(self, direction: str) -> dict[str, int]:
        """Returns the bytes that each peer sent (`direction` is `up`) or received (`down`)."""
        sums: Counter[str] = Counter()
        for row in self.rows:
            sums.update(getattr(row, direction))
        return {peer: sums[peer] for peer in sorted(sums.keys() - {"-"}, key=int)}

    @property
    def objections(self) -> tuple[str, ...]:
        """Reasons why the run did not pass; empty if it passed."""
        return (
            *(["the run was cut short"] if self.cut_short else []),
            *(f"check: {found.rule}: {found.message}" for found in self.report.violations),
            *(["check: a peer has no log"] if self.report.counts.get("peers without a log") else []),
            *(f"not carried out: {what}" for what in self.missed),
            *_of_peers(self),
            *([] if self.scenario.chaos is None else _of_expectations(self, self.scenario.chaos)),
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the outcome as JSON values. Seconds are null if the awaited state was never reached."""
        calm, expected = self.undisturbed, self.scenario.chaos
        objections = self.objections
        return {
            "name": self.scenario.name,
            "fault": None if expected is None else expected.fault,
            "seed": self.scenario.seed,
            "passed": not objections,
            "objections": list(objections),
            "started_after_s": round(self.started_after_s, 3),
            "seconds": round(self.seconds, 3),
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "compute_tokens_per_s": None if self.slowest is None else self.slowest[0],
            "share_of_compute": self.share_of_compute,
            "utilization": self.utilization,
            "loss": {"first": self.loss_first, "last": self.loss_last, "held_out": self.held_out_loss},
            "held_out": self.held_out_loss,
            "held_out_undisturbed": None if calm is None else calm.held_out_loss,
            "loss_ratio": self.loss_ratio,
            "bytes": {"up": self.traffic("up"), "down": self.traffic("down")},
            "microbatches_per_s_before": round(self.pace, 2),
            "recovery_s": _finite(self.recovery_s),
            "recovery_limit_s": None if expected is None else expected.recovery_s,
            "recoveries": [each.as_json() for each in self.recoveries],
            "rerouted_for_s": None if self.rerouted_for_s is None else round(self.rerouted_for_s, 2),
            "failures": {str(peer): code for peer, code in self.failures.items()},
            "events": [{"at": round(m.at_s, 2), "kind": m.kind.value, "what": m.what} for m in self.marks],
            "check": {
                "ok": not self.report.violations,
                "counts": self.report.counts,
                "violations": len(self.report.violations),
            },
            "counts": self.report.counts,
            "lost": self.lost,
            "liars": sorted(self.liars),
            "accused": {peer: asdict(about) | {"by": sorted(about.by)} for peer, about in self.accused.items()},
            "peaks": asdict(self.peaks),
            "undisturbed": None if calm is None else calm.as_json(),
        }


def _of_peers(outcome: Outcome) -> list[str]:
    """Returns objections about failed nodes, nodes started with a fault, and liars. Ignores accusations by liars."""
    found = [
        f"peer {peer} ended with exit code {code}"
        for peer, code in sorted(outcome.failures.items())
        # An excluded faulty peer may give up, but not crash.
        if outcome.odd.get(peer, (True, 0))[0] or code not in REFUSALS
    ]
    for peer, (works, visits) in outcome.odd.items():
        if works and not visits:
            found.append(f"no microbatch visited peer {peer}")
        if not works and visits:
            found.append(f"{visits} microbatches visited peer {peer}, which should be excluded")
    for name, about in outcome.accused.items():
        honest = about.by - outcome.liars
        if name not in outcome.liars and honest:
            found.append(f"{short(PeerId(name))} was accused by {len(honest)} honest replicas, but did not lie")
    for liar in outcome.liars:
        about = outcome.accused.get(liar, Accused())
        if not about.by - outcome.liars:
            found.append(f"no honest replica accused the liar {short(PeerId(liar))}")
        elif about.with_it > COMPANY * about.commits:
            found.append(f"{about.with_it} of {about.commits} rounds included a liar after it was accused")
    return found


def _of_expectations(outcome: Outcome, expected: Expectations) -> list[str]:
    counts, peaks = outcome.report.counts, outcome.peaks
    found = [
        f"{name}: {counts.get(name, 0)}, but at least {least} expected"
        for name, least in expected.at_least.items()
        if counts.get(name, 0) < least
    ]
    found += [
        f"{name}: {counts.get(name, 0)}, but at most {most} allowed"
        for name, most in expected.at_most.items()
        if counts.get(name, 0) > most
    ]
    for what, most, limit in (
        ("file descriptors", peaks.descriptors, MAX_DESCRIPTORS),
        ("threads", peaks.threads, MAX_THREADS),
        ("bytes of memory", peaks.memory_bytes, MAX_MEMORY_BYTES),
    ):
        if most > limit:
            found.append(f"a node used {most} {what}, but only {limit} are allowed")
    return found + _of_recoveries(outcome, expected) + _of_loss(outcome, expected)


def _of_recoveries(outcome: Outcome, expected: Expectations) -> list[str]:
    found = []
    if outcome.pace < LEAST_PACE:
        few = f"{outcome.pace:.2f} microbatches per second before the first fault"
        found.append(f"{few} are too few to measure a recovery")
    for each in outcome.counted:
        if each.seconds > expected.recovery_s and outcome.pace >= LEAST_PACE:
            took = "not recovered" if math.isinf(each.seconds) else f"recovered after {each.seconds:.1f} s"
            found.append(f"{took} ({each.mark.what}); {expected.recovery_s:g} s allowed")
        if expected.pace_within_s is not None and each.pace_s > expected.pace_within_s:
            late = f"the pace was back after {each.pace_s:.1f} s ({each.mark.what})"
            found.append(f"{late}; {expected.pace_within_s:g} s allowed")
    if expected.rerouted_for_s is None:
        return found
    if outcome.rerouted_for_s is None:
        found.append("not all modules are served again")
    elif outcome.rerouted_for_s > expected.rerouted_for_s:
        late = f"documents went to other experts for {outcome.rerouted_for_s:.1f} s after all modules were served again"
        found.append(f"{late}; {expected.rerouted_for_s:g} s allowed")
    return found


def _of_loss(outcome: Outcome, expected: Expectations) -> list[str]:
    if expected.loss_ratio is None:
        return []
    calm, ratio = outcome.undisturbed, outcome.loss_ratio
    if ratio is None or calm is None or calm.held_out_loss is None or outcome.held_out_loss is None:
        return ["the held-out losses with and without faults could not be measured at equal tokens"]
    if ratio <= expected.loss_ratio:
        return []
    return [f"the held-out loss is {ratio:.3f} times the undisturbed run's, but {expected.loss_ratio:g} is allowed"]


def _finite(value: float) -> float | None:
    return round(value, 2) if math.isfinite(value) else None
