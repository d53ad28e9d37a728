"""What a data node believes about the swarm when it plans: who serves which stage, how fast, and how far apart they
are.

Figures are its own measurements where it has some and announcements elsewhere; whoever builds a `Costs` decides that.
Everything that plans reads only this.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.vocabulary.types import PeerId

PeerRoute = tuple[PeerId, ...]
"""The peers of a path in the order of their visits, without the data node at both ends."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and slots of one microbatch.

    Args:
        stages: peers of each stage, stage 0 (the data nodes) first.
        forward_s: forward time on each peer.
        message_s: time a microbatch's tensor takes from one peer to another, both ways given.
        slots: microbatches a peer can hold, from a forward to the end of its backward.
        backward_factor: backward time in forward times.
        head_factor: head and loss on the data node, in its forward times.
        task_overhead_s: time a peer is blocked after each task.
    """

    stages: tuple[tuple[PeerId, ...], ...]
    forward_s: Mapping[PeerId, float]
    message_s: Mapping[PeerId, Mapping[PeerId, float]]
    slots: Mapping[PeerId, int]
    backward_factor: float = 1.5
    head_factor: float = 0.25
    task_overhead_s: float = 0.0

    @property
    def data_nodes(self) -> tuple[PeerId, ...]:
        return self.stages[0]

    def stage_of(self) -> dict[PeerId, int]:
        """The stage of every peer."""
        return {peer: stage for stage, peers in enumerate(self.stages) for peer in peers}

    def service_s(self, peer: PeerId) -> float:
        """How long a visit, out and back, keeps the peer busy."""
        return (1 + self.backward_factor) * self.forward_s[peer] + 2 * self.task_overhead_s

    def own_work_s(self, data_node: PeerId) -> float:
        """How long a microbatch computes on its data node: embedding, head, and the way back."""
        return (1 + self.backward_factor + self.head_factor) * self.forward_s[data_node]

    def round_trip_s(self, data_node: PeerId, route: Sequence[PeerId]) -> float:
        """From the start of the first forward to the end of the last backward when nobody waits."""
        stops = (data_node, *route, data_node)
        ways = sum(self.message_s[here][there] for here, there in itertools.pairwise(stops))
        compute = sum(self.forward_s[peer] for peer in route) * (1 + self.backward_factor)
        return 2 * ways + compute + self.own_work_s(data_node)

    def without(self, gone: frozenset[PeerId]) -> Costs:
        """The same swarm without some peers."""
        stages = tuple(tuple(peer for peer in peers if peer not in gone) for peers in self.stages)
        return Costs(
            stages,
            self.forward_s,
            self.message_s,
            self.slots,
            self.backward_factor,
            self.head_factor,
            self.task_overhead_s,
        )
