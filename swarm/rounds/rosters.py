"""Rosters: what each member's update counts, who reduces which chunks, and whether a roster that somebody sent can be right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from swarm.round_messages import MAX_MEMBERS, Entry, Member, Roster, RoundId
from swarm.rounds.codecs import RoundCodecs, choose
from swarm.rounds.rules import fragment_chunks, fragments_of
from swarm.rounds.words import RoundRules
from swarm.vocabulary import AnchorVersion, PeerId

TOKENS_AT_MOST = 4
"""Times the median: more tokens of one member count no more, because they are its own claim."""
NORM_AT_MOST = 1.5
"""Times the median, and times the root of how many times the median's tokens are in it: a longer update is scaled down to it. Replicas of
equal work have updates of nearly equal norm, so an honest one is rarely touched and a liar can hardly lengthen the step."""
BANDWIDTH_RATIO = 8.0
"""Between the largest and the smallest shard: bandwidths are estimates, and claims."""
BELIEVED_TOKENS = 64
"""Times the median: more of one member's tokens do not enter the version."""
MOST_STEPS = 2**32
MOST_TOKENS = 2**48
CONVENER_REDUCES_FROM = 2
"""From this attempt on the convener alone reduces, so that no two members that cannot reach each other hold up the round."""
SUM_TOLERANCE = 1e-6


def sound_entry(entry: Entry) -> bool:
    """Whether the figures can be true at all."""
    return (
        0 <= entry.steps <= MOST_STEPS
        and 0 <= entry.tokens <= MOST_TOKENS
        and math.isfinite(entry.norm)
        and entry.norm >= 0
        and math.isfinite(entry.bandwidth)
        and entry.bandwidth >= 0
    )


def weigh(entries: Mapping[PeerId, Entry]) -> dict[PeerId, float]:
    """What each pseudo-gradient is multiplied with: its share of the tokens times what clips its norm. All 0 when nobody worked."""
    working = [entry for entry in entries.values() if entry.tokens > 0]
    if not working:
        return dict.fromkeys(entries, 0.0)
    usual = lower_median([entry.tokens for entry in working])
    counted = {peer: min(entry.tokens, TOKENS_AT_MOST * usual) for peer, entry in entries.items()}
    norms = [entry.norm for entry in working if entry.norm > 0]
    longest = NORM_AT_MOST * lower_median(norms) if norms else 0.0
    total = sum(counted.values())

    def clipping(peer: PeerId, norm: float) -> float:
        return min(1.0, longest * math.sqrt(max(1.0, counted[peer] / usual)) / norm) if norm > 0 else 1.0

    return {peer: counted[peer] / total * clipping(peer, entry.norm) for peer, entry in entries.items()}


def shards(chunks: range, bandwidths: Mapping[PeerId, float]) -> dict[PeerId, tuple[int, int]]:
    """Cuts a run of chunks into one run for each peer (maybe empty), in proportion to bandwidth, in the order of the peers' names.

    Bandwidths count up to BANDWIDTH_RATIO times the smallest: a claim of more draws no more to its author. Whole chunks by the largest remainder. An unknown bandwidth (0) counts as the median of the others.
    """
    known = [bandwidth for bandwidth in bandwidths.values() if bandwidth > 0]
    median = lower_median(known) if known else 1.0
    largest = BANDWIDTH_RATIO * min(known, default=1.0)
    peers = sorted(bandwidths)
    weights = [min(bandwidths[peer] or median, largest) for peer in peers]
    exact = [len(chunks) * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(peers)), key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: len(chunks) - sum(counts)]:
        counts[index] += 1
    cut: dict[PeerId, tuple[int, int]] = {}
    start = chunks.start
    for peer, count in zip(peers, counts, strict=True):
        cut[peer] = (start, start + count)
        start += count
    return cut


def make_roster(
    rules: RoundRules, number: RoundId, base: AnchorVersion, entries: Mapping[PeerId, Entry], interval_s: float
) -> Roster | None:
    """The roster of those who entered; None when none of them has worked. The convener must be among them.

    Args:
        interval_s: the time that the work since `base` has taken.
    """
    coefficients = weigh(entries)
    if not any(coefficients.values()):
        return None
    bandwidths = {peer: entry.bandwidth for peer, entry in entries.items()}
    chunks = range(*fragment_chunks(rules, base.fragment))
    if number.attempt >= CONVENER_REDUCES_FROM:
        cut = dict.fromkeys(entries, (chunks.start, chunks.start)) | {number.convener: (chunks.start, chunks.stop)}
    else:
        cut = shards(chunks, bandwidths)
    members = tuple(Member(peer, *cut[peer], coefficients[peer], entries[peer].norm) for peer in sorted(entries))
    steps, tokens = base.steps + _steps(entries), base.tokens + _tokens(entries)
    known = [bandwidth for bandwidth in bandwidths.values() if bandwidth > 0]
    codecs = choose(
        rules.rungs, exchanged_bytes(rules, base, len(entries), number.attempt), min(known, default=0.0), interval_s
    )
    return Roster(number, base, members, steps, tokens, codecs.value.contribution, codecs.reason)


def exchanged_bytes(rules: RoundRules, base: AnchorVersion, members: int, attempt: int) -> float:
    """What the busiest member sends and receives of float32 in one exchange: everybody the fragment about twice; a convener that reduces alone, once each way for
    every other member."""
    first, end = fragment_chunks(rules, base.fragment)
    times = 2 * (members - 1) if attempt >= CONVENER_REDUCES_FROM else 2 * (members - 1) / members
    return times * (end - first) * rules.chunk_bytes


def objection(rules: RoundRules, roster: Roster, own: PeerId, norm: float) -> str | None:
    """What is wrong with a roster that a convener sent us; None when nothing is.

    Args:
        norm: what we declared.
    """
    peers = roster.peers
    if not 1 <= len(peers) <= MAX_MEMBERS or len(set(peers)) != len(peers):
        return "its members are none, too many, or twice there"
    if roster.round.convener not in peers or own not in peers:
        return "it lacks its convener or us"
    if next(member.norm for member in roster.members if member.peer == own) != norm:
        return "it has another norm for us than we declared"
    if RoundCodecs(roster.codec) not in rules.codecs:
        return f"this run's rounds do not use {roster.codec.name}"
    if not all(_sound_member(member) for member in roster.members):
        return "a coefficient or norm is out of range"
    if sum(member.coefficient for member in roster.members) > 1 + SUM_TOLERANCE:
        return "its coefficients add up to more than 1"
    if not _covers(range(*fragment_chunks(rules, roster.base.fragment)), roster.members):
        return "its shards overlap or leave something out"
    more_steps, more_tokens = roster.steps - roster.base.steps, roster.tokens - roster.base.tokens
    if not (0 <= more_steps <= MOST_STEPS and 0 <= more_tokens <= MOST_TOKENS * MAX_MEMBERS):
        return "its steps or tokens are out of range"
    return None


def contributors(roster: Roster) -> tuple[PeerId, ...]:
    """Whose pseudo-gradients are in its result: a member that has done no work is there with weight 0."""
    return tuple(member.peer for member in roster.members if member.coefficient > 0)


def leads_to(rules: RoundRules, roster: Roster, version: AnchorVersion) -> bool:
    """Whether a version can be the result of this roster's exchange; only the digest is not known beforehand."""
    after = (roster.base.fragment + 1) % fragments_of(rules)
    expected = (roster.round.number, roster.steps, roster.tokens, after)
    return (version.round, version.steps, version.tokens, version.fragment) == expected


def may_be_committed(roster: Roster, without: int) -> bool:
    """Whether a majority can have prepared this roster's result when so many of its members are known not to have."""
    return 2 * (len(roster.members) - without) > len(roster.members)


def lower_median(values: Sequence[float]) -> float:
    """Of an even number of values the smaller middle one: of two, one cannot lift the other's limit.

    Raises:
        IndexError: there is no value.
    """
    return sorted(values)[(len(values) - 1) // 2]


def _steps(entries: Mapping[PeerId, Entry]) -> int:
    steps = [entry.steps for entry in entries.values() if entry.tokens > 0]
    ceiling = int(TOKENS_AT_MOST * lower_median(steps))
    return round(sum(min(count, ceiling) for count in steps) / len(steps))


def _tokens(entries: Mapping[PeerId, Entry]) -> int:
    tokens = [entry.tokens for entry in entries.values() if entry.tokens > 0]
    ceiling = int(BELIEVED_TOKENS * lower_median(tokens))
    return sum(min(count, ceiling) for count in tokens)


def _sound_member(member: Member) -> bool:
    return 0 <= member.coefficient <= 1 and math.isfinite(member.norm) and member.norm >= 0


def _covers(chunks: range, members: Sequence[Member]) -> bool:
    end = chunks.start
    for member in sorted(members, key=lambda member: (member.first_chunk, member.end_chunk)):
        if member.first_chunk == member.end_chunk:
            continue
        if member.first_chunk != end or member.end_chunk < member.first_chunk:
            return False
        end = member.end_chunk
    return end == chunks.stop
