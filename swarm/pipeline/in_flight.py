"""A data node's microbatches in flight: their counts, how many there may be (`Window`), and when a step is complete.

With staleness z a microbatch of step s + 1 + z waits until step s is complete.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from swarm.pipeline.custody import KEPT_FOR_OTHERS
from swarm.vocabulary.types import MicrobatchId, Path, PeerId, Reasoned
from swarm.workload.microbatch_sizes import StepRule


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of microbatches since the start of the run: `started` = `completed` + `abandoned` + those in flight."""

    started: int = 0
    completed: int = 0
    abandoned: int = 0
    duplicated: int = 0
    """Repeated completions. Anything but 0 is a defect."""


@dataclass(frozen=True, slots=True)
class Flight:
    """One microbatch in flight. `scored` counts its predicted tokens, `loss` is in nats per predicted token."""

    microbatch: MicrobatchId
    path: Path
    started: float
    tokens: int = 1
    scored: int = 1
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class StepDone:
    """A complete step. `loss` is the mean over its predicted tokens, in nats."""

    step: int
    loss: float
    microbatches: int


@dataclass(frozen=True, slots=True)
class FlightRules:
    """The limits of microbatches in flight.

    Args:
        per_step: microbatches of one step, if all are of the largest size.
        staleness: steps that may begin before the current one is complete.
        steps: stop after this many; None means never.
    """

    per_step: int
    staleness: int
    window: int
    steps: int | None = None
    microbatch_tokens: int = 1

    @property
    def step(self) -> StepRule:
        return StepRule(self.per_step * self.microbatch_tokens, self.microbatch_tokens)

    @property
    def most_by_staleness(self) -> int:
        """Largest number in flight with any window, if all are of the largest size."""
        return self.per_step * (1 + self.staleness)


@dataclass(slots=True)
class Flights:
    """The account of a data node's microbatches.

    Args:
        first_number: first number not used by an earlier life, whose microbatches other peers may hold.
    """

    own: PeerId
    rules: FlightRules
    first_number: int = 0
    counts: Counts = field(default_factory=Counts)
    steps_done: int = 0
    window: int = field(init=False)
    next_number: int = field(init=False)
    _flying: dict[MicrobatchId, Flight] = field(default_factory=dict)
    _done: list[Flight] = field(default_factory=list)
    """Completed microbatches of the current step."""

    def __post_init__(self) -> None:
        self.next_number = self.first_number
        self.window = self.rules.window

    @property
    def in_flight(self) -> tuple[Flight, ...]:
        return tuple(self._flying.values())

    @property
    def finished(self) -> bool:
        return self.rules.steps is not None and self.steps_done >= self.rules.steps and not self._flying

    def get(self, microbatch: MicrobatchId) -> Flight | None:
        return self._flying.get(microbatch)

    def may_start(self) -> Reasoned[bool]:
        rules = self.rules
        if len(self._flying) >= self.window:
            return Reasoned(False, f"the window of {self.window} is full")
        begun = sum(flight.tokens for flight in (*self._done, *self._flying.values()))
        if rules.steps is not None and rules.step.is_complete(begun, rules.steps - self.steps_done):
            return Reasoned(False, f"all {rules.steps} steps are under way or done")
        if rules.step.is_complete(begun, 1 + rules.staleness):
            return Reasoned(False, f"step {self.steps_done + 1} is not complete")
        return Reasoned(True, "there is room")

    def start(self, path: Path, now: float, tokens: int = 1, scored: int | None = None) -> Flight:
        """Numbers and notes a new microbatch on its planned path. `scored`: predicted tokens; None for all."""
        microbatch = MicrobatchId(self.own, self.next_number)
        self.next_number += 1
        flight = Flight(microbatch, path, now, tokens, tokens if scored is None else scored)
        self._flying[microbatch] = flight
        self.counts = replace(self.counts, started=self.counts.started + 1)
        return flight

    def returned(self, microbatch: MicrobatchId, path: Path, loss: float) -> None:
        flight = self._flying.get(microbatch)
        if flight is not None:
            self._flying[microbatch] = replace(flight, path=path, loss=loss)

    def complete(self, microbatch: MicrobatchId) -> StepDone | None:
        """Completes a microbatch. Returns the step if this completes one."""
        flight = self._flying.pop(microbatch, None)
        if flight is None:
            self.counts = replace(self.counts, duplicated=self.counts.duplicated + 1)
            return None
        if flight.loss is None:  # no honest path comes back without having been at its end
            self.counts = replace(self.counts, abandoned=self.counts.abandoned + 1)
            return None
        self.counts = replace(self.counts, completed=self.counts.completed + 1)
        self._done.append(flight)
        if not self.rules.step.is_complete(sum(done.tokens for done in self._done)):
            return None
        done, self._done = self._done, []
        self.steps_done += 1
        losses = [each.scored * each.loss for each in done if each.loss is not None]
        return StepDone(self.steps_done, sum(losses) / sum(each.scored for each in done), len(done))

    def abandon(self, microbatch: MicrobatchId) -> Flight | None:
        """Abandons a microbatch. Without a loss, its data may be launched again under a new number."""
        flight = self._flying.pop(microbatch, None)
        if flight is not None:
            self.counts = replace(self.counts, abandoned=self.counts.abandoned + 1)
        return flight


# ---- the window ------------------------------------------------------------------------------------------------------

GAIN: Final = 2.0
LEAST_IN_EPOCH: Final = 12
"""Fewest microbatches of an epoch. Round trips differ by 10 to 20 %, the mean of these by 5 %."""
LEAST_IN_PROBE: Final = 6
LOWERED: Final = 0.9
"""The window falls when two targets in a row are below this share of it."""
PROBE_AFTER: Final = 8
"""Epochs between two probes of the round trip without queueing, at first."""
LONGEST_UNTIL_PROBE: Final = 96
"""Most epochs between two probes. The number doubles each time that the round trip is unchanged."""
PROBED_SHARE: Final = 0.6
"""Share of the bandwidth-delay product in flight during a probe: no queues, and little throughput is lost."""
HELD: Final = 0.75
"""During a probe throughput drops below this share, unless microbatches were queueing."""
SAME: Final = 0.15
"""Relative difference up to which two round trips count as equal."""
UNMOVED: Final = 0.93
"""Share of its round trip that a smaller window still has if the time is not spent in queues."""
USED: Final = 0.6
"""Share of the window in flight below which something else limits them, so that a larger window is of no use."""


@dataclass(frozen=True, slots=True)
class _Epoch:
    flying: float
    trip_s: float

    @property
    def pace(self) -> float:
        return self.flying / self.trip_s


@dataclass(frozen=True, slots=True)
class _Probe:
    """A probe of the round trip without queueing: the best pace since it began, and the round trip known before."""

    pace: float
    known_s: float
    is_spread: bool = False
    """Whether those in flight have returned once. Before that they arrive together, as they left a queue."""


class Window:
    """The number of microbatches that one data node may have in flight: GAIN times the bandwidth-delay product.

    That is pace times round trip without queueing, as in BBR (Cardwell et al. 2016). A probe lowers the window for two
    epochs now and then, and measures the round trip in the second. An epoch is a window's worth of microbatches.
    """

    def __init__(self, start: int, least: int, most: Reasoned[int]) -> None:
        self._least, self._most = max(1, least), most
        self._wanted = float(max(1, start))
        self._why = "nothing was measured yet"
        self._since = -math.inf
        """Time of the last change. Earlier launches say nothing about this window."""
        self._sums: list[tuple[int, float]] = []
        """Number in flight and round trip of each microbatch of this epoch."""
        self._unloaded_s = math.inf
        self._target_before = math.inf
        self._lowered_from: _Epoch | None = None
        """The epoch before the window fell."""
        self._probe: _Probe | None = None
        self._epochs = 0
        """Epochs since the last probe."""
        self._probe_after = PROBE_AFTER

    @property
    def value(self) -> Reasoned[int]:
        """The number that may be in flight, and why."""
        wanted, most = max(self._least, round(self._wanted)), max(1, self._most.value)
        if wanted <= most:
            return Reasoned(wanted, self._why)
        return Reasoned(most, f"{self._most.reason}; {self._why}")

    def bound(self, most: Reasoned[int]) -> None:
        self._most = most

    def completed(self, started: float, now: float, flying: int) -> None:
        """Takes in a completed microbatch. `flying` counts those in flight until then, itself included."""
        if started < self._since:
            return
        self._sums.append((flying, max(0.0, now - started)))
        count, before = len(self._sums), self.value.value
        if count < max(LEAST_IN_EPOCH if self._probe is None else LEAST_IN_PROBE, before):
            return
        epoch = _Epoch(sum(flying for flying, _ in self._sums) / count, sum(trip for _, trip in self._sums) / count)
        self._sums = []
        if epoch.trip_s <= 0:
            return
        self._decide(epoch)
        if self.value.value != before:
            self._since = now

    def _decide(self, epoch: _Epoch) -> None:
        self._epochs += 1
        if self._probe is not None:
            self._probed(epoch, self._probe)
            return
        is_longer = self._seems_longer(epoch)
        self._unloaded_s = min(self._unloaded_s, epoch.trip_s)
        few = max(float(self._least), PROBED_SHARE * epoch.pace * self._unloaded_s)
        if (is_longer or self._epochs >= self._probe_after) and few < (1 - SAME) * self.value.value:
            self._probe, self._wanted = _Probe(epoch.pace, self._unloaded_s), few
            self._why = "lowered for a moment, to see how long a round trip takes without waiting"
            return
        if is_longer:  # and so few are in flight that it shows without a probe
            self._unloaded_s = epoch.trip_s
        self._move(epoch, GAIN * epoch.pace * self._unloaded_s)

    def _probed(self, epoch: _Epoch, probe: _Probe) -> None:
        if not probe.is_spread:
            self._probe = replace(probe, is_spread=True)
            return
        pace, few = max(probe.pace, epoch.pace), max(float(self._least), epoch.flying / 2)
        self._unloaded_s = epoch.trip_s
        if epoch.pace > HELD * probe.pace and few < (1 - SAME) * epoch.flying:
            # As many are completed as before, so the others only queued. Probes again with half as many.
            self._probe, self._wanted = _Probe(pace, probe.known_s), few
            return
        is_same = abs(epoch.trip_s - probe.known_s) <= SAME * probe.known_s
        self._probe_after = min(LONGEST_UNTIL_PROBE, 2 * self._probe_after) if is_same else PROBE_AFTER
        self._epochs, self._probe, self._target_before = 0, None, math.inf
        self._want(GAIN * pace * self._unloaded_s, pace)

    def _seems_longer(self, epoch: _Epoch) -> bool:
        """Whether links seem slower after the window fell: with queues, the round trip would fall in proportion."""
        # Once in some hundred times that is chance. It only starts a probe: taken for true it doubled the window.
        before, self._lowered_from = self._lowered_from, None
        if before is None or epoch.flying > (1 - SAME) * before.flying:
            return False
        return epoch.trip_s > UNMOVED * before.trip_s

    def _move(self, epoch: _Epoch, target: float) -> None:
        """Follows the target: up at once, if the window is used; down if it has been lower twice."""
        lower, self._target_before = max(target, self._target_before), target
        if target > self._wanted:
            wanted = target if epoch.flying >= USED * self.value.value else self._wanted
        elif lower < LOWERED * self._wanted:
            wanted, self._lowered_from = lower, epoch
        else:
            wanted = self._wanted
        self._want(wanted, epoch.pace)

    def _want(self, wanted: float, pace: float) -> None:
        # The part beyond the bound does not grow for ever.
        self._wanted = min(max(wanted, self._least), GAIN * max(1, self._most.value))
        self._why = (
            f"{pace:.1f} a second with a round trip of {self._unloaded_s:.2f} s without waiting keep"
            f" {pace * self._unloaded_s:.1f} under way, {GAIN:g} times as many keep the peers busy"
        )


def room_at_hops(slots: Iterable[Sequence[int]], visited: float, data_nodes: int) -> Reasoned[int] | None:
    """Returns the microbatches of one of `data_nodes` that find slots, if paths visit a share of the stages."""
    rooms = [
        (sum(min(each - each // KEPT_FOR_OTHERS, each / max(1, data_nodes)) for each in replicas), stage)
        for stage, replicas in enumerate(slots, start=1)
        if any(replicas)
    ]
    if not rooms:
        return None
    room, stage = min(rooms)
    return Reasoned(max(1, int(room / visited)), f"the slots at stage {stage} are for so many of ours")


def least_of(bounds: Iterable[Reasoned[int]]) -> Reasoned[int]:
    return min(bounds, key=lambda bound: bound.value)
