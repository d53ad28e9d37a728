"""A data node's microbatches in flight: when the next may start, their counts, and when a step is complete.

A *step* is as many completed microbatches as have its tokens (`swarm.workload.step_rule`). With staleness z a
microbatch of step s + 1 + z waits until step s is complete, so that with z = 0 nothing of a step is computed with
parameters from before the last one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from swarm.vocabulary.types import MicrobatchId, Path, PeerId, Reasoned
from swarm.workload.step_rule import StepRule


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of microbatches, since the start of the run as far as the node remembers it. `started` = `completed` +
    `abandoned` + those in flight, always.
    """

    started: int = 0
    completed: int = 0
    abandoned: int = 0
    duplicated: int = 0
    """Completions of a microbatch that had completed already. Anything but 0 is a defect."""


@dataclass(frozen=True, slots=True)
class Flight:
    """One microbatch under way."""

    microbatch: MicrobatchId
    path: Path
    started: float
    tokens: int = 1
    scored: int = 1
    """Tokens that are predicted."""
    loss: float | None = None
    """Nats per token that is predicted, once the loss has been computed."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step is complete. `loss` is the mean over its tokens that are predicted, in nats."""

    step: int
    loss: float
    microbatches: int


@dataclass(frozen=True, slots=True)
class FlightRules:
    """The limits of microbatches under way.

    Args:
        per_step: microbatches of one step, where all are as large as they may be.
        staleness: steps that may be begun before the current one is complete.
        window: microbatches in flight at most, to begin with (`Flights.window`).
        steps: stop after this many; None means never.
        microbatch_tokens: of one microbatch, at most.
    """

    per_step: int
    staleness: int
    window: int
    steps: int | None = None
    microbatch_tokens: int = 1

    @property
    def step(self) -> StepRule:
        """The rule by which microbatches make steps."""
        return StepRule(self.per_step * self.microbatch_tokens, self.microbatch_tokens)

    @property
    def most_in_flight(self) -> int:
        """The largest number of microbatches under way at once with the first window, where all are as large as they
        may be."""
        return min(self.window, self.most_by_staleness)

    @property
    def most_by_staleness(self) -> int:
        """How many may be under way at once whatever the window, where all are as large as they may be."""
        return self.per_step * (1 + self.staleness)


@dataclass(slots=True)
class Flights:
    """The data node's account of its microbatches.

    Args:
        first_number: of the first microbatch. A data node that comes back must not use a number of its earlier life
            again: others may still hold that microbatch.
        steps_done: completed, those of earlier lives included.
    """

    own: PeerId
    rules: FlightRules
    first_number: int = 0
    counts: Counts = field(default_factory=Counts)
    steps_done: int = 0
    window: int = field(init=False)
    """Microbatches in flight at most, as found by now (`swarm.pipeline.window`)."""
    _flying: dict[MicrobatchId, Flight] = field(default_factory=dict)
    _done: list[Flight] = field(default_factory=list)
    """Of the step that is not complete yet."""
    _next_number: int = field(init=False)

    def __post_init__(self) -> None:
        self._next_number = self.first_number
        self.window = self.rules.window

    @property
    def in_flight(self) -> tuple[Flight, ...]:
        return tuple(self._flying.values())

    @property
    def next_number(self) -> int:
        return self._next_number

    @property
    def finished(self) -> bool:
        """All steps that were asked for are complete and nothing is under way."""
        return self.rules.steps is not None and self.steps_done >= self.rules.steps and not self._flying

    def get(self, microbatch: MicrobatchId) -> Flight | None:
        return self._flying.get(microbatch)

    def may_start(self) -> Reasoned[bool]:
        """Whether another microbatch may start now."""
        flying, rules = len(self._flying), self.rules
        if flying >= self.window:
            return Reasoned(False, f"the window of {self.window} is full")
        begun = sum(flight.tokens for flight in (*self._done, *self._flying.values()))
        if rules.steps is not None and rules.step.is_complete(begun, rules.steps - self.steps_done):
            return Reasoned(False, f"all {rules.steps} steps are under way or done")
        if rules.step.is_complete(begun, 1 + rules.staleness):
            return Reasoned(False, f"step {self.steps_done + 1} is not complete")
        return Reasoned(True, "there is room")

    def start(self, path: Path, now: float, tokens: int = 1, scored: int | None = None) -> Flight:
        """Numbers and notes a new microbatch of so many tokens on its planned path. `scored`: how many of them are
        predicted; None for all."""
        microbatch = MicrobatchId(self.own, self._next_number)
        self._next_number += 1
        flight = Flight(microbatch, path, now, tokens, tokens if scored is None else scored)
        self._flying[microbatch] = flight
        self.counts = replace(self.counts, started=self.counts.started + 1)
        return flight

    def returned(self, microbatch: MicrobatchId, path: Path, loss: float) -> None:
        """Notes the loss of a microbatch; `path` is the one it really took."""
        flight = self._flying.get(microbatch)
        if flight is not None:
            self._flying[microbatch] = replace(flight, path=path, loss=loss)

    def complete(self, microbatch: MicrobatchId) -> StepDone | None:
        """Completes a microbatch that has come back to where it started. Tells when that ends a step."""
        flight = self._flying.pop(microbatch, None)
        if flight is None:
            self.counts = replace(self.counts, duplicated=self.counts.duplicated + 1)
            return None
        if flight.loss is None:  # no honest path comes back without having been at its end
            self.counts = replace(self.counts, abandoned=self.counts.abandoned + 1)
            return None
        self.counts = replace(self.counts, completed=self.counts.completed + 1)
        self._done.append(flight)
        tokens = sum(done.tokens for done in self._done)
        if not self.rules.step.is_complete(tokens):
            return None
        done, self._done = self._done, []
        self.steps_done += 1
        losses = [each.scored * each.loss for each in done if each.loss is not None]
        loss = sum(losses) / sum(each.scored for each in done)
        return StepDone(self.steps_done, loss, len(done))

    def abandon(self, microbatch: MicrobatchId) -> Flight | None:
        """Gives a microbatch up. Returns its flight, or None when it is not under way (any more).

        If no loss had been computed, no stage has used it, and its data may set out again under a new number.
        """
        flight = self._flying.pop(microbatch, None)
        if flight is not None:
            self.counts = replace(self.counts, abandoned=self.counts.abandoned + 1)
        return flight
