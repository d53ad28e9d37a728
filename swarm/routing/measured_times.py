"""The book of a data node's measured times, from which planner and lanes read: visits to peers, their parts, and the
ways between peers. What was not measured here is as the peer announces it.

A visit is the time that a microbatch spent at the peer, out and back, sending it on included, on this machine's own
clock; it is divided by the queue of ours that it found there, so that it estimates the service time alone
(`Planner` asks for it). Its parts rest on what the peer says too (`costs`, for lanes);
`swarm.routing.latency_attribution` makes the samples of both. All are smoothed; what has not been measured for longest
is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Final, Generic, TypeVar

from swarm.routing.cost_model import Costs
from swarm.vocabulary.announcement import Announcement, Speed
from swarm.vocabulary.pipeline_messages import Direction
from swarm.vocabulary.statistics import Ewma
from swarm.vocabulary.types import PeerId, Reasoned
from swarm.workload.microbatch_sizes import MicrobatchSizes

MAX_PEERS: Final = 20_000
MAX_LINKS: Final = 200_000
UNKNOWN_TOKENS_PER_S: Final = 1000.0
"""Assumed of a peer that has neither been measured nor announced a speed; only its order among equals matters."""
ASSUMED_BACKWARD_FACTOR: Final = 2.0
LEAST_LINK_SHARE: Final = 0.5
"""Sending takes the way there and that of the answer: at least half of it is the way there."""

K = TypeVar("K")


class _Averages(Generic[K]):
    """By key, the longest unmeasured first, which are also forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[K, Ewma] = OrderedDict()

    def add(self, key: K, sample: float) -> None:
        self._known.setdefault(key, Ewma()).add(sample)
        self._known.move_to_end(key)
        while len(self._known) > self._limit:
            self._known.popitem(last=False)

    def get(self, key: K) -> Ewma | None:
        return self._known.get(key)

    def keys(self) -> Iterator[K]:
        return iter(self._known)

    def means(self) -> dict[K, float]:
        return {key: average.mean for key, average in self._known.items()}


class MeasuredTimes:
    """Of one data node.

    Args:
        own: the data node.
        tokens: of one microbatch, at most.
    """

    def __init__(self, own: PeerId, tokens: int) -> None:
        self._own = own
        self.sizes = MicrobatchSizes(tokens)
        """Of those that have set out: what is announced counts for usual ones."""
        self._visits: _Averages[PeerId] = _Averages(MAX_PEERS)
        self._brought_back: _Averages[PeerId] = _Averages(MAX_PEERS)
        """The visits without those that were lost."""
        self._forward: _Averages[PeerId] = _Averages(MAX_PEERS)
        self._backward: _Averages[PeerId] = _Averages(MAX_PEERS)
        self._links: _Averages[frozenset[PeerId]] = _Averages(MAX_LINKS)
        self._link_share = Ewma()
        self._waiting: _Averages[PeerId] = _Averages(MAX_PEERS)

    # ---- samples ---------------------------------------------------------------------------------------------------

    def visited(self, peer: PeerId, seconds: float, queue: int = 0) -> None:
        """A microbatch spent so long at the peer, out and back, which had `queue` others of ours before it."""
        service_s = max(0.0, seconds) / (1 + max(0, queue))
        self._visits.add(peer, service_s)
        self._brought_back.add(peer, service_s)

    def lost(self, peer: PeerId, seconds: float) -> None:
        """A microbatch whose path went through the peer has not come back; it counts as a visit of so long."""
        self._visits.add(peer, seconds)

    def computed(self, peer: PeerId, direction: Direction, seconds: float) -> None:
        (self._forward if direction is Direction.FORWARD else self._backward).add(peer, seconds)

    def waited(self, peer: PeerId, seconds: float) -> None:
        """Each way counts by itself."""
        self._waiting.add(peer, seconds)

    def sent(self, here: PeerId, there: PeerId, seconds: float) -> None:
        """A microbatch's tensor, until the answer that it is there. Both ways are taken for equal."""
        self._links.add(frozenset((here, there)), seconds)

    def came_home(self, moving_s: float, sent_s: float) -> None:
        """How long a microbatch was really on its way between peers, and how long they said that they were sending."""
        if sent_s > 0:
            self._link_share.add(min(1.0, max(LEAST_LINK_SHARE, moving_s / sent_s)))

    # ---- looking ---------------------------------------------------------------------------------------------------

    def visit(self, peer: PeerId) -> Ewma | None:
        """Seconds of a visit with an empty queue, as measured; None when it never was."""
        return self._visits.get(peer)

    def visit_s(self, peer: PeerId, announced: Speed) -> Reasoned[float]:
        """Expected seconds of a usual microbatch's visit with an empty queue."""
        known = self._visits.get(peer)
        if known is not None:
            return Reasoned(known.mean, f"measured {known.samples} times")
        source = "announced" if announced.tokens_per_s > 0 else "unknown"
        return Reasoned(self._announced_s(announced), source)

    def has_brought_back(self, peer: PeerId) -> bool:
        """Whether a microbatch of ours has ever come back from the peer."""
        return self._brought_back.get(peer) is not None

    def usual_s(self, peer: PeerId, announced: Speed) -> float:
        """Seconds of a visit that comes back, with an empty queue: what to wait for before it is taken for lost.

        What was lost says nothing of it, else whoever keeps what it gets would be waited for longer each time. A peer
        that has brought nothing back is taken to be as slow as the slowest that has, whatever it announces.
        """
        known = self._brought_back.get(peer)
        if known is not None:
            return known.mean
        others = self._brought_back.means().values()
        return max(others) if others else self._announced_s(announced)

    def longest_unmeasured(self, peers: Sequence[PeerId]) -> PeerId:
        """Of these, one that was never visited, else the one whose last visit is the oldest.

        Raises:
            ValueError: there are none.
        """
        unmeasured = next((peer for peer in peers if self._visits.get(peer) is None), None)
        return unmeasured or min(peers, key=list(self._visits.keys()).index)

    def waiting_s(self) -> Mapping[PeerId, float]:
        """How long a microbatch waits at each peer before it is computed, on average, one way."""
        return self._waiting.means()

    def wait_s(self, peer: PeerId) -> float:
        """Likewise at one peer; 0 where none was measured."""
        known = self._waiting.get(peer)
        return 0.0 if known is None else known.mean

    @property
    def backward_factor(self) -> float:
        """Of the peers that were measured both ways, by the median."""
        out, back = self._forward.means(), self._backward.means()
        both = [back[peer] / seconds for peer, seconds in out.items() if peer in back and seconds > 0]
        return median(both) if both else ASSUMED_BACKWARD_FACTOR

    def costs(self, stages: Sequence[Sequence[Announcement]]) -> Costs:
        """The swarm as this data node takes it to be: own measurements where there are some, announcements elsewhere.

        Args:
            stages: the live replicas of each stage after stage 0.
        """
        factor, own = self.backward_factor, self._forward.get(self._own)
        forward_s = {a.peer: self._forward_s(a, factor) for announced in stages for a in announced}
        forward_s[self._own] = 0.0 if own is None else own.mean
        slots = {a.peer: max(1, a.slots) for announced in stages for a in announced} | {self._own: 1}
        peers = ((self._own,), *(tuple(a.peer for a in announced) for announced in stages))
        return Costs(peers, forward_s, self._ways(tuple(forward_s)), slots, factor)

    def _forward_s(self, announced: Announcement, factor: float) -> float:
        out, back = self._forward.get(announced.peer), self._backward.get(announced.peer)
        if out is not None and back is not None:
            return (out.mean + back.mean) / (1 + factor)
        if out is not None:
            return out.mean
        return self._announced_s(announced.speed) / (1 + factor)

    def _announced_s(self, announced: Speed) -> float:
        """Of computing a usual microbatch out and back."""
        known = announced if announced.tokens_per_s > 0 else replace(announced, tokens_per_s=UNKNOWN_TOKENS_PER_S)
        return known.seconds(self.sizes.tokens, self.sizes.squares)

    def _ways(self, peers: Sequence[PeerId]) -> Mapping[PeerId, Mapping[PeerId, float]]:
        share = self._link_share.mean if self._link_share.samples else LEAST_LINK_SHARE
        means = self._links.means()
        usual = median(means.values()) if means else 0.0
        from_here = {}
        for peer in peers:
            known = self._links.get(frozenset((self._own, peer)))
            from_here[peer] = usual if known is None else known.mean
        return {peer: _Ways(self._links, peer, peers, from_here, share) for peer in peers}


class _Ways(Mapping[PeerId, float]):
    """Seconds from one peer to each other one. Where nothing was measured: the longer one of the two ways from us."""

    def __init__(
        self,
        links: _Averages[frozenset[PeerId]],
        here: PeerId,
        peers: Sequence[PeerId],
        from_us: Mapping[PeerId, float],
        share: float,
    ) -> None:
        self._here, self._peers, self._share = here, peers, share
        self._links, self._from_us = links, from_us

    def __getitem__(self, there: PeerId) -> float:
        if there == self._here:
            return 0.0
        known = self._links.get(frozenset((self._here, there)))
        sent_s = max(self._from_us[self._here], self._from_us[there]) if known is None else known.mean
        return self._share * sent_s

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._peers)

    def __len__(self) -> int:
        return len(self._peers)
