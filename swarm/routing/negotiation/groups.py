"""Large swarms: data nodes talk in groups, and every group has its own share of the peers. By convention, without a
word.

Without groups everyone would have to hear of everyone's lanes. Members and peers are dealt out in even blocks in the
order of their names, which are hashes of keys: who belongs where does not depend on what anybody measures, and a death
moves only those at the ends of the blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.routing.cost_model import Costs
from swarm.routing.negotiation.negotiation_events import Member
from swarm.vocabulary.routing_messages import EPOCH_BYTES
from swarm.vocabulary.types import PeerId

GROUP = 32
"""Data nodes that talk with each other at most."""


@dataclass(frozen=True, slots=True)
class Group:
    """Some of the live data nodes.

    Args:
        first: rank of its first member among all live data nodes.
        total: how many those are.
        number: which of the `groups` it is.
    """

    members: tuple[Member, ...]
    first: int
    total: int
    number: int
    groups: int

    @property
    def epoch(self) -> bytes:
        """A name for these data nodes at this place among so many."""
        text = [f"{self.first} {self.total}", *(f"{member.peer} {member.incarnation}" for member in self.members)]
        return hashlib.blake2b("\n".join(text).encode(), digest_size=EPOCH_BYTES).digest()

    def rank(self, peer: PeerId) -> int:
        """A member's place in the group."""
        return next(place for place, member in enumerate(self.members) if member.peer == peer)


def group_of(own: PeerId, members: frozenset[Member]) -> Group:
    """The group of one of the members."""
    ranked = sorted(members, key=lambda member: member.peer)
    rank = next(place for place, member in enumerate(ranked) if member.peer == own)
    groups = -(-len(ranked) // GROUP)
    number = rank * groups // len(ranked)
    block = [member for place, member in enumerate(ranked) if place * groups // len(ranked) == number]
    return Group(tuple(block), ranked.index(block[0]), len(ranked), number, groups)


def share_of(costs: Costs, group: Group) -> tuple[Costs, bool]:
    """The group's part of the swarm, and whether no other group uses it. A stage with fewer peers than there are groups
    belongs to all."""
    if group.groups == 1:
        return costs, True
    members = {member.peer for member in group.members}
    stages = [tuple(peer for peer in costs.data_nodes if peer in members)]
    stages += [_block(peers, group) for peers in costs.stages[1:]]
    return replace(costs, stages=tuple(stages)), all(len(peers) >= group.groups for peers in costs.stages[1:])


def _block(peers: Sequence[PeerId], group: Group) -> tuple[PeerId, ...]:
    ranked = sorted(peers)
    if len(ranked) < group.groups:
        return tuple(ranked)
    return tuple(ranked[len(ranked) * group.number // group.groups : len(ranked) * (group.number + 1) // group.groups])
