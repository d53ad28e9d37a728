"""Rosters: each member's weight, the shards that members reduce, and the objections to a roster that somebody sent.

All of it follows from the entries that the members have signed, by integers and by operations that IEEE 754 rounds
alike everywhere, so that every member works out the same, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from swarm.averaging.round_events import RoundRules
from swarm.averaging.schedule import WORK_AT_MOST, fragment_chunks, fragments_of, lower_median, steps_between_rounds
from swarm.averaging.trust import rates, slowest_bytes_per_s
from swarm.compression.round_codecs import RoundCodecs, choose
from swarm.vocabulary.averaging_messages import MAX_MEMBERS, Entry, Member, Roster, RoundId, SignedRoster
from swarm.vocabulary.types import MAX_COUNT, AnchorVersion, PeerId, Reasoned, short

TOKENS_AT_MOST = 4
"""Times the median: more tokens of one member count no more, because they are its own claim."""
NORM_AT_MOST = 1.5
"""Times the median, and times the root of how many times the median's tokens are in it: a longer update is scaled down
to it. Replicas of equal work have updates of nearly equal norm, so an honest one is rarely touched and a liar can
hardly lengthen the step."""
FASTER = 2
"""How much more chunks a member reduces that is faster than the slowest. No more than that, because who reduces more
can falsify more."""
BELIEVED_TOKENS = 64
"""Times the median: more of one member's tokens do not enter the version."""
MOST_STEPS = 2**32
MOST_TOKENS = 2**48
STRANGERS = 4
"""One in so many members may be one that we do not see: two replicas that do not see each other must not hold up the
others, but a convener that makes members up shall not have the most weight."""
ASSUMED_BANDWIDTH = 2.0**20
"""Bytes per second, where none has been measured."""
SLACK = 8.0
"""An exchange may take so many times what it should."""
GRACE_S = 20.0
"""And so much more."""
CONVENER_REDUCES_FROM = 2
"""From this attempt on the convener alone reduces, so that no two members that cannot reach each other hold up the
round."""


def sound_entry(entry: Entry) -> bool:
    """Whether an entry's figures can be true at all."""
    return (
        0 <= entry.steps <= MOST_STEPS
        and 0 <= entry.tokens <= MOST_TOKENS
        and (entry.steps > 0) == (entry.tokens > 0)
        and math.isfinite(entry.norm)
        and entry.norm >= 0
    )


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight of one member's pseudo-gradient."""

    share: float = 0.0
    """Of the tokens."""
    clipping: float = 1.0
    """What shortens it to the norm that is allowed."""

    @property
    def coefficient(self) -> float:
        """The factor of the pseudo-gradient in the sum."""
        return self.share * self.clipping


def weigh(entries: Mapping[PeerId, Entry]) -> dict[PeerId, Weight]:
    """The weight of each pseudo-gradient. All shares are 0 when nobody worked."""
    working = [entry for entry in entries.values() if entry.tokens > 0]
    if not working:
        return dict.fromkeys(entries, Weight())
    usual = lower_median([entry.tokens for entry in working])
    counted = {peer: min(entry.tokens, TOKENS_AT_MOST * usual) for peer, entry in entries.items()}
    norms = [entry.norm for entry in working if entry.norm > 0]
    longest = NORM_AT_MOST * lower_median(norms) if norms else 0.0
    total = sum(counted.values())

    def clipping(peer: PeerId, norm: float) -> float:
        return min(1.0, longest * math.sqrt(max(1.0, counted[peer] / usual)) / norm) if norm > 0 else 1.0

    return {peer: Weight(counted[peer] / total, clipping(peer, entry.norm)) for peer, entry in entries.items()}


def shards(chunks: range, rates: Mapping[PeerId, int], peers: Collection[PeerId]) -> dict[PeerId, tuple[int, int]]:
    """Cuts a run of chunks into one run for each peer (maybe empty), in the order of the peers' names; who is faster
    than the slowest has twice as many. Whole chunks by the largest remainder. An unknown rate counts as the median of
    the others."""
    known = list(rates.values())
    median, slowest = (lower_median(known), min(known)) if known else (0, 0)
    ordered = sorted(peers)
    weights = [FASTER if rates.get(peer, median) > slowest else 1 for peer in ordered]
    counts = [len(chunks) * weight // sum(weights) for weight in weights]
    rest = [len(chunks) * weight % sum(weights) for weight in weights]
    by_remainder = sorted(range(len(ordered)), key=lambda index: (-rest[index], index))
    for index in by_remainder[: len(chunks) - sum(counts)]:
        counts[index] += 1
    cut: dict[PeerId, tuple[int, int]] = {}
    start = chunks.start
    for peer, count in zip(ordered, counts, strict=True):
        cut[peer] = (start, start + count)
        start += count
    return cut


def make_roster(rules: RoundRules, signed: SignedRoster) -> Roster | None:
    """Works the roster out from the entries; None when none of those who entered has worked. The convener must be among
    them.
    """
    entries = {entry.peer: entry for entry in signed.entries}
    number, base = signed.round, signed.base
    weights = weigh(entries)
    if not any(weight.coefficient for weight in weights.values()):
        return None
    chunks = range(*fragment_chunks(rules, base.fragment))
    if number.attempt >= CONVENER_REDUCES_FROM:
        cut = dict.fromkeys(entries, (chunks.start, chunks.start)) | {number.convener: (chunks.start, chunks.stop)}
    else:
        cut = shards(chunks, rates(entries), entries)
    members = tuple(
        Member(peer, *cut[peer], weights[peer].coefficient, entries[peer].norm, weights[peer].share)
        for peer in sorted(entries)
    )
    steps = min(base.steps + _steps(rules, entries), MAX_COUNT)
    tokens = min(base.tokens + _tokens(entries), MAX_COUNT)
    return Roster(number, base, members, steps, tokens, signed.codec, signed.codec_reason)


def codec_of(
    rules: RoundRules,
    number: RoundId,
    base: AnchorVersion,
    entries: Mapping[PeerId, Entry],
    interval_s: float,
    own: float,
) -> Reasoned[RoundCodecs]:
    """The codec that the convener chooses.

    Args:
        interval_s: the time that the work since `base` has taken.
        own: bytes per second of the convener's best link, for when nobody has measured any in rounds yet; 0 when not
            known.
    """
    slowest = slowest_bytes_per_s(entries) or own
    return choose(rules.rungs, exchanged_bytes(rules, base, len(entries), number.attempt), slowest, interval_s)


def exchanged_bytes(rules: RoundRules, base: AnchorVersion, members: int, attempt: int) -> float:
    """The bytes of float32 that the busiest member sends and receives in one exchange: everybody the fragment about
    twice; a convener that reduces alone, once each way for every other member.
    """
    first, end = fragment_chunks(rules, base.fragment)
    times = 2 * (members - 1) if attempt >= CONVENER_REDUCES_FROM else 2 * (members - 1) / members
    return times * (end - first) * rules.chunk_bytes


def exchange_limit_s(rules: RoundRules, signed: SignedRoster, own: float) -> float:
    """The time limit of the exchange in seconds, as for float32.

    Args:
        own: bytes per second of our own best link; 0 when not known.
    """
    entries = {entry.peer: entry for entry in signed.entries}
    slowest = min(slowest_bytes_per_s(entries) or ASSUMED_BANDWIDTH, own or ASSUMED_BANDWIDTH)
    return GRACE_S + SLACK * exchanged_bytes(rules, signed.base, len(entries), signed.round.attempt) / slowest


def objection(rules: RoundRules, signed: SignedRoster, own: Entry, verify: Callable[[Entry], bool]) -> str | None:
    """The reason why a convener's roster is wrong; None when it is not.

    Args:
        own: our entry.
        verify: whether an entry is signed by who enters; asked last, once for each of the others.
    """
    peers = [entry.peer for entry in signed.entries]
    if not 1 <= len(peers) <= MAX_MEMBERS or len(set(peers)) != len(peers):
        return "its members are none, too many, or twice there"
    if signed.round.convener not in peers or own not in signed.entries:
        return "it lacks its convener, or our entry as we made it"
    if RoundCodecs(signed.codec) not in rules.codecs:
        return f"this run's rounds do not use {signed.codec.name}"
    for entry in signed.entries:
        who = short(entry.peer)
        if (entry.round, entry.base) != (signed.round, signed.base):
            return f"the entry of {who} is of another attempt"
        if not sound_entry(entry):
            return f"the entry of {who} has impossible figures"
    forged = next((entry.peer for entry in signed.entries if entry != own and not verify(entry)), None)
    return None if forged is None else f"{short(forged)} has not signed its entry"


def oddity(signed: SignedRoster, own: PeerId, known: Collection[PeerId], here: Collection[PeerId]) -> str | None:
    """The reason not to follow a roster though its convener may be honest, which may see other replicas than we do;
    None when nothing is odd.

    At the first attempt nobody has been left out for a reason yet, so one that lacks most of us would throw their work
    away.

    Args:
        known: the other replicas of the module that we see.
        here: those of them that stand on our anchor and serve.
    """
    strangers = {entry.peer for entry in signed.entries} - {own, *known}
    if len(strangers) > max(1, len(signed.entries) // STRANGERS):
        return f"{len(strangers)} in it are no replicas of this module that we see"
    if signed.round.attempt == 0 and 2 * len(signed.entries) < len(here) + 1:
        return f"it has {len(signed.entries)} of the {len(here) + 1} replicas that stand here"
    return None


def contributors(roster: Roster) -> tuple[PeerId, ...]:
    """The members whose pseudo-gradients are in the result: one that has done no work is there with weight 0."""
    return tuple(member.peer for member in roster.members if member.coefficient > 0)


def leads_to(rules: RoundRules, roster: Roster, version: AnchorVersion) -> bool:
    """Whether a version can be the result of this roster's exchange; only the digest is not known beforehand."""
    after = (roster.base.fragment + 1) % fragments_of(rules)
    expected = (roster.round.number, roster.steps, roster.tokens, after)
    return (version.round, version.steps, version.tokens, version.fragment) == expected


def may_be_committed(roster: Roster, without: int) -> bool:
    """Whether a majority can have prepared this roster's result when so many of its members are known not to have."""
    return 2 * (len(roster.members) - without) > len(roster.members)


def _steps(rules: RoundRules, entries: Mapping[PeerId, Entry]) -> int:
    """The mean. One that lies makes the schedule of two go half as fast or half as fast again, and no more."""
    steps = [entry.steps for entry in entries.values() if entry.tokens > 0]
    ceiling = WORK_AT_MOST * max(lower_median(steps), steps_between_rounds(rules))
    return (2 * sum(min(count, ceiling) for count in steps) + len(steps)) // (2 * len(steps))


def _tokens(entries: Mapping[PeerId, Entry]) -> int:
    tokens = [entry.tokens for entry in entries.values() if entry.tokens > 0]
    ceiling = BELIEVED_TOKENS * lower_median(tokens)
    return sum(min(count, ceiling) for count in tokens)
