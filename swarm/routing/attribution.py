"""Attributes the times and losses of microbatches to the replicas on their paths. Claims alone change neither.

Times: a hop claims how long it waited, computed and sent, but the time between two neighbouring receipts is observed.
The part that no claim explains counts as the later hop's computing time: false claims of speed make a peer look slow.
By the triangle inequality the claims of honest hops cover the delays of their receipts.

Losses: a data node computes every loss itself, so replicas cannot claim a small one. Losses fall during training: each
microbatch is compared with its neighbours in time that visited other replicas, and medians ignore odd documents.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import Final

from swarm.routing.measured_times import ASSUMED_BACKWARD_FACTOR, LOST_ADDS, MeasuredTimes
from swarm.vocabulary.pipeline_messages import Direction, Receipt
from swarm.vocabulary.statistics import Latest
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, Path, PeerId

MAX_TRACES: Final = 4096
MAX_HEARD: Final = 1024
LOST_S: Final = 10.0  # Shortest visit time that a lost microbatch counts as: failing at once must not look fast

_Mark = tuple[Direction, int]  # Direction of a pass and position of the sender


@dataclass(frozen=True, slots=True)
class _Passed:
    sender: PeerId
    receipt: Receipt
    at: float


@dataclass(slots=True)
class _Trace:
    path: Path
    begun: float
    queue: Mapping[PeerId, int]  # Our microbatches in flight through each peer at the launch
    size: float  # Cost relative to a usual microbatch, by which measurements are divided
    loss_known: float | None = None
    completed: float | None = None
    passed: dict[_Mark, _Passed] = field(default_factory=dict)
    elapsed_s: dict[_Mark, float] = field(default_factory=dict)  # Of each hop's visit
    at_peers_s: float = 0.0  # Sum of waiting and computing times at all peers
    sent_s: float = 0.0

    def is_hop(self, position: int) -> bool:
        return 0 <= position < len(self.path.hops)

    def held(self) -> tuple[int, int, float]:
        """Returns the position of the last known holder, the position after it, and since when it has had the text."""
        last = max(self.passed.items(), key=lambda each: each[1].at, default=None)
        if last is None:
            return -1, 0, self.begun
        (direction, position), passed = last
        return position + _STEP[direction], position + 2 * _STEP[direction], passed.at

    def started(self, mark: _Mark) -> float | None:
        """Returns when a hop's visit began: at the previous hop's receipt, or at our start of the pass."""
        direction, position = mark
        before = self.passed.get((direction, position - _STEP[direction]))
        if before is not None:
            return before.at
        if direction is Direction.FORWARD:
            return self.begun if position == 0 else None
        return self.loss_known if position == len(self.path.hops) - 1 else None


_STEP: Final = {Direction.FORWARD: 1, Direction.BACKWARD: -1}


class PathTimes:
    """Converter of receipts of the microbatches of the data node `own` to samples for `MeasuredTimes`."""

    def __init__(self, own: PeerId, times: MeasuredTimes, slots_of: Callable[[PeerId], int]) -> None:
        self._own, self._times, self._slots_of = own, times, slots_of
        self.sizes = times.sizes  # Of launched microbatches
        self._traces = Latest[MicrobatchId, _Trace](MAX_TRACES)
        self._heard = Latest[PeerId, float](MAX_HEARD)  # When each peer's last receipt arrived

    def launched(
        self, microbatch: MicrobatchId, path: Path, queue: Mapping[PeerId, int], now: float, size: float = 1.0
    ) -> None:
        """Starts the trace of a launched microbatch. `queue`: our microbatches in flight through each peer."""
        self._traces[microbatch] = _Trace(path, now, dict(queue), size)

    def path_of(self, microbatch: MicrobatchId) -> Path | None:
        """Returns the path of a microbatch that is in flight or whose receipts are incomplete; None if unknown."""
        trace = self._traces.get(microbatch)
        return None if trace is None else trace.path

    def loss_known(self, microbatch: MicrobatchId, now: float) -> None:
        """Records when a microbatch's loss was known, which starts the backward pass."""
        trace = self._traces.get(microbatch)
        if trace is not None:
            trace.loss_known = now

    def passed(self, sender: PeerId, receipt: Receipt, now: float) -> None:
        """Adds a hop's receipt. `sender` may have replaced the planned peer. Repeats and any order are fine."""
        self._heard[sender] = now
        trace = self._traces.get(receipt.microbatch)
        direction, position = mark = receipt.direction, receipt.position
        if trace is None or mark in trace.passed or not -1 <= position <= len(trace.path.hops):
            return
        if trace.is_hop(position):
            trace.path = _as_repaired(trace.path, position, sender)
        elif sender != self._own:
            return
        trace.passed[mark] = _Passed(sender, receipt, now)
        after = position + _STEP[direction]
        if -1 <= after <= len(trace.path.hops):
            if sender != self._own:  # `Planner.sent` has our own, also those that were given up
                self._times.sent(sender, trace.path.peer_at(after), receipt.sent_s / trace.size)
            trace.sent_s += receipt.sent_s
        if not trace.is_hop(position):  # our own work
            trace.at_peers_s += receipt.waited_s + receipt.computed_s
            if direction is Direction.FORWARD:
                self._times.computed(sender, direction, receipt.computed_s / trace.size)
        for known in (mark, (direction, after)):
            self._add_visit(trace, known)
        self._add_completed(receipt.microbatch, trace)

    def completed(self, microbatch: MicrobatchId, now: float) -> None:
        """Records the end of a microbatch's backward pass. Its last receipts may still arrive."""
        trace = self._traces.get(microbatch)
        if trace is not None:
            trace.completed = now
            self._add_completed(microbatch, trace)

    def lost(self, microbatch: MicrobatchId, now: float) -> None:
        """Counts a lost microbatch against every hop of its path, because we cannot tell which hop is at fault."""
        trace = self._traces.pop(microbatch, None)  # the times of honest peers recover by visits on other paths
        if trace is not None:
            self._add_stuck(trace, now)
            for hop in trace.path.hops:
                known = self._times.visit(hop.peer)
                most = math.inf if known is None else known.raised(LOST_ADDS)
                self._times.lost(hop.peer, min(max(LOST_S, now - trace.begun), most))

    def holders(self, microbatch: MicrobatchId) -> dict[Hop, bool]:
        """Returns the hops that may hold a microbatch up: its last known holder and the next. True: silent since."""
        trace = self._traces.get(microbatch)
        if trace is None:
            return {}
        holder, after, since = trace.held()
        hops = [trace.path.hops[position] for position in (holder, after) if trace.is_hop(position)]
        return {hop: self._heard.get(hop.peer, since) <= since for hop in hops}

    def _add_stuck(self, trace: _Trace, now: float) -> None:
        """Adds a lost microbatch to the link by which its last known holder should have passed it on."""
        holder, after, since = trace.held()
        if trace.is_hop(holder):
            self._times.stuck(trace.path.peer_at(holder), trace.path.peer_at(after), now - since)

    def _add_visit(self, trace: _Trace, mark: _Mark) -> None:
        """Measures the time of a hop's visit, once the receipts of this hop and of the previous hop are known."""
        passed, started = trace.passed.get(mark), trace.started(mark)
        if passed is None or started is None or mark in trace.elapsed_s or not trace.is_hop(mark[1]):
            return
        trace.elapsed_s[mark] = max(0.0, passed.at - started)
        self._add_total(trace, passed)
        self._add_parts(trace, passed)

    def _add_total(self, trace: _Trace, passed: _Passed) -> None:
        """Adds a sample of forward plus backward time at a hop, with queueing and sending, if one peer did both."""
        marks = [(direction, passed.receipt.position) for direction in Direction]
        elapsed_s = [trace.elapsed_s[mark] for mark in marks if mark in trace.elapsed_s]
        if len(elapsed_s) == len(marks) and all(trace.passed[mark].sender == passed.sender for mark in marks):
            self._times.visited(passed.sender, sum(elapsed_s) / trace.size, trace.queue.get(passed.sender, 0))

    def _add_parts(self, trace: _Trace, passed: _Passed) -> None:
        """Adds samples of waiting and computing time. Claimed waiting counts up to the time of a full queue."""
        receipt, sender = passed.receipt, passed.sender
        elapsed_s = trace.elapsed_s[receipt.direction, receipt.position]
        claimed_s = min(receipt.computed_s, elapsed_s)
        waited_s = min(receipt.waited_s, max(0, self._slots_of(sender) - 1) * (1 + ASSUMED_BACKWARD_FACTOR) * claimed_s)
        computed_s = claimed_s + max(0.0, elapsed_s - waited_s - claimed_s - receipt.sent_s)
        self._times.computed(sender, receipt.direction, computed_s / trace.size)
        self._times.waited(sender, waited_s)
        trace.at_peers_s += waited_s + computed_s

    def _add_completed(self, microbatch: MicrobatchId, trace: _Trace) -> None:
        """Ends the trace of a completed microbatch once all receipts are known, and adds its time on links."""
        if trace.completed is not None and len(trace.elapsed_s) >= len(Direction) * len(trace.path.hops):
            del self._traces[microbatch]
            self._times.completed(trace.completed - trace.begun - trace.at_peers_s, trace.sent_s)


def _as_repaired(path: Path, position: int, sender: PeerId) -> Path:
    """Returns the repaired path: `sender` is at `position`, as a substitute, or because a hop was skipped."""
    following = position + 1
    if path.hops[position].peer != sender and following < len(path.hops) and path.hops[following].peer == sender:
        return path.without(position)
    return path.with_peer(position, sender)


WINDOW: Final = 256  # Number of microbatches that are compared
AT_LEAST: Final = 12  # Microbatches through a replica, and through the others, before it is judged
MARGIN: Final = 0.15  # Tolerated excess of a replica's loss, as a share of the others' and of the run's recent loss
BLOCK: Final = 32  # Microbatches per lower quartile of losses, which is honest even if a third of them visit a liar
EARLIEST: Final = 256  # Microbatches before a replica is excluded: until then the run's recent loss is unknown
ROUNDS: Final = 2  # Rounds whose losses are recent: a new or late replica is no better than the module a round ago
MOST_BLOCKS: Final = 4096
DEVIATIONS: Final = 5.0  # Tolerated excess that chance explains, in standard errors of a median
_MAD_TO_SIGMA: Final = 1.4826
_MEDIAN_TO_MEAN: Final = 1.2533  # Ratio of the standard errors of median and mean, for normal values


@dataclass(frozen=True, slots=True)
class Outlier:
    """A replica to exclude from paths, because its microbatches have too great losses."""

    peer: PeerId
    module: ModuleId
    why: str


@dataclass(frozen=True, slots=True)
class _Excess:
    """Excess of a replica's losses over the module's other replicas, in nats per token."""

    hop: Hop
    count: int
    nats: float
    usual: float  # Median loss of microbatches through the other replicas
    is_outlier: bool


class LossOutliers:
    """Finder of outliers among replicas, by the losses of one data node's microbatches."""

    def __init__(self, round_microbatches: int) -> None:
        """`round_microbatches`: number of microbatches of one replica between two rounds."""
        self._round_microbatches = round_microbatches
        self._returned: deque[tuple[tuple[Hop, ...], float]] = deque(maxlen=WINDOW)
        self._block: list[float] = []
        self._levels: deque[float] = deque(maxlen=MOST_BLOCKS)  # Lower quartiles of consecutive blocks
        self._highest = math.inf  # Highest level of the last rounds; infinite until known, which excludes no replica

    def returned(self, path: Path, loss: float) -> Outlier | None:
        """Adds a microbatch's loss, in nats per token, and its repaired path. Returns a replica to exclude, or None."""
        self._returned.append((path.hops, loss))
        self._remember(loss)
        if loss <= (1 + MARGIN) * self._highest:  # almost always: skips the costly part
            return None
        found = [one for hop in path.hops if (one := self._excess(hop, AT_LEAST)) is not None and one.is_outlier]
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
        through = [(loss, hop in hops) for hops, loss in self._returned if any(at.module == hop.module for at in hops)]
        others = [loss for loss, is_own in through if not is_own]
        count = len(through) - len(others)
        if count < at_least or len(others) < AT_LEAST:
            return None
        chance = _MAD_TO_SIGMA * median(abs(one) for one in _excesses([(loss, True) for loss in others]))
        usual, nats = median(others), median(_excesses(through))
        allowed = DEVIATIONS * _MEDIAN_TO_MEAN * chance / math.sqrt(count)
        own = median(loss for loss, is_own in through if is_own)
        is_outlier = nats > MARGIN * usual + allowed and own > (1 + MARGIN) * self._highest + allowed
        return _Excess(hop, count, nats, usual, is_outlier)


def _excesses(losses: Sequence[tuple[float, bool]]) -> Iterator[float]:
    """Yields how far each marked loss is above the mean of its unmarked neighbours in time (any if all are marked)."""
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
