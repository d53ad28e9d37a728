"""Replicas that do harm to what goes through them: their microbatches come back with greater losses than those of the
module's other replicas.

A data node computes every loss itself and knows which replicas a microbatch has visited. Nothing that a replica says is
used, and making its losses small takes honest work. The loss of a module falls while it is trained, so each microbatch
is compared with its neighbours in time that went through other replicas of the module, and medians are compared, which
single odd documents do not move.

A replica that has just come, or fallen behind, is no better than the module was a round ago, and in a young run that is
far worse than the others are by now. So nobody is left out whose losses the run itself had within the last two rounds.
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
"""Microbatches that are remembered."""
AT_LEAST: Final = 12
"""Microbatches through a replica, and through the others, before it is judged: what it can spoil each time that it is
let in again."""
MARGIN: Final = 0.15
"""Of the others' loss, and of what it was, that a replica's may be greater."""
BLOCK: Final = 32
"""Microbatches of which one figure is kept for longer: the lower quartile of their losses, so that it is an honest
one's though a third go through a liar."""
EARLIEST: Final = 256
"""Microbatches before anybody is left out: what a run was like is not known at its beginning, or when it is resumed."""
ROUNDS: Final = 2
MOST_BLOCKS: Final = 4096
DEVIATIONS: Final = 5.0
"""Standard errors of a median that are taken for chance, besides."""
_MAD_TO_SIGMA: Final = 1.4826
_MEDIAN_TO_MEAN: Final = 1.2533
"""Standard error of a median over that of a mean, for normal values."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A replica to be left out of paths."""

    peer: PeerId
    module: ModuleId
    why: str


@dataclass(frozen=True, slots=True)
class _Excess:
    """How far the losses through one replica lie above those through the others of its module."""

    hop: Hop
    count: int
    nats: float
    usual: float
    """The others' loss."""
    odd: bool
    """Whether that is more than chance and honest differences make."""


class LossOutliers:
    """One data node's comparison.

    Args:
        round_microbatches: that a replica sees from one round to the next.
    """

    def __init__(self, round_microbatches: int) -> None:
        self._round_microbatches = round_microbatches
        self._returned: deque[tuple[tuple[Hop, ...], float]] = deque(maxlen=WINDOW)
        self._block: list[float] = []
        self._levels: deque[float] = deque(maxlen=MOST_BLOCKS)
        """Of one block after the other."""
        self._highest = inf
        """Of those of the last rounds; nothing is odd before it is known."""

    def returned(self, path: Path, loss: float) -> Outlier | None:
        """Takes the loss of a microbatch, in nats per token, and the path it really took. Returns the replica to be
        left out, if there is one."""
        self._returned.append((path.hops, loss))
        self._remember(loss)
        if loss <= (1 + MARGIN) * self._highest:  # almost all are: this costs little, what follows does not
            return None
        found = [excess for hop in path.hops if (excess := self._excess(hop, AT_LEAST)) is not None and excess.odd]
        if not found:
            return None
        worst = max(found, key=lambda excess: excess.nats)
        # Whoever shares many paths with it looks bad too, and may have been seen more often so far.
        everybody = {hop for hops, _ in self._returned for hop in hops}
        others = (self._excess(hop, AT_LEAST // 2) for hop in everybody)
        if any(other is not None and other.nats > worst.nats for other in others):
            return None
        return self._left_out(worst)

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

    def _replicas(self) -> int:
        """Of the module that has most of them."""
        hops = {hop for hops, _ in self._returned for hop in hops}
        return max(Counter(hop.module for hop in hops).values(), default=1)

    def _left_out(self, excess: _Excess) -> Outlier:
        # Only what comes without it tells of the others.
        kept = [one for one in self._returned if excess.hop not in one[0]]
        self._returned = deque(kept, maxlen=WINDOW)
        last = f"the losses of its last {excess.count} microbatches"
        why = f"{last} are {excess.nats:.2f} above the {excess.usual:.2f} of other replicas"
        return Outlier(excess.hop.peer, excess.hop.module, why)

    def _excess(self, hop: Hop, at_least: int) -> _Excess | None:
        """None when too few microbatches have gone through that replica, or through others of its module."""
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
        odd = nats > MARGIN * usual + allowed and own > (1 + MARGIN) * self._highest + allowed
        return _Excess(hop, count, nats, usual, odd)


def _excesses(losses: Sequence[tuple[float, bool]]) -> Iterator[float]:
    """How far each marked loss lies above its neighbours: of those not marked the one before and the one after, or,
    where all are marked, of all.

    Args:
        losses: in the order in which they came; and which are marked.
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
