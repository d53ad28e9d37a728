"""Which state a newcomer takes: it has none of its own to compare, only what the module's replicas say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from swarm.vocabulary import AnchorVersion, PeerId, Reasoned


def choose_version(announced: Mapping[PeerId, AnchorVersion]) -> Reasoned[AnchorVersion | None]:
    """The version on which most replicas stand, if at least half of those that say so stand on it.

    One vote a peer, so one that lies never prevails against two that agree. Of two halves (a partition that has just healed) the
    one with more tokens behind it wins, then the higher round, then the higher digest: as the replicas themselves decide.
    Whether a lone replica tells the truth cannot be known.

    Args:
        announced: what each live replica with a state announces.
    """
    if not announced:
        return Reasoned(None, "no replica of this module has announced a state")
    votes = Counter(announced.values())
    best = max(votes, key=lambda v: (votes[v], v.tokens, v.round, v.digest, v.steps, v.fragment))
    count, total = votes[best], len(announced)
    if 2 * count < total:
        return Reasoned(None, f"{total} replicas stand on {len(votes)} states, and no half of them on the same")
    return Reasoned(best, f"{count} of {total} replicas stand on round {best.round}")
