"""When the tensors that are under way to a peer will be there.

A tensor's header comes first and its chunks after it, so that a peer knows of a job before it can begin, and can have
its device free by then (`swarm.pipeline.compute_queue`). What is heard of arrivals stays apart from that queue, because
it belongs to the event loop, and the queue to the thread that computes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.statistics import Ewma
from swarm.vocabulary.types import PeerId

MOST_SENDERS: Final = 256
"""Whose speed is remembered."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    sender: PeerId
    size_bytes: int
    since: float
    expected: float


class ArrivalForecast:
    """The expected times of tensors under way, by how long those before took from the same sender. Of a sender's first
    one nothing is known, and nothing is expected."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, _UnderWay] = {}
        self._seconds_per_byte: dict[PeerId, Ewma] = {}
        self._latest = -math.inf

    @property
    def expected(self) -> tuple[float, ...]:
        """The times, that of the latest to arrive included: the job that it brings is about to be queued."""
        return (*(each.expected for each in self._under_way.values()), self._latest)

    def announced(self, sender: PeerId, tensor: Hashable, size_bytes: int, now: float) -> None:
        """Takes in the header of a tensor that was admitted. Its place in memory bounds how many there are."""
        known = self._seconds_per_byte.get(sender)
        expected = -math.inf if known is None else now + known.mean * size_bytes
        self._under_way[sender, tensor] = _UnderWay(sender, size_bytes, now, expected)

    def arrived(self, sender: PeerId, tensor: Hashable, now: float) -> None:
        """Takes in that all of it is there."""
        under_way = self._under_way.pop((sender, tensor), None)
        self._latest = now
        if under_way is None or not under_way.size_bytes:
            return
        known = self._seconds_per_byte.pop(sender, None) or Ewma()
        known.add((now - under_way.since) / under_way.size_bytes)
        self._seconds_per_byte[sender] = known  # as the latest, so that the first is who was quiet for longest
        if len(self._seconds_per_byte) > MOST_SENDERS:
            del self._seconds_per_byte[next(iter(self._seconds_per_byte))]

    def broken_off(self, sender: PeerId, tensor: Hashable) -> None:
        """Takes in that the rest of it will not come."""
        self._under_way.pop((sender, tensor), None)
