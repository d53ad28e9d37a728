"""How many small messages wait to be taken in by each peer.

A link makes whoever tells it something wait while its peer does not read. A peer that asks and never reads would so
collect waiting messages, and memory with them, for as long as it asks.
"""

from __future__ import annotations

from collections import Counter

from swarm.vocabulary.types import PeerId


class PendingMessages:
    """Messages on the way, by peer.

    Args:
        most: to one peer. More than an honest one ever leaves unread.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._under_way: Counter[PeerId] = Counter()

    def begin(self, peer: PeerId) -> bool:
        """Whether one more may be on the way to the peer; if so it is, until `end`."""
        if self._under_way[peer] >= self._most:
            return False
        self._under_way[peer] += 1
        return True

    def end(self, peer: PeerId) -> None:
        """One has arrived, or will not."""
        self._under_way[peer] -= 1
        if not self._under_way[peer]:
            del self._under_way[peer]
