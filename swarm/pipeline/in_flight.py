"""A data node's microbatches in flight: counts, completed steps, and the limit of their number (window)."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from swarm.pipeline.custody import KEPT_FOR_OTHERS
from swarm.vocabulary.types import MicrobatchId, Path, PeerId, Reasoned
from swarm.workload.microbatch_sizes import StepRule


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of microbatches since the start of the run: `started` = `completed` + `abandoned` + in flight."""

    started: int = 0
    completed: int = 0
    abandoned: int = 0
    duplicated: int = 0  # Repeated completions; always 0 without a bug


@dataclass(frozen=True, slots=True)
class InFlight:
    """One microbatch in flight. `scored`: predicted tokens; `loss`: nats per predicted token."""

    microbatch: MicrobatchId
    path: Path
    started: float
    tokens: int = 1
    scored: int = 1
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class StepDone:
    """A completed training step. `loss`: mean over the step's predicted tokens, in nats."""

    step: int
    loss: float
    microbatches: int


@dataclass(frozen=True, slots=True)
class InFlightRules:
    """Limits on a data node's microbatches in flight."""

    per_step: int  # Microbatches per step, if all have the largest size
    staleness: int  # Steps that may start before the current one is complete
    window: int
    steps: int | None = None  # Stop after this many; None: never
    microbatch_tokens: int = 1
    staleness_steps: int = 0  # Steps after which the staleness grows by one, from 0; 0: it is whole from the start

    @property
    def step(self) -> StepRule:
        return StepRule(self.per_step * self.microbatch_tokens, self.microbatch_tokens)


def staleness_at(steps: int, most: int, steps_each: int) -> int:
    """Returns the staleness after `steps` steps, which grows by one each `steps_each`."""
    # At first late gradients cost a fifth of the tokens; later, delayed by 1 % of all steps so far, nearly none.
    return min(most, steps // steps_each) if steps_each else most


@dataclass(slots=True)
class InFlightTable:
    """A data node's microbatches in flight, with their counts."""

    own: PeerId
    rules: InFlightRules
    first_number: int = 0  # Above all numbers before a restart: other peers may still hold those microbatches
    counts: Counts = field(default_factory=Counts)
    steps_done: int = 0
    steps_before: int = 0  # Of the run, before this data node's own
    window: int = field(init=False)
    next_number: int = field(init=False)
    _flying: dict[MicrobatchId, InFlight] = field(default_factory=dict)
    _done: list[InFlight] = field(default_factory=list)  # Completed microbatches of the current step

    def __post_init__(self) -> None:
        self.next_number = self.first_number
        self.window = self.rules.window

    @property
    def entries(self) -> tuple[InFlight, ...]:
        return tuple(self._flying.values())

    @property
    def finished(self) -> bool:
        return self.rules.steps is not None and self.steps_done >= self.rules.steps and not self._flying

    @property
    def staleness(self) -> int:
        """Steps that may now start before the current one is complete."""
        return staleness_at(self.steps_before + self.steps_done, self.rules.staleness, self.rules.staleness_steps)

    def get(self, microbatch: MicrobatchId) -> InFlight | None:
        return self._flying.get(microbatch)

    def may_start(self) -> Reasoned[bool]:
        rules = self.rules
        if len(self._flying) >= self.window:
            return Reasoned(False, f"the window of {self.window} is full")
        begun = sum(entry.tokens for entry in (*self._done, *self._flying.values()))
        if rules.steps is not None and rules.step.is_complete(begun, rules.steps - self.steps_done):
            return Reasoned(False, f"all {rules.steps} steps are in flight or complete")
        if rules.step.is_complete(begun, 1 + self.staleness):
            return Reasoned(False, f"step {self.steps_done + 1} is not complete")
        return Reasoned(True, "the window has room")

    def start(self, path: Path, now: float, tokens: int = 1, scored: int | None = None) -> InFlight:
        """Adds a new microbatch with the next number. `scored`: predicted tokens; None: all tokens."""
        microbatch = MicrobatchId(self.own, self.next_number)
        self.next_number += 1
        entry = InFlight(microbatch, path, now, tokens, tokens if scored is None else scored)
        self._flying[microbatch] = entry
        self.counts = replace(self.counts, started=self.counts.started + 1)
        return entry

    def returned(self, microbatch: MicrobatchId, path: Path, loss: float) -> None:
        entry = self._flying.get(microbatch)
        if entry is not None:
            self._flying[microbatch] = replace(entry, path=path, loss=loss)

    def complete(self, microbatch: MicrobatchId) -> StepDone | None:
        """Removes a completed microbatch. Returns the training step that ends with this microbatch, if any."""
        entry = self._flying.pop(microbatch, None)
        if entry is None:
            self.counts = replace(self.counts, duplicated=self.counts.duplicated + 1)
            return None
        if entry.loss is None:  # an honest path reaches its end, where the loss is computed, before it returns
            self.counts = replace(self.counts, abandoned=self.counts.abandoned + 1)
            return None
        self.counts = replace(self.counts, completed=self.counts.completed + 1)
        self._done.append(entry)
        if not self.rules.step.is_complete(sum(done.tokens for done in self._done)):
            return None
        done, self._done = self._done, []
        self.steps_done += 1
        losses = [each.scored * each.loss for each in done if each.loss is not None]
        return StepDone(self.steps_done, sum(losses) / sum(each.scored for each in done), len(done))

    def abandon(self, microbatch: MicrobatchId) -> InFlight | None:
        """Removes an abandoned microbatch. If it has no loss yet, its text may be launched again with a new number."""
        entry = self._flying.pop(microbatch, None)
        if entry is not None:
            self.counts = replace(self.counts, abandoned=self.counts.abandoned + 1)
        return entry


TRIPS: Final = 16
LATE: Final = 3.0
LEAST_LATE_S: Final = 1.0  # Shorter delays are the machine's, and another path gains nothing


class Stragglers:
    """Finder of microbatches in flight for LATE times the slowest of the last TRIPS: another path will be faster."""

    def __init__(self) -> None:
        self._trips_s = deque[float](maxlen=TRIPS)
        self._next_from = -math.inf

    def completed(self, entry: InFlight, now: float) -> None:
        self._trips_s.append(now - entry.started)
        self._next_from = -math.inf

    def find(self, entries: Iterable[InFlight], now: float) -> InFlight | None:
        """Returns a microbatch to launch again. If none completes, the next one is due after the same time again."""
        oldest = min(entries, key=lambda entry: entry.started, default=None)
        if oldest is None or len(self._trips_s) < TRIPS // 4:
            return None
        if now - max(oldest.started, self._next_from) <= max(LEAST_LATE_S, LATE * max(self._trips_s)):
            return None
        self._next_from = now
        return oldest


GAIN: Final = 2.0
LEAST_IN_EPOCH: Final = 12  # Microbatches. Single round trips vary by 10 to 20 %, the mean of 12 by 5 %
LEAST_IN_PROBE: Final = 6
LOWERED: Final = 0.9  # The window shrinks after two consecutive targets below this share
PROBE_AFTER: Final = 8  # Initial epochs between probes of the round trip without queueing
LONGEST_UNTIL_PROBE: Final = 96  # Epochs between probes. Doubles each time the round trip is unchanged
# Share of the bandwidth-delay product in flight during a probe, so that queues drain and little throughput is lost
PROBED_SHARE: Final = 0.6
HELD: Final = 0.75  # During a probe, throughput drops below this share unless microbatches were queueing
SAME: Final = 0.15  # Relative difference up to which two round trips count as equal
UNMOVED: Final = 0.93  # A smaller window keeps this share of the round trip if queues are not the cause
USED: Final = 0.6  # Share of the window in flight below which the window is not the limit


@dataclass(frozen=True, slots=True)
class _Epoch:
    flying: float
    trip_s: float

    @property
    def pace(self) -> float:
        return self.flying / self.trip_s


@dataclass(frozen=True, slots=True)
class _Probe:
    """A measurement in progress of the round trip without queueing."""

    pace: float  # Highest pace since the start of the probe
    known_s: float  # Round trip measured before
    # Whether all microbatches in flight have returned once. Before that they return in a burst, as they left a queue.
    is_spread: bool = False


class Window:
    """Number of microbatches that a data node may have in flight: GAIN times the bandwidth-delay product.

    This product is pace times round trip without queueing (BBR, Cardwell et al. 2016). An occasional probe lowers the
    window for two epochs, and measures the round trip in the second one. An epoch is one window of microbatches.
    """

    def __init__(self, start: int, least: int, most: Reasoned[int]) -> None:
        self._least, self._most = max(1, least), most
        self._wanted = float(max(1, start))
        self._why = "not measured yet"
        self._since = -math.inf  # Time of the last change. Earlier launches do not measure this window.
        self._sums: list[tuple[int, float]] = []  # (in flight, round trip) of each microbatch of this epoch
        self._unloaded_s = math.inf
        self._target_before = math.inf
        self._lowered_from: _Epoch | None = None  # The last epoch before the window shrank
        self._probe: _Probe | None = None
        self._epochs = 0  # Epochs since the last probe
        self._probe_after = PROBE_AFTER

    @property
    def value(self) -> Reasoned[int]:
        """Microbatches that may be in flight, with the reason."""
        wanted, most = max(self._least, round(self._wanted)), max(1, self._most.value)
        if wanted <= most:
            return Reasoned(wanted, self._why)
        return Reasoned(most, f"{self._most.reason}; {self._why}")

    def bound(self, most: Reasoned[int]) -> None:
        self._most = most

    def completed(self, started: float, now: float, flying: int) -> None:
        """Adds a microbatch's round trip. `flying`: microbatches in flight until its end, including itself."""
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
            self._why = "lowered for a moment, to measure the round trip without queueing"
            return
        if is_longer:  # too few are in flight for a probe, so take the measured round trip
            self._unloaded_s = epoch.trip_s
        self._move(epoch, GAIN * epoch.pace * self._unloaded_s)

    def _probed(self, epoch: _Epoch, probe: _Probe) -> None:
        if not probe.is_spread:
            self._probe = replace(probe, is_spread=True)
            return
        pace, few = max(probe.pace, epoch.pace), max(float(self._least), epoch.flying / 2)
        self._unloaded_s = epoch.trip_s
        if epoch.pace > HELD * probe.pace and few < (1 - SAME) * epoch.flying:
            # Throughput is unchanged, so the others were only queueing. Probe again with half the window.
            self._probe, self._wanted = _Probe(pace, probe.known_s), few
            return
        is_same = abs(epoch.trip_s - probe.known_s) <= SAME * probe.known_s
        self._probe_after = min(LONGEST_UNTIL_PROBE, 2 * self._probe_after) if is_same else PROBE_AFTER
        self._epochs, self._probe, self._target_before = 0, None, math.inf
        self._want(GAIN * pace * self._unloaded_s, pace)

    def _seems_longer(self, epoch: _Epoch) -> bool:
        """Whether links seem slower: with a smaller window the round trip did not shrink, as queueing time would."""
        # This can be noise (about 1 in 100). It only starts a probe, since trusting it doubled the window by mistake.
        before, self._lowered_from = self._lowered_from, None
        if before is None or epoch.flying > (1 - SAME) * before.flying:
            return False
        return epoch.trip_s > UNMOVED * before.trip_s

    def _move(self, epoch: _Epoch, target: float) -> None:
        """Moves the window to `target`: up at once if the present window is used; down after two lower targets."""
        lower, self._target_before = max(target, self._target_before), target
        if target > self._wanted:
            wanted = target if epoch.flying >= USED * self.value.value else self._wanted
        elif lower < LOWERED * self._wanted:
            wanted, self._lowered_from = lower, epoch
        else:
            wanted = self._wanted
        self._want(wanted, epoch.pace)

    def _want(self, wanted: float, pace: float) -> None:
        # Limit the excess over the bound, so that the window can shrink soon.
        self._wanted = min(max(wanted, self._least), GAIN * max(1, self._most.value))
        self._why = (
            f"{pace:.1f} per second with a round trip of {self._unloaded_s:.2f} s without queueing need"
            f" {pace * self._unloaded_s:.1f} in flight; {GAIN:g} times that keeps the peers busy"
        )


def room_at_hops(slots: Iterable[Sequence[int]], visited: float, data_nodes: int) -> Reasoned[int] | None:
    """Returns how many microbatches one of `data_nodes` may have at all peers. `visited`: share of stages on a path."""
    rooms = [
        (sum(min(each - each // KEPT_FOR_OTHERS, each / max(1, data_nodes)) for each in replicas), stage)
        for stage, replicas in enumerate(slots, start=1)
        if any(replicas)
    ]
    if not rooms:
        return None
    room, stage = min(rooms)
    return Reasoned(max(1, int(room / visited)), f"stage {stage} has no slots for further microbatches of ours")
