"""PipeFisher's schedule in the node's own compute queue, in virtual time: the work of K-FAC in what a pipeline leaves
idle.

At the first microbatch of a step a stage begins a refresh: each microbatch of that step gives a curvature factor of the
layers' inputs after its forward pass and one of their outputs' gradients after its backward pass; then each factor is
inverted (Osawa et al. 2022, arXiv:2211.14133, section 3). All of it is work for idle time; nothing has a deadline. The
next refresh begins with the first step after its end, so that the steps from one to the next are the refresh period.
Preconditioning is part of every inner step. The paper replays a list made offline from a profile; here the queue takes
a chunk whenever no job waits.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from benchmarks.emulated_pipeline import Account, Durations, FillingPeer, FillingWorld, Setting, share_of_time
from swarm.pipeline.custody_events import Work
from swarm.simulation.pipeline_peer import Peer
from swarm.vocabulary.types import ModuleId, PeerId

WARM_STEPS: Final = 2
_KEPT: Final = 1.0
"""As `emulated_pipeline.FillingWorld.kept`; this benchmark does not look at graphs."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds that a stage's parts take: the two passes of a microbatch, its curvature (both factors of all
    layers), all inversions of a refresh, preconditioning in an inner step."""

    forward_ms: float
    backward_ms: float
    curvature_ms: float
    inversion_ms: float
    precondition_ms: float

    @property
    def durations(self) -> Durations:
        """The same without K-FAC, as half of a backward pass each for input and weights; stage 0's parts and the inner
        step count for nothing, as in the paper's model."""
        half = self.backward_ms / 2e3
        return Durations(self.forward_ms / 1e3, half, half, 0.0, 0.0, 0.0)

    def refresh_ms(self, microbatches: int) -> float:
        """The work of a refresh, of so many microbatches."""
        return microbatches * self.curvature_ms + self.inversion_ms

    def bubble_ms(self, stages: int) -> float:
        """What a stage is idle in a step of GPipe or 1F1B."""
        return (stages - 1) * (self.forward_ms + self.backward_ms)

    def work_over_bubble(self, stages: int, microbatches: int) -> float:
        """The paper's figure: (curvature + inversion) / bubble."""
        return self.refresh_ms(microbatches) / self.bubble_ms(stages)

    def utilisation(self, stages: int, microbatches: int, period: int | None) -> float:
        """The share of a step that a stage computes, by the same model; with a refresh every `period` steps or without
        K-FAC."""
        passes_ms = microbatches * (self.forward_ms + self.backward_ms)
        if period is None:
            return passes_ms / (passes_ms + self.bubble_ms(stages))
        each_ms = passes_ms + self.precondition_ms
        return (each_ms + self.refresh_ms(microbatches) / period) / (each_ms + self.bubble_ms(stages))


@dataclass(frozen=True, slots=True)
class SecondOrder:
    """How K-FAC's work is done."""

    profile: Profile
    in_bubbles: bool = True
    """Else at the end of the step from which it is, before the inner step."""
    every: int = 1
    """Steps from one refresh to the next at least."""


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What an arm did while it was measured. Shares are means over the stages."""

    step_ms: float
    busy: float
    """Share of the time in passes and inner steps."""
    idle_work: float
    period: float
    """Steps from one refresh to the next, the mean of the stage with the longest."""
    delay_ms: float
    """The longest that a job waited for a chunk of idle work."""
    kept: float
    """The most microbatches of which a stage kept inputs and gradients for curvature."""

    @property
    def utilisation(self) -> float:
        """The share of the time that devices computed."""
        return self.busy + self.idle_work


@dataclass(frozen=True, slots=True)
class _Piece:
    """A curvature factor of one microbatch, or half of the inversions."""

    seconds: float
    is_curvature: bool


class KfacPeer(FillingPeer):
    """A stage peer that preconditions its inner steps."""

    def __init__(self, world: KfacWorld, own: PeerId, module: ModuleId, incarnation: int) -> None:
        self.second_order = world.second_order
        self.begun: list[int] = []
        """The steps, from 0, with whose microbatches a refresh began."""
        self.most_kept = 0
        """Factors of one microbatch whose inputs or gradients were kept."""
        self._undone: deque[_Piece] = deque()
        """Of the refresh under way, the piece in the queue included."""
        self._is_queued = False
        self._passes: Counter[Work] = Counter()
        super().__init__(world, own, module, incarnation)

    def _passed(self, work: Work) -> None:
        super()._passed(work)
        step, place = divmod(self._passes[work], self.setting.per_step)
        self._passes[work] += 1
        if self.second_order is not None:
            if work is Work.FORWARD and place == 0 and self._may_begin(step, self.second_order.every):
                self.begun.append(step)
            if self.begun and self.begun[-1] == step:
                self._note(self.second_order, is_last=work is Work.BACKWARD and place == self.setting.per_step - 1)

    def _may_begin(self, step: int, every: int) -> bool:
        """Whether nothing is left of the last refresh, which began long enough ago."""
        return not self._undone and (not self.begun or step >= self.begun[-1] + every)

    def _note(self, second_order: SecondOrder, *, is_last: bool) -> None:
        """Adds the work that a pass of the refresh's step leaves."""
        profile, slowness = second_order.profile, self._ground.slowness(self.id)
        self._undone.append(_Piece(slowness * profile.curvature_ms / 2e3, is_curvature=True))
        self.most_kept = max(self.most_kept, sum(piece.is_curvature for piece in self._undone))
        if is_last:
            inverse = _Piece(slowness * profile.inversion_ms / 2e3, is_curvature=False)
            self._undone.extend((inverse, inverse))
        if second_order.in_bubbles:
            self._queue_one()

    def _queue_one(self) -> None:
        """Puts the oldest piece into the queue, one at a time: what has a deadline, weights' gradients, waits for the
        end of one piece and not of all."""
        if self._undone and not self._is_queued:
            self._is_queued = True
            self.queue.submit(self._compute_piece(self._undone[0].seconds), "curvature or inverse")

    def _compute_piece(self, seconds: float) -> Iterator[None]:
        for is_last in self._in_chunks(seconds):
            if is_last:
                self._undone.popleft()
                self._is_queued = False
                self._queue_one()
            yield

    def _step(self) -> None:
        super()._step()
        if self.second_order is not None:
            self._spent_s += self._ground.slowness(self.id) * self.second_order.profile.precondition_ms / 1e3
            if not self.second_order.in_bubbles:
                self._spent_s += sum(piece.seconds for piece in self._undone)
                self._undone.clear()


class KfacWorld(FillingWorld):
    """The world of one arm; `second_order` is None without K-FAC."""

    def __init__(self, setting: Setting, second_order: SecondOrder | None) -> None:
        self.second_order = second_order
        super().__init__(setting, _KEPT)

    def new_peer(self, own: PeerId, module: ModuleId, incarnation: int) -> Peer:
        return KfacPeer(self, own, module, incarnation)

    def run_steps(self, steps: int) -> None:
        """Lets time pass until the data node has completed so many."""
        ((_, flights),) = self.data_nodes()
        self.time.run_until(math.inf, lambda: flights.steps_done >= steps)


def pipeline(profile: Profile, stages: int, microbatches: int, chunk_s: float) -> Setting:
    """The paper's ground: equal devices, nothing on the way."""
    return Setting(
        0.0, 1, window=microbatches, body_s=0.0, chunk_s=chunk_s, stages=stages, per_step=microbatches,
        durations=profile.durations, spread=0.0, jitter=0.0,
    )  # fmt: skip


def run(setting: Setting, second_order: SecondOrder | None, steps: int) -> Refreshed:
    """Runs one arm for so many steps after a warm-up."""
    world = KfacWorld(setting, second_order)
    world.run_steps(WARM_STEPS)
    begin = world.time.now
    world.run_steps(WARM_STEPS + steps)
    peers = [peer for peer in world.stage_peers if isinstance(peer, KfacPeer)]
    accounts, span = [peer.account for peer in peers], (begin, world.time.now)
    return Refreshed(
        1e3 * (world.time.now - begin) / steps,
        share_of_time([account.busy for account in accounts], *span),
        share_of_time([account.idle_work for account in accounts], *span),
        max(period(peer.begun) for peer in peers),
        1e3 * max(longest_delay_s(account) for account in accounts),
        max(peer.most_kept for peer in peers) / 2,
    )


def run_arms(setting: Setting, profile: Profile, steps: int) -> dict[str, Refreshed]:
    """The pipeline without K-FAC, with its work in the bubbles, and with the same refreshes in the step."""
    filled = run(setting, SecondOrder(profile), steps)
    every = max(1, round(filled.period)) if math.isfinite(filled.period) else steps
    return {
        "bare": run(setting, None, steps),
        "bubbles": filled,
        "in step": run(setting, SecondOrder(profile, in_bubbles=False, every=every), steps),
    }


def period(begun: list[int]) -> float:
    """The mean steps from one refresh to the next, the first left out where there are others: nothing was in the
    pipeline yet. Infinite where none came after another."""
    between = [later - earlier for earlier, later in pairwise(begun)]
    return statistics.fmean(between[1:] or between) if between else math.inf


def longest_delay_s(account: Account) -> float:
    """The longest that a job waited while idle work was computed."""
    ends = [end for _, end in account.idle_work]
    longest = 0.0
    for came, wait in account.waits:
        delay, at = 0.0, bisect_right(ends, came)
        while at < len(ends) and account.idle_work[at][0] < came + wait:
            begin, end = account.idle_work[at]
            delay += min(end, came + wait) - max(begin, came)
            at += 1
        longest = max(longest, delay)
    return longest


def over_links(setting: Setting, one_way_ms: int, seed: int) -> Setting:
    """The same devices on this project's ground: unequal peers, links so many milliseconds long."""
    unlike = Setting(one_way_ms / 1e3, seed)
    return replace(
        setting, one_way_s=unlike.one_way_s, seed=seed, body_s=unlike.body_s, spread=unlike.spread, jitter=unlike.jitter
    )
