"""The verdict on a scenario: whether it was passed, and if not, why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lab.audit import Report
from lab.chaos.chaos_run import ChaosRun, Peaks
from lab.chaos.chaos_scenario import ChaosScenario, Expectations
from lab.chaos.recovery import Recovery
from lab.experiment.log_watch import Accused
from lab.experiment.metrics import Mark
from node.observability.events import Visit
from swarm.vocabulary.types import PeerId, short

MAX_DESCRIPTORS: Final = 512
MAX_THREADS: Final = 256
MAX_MEMORY_BYTES: Final = 2 * 2**30
"""Of one node with the small model; torch alone takes a few hundred megabytes."""
LEAST_PACE: Final = 0.5
"""Microbatches a second before the first fault: below it there is nothing to measure by."""
REFUSALS: Final = frozenset(range(65, 79)) - {70}
"""Exit codes of `swarm.vocabulary.errors` that say that something cannot work; 70 would be a defect."""
COMPANY: Final = 0.25
"""Of the rounds that a replica commits after it has accused a liar, those with the liar in them: it is left out for a
while, and then tried again."""
_VISIT = f'{{"event":"{Visit.NAME}"'.encode()


@dataclass(frozen=True, slots=True)
class Trial:
    """The observations of a run that the verdict and the report need."""

    scenario: ChaosScenario
    started_after_s: float
    seconds: float
    """From the moment when all were at work to the end of the trial."""
    pace: float
    """Microbatches a second before the first fault."""
    recoveries: tuple[Recovery, ...]
    marks: tuple[Mark, ...]
    completed: tuple[float, ...]
    report: Report
    failures: Mapping[int, int]
    """Exit codes of nodes that ended neither in good order nor by our hand."""
    missed: tuple[str, ...]
    odd: Mapping[int, bool]
    """Peers that are not like the others, and whether they should be worked with."""
    peers: Mapping[int, str]
    resources: Peaks
    logs: Path
    cut_short: bool
    liars: frozenset[str] = frozenset()
    """Peers that lie in rounds."""
    accused: Mapping[str, Accused] = field(default_factory=dict)
    """Replicas that others have accused of lying."""
    tokens: int = 0
    """Trained when the held-out loss was asked for."""
    held_out: float | None = None
    """Through the swarm as it was at the end; None when it was not measured."""
    rerouted_for_s: float | None = None
    """That documents went to other experts after all modules were served again; None when they are not."""
    undisturbed: float | None = None
    """The held-out loss of the run that it is compared with."""

    @property
    def loss_ratio(self) -> float | None:
        """The held-out loss over that of the undisturbed run at as many tokens."""
        return None if self.held_out is None or self.undisturbed is None else self.held_out / self.undisturbed


def trial_of(run: ChaosRun, undisturbed: float | None) -> Trial:
    """The observations of a run that has ended."""
    assert isinstance(run.scenario, ChaosScenario)
    return Trial(
        scenario=run.scenario,
        started_after_s=run.started_after_s,
        seconds=run.seconds,
        pace=run.pace,
        recoveries=run.recoveries(run.seconds),
        marks=tuple(run.marks),
        completed=tuple(at for at in run.completed if at <= run.seconds),
        report=run.report,
        failures=run.failures,
        missed=(*run.missed, *(f"in vain: waited for {what}" for what in run.waiting)),
        odd=run.odd,
        peers={peer.index: peer.peer for peer in run.lab.swarm.peers},
        resources=run.resources.peaks,
        logs=run.logs,
        cut_short=run.stop.is_set(),
        liars=frozenset(run.liars),
        accused=run.watch.accused,
        tokens=run.progress.tokens if run.scenario.held_out else 0,
        held_out=run.held_out_loss,
        rerouted_for_s=run.rerouted_for_s(),
        undisturbed=undisturbed,
    )


def objections(trial: Trial) -> tuple[str, ...]:
    """The objections to a trial; none when the scenario was passed."""
    expected = trial.scenario.chaos
    return (
        *(["the run was cut short"] if trial.cut_short else []),
        *(f"check: {found.rule}: {found.message}" for found in trial.report.violations),
        *(f"not carried out: {what}" for what in trial.missed),
        *_of_failures(trial),
        *_of_odd_peers(trial),
        *_of_liars(trial.liars, trial.accused),
        *_of_counts(expected, trial.report.counts),
        *_of_resources(trial.resources),
        *_of_recoveries(expected, trial.pace, trial.recoveries),
        *_of_experts(expected, trial),
        *_of_loss(expected.loss_ratio, trial.loss_ratio),
    )


def losses(report: Report) -> dict[str, int]:
    """The losses of microbatches and gradients, as counts of the check."""
    names = ("abandoned", "lost with a killed peer", "retracted")
    return {name: report.counts.get(name, 0) for name in names if report.counts.get(name, 0)}


def _of_failures(trial: Trial) -> list[str]:
    """An odd peer that is left out may give up, but not break."""
    return [
        f"peer {peer} ended with exit code {code}"
        for peer, code in sorted(trial.failures.items())
        if trial.odd.get(peer, True) or code not in REFUSALS
    ]


def _of_odd_peers(trial: Trial) -> list[str]:
    found = []
    for peer, works in trial.odd.items():
        visits = _visits_of(trial.peers[peer], trial.logs)
        if works and not visits:
            found.append(f"nobody worked with peer {peer}")
        if not works and visits:
            found.append(f"{visits} microbatches visited peer {peer}, which should have been left out")
    return found


def _of_liars(liars: frozenset[str], accused: Mapping[str, Accused]) -> list[str]:
    """Each liar is named and left out, and nobody else is named; what liars say themselves is no evidence."""
    found = []
    for peer, about in accused.items():
        honest = about.by - liars
        if peer not in liars and honest:
            found.append(f"{short(PeerId(peer))} was accused by {len(honest)} honest replicas, and did not lie")
    for liar in liars:
        about = accused.get(liar, Accused())
        if not about.by - liars:
            found.append(f"nobody has named {short(PeerId(liar))}, which lies")
        elif about.with_it > COMPANY * about.commits:
            found.append(f"{about.with_it} of {about.commits} rounds had a liar in them after it was named")
    return found


def _visits_of(peer: str, logs: Path) -> int:
    lines = (line for path in logs.glob(f"{peer}-*.jsonl") for line in path.read_bytes().splitlines())
    return sum(line.startswith(_VISIT) for line in lines)


def _of_counts(expected: Expectations, counts: Mapping[str, int]) -> list[str]:
    few = [
        f"{name}: {counts.get(name, 0)}, at least {least} wanted"
        for name, least in expected.at_least.items()
        if counts.get(name, 0) < least
    ]
    return few + [
        f"{name}: {counts.get(name, 0)}, at most {most} allowed"
        for name, most in expected.at_most.items()
        if counts.get(name, 0) > most
    ]


def _of_resources(peaks: Peaks) -> list[str]:
    limits = (
        ("file descriptors", peaks.descriptors, MAX_DESCRIPTORS),
        ("threads", peaks.threads, MAX_THREADS),
        ("bytes of memory", peaks.memory_bytes, MAX_MEMORY_BYTES),
    )
    return [f"a node had {most} {what}, {limit} are allowed" for what, most, limit in limits if most > limit]


def _of_recoveries(expected: Expectations, pace: float, recoveries: Sequence[Recovery]) -> list[str]:
    if pace < LEAST_PACE:
        return [f"{pace:.2f} microbatches a second before the first fault are too few to measure a recovery by"]
    found = []
    for each in recoveries:
        if not each.counts or each.seconds <= expected.recovery_s:
            continue
        took = "not recovered" if math.isinf(each.seconds) else f"recovered after {each.seconds:.1f} s"
        found.append(f"{took} ({each.mark.what}); {expected.recovery_s:g} s are allowed")
    return found


def _of_experts(expected: Expectations, trial: Trial) -> list[str]:
    """Of a run whose experts stand in for each other: how soon the pace is back, and the documents are."""
    found = [
        f"the pace was back after {each.pace_s:.1f} s ({each.mark.what}); {expected.pace_within_s:g} s are allowed"
        for each in trial.recoveries
        if expected.pace_within_s is not None and each.counts and each.pace_s > expected.pace_within_s
    ]
    if expected.rerouted_for_s is None:
        return found
    if trial.rerouted_for_s is None:
        return [*found, "not all modules are served again"]
    if trial.rerouted_for_s > expected.rerouted_for_s:
        late = f"documents went to other experts for {trial.rerouted_for_s:.1f} s after all modules were served again"
        return [*found, f"{late}; {expected.rerouted_for_s:g} s are allowed"]
    return found


def _of_loss(allowed: float | None, ratio: float | None) -> list[str]:
    if allowed is None or (ratio is not None and ratio <= allowed):
        return []
    if ratio is None:
        return ["the held-out losses with and without the faults could not be measured at as many tokens"]
    return [f"the held-out loss is {ratio:.3f} of the undisturbed run's; {allowed:g} is allowed"]
