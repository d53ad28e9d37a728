"""A round's roster: members with weights and ranges of chunks, computed bit for bit equally by all; and its checks."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median_low

from swarm.averaging.proven_work import lead, proven_work
from swarm.averaging.round_events import ASSUMED_BANDWIDTH, RoundRules, Signer
from swarm.averaging.schedule import WORK_AT_MOST, fragment_chunks, fragments_of, steps_between_rounds
from swarm.averaging.trust import rates, slowest_bytes_per_s
from swarm.compression.round_codecs import choose
from swarm.vocabulary.averaging_messages import MAX_MEMBERS, Entry, Member, Roster, RoundId, SignedRoster
from swarm.vocabulary.types import MAX_COUNT, AnchorVersion, Codec, PeerId, Reasoned, short

NORM_AT_MOST = 1.5  # Largest update norm, in medians. Larger updates are scaled down.
MOST_LEAD = 64.0  # Largest factor by which proven work raises a limit
FASTER = 2  # Shard size of fast members over slow ones. A larger ratio would let one member falsify more.
BELIEVED_TOKENS = 1.5  # Most unproven tokens of one member that the version counts, in medians
MOST_STEPS = 2**32
MOST_TOKENS = 2**48
STRANGERS = 4  # Share of members (1/4) that we may not know: enough for partial views, no invented majority
SLACK = 8.0
GRACE_S = 20.0
LEADER_REDUCES_FROM = 2  # From this attempt the leader alone reduces, in case two members cannot reach each other


def sound_entry(entry: Entry) -> bool:
    return (
        0 <= entry.steps <= MOST_STEPS
        and 0 <= entry.tokens <= MOST_TOKENS
        and (entry.steps > 0) == (entry.tokens > 0)
        and math.isfinite(entry.norm)
        and entry.norm >= 0
    )


@dataclass(frozen=True, slots=True)
class Weight:
    """Weight of one member's pseudo-gradient in the mean: its share of tokens, and the factor that clips its norm."""

    share: float = 0.0
    clipping: float = 1.0

    @property
    def coefficient(self) -> float:
        return self.share * self.clipping


def weigh(entries: Mapping[PeerId, Entry], proven: Mapping[PeerId, float] | None = None) -> dict[PeerId, Weight]:
    """Computes the weight of each member's pseudo-gradient from tokens and norms; all are 0 if no member worked.

    Tokens and norms are only claims. They count up to the median, and beyond it as far as `proven` work (tokens per
    second) allows. Members without proven work count together like one member, if others have it. No member counts for
    more than all others together, unless it has more tokens and more proven work than they.
    """
    claims = _Claims.of(entries, proven or {})
    if claims is None:
        return dict.fromkeys(entries, Weight())
    counted = {peer: claims.tokens_of(peer, 1.0) for peer in entries}
    norms = [entry.norm for peer, entry in entries.items() if entry.norm > 0 and peer in claims.judges]
    longest = NORM_AT_MOST * median_low(norms) if norms else 0.0
    total = math.fsum(counted.values())

    def clipping(peer: PeerId, norm: float) -> float:
        return min(1.0, longest * claims.leads[peer] / norm) if norm > 0 and longest else 1.0

    weights = {peer: Weight(counted[peer] / total, clipping(peer, entry.norm)) for peer, entry in entries.items()}
    lengths = {peer: weights[peer].coefficient * entry.norm for peer, entry in entries.items()}
    # Share and norm both grow with work, so the limit is the square of the lead.
    largest = max(sorted(lengths), key=lambda peer: lengths[peer] / claims.leads[peer] ** 2)
    limit = claims.leads[largest] ** 2 * math.fsum(length for peer, length in lengths.items() if peer != largest)
    if 0 < limit < lengths[largest]:
        share, clip = weights[largest].share, weights[largest].clipping
        weights[largest] = Weight(share, clip * limit / lengths[largest])
    return weights


@dataclass(frozen=True, slots=True)
class _Claims:
    """The members' claimed tokens, and how far proven work supports them."""

    tokens: dict[PeerId, int]
    proven: Mapping[PeerId, float]
    judges: frozenset[PeerId]  # Working members whose medians count: those with proven work, or all if none has it
    usual: int  # Median tokens of the judges
    leads: dict[PeerId, float]  # Work over that of all others together, by tokens and by proof; from 1 to MOST_LEAD

    @classmethod
    def of(cls, entries: Mapping[PeerId, Entry], proven: Mapping[PeerId, float]) -> "_Claims | None":
        """Returns the claims of a round's members; None if no member worked."""
        tokens = {peer: entry.tokens for peer, entry in sorted(entries.items()) if entry.tokens > 0}
        if not tokens:
            return None
        work = {peer: proven[peer] for peer in tokens if peer in proven}
        judges = frozenset(work or tokens)
        leads = {peer: min(MOST_LEAD, max(1.0, min(lead(peer, tokens), lead(peer, work)))) for peer in entries}
        return cls(tokens, work, judges, median_low([tokens[peer] for peer in judges]), leads)

    def tokens_of(self, peer: PeerId, unproven: float) -> float:
        """Returns the tokens of a member that count. `unproven`: limit without proven work, in medians."""
        tokens = self.tokens.get(peer, 0)
        if not self.proven:
            return min(tokens, unproven * self.usual)
        if peer not in self.proven:
            return min(tokens, self.usual) / max(1, len(self.tokens) - len(self.proven))
        ratio = self.proven[peer] / median_low(self.proven.values())
        return min(tokens, max(unproven, min(MOST_LEAD, ratio)) * self.usual)


def shards(chunks: range, rates: Mapping[PeerId, int], peers: Collection[PeerId]) -> dict[PeerId, tuple[int, int]]:
    """Divides chunks among peers by id. Fast peers get twice the chunks of slow ones; unknown rates are the median."""
    known = list(rates.values())
    median, slowest = (median_low(known), min(known)) if known else (0, 0)
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
    """Computes a round's roster from the members' signed entries; None if no member worked."""
    entries = {entry.peer: entry for entry in signed.entries}
    number, base = signed.round, signed.base
    proven = proven_work(signed.tallies) if number.module.stage > 0 else {}
    weights = weigh(entries, proven)
    if not any(weight.coefficient for weight in weights.values()):
        return None
    chunks = range(*fragment_chunks(rules, base.fragment))
    if number.attempt >= LEADER_REDUCES_FROM:
        cut = dict.fromkeys(entries, (chunks.start, chunks.start)) | {number.convener: (chunks.start, chunks.stop)}
    else:
        cut = shards(chunks, rates(entries), entries)
    members = tuple(
        Member(peer, *cut[peer], weights[peer].coefficient, entries[peer].norm, weights[peer].share)
        for peer in sorted(entries)
    )
    steps = min(base.steps + _steps(rules, entries), MAX_COUNT)
    tokens = min(base.tokens + _tokens(entries, proven), MAX_COUNT)
    return Roster(number, base, members, steps, tokens, signed.codec, signed.codec_reason)


def codec_of(
    rules: RoundRules, number: RoundId, base: AnchorVersion, entries: Mapping[PeerId, Entry], every_s: float, own: float
) -> Reasoned[Codec]:
    """Chooses the codec of a round that we lead. `own`: goodput of our best link, if no member measured a rate."""
    slowest = slowest_bytes_per_s(entries) or own
    return choose(rules.codecs, exchanged_bytes(rules, base, len(entries), number.attempt), slowest, every_s)


def exchanged_bytes(rules: RoundRules, base: AnchorVersion, members: int, attempt: int) -> float:
    """Returns the bytes that the busiest member sends and receives in a round's exchange, if sent as float32."""
    first, end = fragment_chunks(rules, base.fragment)
    times = 2 * (members - 1) if attempt >= LEADER_REDUCES_FROM else 2 * (members - 1) / members
    return times * (end - first) * rules.chunk_bytes


def exchange_pace(rules: RoundRules, signed: SignedRoster, own: float) -> tuple[float, float]:
    """Returns the bytes per second of a round's slowest link, and the longest time of its exchange in seconds.

    `own`: goodput of our best link; 0: unknown.
    """
    entries = {entry.peer: entry for entry in signed.entries}
    slowest = min(slowest_bytes_per_s(entries) or ASSUMED_BANDWIDTH, own or ASSUMED_BANDWIDTH)
    sent = exchanged_bytes(rules, signed.base, len(entries), signed.round.attempt)
    return slowest, GRACE_S + SLACK * sent / rules.piece_bytes * rules.piece_s(slowest)


def objection(rules: RoundRules, signed: SignedRoster, own: Entry, signer: Signer) -> str | None:
    """Checks members, codec, figures and signatures of a leader's roster. Returns the fault, or None."""
    peers = [entry.peer for entry in signed.entries]
    if not 1 <= len(peers) <= MAX_MEMBERS or len(set(peers)) != len(peers):
        return "it has no members, too many, or the same one twice"
    if signed.round.convener not in peers or own not in signed.entries:
        return "it lacks its leader, or our unchanged entry"
    if signed.codec not in rules.codecs:
        return f"this run's rounds do not use {signed.codec.name}"
    for entry in signed.entries:
        who = short(entry.peer)
        if (entry.round, entry.base) != (signed.round, signed.base):
            return f"the entry of {who} belongs to another attempt"
        if not sound_entry(entry):
            return f"the entry of {who} has impossible figures"
    by = {tally.data_node for tally in signed.tallies if tally.module == signed.round.module}
    if len(by) != len(signed.tallies) or not all(map(signer.vouches, signed.tallies)):
        return "its tallies of work are not signed by different data nodes of the run"
    forged = next((entry.peer for entry in signed.entries if entry != own and not signer.verify(entry)), None)
    return None if forged is None else f"the entry of {short(forged)} has a bad signature"


def oddity(signed: SignedRoster, own: PeerId, known: Collection[PeerId], here: Collection[PeerId]) -> str | None:
    """Returns a reason not to follow a valid roster: too many unknown members, or too few replicas on our anchor."""
    strangers = {entry.peer for entry in signed.entries} - {own, *known}
    if len(strangers) > max(1, len(signed.entries) // STRANGERS):
        return f"{len(strangers)} of its members are not replicas that we know"
    if signed.round.attempt == 0 and 2 * len(signed.entries) < len(here) + 1:
        return f"it has {len(signed.entries)} of the {len(here) + 1} replicas on our anchor"
    return None


def contributors(roster: Roster) -> tuple[PeerId, ...]:
    """Returns the members whose pseudo-gradients count in the mean, without idle members (weight 0)."""
    return tuple(member.peer for member in roster.members if member.coefficient > 0)


def leads_to(rules: RoundRules, roster: Roster, version: AnchorVersion) -> bool:
    """Whether a round with this roster can result in this anchor version. The digest is not checked."""
    after = (roster.base.fragment + 1) % fragments_of(rules)
    expected = (roster.round.number, roster.steps, roster.tokens, after)
    return (version.round, version.steps, version.tokens, version.fragment) == expected


def may_be_committed(roster: Roster, without: int) -> bool:
    """Whether a majority of the roster may hold the round's result, if `without` members are known to lack it."""
    return 2 * (len(roster.members) - without) > len(roster.members)


def _steps(rules: RoundRules, entries: Mapping[PeerId, Entry]) -> int:
    """Returns the mean inner steps of members that worked. A liar among two can at most halve it, or add half."""
    steps = [entry.steps for entry in entries.values() if entry.tokens > 0]
    ceiling = WORK_AT_MOST * max(median_low(steps), steps_between_rounds(rules))
    return (2 * sum(min(count, ceiling) for count in steps) + len(steps)) // (2 * len(steps))


def _tokens(entries: Mapping[PeerId, Entry], proven: Mapping[PeerId, float]) -> int:
    claims = _Claims.of(entries, proven)
    return 0 if claims is None else round(math.fsum(claims.tokens_of(peer, BELIEVED_TOKENS) for peer in claims.tokens))
