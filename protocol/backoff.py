"""How long to leave a peer alone after dialling it failed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from protocol.seams import Clock
from swarm.vocabulary import PeerId

MAX_REMEMBERED_PEERS: Final = 1024


class Backoff:
    """Doubles the wait with every failure up to a limit, and takes a random part off so that peers do not dial in step
    ("full jitter" halved: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/)."""

    def __init__(self, clock: Clock, first_s: float, longest_s: float, jitter: Callable[[], float]) -> None:
        self._clock = clock
        self._first_s = first_s
        self._longest_s = longest_s
        self._jitter = jitter
        self._failures: OrderedDict[PeerId, tuple[int, float]] = OrderedDict()

    def wait_s(self, peer: PeerId) -> float:
        """Seconds until the peer may be dialled; 0 for one that has not failed."""
        _, next_at = self._failures.get(peer, (0, 0.0))
        return max(0.0, next_at - self._clock.monotonic()) if next_at else 0.0

    def failed(self, peer: PeerId) -> None:
        count = self._failures.pop(peer, (0, 0.0))[0]
        wait_s = min(self._longest_s, self._first_s * 2 ** min(count, 30)) * (1 - self._jitter() / 2)
        self._failures[peer] = (count + 1, self._clock.monotonic() + wait_s)
        if len(self._failures) > MAX_REMEMBERED_PEERS:
            self._failures.popitem(last=False)

    def succeeded(self, peer: PeerId) -> None:
        self._failures.pop(peer, None)
