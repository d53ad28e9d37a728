"""A data node's window: how many microbatches it has under way at most, found by what it measures.

By Little's law as many are under way as come home in a second times a round trip in seconds. While the window is too
small nobody waits: twice as many under way bring twice as many home. Beyond the bandwidth-delay product (the pace times
the round trip without waiting) only waiting grows. So the window is twice the product (GAIN, as in BBR, Cardwell et al.
2016): as many on their way and being computed as the swarm can take, and as many again that wait, so that no peer is
idle because the next one is late. From below that doubles the window each round trip until the pace rises no more, and
from above it falls to the same.

What a round trip takes without waiting is the shortest mean of an epoch, which is a window's worth of microbatches.
Links change, so now and then the window is lowered for two epochs to see it anew, in the second. Where waiting is no
shorter with fewer under way, it may not be waiting: perhaps the ways have become longer, and that is seen at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from swarm.pipeline.custody import KEPT_FOR_OTHERS
from swarm.vocabulary.types import Reasoned

GAIN: Final = 2.0
LEAST_IN_EPOCH: Final = 12
"""Round trips differ by a tenth or two from each other; the mean of so many by a twentieth."""
LEAST_IN_LOOK: Final = 6
LOWERED: Final = 0.9
"""A window is kept while what is measured asks for more than this part of it; twice in a row for less, it falls."""
LOOK_AGAIN: Final = 8
"""Epochs after which the round trip without waiting is seen anew, at first..."""
LONGEST_UNTIL_LOOK: Final = 96
"""... and at most: twice as many each time that it is found to be as it was."""
FEW: Final = 0.6
"""For a look so much of the product is under way: nobody waits then, and little of the pace is lost."""
HELD: Final = 0.75
"""With so few under way less than so much of the pace is left, unless there were others that waited."""
SAME: Final = 0.15
"""A round trip that differs by no more from another is as long."""
UNMOVED: Final = 0.93
"""A round trip of at least so much of one with a sixth more under way does not consist of waiting."""
USED: Final = 0.6
"""With less of the window under way something else holds microbatches back, and a larger window would change
nothing."""


@dataclass(frozen=True, slots=True)
class _Epoch:
    """Means over an epoch."""

    flying: float
    trip_s: float

    @property
    def pace(self) -> float:
        """Microbatches that come home in a second."""
        return self.flying / self.trip_s


@dataclass(frozen=True, slots=True)
class _Look:
    """A look at the round trip without waiting: the best pace since it began, and what was known before."""

    pace: float
    known_s: float
    is_spread: bool = False
    """Whether those under way have gone round once since the window was lowered. Until then they come in one row, as
    they left a queue, and wait for each other."""


@dataclass(slots=True)
class _Sums:
    count: int = 0
    flying: float = 0.0
    trip_s: float = 0.0

    def add(self, flying: int, trip_s: float) -> None:
        self.count += 1
        self.flying += flying
        self.trip_s += trip_s


class Window:
    """The window of one data node.

    Args:
        start: what it begins with.
        least: it is never smaller, whatever is measured.
        most: it is never larger, and why.
    """

    def __init__(self, start: int, least: int, most: Reasoned[int]) -> None:
        self._least, self._most = max(1, least), most
        self._wanted = float(max(1, start))
        self._why = "nothing was measured yet"
        self._since = -math.inf
        """What was launched before says nothing about this window."""
        self._sums = _Sums()
        self._unloaded_s = math.inf
        """A round trip without waiting."""
        self._target_before = math.inf
        self._lowered_from: _Epoch | None = None
        """What the epoch before the window fell was like."""
        self._look: _Look | None = None
        self._epochs = 0
        """Since the last look."""
        self._look_after = LOOK_AGAIN

    @property
    def value(self) -> Reasoned[int]:
        """How many may be under way, and why."""
        wanted, most = max(self._least, round(self._wanted)), max(1, self._most.value)
        if wanted <= most:
            return Reasoned(wanted, self._why)
        return Reasoned(most, f"{self._most.reason}; {self._why}")

    def bound(self, most: Reasoned[int]) -> None:
        """Sets what it may be at most from now on."""
        self._most = most

    def completed(self, started: float, now: float, flying: int) -> None:
        """Takes in that a microbatch has come home.

        Args:
            started: when it set out, in seconds; `now` is later.
            flying: how many were under way until then, itself included.
        """
        if started < self._since:
            return
        self._sums.add(flying, max(0.0, now - started))
        least = LEAST_IN_EPOCH if self._look is None else LEAST_IN_LOOK
        if self._sums.count < max(least, self.value.value):
            return
        sums, self._sums = self._sums, _Sums()
        epoch = _Epoch(sums.flying / sums.count, sums.trip_s / sums.count)
        if epoch.trip_s <= 0:
            return
        before = self.value.value
        self._decide(epoch)
        if self.value.value != before:
            self._since = now

    def _decide(self, epoch: _Epoch) -> None:
        self._epochs += 1
        if self._look is not None:
            self._looked(epoch, self._look)
            return
        is_longer = self._seems_longer(epoch)
        self._unloaded_s = min(self._unloaded_s, epoch.trip_s)
        product = epoch.pace * self._unloaded_s
        few = max(float(self._least), FEW * product)
        if (is_longer or self._epochs >= self._look_after) and few < (1 - SAME) * self.value.value:
            self._look, self._wanted = _Look(epoch.pace, self._unloaded_s), few
            self._why = "lowered for a moment, to see how long a round trip takes without waiting"
            return
        if is_longer:  # and there are so few under way already that it can be seen without fewer
            self._unloaded_s = epoch.trip_s
        self._move(epoch, GAIN * epoch.pace * self._unloaded_s)

    def _looked(self, epoch: _Epoch, look: _Look) -> None:
        """Takes the round trip of few under way for that without waiting. Where as many came home as with more, the
        others only waited, and half as many are tried."""
        if not look.is_spread:
            self._look = replace(look, is_spread=True)
            return
        pace, few = max(look.pace, epoch.pace), max(float(self._least), epoch.flying / 2)
        known_s, self._unloaded_s = look.known_s, epoch.trip_s
        if epoch.pace > HELD * look.pace and few < (1 - SAME) * epoch.flying:
            self._look, self._wanted = _Look(pace, known_s), few
            return
        is_same = abs(epoch.trip_s - known_s) <= SAME * known_s
        self._look_after = min(LONGEST_UNTIL_LOOK, 2 * self._look_after) if is_same else LOOK_AGAIN
        self._epochs, self._look, self._target_before = 0, None, math.inf
        self._want(GAIN * pace * self._unloaded_s, pace)

    def _seems_longer(self, epoch: _Epoch) -> bool:
        """Whether the ways seem to be longer, after the window fell: were others waited for, round trips would be
        shorter in proportion. Once in some hundred times that is chance: taken for true it doubled the window."""
        before, self._lowered_from = self._lowered_from, None
        if before is None or epoch.flying > (1 - SAME) * before.flying:
            return False
        return epoch.trip_s > UNMOVED * before.trip_s

    def _move(self, epoch: _Epoch, target: float) -> None:
        """Follows the target: up at once, if what is allowed is made use of; down when it has been lower twice."""
        lower, self._target_before = max(target, self._target_before), target
        if target > self._wanted:
            wanted = target if epoch.flying >= USED * self.value.value else self._wanted
        elif lower < LOWERED * self._wanted:
            wanted, self._lowered_from = lower, epoch
        else:
            wanted = self._wanted
        self._want(wanted, epoch.pace)

    def _want(self, wanted: float, pace: float) -> None:
        # What is beyond the bound does not grow for ever.
        self._wanted = min(max(wanted, self._least), GAIN * max(1, self._most.value))
        self._why = (
            f"{pace:.1f} a second with a round trip of {self._unloaded_s:.2f} s without waiting keep"
            f" {pace * self._unloaded_s:.1f} under way, {GAIN:g} times as many keep the peers busy"
        )


def room_at_hops(slots: Iterable[Sequence[int]], visited: float, data_nodes: int) -> Reasoned[int] | None:
    """The microbatches for which one of `data_nodes` finds slots at the hops of its paths; None where nobody has said.

    Args:
        slots: of the replicas of each stage after 0.
        visited: the part of these stages that a path visits.
    """
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
    """The bound that holds: the smallest, with its reason."""
    return min(bounds, key=lambda bound: bound.value)
