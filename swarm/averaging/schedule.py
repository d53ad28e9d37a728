"""The arithmetic of rounds: order of leaders, due rounds, round numbers, and the version that the module holds."""

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
"""First leaders in order that learn the progress of a replica."""
LARGEST_LEAD = 2**20
FIRST_LEAD = 1024
LEAD_TIMES = 4
"""Largest round number accepted from one replica: 4x ours, or ours + 1024. A partitioned replica is hardly faster."""
MOST_ROUNDS = 2**36
"""A hundred a second for twenty years."""
SLACK_ROUNDS = 1024
SLACK_WORK = 1024
"""Largest ratio of steps and tokens of a version to its rounds + SLACK_ROUNDS."""
STEPS_TIMES_ALONE = 2
"""After this many times `inner_steps` a replica opens a round, whatever the others did."""
WORK_AT_MOST = 2
"""Counted steps of one replica, in average shares: one claim makes no round due."""


def precedence(module: ModuleId, base: AnchorVersion, number: int, peer: PeerId) -> bytes:
    """A replica's precedence as leader, smallest first: rendezvous hashing (Thaler and Ravishankar 1998)."""
    # The digest prevents keys made to lead a given round.
    header = struct.pack("<IIQ", module.stage, module.expert, number) + base.digest
    return hashlib.sha256(b"skipstone-convener:2\0" + header + peer.encode()).digest()


def leader_order(module: ModuleId, base: AnchorVersion, number: int, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """The order of leaders: each replaces those before it that are silent."""
    return tuple(sorted(set(peers), key=lambda peer: precedence(module, base, number, peer)))


def lower_median(values: Sequence[Number]) -> Number:
    """The lower median: one of two values cannot raise the limit. Raises IndexError if there is none."""
    return sorted(values)[(len(values) - 1) // 2]


def fragments_of(rules: RoundRules) -> int:
    return max(1, min(rules.fragments, rules.chunks))


def fragment_chunks(rules: RoundRules, fragment: int) -> tuple[int, int]:
    """First and end chunk of a fragment, as in the layout."""
    count = fragments_of(rules)
    return round(fragment * rules.chunks / count), round((fragment + 1) * rules.chunks / count)


def steps_between_rounds(rules: RoundRules) -> int:
    return -(-rules.inner_steps // fragments_of(rules))


def due(
    rules: RoundRules, own_steps: int, others: Iterable[int], replicas: int, since_commit_s: float
) -> Reasoned[bool]:
    """Whether a round is due. `others`: reported steps of other replicas; `replicas`: replicas on our anchor."""
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
    return 0 <= number <= min(own.round + LARGEST_LEAD, MOST_ROUNDS)


def possible(rules: RoundRules, version: AnchorVersion) -> bool:
    steps = SLACK_WORK * rules.inner_steps * (version.round + SLACK_ROUNDS)
    tokens = steps * rules.step_tokens * MAX_MEMBERS
    return 0 <= version.round <= MOST_ROUNDS and 0 <= version.steps <= steps and 0 <= version.tokens <= tokens


def near(own: AnchorVersion, number: int) -> bool:
    """Whether one replica alone is believed to have come this far."""
    return number <= own.round + min(LARGEST_LEAD, max(FIRST_LEAD, LEAD_TIMES * own.round))


def next_number(own: AnchorVersion, seen: Iterable[AnchorVersion]) -> int:
    """The number of the next round: one more than any live replica has."""
    return 1 + max([own.round, *(version.round for version in seen if near(own, version.round))])


def standing(rules: RoundRules, own: AnchorVersion, others: Mapping[PeerId, AnchorVersion]) -> Reasoned[AnchorVersion]:
    """The version of most live replicas; of equally many, the greater by (tokens, round, digest).

    Round 0 never wins against a later one: leaving it loses nothing. A version far beyond ours, or beyond round 0 while
    most replicas stand there, may be made up. It counts if at least two replicas and half of all hold it, or if its
    holder is the only other replica.
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
    """The version that most replicas announce, if at least half of them do; of two halves the one with more tokens."""
    if not announced:
        return Reasoned(None, "no replica of this module has announced a state")
    votes = Counter(announced.values())
    best = max(votes, key=lambda v: (votes[v], v.tokens, v.round, v.digest, v.steps, v.fragment))
    count, total = votes[best], len(announced)
    if 2 * count < total:
        return Reasoned(None, f"{total} replicas stand on {len(votes)} states, and no half of them on the same")
    return Reasoned(best, f"{count} of {total} replicas stand on round {best.round}")
