"""Finds replicas that raise losses: their microbatches lose more than microbatches through other replicas.

A data node computes every loss itself, so replicas cannot claim a small one. Losses fall during training: each
microbatch is compared with its neighbours in time that visited other replicas, and medians ignore odd documents.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, sqrt
from statistics import median
from typing import Final

from swarm.vocabulary.types import Hop, ModuleId, Path, PeerId

WINDOW: Final = 256
"""Number of microbatches that are compared."""
AT_LEAST: Final = 12
"""Microbatches through a replica, and through the others, before it is judged: its damage after each return."""
MARGIN: Final = 0.15
"""Tolerated excess of a replica's loss, as a share of the others' loss and of the run's recent loss."""
BLOCK: Final = 32
"""Microbatches per long-term figure: the lower quartile of their losses, honest even if a third visit a liar."""
EARLIEST: Final = 256
"""Microbatches before a replica is excluded: at the start and after a restart the run's recent loss is unknown."""
ROUNDS: Final = 2
"""Rounds whose losses count as recent: a new or late replica is no better than the module was a round ago."""
MOST_BLOCKS: Final = 4096
DEVIATIONS: Final = 5.0
"""Tolerated excess that chance explains, in standard errors of a median."""
_MAD_TO_SIGMA: Final = 1.4826
_MEDIAN_TO_MEAN: Final = 1.2533
"""Ratio of the standard errors of median and mean, for normal values."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A replica to exclude from paths, because its microbatches have too great losses."""

    peer: PeerId
    module: ModuleId
    why: str


@dataclass(frozen=True, slots=True)
class _Excess:
    """Excess of a replica's losses over the module's other replicas.

    Args:
        nats: excess, in nats per token.
        usual: median loss of microbatches through the other replicas, in nats per token.
    """

    hop: Hop
    count: int
    nats: float
    usual: float
    is_outlier: bool


class LossOutliers:
    """Finder of outliers among replicas, by the losses of one data node's microbatches.

    Args:
        round_microbatches: microbatches that a replica gets between two rounds.
    """

    def __init__(self, round_microbatches: int) -> None:
        self._round_microbatches = round_microbatches
        self._returned: deque[tuple[tuple[Hop, ...], float]] = deque(maxlen=WINDOW)
        self._block: list[float] = []
        self._levels: deque[float] = deque(maxlen=MOST_BLOCKS)
        """Lower quartiles of consecutive blocks."""
        self._highest = inf
        """Highest level of the last rounds; infinite until known, which excludes no replica."""

    def returned(self, path: Path, loss: float) -> Outlier | None:
        """Adds a microbatch's loss, in nats per token, and its repaired path. Returns a replica to exclude, or None."""
        self._returned.append((path.hops, loss))
        self._remember(loss)
        if loss <= (1 + MARGIN) * self._highest:  # almost always: skips the costly part
            return None
        found = [
            excess for hop in path.hops if (excess := self._excess(hop, AT_LEAST)) is not None and excess.is_outlier
        ]
        if not found:
            return None
        worst = max(found, key=lambda excess: excess.nats)
        # Honest replicas that share many paths with a liar look bad too, and may have more microbatches so far.
        others = (self._excess(hop, AT_LEAST // 2) for hop in self._hops())
        if any(other is not None and other.nats > worst.nats for other in others):
            return None
        return self._exclude(worst)

    def _remember(self, loss: float) -> None:
        self._block.append(loss)
        if len(self._block) < BLOCK:
            return
        self._levels.append(sorted(self._block)[BLOCK // 4])
        self._block.clear()
        span = ROUNDS * self._round_microbatches * self._replicas()
        if BLOCK * len(self._levels) >= min(span, EARLIEST):
            blocks = -(-span // BLOCK)
            self._highest = max(islice(reversed(self._levels), blocks))

    def _hops(self) -> set[Hop]:
        return {hop for hops, _ in self._returned for hop in hops}

    def _replicas(self) -> int:
        """Returns the largest number of replicas of one module."""
        return max(Counter(hop.module for hop in self._hops()).values(), default=1)

    def _exclude(self, excess: _Excess) -> Outlier:
        # Its microbatches would make the other replicas on their paths look bad.
        kept = [one for one in self._returned if excess.hop not in one[0]]
        self._returned = deque(kept, maxlen=WINDOW)
        last = f"the losses of its last {excess.count} microbatches"
        why = f"{last} are {excess.nats:.2f} above the {excess.usual:.2f} of other replicas"
        return Outlier(excess.hop.peer, excess.hop.module, why)

    def _excess(self, hop: Hop, at_least: int) -> _Excess | None:
        """Compares losses through a replica and through its module's others; None for too few microbatches."""
        through = [
            (loss, hop in hops) for hops, loss in self._returned if any(other.module == hop.module for other in hops)
        ]
        others = [loss for loss, is_own in through if not is_own]
        count = len(through) - len(others)
        if count < at_least or len(others) < AT_LEAST:
            return None
        chance = _MAD_TO_SIGMA * median(abs(one) for one in _excesses([(loss, True) for loss in others]))
        usual, nats = median(others), median(_excesses(through))
        allowed = DEVIATIONS * _MEDIAN_TO_MEAN * chance / sqrt(count)
        own = median(loss for loss, is_own in through if is_own)
        is_outlier = nats > MARGIN * usual + allowed and own > (1 + MARGIN) * self._highest + allowed
        return _Excess(hop, count, nats, usual, is_outlier)


def _excesses(losses: Sequence[tuple[float, bool]]) -> Iterator[float]:
    """Yields how far each marked loss is above the mean of its unmarked neighbours (any neighbours if all are marked).

    Args:
        losses: losses in time order, each with its mark.
    """
    all_marked = all(marked for _, marked in losses)
    before: list[float | None] = []
    last: float | None = None
    for loss, marked in losses:
        before.append(last)
        last = loss if all_marked or not marked else last
    after: float | None = None
    for (loss, marked), earlier in zip(reversed(losses), reversed(before), strict=True):
        beside = [other for other in (earlier, after) if other is not None]
        if marked and beside:
            yield loss - sum(beside) / len(beside)
        after = loss if all_marked or not marked else after
