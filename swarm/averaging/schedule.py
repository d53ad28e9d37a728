"""Arithmetic of averaging rounds: order of leaders, due rounds, round numbers, and the module's agreed anchor."""

import hashlib
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from swarm.averaging.round_events import RoundRules
from swarm.vocabulary.averaging_messages import MAX_MEMBERS
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId, Reasoned

INFORMED = 3  # Number of next leaders to which a replica reports its progress
LARGEST_LEAD = 2**20
FIRST_LEAD = 1024
LEAD_TIMES = 4  # Largest round of one replica: 4x ours, or ours + 1024. A partitioned one cannot be much faster
MOST_ROUNDS = 2**36  # 100 rounds per second for 20 years
SLACK_ROUNDS = 1024
SLACK_WORK = 1024  # Largest ratio of steps and tokens of a version to its rounds + SLACK_ROUNDS
STEPS_TIMES_ALONE = 2  # After this many times `inner_steps` a replica opens a round, regardless of the other replicas
WORK_AT_MOST = 2  # Most steps counted of one replica, in equal shares, so that a single claim cannot make a round due


def precedence(module: ModuleId, base: AnchorVersion, number: int, peer: PeerId) -> bytes:
    """Returns the sort key of a replica in the order of leaders: rendezvous hashing (Thaler and Ravishankar 1998)."""
    # The digest is not known in advance, so that keys cannot be made to lead a certain round.
    header = struct.pack("<IIQ", module.stage, module.expert, number) + base.digest
    return hashlib.sha256(b"skipstone-convener:2\0" + header + peer.encode()).digest()


def leader_order(module: ModuleId, base: AnchorVersion, number: int, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Returns the peers in the order in which they lead a round: each one only if the peers before it are silent."""
    return tuple(sorted(set(peers), key=lambda peer: precedence(module, base, number, peer)))


def fragments_of(rules: RoundRules) -> int:
    return max(1, min(rules.fragments, rules.chunks))


def fragment_chunks(rules: RoundRules, fragment: int) -> tuple[int, int]:
    """Returns the chunks of a fragment of the parameters: the first, and the end (exclusive)."""
    count = fragments_of(rules)
    return round(fragment * rules.chunks / count), round((fragment + 1) * rules.chunks / count)


def steps_between_rounds(rules: RoundRules) -> int:
    return -(-rules.inner_steps // fragments_of(rules))


def due(
    rules: RoundRules, own_steps: int, others: Iterable[int], replicas: int, since_commit_s: float
) -> Reasoned[bool]:
    """Decides whether a round is due. `others`: other replicas' inner steps; `replicas`: number on our anchor."""
    share = steps_between_rounds(rules)
    done = own_steps + sum(min(steps, WORK_AT_MOST * share) for steps in others)
    if done >= share * replicas:
        return Reasoned(True, f"{replicas} replicas have done {done} inner steps")
    if own_steps >= STEPS_TIMES_ALONE * rules.inner_steps:
        return Reasoned(True, f"this replica alone has done {own_steps} inner steps")
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
    """Whether a round number is near enough to ours to be believed if only one replica claims it."""
    return number <= own.round + min(LARGEST_LEAD, max(FIRST_LEAD, LEAD_TIMES * own.round))


def next_number(own: AnchorVersion, seen: Iterable[AnchorVersion]) -> int:
    """Returns the number of the next round: one above the highest credible round of this replica and of `seen`."""
    return 1 + max([own.round, *(version.round for version in seen if near(own, version.round))])


def standing(rules: RoundRules, own: AnchorVersion, others: Mapping[PeerId, AnchorVersion]) -> Reasoned[AnchorVersion]:
    """Returns the anchor version that most live replicas have; ties go to the greater (tokens, round, digest).

    Round 0 never wins against a later round, because it has no work to lose. A version far beyond ours, or beyond
    round 0 while most replicas have round 0, may be invented: it counts only if at least two replicas and half of the
    others have it, or if there is only one other replica.
    """
    if all(version == own for version in others.values()):
        return Reasoned(own, f"all {len(others) + 1} replicas have our anchor")
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
        return Reasoned(own, f"{credible[own]} of {len(others) + 1} replicas have our anchor")
    why = "more" if later[best] > credible[own] or own.round == 0 else "a tie, and it has more tokens"
    return Reasoned(best, f"{credible[best]} replicas have round {best.round}, {credible[own]} have ours ({why})")


def voters(announced: Mapping[PeerId, AnchorVersion], proven: Collection[PeerId]) -> Mapping[PeerId, AnchorVersion]:
    """Selects the announcements of replicas with proven work; all of them if no replica has proven work."""
    return {peer: version for peer, version in announced.items() if peer in proven} or announced


def choose_version(announced: Mapping[PeerId, AnchorVersion]) -> Reasoned[AnchorVersion | None]:
    """Returns the anchor version that most replicas announce, if at least half of them do; ties go to more tokens."""
    if not announced:
        return Reasoned(None, "no replica of this module has announced a state")
    votes = Counter(announced.values())
    best = max(votes, key=lambda v: (votes[v], v.tokens, v.round, v.digest, v.steps, v.fragment))
    count, total = votes[best], len(announced)
    if 2 * count < total:
        return Reasoned(None, f"{total} replicas have {len(votes)} states, and none is held by half of them")
    return Reasoned(best, f"{count} of {total} replicas have round {best.round}")
