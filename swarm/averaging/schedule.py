"""The arithmetic of rounds: convener order, due rounds, round numbers, and the version the module stands on.

Which state a newcomer takes: it has none of its own to compare, only what the module's replicas say.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from swarm.averaging.round_events import RoundRules
from swarm.vocabulary.averaging_messages import MAX_MEMBERS
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId, Reasoned

Number = TypeVar("Number", int, float)

INFORMED = 3
"""So many in the order of conveners learn how far a replica is."""
LARGEST_LEAD = 2**20
FIRST_LEAD = 1024
LEAD_TIMES = 4
"""A single replica's word is taken for a round so many times ours, or so much beyond a small one: one that was cut off
has gone on by itself, hardly several times as fast. Without a limit one lie could use up the numbers."""
MOST_ROUNDS = 2**36
"""A hundred a second for twenty years: no run is further, whoever says so, and numbers are left."""
SLACK_ROUNDS = 1024
SLACK_WORK = 1024
"""A version has at most so many times the steps and tokens that its rounds, and SLACK_ROUNDS more, are there for:
rounds that fail for hours add to the next one."""
STEPS_TIMES_ALONE = 2
"""A replica that has so many times `inner_steps` behind it opens a round whatever it knows of the others."""
WORK_AT_MOST = 2
"""Times the average share: more of one replica's steps are not counted, so that one claim alone makes no round due."""


def precedence(module: ModuleId, base: AnchorVersion, number: int, peer: PeerId) -> bytes:
    """A replica's precedence as convener of this round from this anchor: the smallest value convenes.

    Rendezvous hashing (Thaler and Ravishankar 1998): everybody computes the same order, each round has another one, and
    a peer that comes or goes changes nobody else's place. The anchor's digest is in it, so that nobody knows the order
    before the round before has been committed: a key that convenes a given round cannot be made in advance.
    """
    header = struct.pack("<IIQ", module.stage, module.expert, number) + base.digest
    return hashlib.sha256(b"skipstone-convener:2\0" + header + peer.encode()).digest()


def convener_order(module: ModuleId, base: AnchorVersion, number: int, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """The order of conveners: the first convenes, the next steps in when those before are silent."""
    return tuple(sorted(set(peers), key=lambda peer: precedence(module, base, number, peer)))


def lower_median(values: Sequence[Number]) -> Number:
    """The lower median: of two values, the smaller, so that one cannot lift the other's limit.

    Raises:
        IndexError: there is no value.
    """
    return sorted(values)[(len(values) - 1) // 2]


def fragments_of(rules: RoundRules) -> int:
    """The number of fragments of a module, at most that of its chunks."""
    return max(1, min(rules.fragments, rules.chunks))


def fragment_chunks(rules: RoundRules, fragment: int) -> tuple[int, int]:
    """The first and end chunk of a fragment; the same borders as the module's layout has."""
    count = fragments_of(rules)
    return round(fragment * rules.chunks / count), round((fragment + 1) * rules.chunks / count)


def steps_between_rounds(rules: RoundRules) -> int:
    """The inner steps of the average replica from one round to the next: each fragment has its turn once in
    `inner_steps`.
    """
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
    """Whether a round with this number can be the next one for us."""
    return 0 <= number <= min(own.round + LARGEST_LEAD, MOST_ROUNDS)


def possible(rules: RoundRules, version: AnchorVersion) -> bool:
    """Whether a version's figures can be true, and fit each other, in this run at all."""
    steps = SLACK_WORK * rules.inner_steps * (version.round + SLACK_ROUNDS)
    tokens = steps * rules.step_tokens * MAX_MEMBERS
    return 0 <= version.round <= MOST_ROUNDS and 0 <= version.steps <= steps and 0 <= version.tokens <= tokens


def near(own: AnchorVersion, number: int) -> bool:
    """Whether a round's number is so close to ours that one replica alone is believed to have come so far."""
    return number <= own.round + min(LARGEST_LEAD, max(FIRST_LEAD, LEAD_TIMES * own.round))


def next_number(own: AnchorVersion, seen: Iterable[AnchorVersion]) -> int:
    """The number of the next round: one more than any live replica has, so that whoever takes over the result moves
    forward.
    """
    return 1 + max([own.round, *(version.round for version in seen if near(own, version.round))])


def standing(rules: RoundRules, own: AnchorVersion, others: Mapping[PeerId, AnchorVersion]) -> Reasoned[AnchorVersion]:
    """The version that the module stands on, as we see it: that of most live replicas; of equally many, the greater by
    (tokens, round, digest).

    Round 0 is what everybody starts from, and nothing agreed is lost by leaving it: it never wins against a later one.
    But a version that is far beyond ours, and beyond round 0 any while not most replicas have left it, is one that
    somebody may have made up: it counts when at least two replicas, and half of those we see, stand there, or when
    there is no other replica than the one that says so.

    Args:
        others: what the other serving replicas stand on.
    """
    if all(version == own for version in others.values()):
        return Reasoned(own, f"all {len(others) + 1} replicas stand on our anchor")
    counts = Counter(version for version in others.values() if possible(rules, version))
    begun = 2 * sum(version.round > 0 for version in others.values()) > len(others) + 1
    credible = {
        version: count
        for version, count in counts.items()
        if ((own.round > 0 or begun) and near(own, version.round))
        or version.round == 0
        or len(others) == 1
        or (count > 1 and 2 * count >= len(others))
    }
    credible[own] = counts[own] + 1
    later = {version: count for version, count in credible.items() if version.round > 0} or credible
    best = max(later, key=lambda version: (later[version], version.tokens, version.round, version.digest))
    if best == own:
        return Reasoned(own, f"{credible[own]} of {len(others) + 1} replicas stand on our anchor")
    why = "more" if later[best] > credible[own] or own.round == 0 else "as many, and it is greater"
    return Reasoned(best, f"{credible[best]} replicas stand on round {best.round}, {credible[own]} on ours ({why})")


def choose_version(announced: Mapping[PeerId, AnchorVersion]) -> Reasoned[AnchorVersion | None]:
    """The version on which most replicas stand, if at least half of those that say so stand on it.

    One vote a peer, so one that lies never prevails against two that agree. Of two halves (a partition that has just
    healed) the one with more tokens behind it wins, then the higher round, then the higher digest: as the replicas
    themselves decide. Whether a lone replica tells the truth cannot be known.

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
