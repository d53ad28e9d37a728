"""Smoothed times of peers and links as measured by a data node, or as announced if not measured.

A visit is forward plus backward time at a peer, with sending, over the number of our microbatches there. Its parts
also rely on claims. `swarm.routing.attribution` adds samples.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, TypeVar

from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.pipeline_messages import Direction
from swarm.vocabulary.statistics import Ewma, Latest
from swarm.vocabulary.types import PeerId, Reasoned
from swarm.workload.microbatch_sizes import MicrobatchSizes

MAX_PEERS: Final = 20_000
MAX_LINKS: Final = 200_000
UNKNOWN_TOKENS_PER_S: Final = 1000.0  # Speed assumed if a peer has neither measurements nor an announced speed
ASSUMED_BACKWARD_FACTOR: Final = 2.0
SLOWER_AT_MOST: Final = 4.0
LOST_ADDS: Final = 0.2  # Largest share by which a lost microbatch raises a mean: another peer may be at fault
LEAST_LINK_SHARE: Final = 0.5  # Smallest share of the sending time that the tensor takes; the answer takes the rest

PeerRoute = tuple[PeerId, ...]  # The peers of a path in the order of their visits, without the data node at both ends


@dataclass(frozen=True, slots=True)
class Costs:
    """Expected times of one microbatch at peers and on links, in seconds, and slots of peers."""

    forward_s: Mapping[PeerId, float]
    message_s: Mapping[PeerId, Mapping[PeerId, float]]  # Of a microbatch's tensor from one peer to another
    slots: Mapping[PeerId, int]  # Microbatches that a peer can hold, from the forward to the end of the backward pass
    backward_factor: float = 1.5  # Backward time in forward times
    task_overhead_s: float = 0.0  # Time that a peer is blocked after each task

    def service_s(self, peer: PeerId) -> float:
        """Returns how long the forward and backward pass of a microbatch keep the peer busy."""
        return (1 + self.backward_factor) * self.forward_s[peer] + 2 * self.task_overhead_s


K = TypeVar("K")


class _Averages(Latest[K, Ewma]):
    """Table of moving averages. If full, the least recently measured key is dropped."""

    def add(self, key: K, sample: float) -> None:
        known = self[key] = self.get(key) or Ewma()
        known.add(sample)

    def means(self) -> dict[K, float]:
        return {key: average.mean for key, average in self.items()}


class MeasuredTimes:
    """Mean times of peers and links, as measured by the data node `own`. `tokens`: of a largest microbatch."""

    def __init__(self, own: PeerId, tokens: int) -> None:
        self._own = own
        self.sizes = MicrobatchSizes(tokens)  # Of launched microbatches. Announced speeds refer to the usual size.
        self._visits: _Averages[PeerId] = _Averages(MAX_PEERS)
        self._completed: _Averages[PeerId] = _Averages(MAX_PEERS)  # Visits without lost microbatches
        self._forward: _Averages[PeerId] = _Averages(MAX_PEERS)
        self._backward: _Averages[PeerId] = _Averages(MAX_PEERS)
        self._links: _Averages[frozenset[PeerId]] = _Averages(MAX_LINKS)
        self._link_share = Ewma()
        self._waiting: _Averages[PeerId] = _Averages(MAX_PEERS)

    def visited(self, peer: PeerId, seconds: float, queue: int = 0) -> None:
        """Adds a sample of the time of both passes at a peer. `queue`: our microbatches that were already there."""
        service_s = max(0.0, seconds) / (1 + max(0, queue))
        self._visits.add(peer, service_s)
        self._completed.add(peer, service_s)

    def lost(self, peer: PeerId, seconds: float) -> None:
        """Adds a lost microbatch as a visit of `seconds` to a peer, which does not change timeouts."""
        self._visits.add(peer, seconds)

    def computed(self, peer: PeerId, direction: Direction, seconds: float) -> None:
        (self._forward if direction is Direction.FORWARD else self._backward).add(peer, seconds)

    def waited(self, peer: PeerId, seconds: float) -> None:
        """Adds a sample of the time that a microbatch waited in a peer's queue before a pass."""
        self._waiting.add(peer, seconds)

    def sent(self, here: PeerId, there: PeerId, seconds: float) -> None:
        """Adds a sample of the time from sending a tensor to its acknowledgement, for both directions of a link."""
        self._links.add(frozenset((here, there)), seconds)

    def stuck(self, here: PeerId, there: PeerId, seconds: float) -> None:
        """Adds a microbatch that was lost between two peers after `seconds`. The link may not be at fault."""
        known = self._links.get(frozenset((here, there)))
        self.sent(here, there, seconds if known is None else min(seconds, known.raised(LOST_ADDS)))

    def completed(self, moving_s: float, sent_s: float) -> None:
        """Adds a microbatch's observed time on links, and the sum of the sending times that peers claimed."""
        if sent_s > 0:
            self._link_share.add(min(1.0, max(LEAST_LINK_SHARE, moving_s / sent_s)))

    def visit(self, peer: PeerId) -> Ewma | None:
        """Returns the measured seconds of a visit to a peer with an empty queue; None if not measured."""
        return self._visits.get(peer)

    def visit_s(self, peer: PeerId, announced: float) -> Reasoned[float]:
        """Returns the expected seconds of a usual microbatch's visit with an empty queue, and their source."""
        known = self._visits.get(peer)
        if known is not None:
            return Reasoned(known.mean, f"measured {known.samples} times")
        return Reasoned(self._announced_s(announced), "announced" if announced > 0 else "unknown")

    def has_completed(self, peer: PeerId) -> bool:
        """Whether the peer has ever completed both passes of one of our microbatches."""
        return self._completed.get(peer) is not None

    def usual_s(self, peer: PeerId, announced: float) -> float:
        """Returns the seconds of a completed visit with an empty queue, from which timeouts follow.

        A peer without completed visits counts as the slowest of the others, or up to SLOWER_AT_MOST times slower if it
        announces that.
        """
        # Lost microbatches are left out: otherwise each one that a peer keeps would lengthen its timeout.
        known = self._completed.get(peer)
        if known is not None:
            return known.mean
        slowest, own = max(self._completed.means().values(), default=None), self._announced_s(announced)
        return own if slowest is None else max(slowest, min(SLOWER_AT_MOST * slowest, own))

    def longest_unmeasured(self, peers: Collection[PeerId]) -> PeerId:
        """Returns the one of `peers` (at least one) that was never visited, or whose last visit is the oldest."""
        unmeasured = min((peer for peer in peers if peer not in self._visits), default=None)
        return unmeasured or next(peer for peer in self._visits if peer in peers)

    def doubt(self, peer: PeerId, route: PeerRoute) -> None:
        """Makes the next samples of a peer, and of its links on `route`, count as much as all earlier ones."""
        # One slow visit keeps a peer out of routes. At the usual weight, dozens of rare trials would bring it back.
        around = route[max(0, route.index(peer) - 1) : route.index(peer) + 2]
        tables = (self._visits, self._forward, self._backward, self._waiting)
        links = [self._links.get(frozenset((peer, other))) for other in (self._own, *around)]
        for known in [table.get(peer) for table in tables] + links:
            if known is not None:
                known.samples = min(known.samples, 1)

    def waiting_s(self) -> Mapping[PeerId, float]:
        """Returns the mean time in each peer's queue before a pass, in seconds."""
        return self._waiting.means()

    def wait_s(self, peer: PeerId) -> float:
        """Returns the mean time in a peer's queue before a pass, in seconds; 0 if unknown."""
        known = self._waiting.get(peer)
        return 0.0 if known is None else known.mean

    @property
    def backward_factor(self) -> float:
        """Median ratio of backward to forward time, over the peers whose times of both passes were measured."""
        out, back = self._forward.means(), self._backward.means()
        both = [back[peer] / seconds for peer, seconds in out.items() if peer in back and seconds > 0]
        return median(both) if both else ASSUMED_BACKWARD_FACTOR

    def sending_s(self, peers: Iterable[PeerId]) -> dict[PeerId, float]:
        """Returns the expected seconds to send a tensor to each peer; an unmeasured link counts as a median one."""
        links = {peer: self._links.get(frozenset((self._own, peer))) for peer in peers}
        usual = median(self._links.means().values()) if self._links and None in links.values() else 0.0
        return {peer: usual if known is None else known.mean for peer, known in links.items()}

    def costs(self, replicas: Sequence[Announcement]) -> Costs:
        """Returns the costs of live replicas: own measurements, or announcements where these are missing."""
        factor, own = self.backward_factor, self._forward.get(self._own)
        forward_s = {a.peer: self._forward_s(a, factor) for a in replicas}
        forward_s[self._own] = 0.0 if own is None else own.mean
        slots = {a.peer: max(1, a.slots) for a in replicas} | {self._own: 1}
        return Costs(forward_s, self._message_s(tuple(forward_s)), slots, factor)

    def _forward_s(self, announced: Announcement, factor: float) -> float:
        out, back = self._forward.get(announced.peer), self._backward.get(announced.peer)
        if out is not None and back is not None:
            return (out.mean + back.mean) / (1 + factor)
        if out is not None:
            return out.mean
        return self._announced_s(announced.tokens_per_second) / (1 + factor)

    def _announced_s(self, announced: float) -> float:
        """Returns the seconds that a peer needs for both passes of a usual microbatch, by its announced speed."""
        return self.sizes.cost / (announced if announced > 0 else UNKNOWN_TOKENS_PER_S)

    def _message_s(self, peers: Sequence[PeerId]) -> Mapping[PeerId, Mapping[PeerId, float]]:
        share = self._link_share.mean if self._link_share.samples else LEAST_LINK_SHARE
        from_here = self.sending_s(peers)
        return {peer: _MessageSeconds(self._links, peer, peers, from_here, share) for peer in peers}


@dataclass(frozen=True, slots=True, eq=False)
class _MessageSeconds(Mapping[PeerId, float]):
    """Sending times from one peer to others. An unmeasured link counts as the slower of our links to both peers."""

    links: _Averages[frozenset[PeerId]]
    here: PeerId
    peers: Sequence[PeerId]
    from_us: Mapping[PeerId, float]
    share: float

    def __getitem__(self, there: PeerId) -> float:
        if there == self.here:
            return 0.0
        known = self.links.get(frozenset((self.here, there)))
        sent_s = max(self.from_us[self.here], self.from_us[there]) if known is None else known.mean
        return self.share * sent_s

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self.peers)

    def __len__(self) -> int:
        return len(self.peers)
