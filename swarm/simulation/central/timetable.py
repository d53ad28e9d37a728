"""The timetable of one peer: what has been announced to come, and what one visit more would mean for it.

A peer is a single server that takes tasks in the order of their arrival; a forward also needs a slot, held until that
microbatch's backward is done. So a visit waits for those that arrive before it, and makes those wait that arrive while
it is served: the second is what a data node must not forget about the others.

Entries are tuples: a timetable is asked hundreds of times for one microbatch.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from swarm.simulation.forecast import Task, Unit


class Turn(NamedTuple):
    """When a task would start, and the others' delay it causes: seconds times the urgency of whom it hits."""

    start: float
    imposed: float


class _Entry(NamedTuple):
    arrival: float
    start: float
    end: float
    urgency: float
    unit: Unit


class _Hold(NamedTuple):
    start: float
    end: float
    urgency: float
    unit: Unit


_ARRIVAL = attrgetter("arrival")


class Timetable:
    """Reservations of one peer.

    Args:
        slots: microbatches it can hold.
        overhead_s: time it is blocked after each task.
    """

    def __init__(self, slots: int, overhead_s: float) -> None:
        self._slots, self._overhead = slots, overhead_s
        self._entries: list[_Entry] = []
        self._holds: list[_Hold] = []

    # ---- asking --------------------------------------------------------------------------------------------------

    def turn(self, arrival: float, duration: float) -> Turn:
        """A task that needs no slot."""
        entries = self._entries
        place = bisect_right(entries, arrival, key=_ARRIVAL)
        start = arrival
        if place:
            start = max(start, entries[place - 1].end + self._overhead)
        blocked, imposed = start + duration + self._overhead, 0.0
        for entry in entries[place:]:
            if entry.start >= blocked:
                break
            imposed += entry.urgency * (blocked - entry.start)
            blocked += entry.end - entry.start + self._overhead
        return Turn(start, imposed)

    def forward_turn(self, arrival: float, duration: float) -> Turn:
        """A forward: it starts no earlier than a slot is free."""
        first = self.turn(arrival, duration)
        if len(self._holds) < self._slots:
            return first
        leaving = [hold.end for hold in self._holds if hold.start <= first.start < hold.end]
        if len(leaving) < self._slots:
            return first
        leaving.sort()
        return self.turn(leaving[len(leaving) - self._slots], duration)

    def holding(self, start: float, end: float) -> float:
        """The others' delay, times urgency, if a microbatch holds a slot from `start` to `end`."""
        if len(self._holds) < self._slots:
            return 0.0
        imposed = 0.0
        for hold in self._holds:
            if not start < hold.start < end:
                continue
            leaving = [
                other.end for other in self._holds if other.start <= hold.start < other.end and other is not hold
            ]
            if len(leaving) >= self._slots - 1:
                leaving.append(end)
                leaving.sort()
                imposed += hold.urgency * max(0.0, leaving[len(leaving) - self._slots] - hold.start)
        return imposed

    # ---- changing ------------------------------------------------------------------------------------------------

    def reserve(self, unit: Unit, tasks: Sequence[Task], urgency: float) -> None:
        """Enters a microbatch's tasks on this peer; from the first's start to the last's end it holds a slot if there
        are several."""
        for task in tasks:
            insort(self._entries, _Entry(task.arrival, task.start, task.end, urgency, unit), key=_ARRIVAL)
        if len(tasks) > 1:
            self._holds.append(_Hold(tasks[0].start, tasks[-1].end, urgency, unit))

    def release(self, unit: Unit) -> None:
        """Forgets a microbatch."""
        self._entries = [entry for entry in self._entries if entry.unit != unit]
        self._holds = [hold for hold in self._holds if hold.unit != unit]

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()
        self._holds.clear()
