"""How long to leave a peer alone after dialling it failed, or when links to it do not last."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from protocol.seams import Clock
from swarm.vocabulary import PeerId

MAX_REMEMBERED_PEERS: Final = 1024
MOST_REPLACED: Final = 3
REPLACED_WITHIN_S: Final = 10.0


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


class Turnover:
    """Counts how often a link to a peer has been replaced by another of late. Honest peers do that when they start again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._replaced: OrderedDict[PeerId, deque[float]] = OrderedDict()

    def replaced(self, peer: PeerId) -> None:
        """A link was."""
        self._replaced.setdefault(peer, deque(maxlen=MOST_REPLACED)).append(self._clock.monotonic())
        self._replaced.move_to_end(peer)
        if len(self._replaced) > MAX_REMEMBERED_PEERS:
            self._replaced.popitem(last=False)

    def is_high(self, peer: PeerId) -> bool:
        """Whether the peer's links were replaced MOST_REPLACED times within REPLACED_WITHIN_S."""
        times = self._replaced.get(peer)
        return (
            times is not None and len(times) == MOST_REPLACED and self._clock.monotonic() - times[0] < REPLACED_WITHIN_S
        )
