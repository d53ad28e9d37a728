"""Recovery figures: whether and how soon a swarm comes back after a fault. Pure: times and anchors in, figures out.

Back is: for WINDOW_S on end at least half as many microbatches are completed as before the first fault, or the share
that the scenario asks for (of the median WINDOW_S there, so that a slow start or a pause of the machine does not
count), and every module has a serving replica.
The recovery is the time until such a window begins. It is counted from the fault, and where the fault lasts also from
its end. Besides, the replicas of each module stand together while they train.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from lab.experiment.log_watch import Held
from lab.experiment.metrics import Mark

WINDOW_S: Final = 3.0
SHARE: Final = 0.5
NOTICED_S: Final = 1.0
"""That a process is gone shows no later."""
_STEP_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Recovery:
    """The recovery after one fault, or the end of one. Seconds; infinite for never."""

    mark: Mark
    pace_s: float
    """Until the pace was back."""
    served_s: float
    """Until every module had a serving replica."""

    @property
    def counts(self) -> bool:
        """Whether the limit holds for it: not while a fault lasts."""
        return not self.mark.lasts

    @property
    def seconds(self) -> float:
        """The seconds until both the pace and the service are back."""
        return max(self.pace_s, self.served_s)


def pace_before(times: Sequence[float], until_s: float) -> float:
    """Completed microbatches a second before the first fault; `times` (ascending) are those of completion, from 0 on. 0
    when that was too short.
    """
    starts = [start * _STEP_S for start in range(math.ceil(max(0.0, until_s - WINDOW_S) / _STEP_S))]
    return statistics.median(_in_window(times, start) / WINDOW_S for start in starts) if starts else 0.0


def pace_back_after(times: Sequence[float], since_s: float, pace: float, end_s: float, share: float = SHARE) -> float:
    """The seconds from `since_s` until a share of the pace is back; infinite when it is not before `end_s`."""
    needed = share * pace * WINDOW_S
    first = bisect_left(times, since_s)
    for start in (since_s, *times[first:]):
        if start + WINDOW_S > end_s:
            break
        if _in_window(times, start) >= max(1.0, needed):
            return start - since_s
    return math.inf


def served_after(changes: Sequence[tuple[float, bool]], since_s: float) -> float:
    """The seconds from `since_s` until all is served; `changes` say since when it is or is not, ascending. What it is
    before them counts as served.
    """
    for at, (gap_s, served) in enumerate(changes):
        if served or gap_s > since_s + NOTICED_S:
            continue
        ends_s = next((later_s for later_s, again in changes[at:] if again), math.inf)
        if ends_s > since_s:
            return ends_s - since_s
    return 0.0


def rerouted_after(changes: Sequence[tuple[float, bool]], rerouted: Sequence[float]) -> float | None:
    """The seconds from when all modules were served again to the last microbatch that was routed to another expert than
    its own; None when some module was not served at the end.

    Args:
        changes: see `served_after`.
        rerouted: when such microbatches were completed, ascending.
    """
    if not changes or not changes[-1][1]:
        return None
    return max(0.0, rerouted[-1] - changes[-1][0]) if rerouted else 0.0


def _in_window(times: Sequence[float], start: float) -> int:
    return bisect_left(times, start + WINDOW_S) - bisect_left(times, start)


def stand_together(replicas: Iterable[Sequence[Held]]) -> bool:
    """Whether all replicas of each module hold one anchor, or the one before it, because a round may be applied just
    now. `skipstone check` wants it so at the end.

    Args:
        replicas: of each its last anchors, the latest last; at least one.
    """
    by_module: defaultdict[str, list[Sequence[Held]]] = defaultdict(list)
    for anchors in replicas:
        by_module[anchors[-1].module].append(anchors)
    return all(_are_together(histories) for histories in by_module.values())


def _are_together(histories: list[Sequence[Held]]) -> bool:
    newest = max(anchors[-1].round for anchors in histories)
    ahead = [anchors for anchors in histories if anchors[-1].round == newest]
    behind = {anchors[-1] for anchors in histories if anchors[-1].round != newest}
    before = {held for anchors in ahead for held in anchors[:-1] if held.round == newest - 1}
    return len({anchors[-1] for anchors in ahead}) == 1 and behind <= before
