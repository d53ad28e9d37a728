"""What a data node has measured on its own paths, and how it takes the swarm to be by that: computation of peers, and
the ways between them.

Exponential averages, bounded. `swarm.routing.latency_attribution` makes the samples.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Generic, TypeVar

from swarm.routing.cost_model import Costs
from swarm.routing.service_times import MAX_PEERS, NEW_SAMPLE_WEIGHT, UNKNOWN_TOKENS_PER_S
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.pipeline_messages import Direction
from swarm.vocabulary.types import PeerId

MAX_LINKS: Final = 200_000
ASSUMED_BACKWARD_FACTOR: Final = 2.0
LEAST_LINK_SHARE: Final = 0.5
"""Sending takes the way there and that of the answer: at least half of it is the way there."""

K = TypeVar("K")


@dataclass(slots=True)
class Average:
    """Exponential average of samples; the first ones count alike, so that it is soon one."""

    mean: float = 0.0
    samples: int = 0

    def add(self, sample: float) -> None:
        self.samples += 1
        self.mean += max(NEW_SAMPLE_WEIGHT, 1 / self.samples) * (sample - self.mean)


class _Averages(Generic[K]):
    """By key; those that have not been used for longest are forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[K, Average] = OrderedDict()

    def add(self, key: K, sample: float) -> None:
        self._known.setdefault(key, Average()).add(sample)
        self._known.move_to_end(key)
        while len(self._known) > self._limit:
            self._known.popitem(last=False)

    def get(self, key: K) -> Average | None:
        return self._known.get(key)

    def means(self) -> dict[K, float]:
        return {key: average.mean for key, average in self._known.items()}


class Measurements:
    """Of one data node.

    Args:
        own: the data node.
        tokens: of one microbatch.
    """

    def __init__(self, own: PeerId, tokens: int) -> None:
        self._own, self._tokens = own, tokens
        self._forward: _Averages[PeerId] = _Averages(MAX_PEERS)
        self._backward: _Averages[PeerId] = _Averages(MAX_PEERS)
        self._links: _Averages[frozenset[PeerId]] = _Averages(MAX_LINKS)
        self._link_share = Average()
        self._waiting: _Averages[PeerId] = _Averages(MAX_PEERS)

    # ---- samples ---------------------------------------------------------------------------------------------------

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

    def waiting_s(self) -> Mapping[PeerId, float]:
        """How long a microbatch waits at each peer before it is computed, on average, one way."""
        return self._waiting.means()

    @property
    def backward_factor(self) -> float:
        """Of the peers that were measured both ways, by the median."""
        out, back = self._forward.means(), self._backward.means()
        both = [back[peer] / seconds for peer, seconds in out.items() if peer in back and seconds > 0]
        return median(both) if both else ASSUMED_BACKWARD_FACTOR

    def costs(self, stages: Sequence[Sequence[Announcement]], in_flight: int) -> Costs:
        """The swarm as this data node takes it to be: own measurements where there are some, announcements elsewhere.

        Args:
            stages: the live replicas of each stage, the data nodes (ourselves included) first.
            in_flight: microbatches that a data node has under way at most.
        """
        factor = self.backward_factor
        forward_s = {a.peer: self._forward_s(a, factor) for announced in stages for a in announced}
        own_s = forward_s.get(self._own, 0.0)
        forward_s |= {announcement.peer: own_s for announcement in stages[0]}
        slots = {a.peer: max(1, a.slots) for announced in stages for a in announced}
        slots |= {announcement.peer: in_flight for announcement in stages[0]}
        peers = tuple(tuple(a.peer for a in announced) for announced in stages)
        return Costs(peers, forward_s, self._ways(tuple(forward_s)), slots, factor)

    def _forward_s(self, announced: Announcement, factor: float) -> float:
        out, back = self._forward.get(announced.peer), self._backward.get(announced.peer)
        if out is not None and back is not None:
            return (out.mean + back.mean) / (1 + factor)
        if out is not None:
            return out.mean
        return self._tokens / (announced.tokens_per_second or UNKNOWN_TOKENS_PER_S) / (1 + factor)

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
