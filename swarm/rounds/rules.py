"""The arithmetic of rounds: who convenes, when a round is due, which number it gets, and which version the module stands on."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Mapping

from swarm.round_messages import MAX_ROUND
from swarm.rounds.words import RoundRules
from swarm.vocabulary import AnchorVersion, ModuleId, PeerId, Reasoned

INFORMED = 3
"""So many in the order of conveners learn how far a replica is."""
PLAUSIBLE_LEAD = 2**20
"""A round so far beyond ours is no honest claim. Without this one lie could use up the numbers."""
STEPS_TIMES_ALONE = 2
"""A replica that has so many times `inner_steps` behind it opens a round whatever it knows of the others."""
WORK_AT_MOST = 2
"""Times the average share: more of one fellow's steps are not counted, so that one claim alone makes no round due."""


def precedence(module: ModuleId, number: int, peer: PeerId) -> bytes:
    """Of all who could convene this round, the one with the smallest value does.

    Rendezvous hashing (Thaler and Ravishankar 1998): everybody computes the same order, each round has another one, and a peer
    that comes or goes changes nobody else's place.
    """
    header = struct.pack("<IIQ", module.stage, module.expert, number)
    return hashlib.sha256(b"skipstone-convener:1\0" + header + peer.encode()).digest()


def convener_order(module: ModuleId, number: int, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Who convenes, and who steps in when those before are silent."""
    return tuple(sorted(set(peers), key=lambda peer: precedence(module, number, peer)))


def fragments_of(rules: RoundRules) -> int:
    """There are no more fragments than chunks."""
    return max(1, min(rules.fragments, rules.chunks))


def fragment_chunks(rules: RoundRules, fragment: int) -> tuple[int, int]:
    """First and end chunk of a fragment; the same borders as the module's layout has."""
    count = fragments_of(rules)
    return round(fragment * rules.chunks / count), round((fragment + 1) * rules.chunks / count)


def steps_between_rounds(rules: RoundRules) -> int:
    """Inner steps of the average replica from one round to the next: each fragment has its turn once in `inner_steps`."""
    return -(-rules.inner_steps // fragments_of(rules))


def due(
    rules: RoundRules, own_steps: int, others: Iterable[int], replicas: int, since_commit_s: float
) -> Reasoned[bool]:
    """Whether a round is due.

    Args:
        others: steps since this anchor that the other replicas on it have reported; who reported nothing may be absent.
        replicas: how many stand on this anchor, we included.
    """
    share = steps_between_rounds(rules)
    done = own_steps + sum(min(steps, WORK_AT_MOST * share) for steps in others)
    if done >= share * replicas:
        return Reasoned(True, f"{done} inner steps are done by {replicas} replicas")
    if own_steps >= STEPS_TIMES_ALONE * rules.inner_steps:
        return Reasoned(True, f"{own_steps} inner steps are done here alone")
    if done > 0 and since_commit_s >= rules.longest_s:
        return Reasoned(True, f"the last round was {since_commit_s:.0f} s ago")
    return Reasoned(False, f"{done} of {share * replicas} inner steps are done")


def plausible_round(own: AnchorVersion, number: int) -> bool:
    """Whether a version or round with this number can be. Who stands at round 0 knows nothing yet and believes any."""
    return 0 <= number <= MAX_ROUND and (own.round == 0 or number <= own.round + PLAUSIBLE_LEAD)


def next_number(own: AnchorVersion, seen: Iterable[AnchorVersion]) -> int:
    """One more than any live replica has, so that whoever takes over the result moves forward."""
    return 1 + max([own.round, *(version.round for version in seen if version.round <= own.round + PLAUSIBLE_LEAD)])


def standing(own: AnchorVersion, others: Mapping[PeerId, AnchorVersion]) -> Reasoned[AnchorVersion]:
    """The version that the module stands on, as we see it: that of most live replicas; of equally many, the greater by
    (tokens, round, digest).

    Round 0 is what everybody starts from, and nothing agreed is lost by leaving it: it never wins against a later one.

    Args:
        others: what the other serving replicas stand on.
    """
    if all(version == own for version in others.values()):
        return Reasoned(own, f"all {len(others) + 1} replicas stand on our anchor")
    counts = Counter(version for version in others.values() if plausible_round(own, version.round))
    counts[own] += 1
    later = {version: count for version, count in counts.items() if version.round > 0} or dict(counts)
    best = max(later, key=lambda version: (later[version], version.tokens, version.round, version.digest))
    if best == own:
        return Reasoned(own, f"{counts[own]} of {len(others) + 1} replicas stand on our anchor")
    why = "more" if later[best] > counts[own] or own.round == 0 else "as many, and it is greater"
    return Reasoned(best, f"{counts[best]} replicas stand on round {best.round}, {counts[own]} on ours ({why})")
