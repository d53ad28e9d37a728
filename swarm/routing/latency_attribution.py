"""Turns the receipts of a microbatch's hops into measured times of peers and links, on this machine's clock.

A hop claims how long it waited, computed and sent, but the time between two neighbouring receipts is observed. The
part that no claim explains counts as the later hop's computing time: false claims of speed make a peer look slow.
By the triangle inequality the claims of honest hops cover the delays of their receipts.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from swarm.routing.measured_times import ASSUMED_BACKWARD_FACTOR, MeasuredTimes
from swarm.vocabulary.pipeline_messages import Direction, Receipt
from swarm.vocabulary.types import MicrobatchId, Path, PeerId
from swarm.workload.microbatch_sizes import MicrobatchSizes

MAX_TRACES: Final = 4096
LOST_S: Final = 10.0
"""Shortest visit time that a lost microbatch counts as, in seconds: failing at once must not look fast."""
LOST_ADDS: Final = 0.2
"""Largest share by which a lost microbatch raises a peer's mean: another hop may be at fault."""

_Mark = tuple[Direction, int]
"""Direction of a pass and position of the sender."""


@dataclass(frozen=True, slots=True)
class _Passed:
    sender: PeerId
    receipt: Receipt
    at: float


@dataclass(slots=True)
class _Trace:
    """Observed times of one microbatch.

    Args:
        queue: our microbatches in flight through each peer at the launch.
        size: cost relative to a usual microbatch, by which measurements are divided.
        elapsed_s: time of each hop's visit.
        at_peers_s: sum of waiting and computing times at all peers.
    """

    path: Path
    begun: float
    queue: Mapping[PeerId, int]
    size: float
    loss_known: float | None = None
    completed: float | None = None
    passed: dict[_Mark, _Passed] = field(default_factory=dict)
    elapsed_s: dict[_Mark, float] = field(default_factory=dict)
    at_peers_s: float = 0.0
    sent_s: float = 0.0

    def is_hop(self, position: int) -> bool:
        return 0 <= position < len(self.path.hops)

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


def _next_position(mark: _Mark) -> int:
    return mark[1] + _STEP[mark[0]]


class PathTimes:
    """Converter of the receipts of a data node's microbatches to samples for `MeasuredTimes`.

    Args:
        own: the data node.
        slots_of: returns the slots that a peer announces.
    """

    def __init__(self, own: PeerId, times: MeasuredTimes, slots_of: Callable[[PeerId], int]) -> None:
        self._own, self._times, self._slots_of = own, times, slots_of
        self._traces: OrderedDict[MicrobatchId, _Trace] = OrderedDict()

    def launched(
        self, microbatch: MicrobatchId, path: Path, queue: Mapping[PeerId, int], now: float, size: float = 1.0
    ) -> None:
        """Starts the trace of a launched microbatch.

        Args:
            queue: our microbatches in flight through each peer.
            size: cost relative to a usual microbatch: longer documents must not make a peer look slow.
        """
        self._traces[microbatch] = _Trace(path, now, dict(queue), size)
        while len(self._traces) > MAX_TRACES:
            self._traces.popitem(last=False)

    @property
    def sizes(self) -> MicrobatchSizes:
        """Sizes of launched microbatches."""
        return self._times.sizes

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
        """Adds a hop's receipt. `sender` may be a substitute. Receipts may be repeated and in any order."""
        trace = self._traces.get(receipt.microbatch)
        direction, position = mark = receipt.direction, receipt.position
        if trace is None or mark in trace.passed or not -1 <= position <= len(trace.path.hops):
            return
        if trace.is_hop(position):
            trace.path = _as_repaired(trace.path, position, sender)
        elif sender != self._own:
            return
        trace.passed[mark] = _Passed(sender, receipt, now)
        self._add_link(trace, sender, receipt)
        if not trace.is_hop(position):
            self._add_own_work(trace, sender, receipt)
        for known in (mark, (direction, _next_position(mark))):
            self._add_visit(trace, known)
        self._add_completed(receipt.microbatch, trace)

    def completed(self, microbatch: MicrobatchId, now: float) -> None:
        """Records the end of a microbatch's backward pass. Its last receipts may still arrive."""
        trace = self._traces.get(microbatch)
        if trace is not None:
            trace.completed = now
            self._add_completed(microbatch, trace)

    def lost(self, microbatch: MicrobatchId, now: float) -> None:
        """Counts a lost microbatch against every hop of its path.

        We cannot tell which hop is at fault; the times of honest peers recover by visits on other paths.
        """
        trace = self._traces.pop(microbatch, None)
        if trace is not None:
            for hop in trace.path.hops:
                known = self._times.visit(hop.peer)
                most = math.inf if known is None else known.mean * (1 + LOST_ADDS / known.gain)
                self._times.lost(hop.peer, min(max(LOST_S, now - trace.begun), most))

    # ---- samples -------------------------------------------------------------------------------------------------

    def _add_link(self, trace: _Trace, sender: PeerId, receipt: Receipt) -> None:
        position = _next_position((receipt.direction, receipt.position))
        if -1 <= position <= len(trace.path.hops):
            self._times.sent(sender, trace.path.peer_at(position), receipt.sent_s / trace.size)
            trace.sent_s += receipt.sent_s

    def _add_own_work(self, trace: _Trace, sender: PeerId, receipt: Receipt) -> None:
        trace.at_peers_s += receipt.waited_s + receipt.computed_s
        if receipt.direction is Direction.FORWARD:
            self._times.computed(sender, Direction.FORWARD, receipt.computed_s / trace.size)

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
