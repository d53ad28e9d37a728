"""Input of the route search: times of peers and links, and slots of peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.vocabulary.types import PeerId

PeerRoute = tuple[PeerId, ...]
"""The peers of a path in the order of their visits, without the data node at both ends."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Expected times of one microbatch at peers and on links, in seconds, and slots of peers.

    Args:
        forward_s: forward time of each peer.
        message_s: time of a microbatch's tensor from one peer to another.
        slots: microbatches that a peer can hold, from the forward to the end of the backward pass.
        backward_factor: backward time in forward times.
        task_overhead_s: time that a peer is blocked after each task.
    """

    forward_s: Mapping[PeerId, float]
    message_s: Mapping[PeerId, Mapping[PeerId, float]]
    slots: Mapping[PeerId, int]
    backward_factor: float = 1.5
    task_overhead_s: float = 0.0

    def service_s(self, peer: PeerId) -> float:
        """Returns how long the forward and backward pass of a microbatch keep the peer busy."""
        return (1 + self.backward_factor) * self.forward_s[peer] + 2 * self.task_overhead_s
