"""Links that lose, delay, reorder and repeat small messages, and that can be cut. Everything follows from a seed."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from swarm.simulation.virtual_network import Thunk, VirtualTime
from swarm.vocabulary.types import PeerId


class VirtualLinks:
    """Between all pairs of peers.

    Args:
        loss: share of the messages that vanish without a trace. Tensors do not: their links are reliable until they are
            cut.
    """

    def __init__(self, time: VirtualTime, random: Random, loss: float, repeats: float, slowest_s: float) -> None:
        self._time = time
        self._random = random
        self.loss = loss
        self.repeats = repeats
        self._slowest_s = slowest_s
        self._cut: set[frozenset[PeerId]] = set()
        self._group: dict[PeerId, int] = {}
        self.sent = 0

    def up(self, one: PeerId, other: PeerId) -> bool:
        same = self._group.get(one, 0) == self._group.get(other, 0)
        return same and frozenset((one, other)) not in self._cut

    def message(self, sender: PeerId, to: PeerId, deliver: Thunk) -> bool:
        """False when the sender learns that there is no link."""
        self.sent += 1
        if not self.up(sender, to):
            return False
        copies = 2 if self._random.random() < self.repeats else 1
        for _ in range(copies):
            if self._random.random() >= self.loss:
                self._carry(sender, to, self._random.uniform(0.001, self._slowest_s), deliver)
        return True

    def tensor(self, sender: PeerId, to: PeerId, seconds: float, deliver: Thunk) -> None:
        self._carry(sender, to, seconds + self._random.uniform(0.001, 0.01), deliver)

    def _carry(self, sender: PeerId, to: PeerId, seconds: float, deliver: Thunk) -> None:
        self._time.after(seconds, lambda: deliver() if self.up(sender, to) else None)

    # ---- faults -------------------------------------------------------------------------------------------------

    def cut(self, one: PeerId, other: PeerId) -> None:
        self._cut.add(frozenset((one, other)))

    def partition(self, *groups: Iterable[PeerId]) -> None:
        self._group = {peer: number for number, group in enumerate(groups) for peer in group}

    def heal(self) -> None:
        self._cut.clear()
        self._group.clear()
