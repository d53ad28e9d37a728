"""The leader's side of one attempt at an averaging round. The leader is also a member, and sends messages to itself."""

import enum
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.averaging.proven_work import to_carry
from swarm.averaging.replica_view import LATE_TIMES, ReplicaView
from swarm.averaging.roster import codec_of, exchange_pace, leads_to, make_roster, may_be_committed, sound_entry
from swarm.averaging.round_events import SendMessage, SnapshotTaken
from swarm.averaging.schedule import fragments_of, near, precedence
from swarm.vocabulary import averaging_messages as messages
from swarm.vocabulary.types import AnchorVersion, PeerId


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Verdict: the attempt at a round failed, and the next attempt excludes the peers in `without`."""

    without: frozenset[PeerId]
    why: str
    accuser: PeerId | None = None


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Verdict: the attempt at a round failed, and the leader pauses before the next attempt."""

    why: str


Verdict = messages.Commit | TryAgain | GivenUp


class Answer(enum.Enum):
    """Answer of an invited replica to the leader."""

    NONE = 1
    ACCEPTED = 2
    ENTERED = 3
    ELSEWHERE = 4
    NOT_YET = 5  # Has another anchor, or prepares. Gets the timeout of a silent replica, to catch up in that time.
    PAST = 6
    REFUSED = 7


WITH_US = (Answer.ACCEPTED, Answer.ENTERED)
ASKED_AGAIN = (Answer.NONE, Answer.ELSEWHERE, Answer.NOT_YET)
DECLINED = {
    messages.DeclineReason.OTHER_CONVENER: Answer.ELSEWHERE,
    messages.DeclineReason.OTHER_ANCHOR: Answer.NOT_YET,
    messages.DeclineReason.NOT_READY: Answer.NOT_YET,
    messages.DeclineReason.PAST: Answer.PAST,
}


@dataclass(slots=True)
class Invitee:
    """The leader's record of one invited replica: its answer, its entry, and its complaints about other members."""

    heard: float
    answer: Answer = Answer.NONE
    lost: bool = False
    late: bool = False  # It catches up with our anchor from one shortly before it
    entry: messages.Entry | None = None
    prepared: AnchorVersion | None = None
    waiting_for: frozenset[PeerId] = frozenset()
    rejected: frozenset[PeerId] = frozenset()

    def silent(self, now: float, patience_s: float) -> bool:
        return now - self.heard > (patience_s / 2 if self.lost else patience_s)


class Leader:
    """State machine of the leader in one attempt at a round."""

    def __init__(self, view: ReplicaView, number: messages.RoundId, invitees: Iterable[PeerId]) -> None:
        self.round = number
        self.roster: messages.Roster | None = None
        self._goodput = self._slowest = 0.0  # Of our best link, and of the slowest invitee or member
        self.longest = math.inf
        self.forgers: set[PeerId] = set()  # Peers that sent an entry that no honest replica sends
        self._signed: messages.SignedRoster | None = None
        self._own = view.own
        self._base = view.version
        self.invitees = {peer: Invitee(view.now) for peer in sorted(invitees)}
        self._earlier = tuple(view.attempt_log.rosters)
        # Lone accusers of earlier attempts. A peer that is the only accuser again is excluded itself. Otherwise one
        # liar could exclude all others one by one.
        self._doubted = frozenset(view.attempt_log.doubted)
        self._rules = view.rules
        self._signer = view.signer
        self._usual = view.usual
        self._tallies = to_carry(view.tallies)
        self._opened = view.now
        self._interval_s = view.anchored_s
        self._late_s = view.patience_with_late_s()
        self._reliable = view.others.proven or view.others.all
        self._pulsed = view.now
        self._deadline = 0.0
        self._accused_since: float | None = None

    def prepared(self, taken: SnapshotTaken) -> None:
        self._goodput, self.longest = taken.bandwidth, taken.longest
        self._slowest = taken.slowest(self.invitees.keys() - {self._own})

    def open(self) -> list[SendMessage]:
        return [SendMessage(peer, messages.Invitation(self.round, self._base)) for peer in self.invitees]

    def dissolve(self, why: str) -> list[SendMessage]:
        others = (peer for peer, invitee in self.invitees.items() if peer != self._own and invitee.answer in WITH_US)
        return [SendMessage(peer, messages.Dissolved(self.round, why)) for peer in others]

    def lost(self, peer: PeerId) -> None:
        invitee = self.invitees.get(peer)
        if invitee is not None:
            invitee.lost = True

    def hear(self, sender: PeerId, message: messages.RoundControl, now: float) -> list[SendMessage]:
        invitee = self.invitees.get(sender)
        if invitee is None:
            return [SendMessage(sender, messages.Dissolved(self.round, "you are not among those invited"))]
        invitee.heard, invitee.lost = now, False
        match message:
            case messages.Accepting():
                invitee.answer = invitee.answer if invitee.answer is Answer.ENTERED else Answer.ACCEPTED
            case messages.Entry():
                return self._entered(sender, invitee, message)
            case messages.Declined(_, reason, version):
                made_up = reason is messages.DeclineReason.PAST and not near(self._base, version.round)
                invitee.answer = Answer.REFUSED if made_up else DECLINED.get(reason, Answer.REFUSED)
                behind = self._base.round - LATE_TIMES * fragments_of(self._rules) <= version.round < self._base.round
                invitee.late = invitee.answer is Answer.NOT_YET and behind and sender in self._reliable
                invitee.entry = None
            case messages.Pulse(_, waiting_for, rejected):
                invitee.waiting_for = frozenset(waiting_for) & self.invitees.keys()
                invitee.rejected |= frozenset(rejected) & self.invitees.keys()
            case messages.Prepared(_, version):
                if self.roster is not None and leads_to(self._rules, self.roster, version):
                    invitee.prepared, invitee.waiting_for = version, frozenset()
            case _:
                pass
        return []

    def _entered(self, sender: PeerId, invitee: Invitee, entry: messages.Entry) -> list[SendMessage]:
        if self._signed is not None:
            if entry in self._signed.entries and entry.peer == sender:
                return [SendMessage(sender, self._signed)]
            return [SendMessage(sender, messages.Dissolved(self.round, "the roster was fixed without you"))]
        if entry == invitee.entry:
            return []
        signed = sender == self._own or self._signer.verify(entry)
        if entry.peer != sender or not sound_entry(entry) or not signed:
            self.forgers.add(sender)
        elif entry.base == self._base:
            invitee.answer, invitee.entry = Answer.ENTERED, entry
            return []
        invitee.answer, invitee.entry = Answer.REFUSED, None
        return [SendMessage(sender, messages.Dissolved(self.round, "your entry has a bad signature, figures or base"))]

    def advance(self, now: float) -> tuple[list[SendMessage], Verdict | None]:
        """Returns the messages that are due, and the verdict on this attempt; None while the attempt continues."""
        tells = self._pulses(now)
        if self.roster is not None:
            return tells, self._judge_exchange(self.roster, now)
        if any(self._awaited(invitee, now) for invitee in self.invitees.values()):
            return tells, None
        verdict = self._judge_entries()
        if verdict is None:
            tells += self._fix(now)
            verdict = None if self.roster is not None else GivenUp("no member has worked since the anchor")
        return tells, verdict

    def _pulses(self, now: float) -> list[SendMessage]:
        if now - self._pulsed < self._rules.pulse_s:
            return []
        self._pulsed = now
        invitation, pulse = messages.Invitation(self.round, self._base), messages.Pulse(self.round)
        unsure = ASKED_AGAIN if self.roster is None else ()
        return [
            SendMessage(peer, invitation if invitee.answer in unsure else pulse)
            for peer, invitee in self.invitees.items()
            if invitee.answer in WITH_US or invitee.answer in unsure
        ]

    def _awaited(self, invitee: Invitee, now: float) -> bool:
        waited = now - self._opened
        # Messages queue behind pieces of the last attempt, downloads of state, and microbatches.
        behind_piece_s = self._rules.piece_s(self._slowest)
        if invitee.answer is Answer.ACCEPTED:
            return waited < self._rules.prepare_s and not invitee.silent(now, self._rules.silence_s + behind_piece_s)
        patience_s = self._rules.answer_s + (behind_piece_s if invitee.answer is Answer.NONE else 0.0)
        if invitee.lost:
            patience_s /= 2
        elif invitee.late:
            patience_s = max(patience_s, self._late_s)
        return invitee.answer in ASKED_AGAIN and waited < patience_s

    def _judge_entries(self) -> Verdict | None:
        if self.invitees[self._own].answer is not Answer.ENTERED:
            return GivenUp("our own update is not ready")
        elsewhere = sum(invitee.answer is Answer.ELSEWHERE for invitee in self.invitees.values())
        with_us = sum(invitee.answer in WITH_US for invitee in self.invitees.values()) - 1
        if elsewhere and elsewhere >= with_us:
            return GivenUp("the others follow another leader")
        past = any(invitee.answer is Answer.PAST for invitee in self.invitees.values())
        if past and 2 * (with_us + 1) <= len(self.invitees):  # a minority may be wrong
            return GivenUp("this round has been committed without us")
        return self._found()

    def _found(self) -> messages.Commit | None:
        """Returns a Commit of an earlier attempt's result if a majority may hold it: a peer may have committed it."""
        entries = self._entries()
        holders: defaultdict[AnchorVersion, list[PeerId]] = defaultdict(list)
        for peer, entry in entries.items():
            if entry.staged is not None and self._base.round < entry.staged.round <= self.round.number:
                holders[entry.staged].append(peer)
        possible = [version for version, peers in holders.items() if self._possible(version, peers, entries)]
        if not possible:
            return None
        version = max(possible, key=lambda version: (len(holders[version]), version.tokens, version.digest))
        return messages.Commit(self.round, version, tuple(holders[version]))

    def _possible(self, version: AnchorVersion, holders: Sequence[PeerId], entries: Iterable[PeerId]) -> bool:
        # If too many members of that roster lack the result, the claim is a lie.
        led_there = [roster for roster in self._earlier if leads_to(self._rules, roster, version)]
        if not led_there:
            return 2 * len(holders) >= len(list(entries))
        lacking = set(entries) - set(holders)
        return any(may_be_committed(roster, sum(one.peer in lacking for one in roster.members)) for roster in led_there)

    def _fix(self, now: float) -> list[SendMessage]:
        own = self._entries()[self._own]
        odd = [peer for peer, entry in self._entries().items() if self._usual.too_short(entry, own)]
        signed, self.roster = self._sign(odd)
        # Clipping makes a long update as long as the others. If there are no others, leave it out.
        while self.roster is not None and self.roster.largest_norm > max(self.longest, own.norm):
            odd.append(max(self.roster.members, key=lambda member: (member.norm, member.peer)).peer)
            signed, self.roster = self._sign(odd)
        if self.roster is None:
            return []
        self._signed = signed
        self._slowest, limit_s = exchange_pace(self._rules, signed, self._goodput)
        self._deadline = now + limit_s
        for invitee in self.invitees.values():
            invitee.heard = max(invitee.heard, now) if invitee.entry is not None else invitee.heard
        late = [peer for peer, invitee in self.invitees.items() if invitee.answer is Answer.ACCEPTED]
        for peer in late:
            self.invitees[peer].answer = Answer.REFUSED
        why = dict.fromkeys(late, "the roster was fixed without you")
        why |= dict.fromkeys(odd, "your update is too small or too large")
        excluded = [SendMessage(peer, messages.Dissolved(self.round, each)) for peer, each in why.items()]
        return excluded + [SendMessage(entry.peer, signed) for entry in signed.entries]

    def _sign(self, without: Iterable[PeerId]) -> tuple[messages.SignedRoster, messages.Roster | None]:
        for peer in without:
            self.invitees[peer].answer, self.invitees[peer].entry = Answer.REFUSED, None
        entries = self._entries()
        codecs = codec_of(self._rules, self.round, self._base, entries, self._interval_s, self._goodput)
        choice = codecs.value, codecs.reason
        signed = messages.SignedRoster(self.round, self._base, tuple(entries.values()), *choice, self._tallies)
        return signed, make_roster(self._rules, signed)

    def _entries(self) -> dict[PeerId, messages.Entry]:
        return {peer: invitee.entry for peer, invitee in self.invitees.items() if invitee.entry is not None}

    def _judge_exchange(self, roster: messages.Roster, now: float) -> Verdict | None:
        members = {member.peer: self.invitees[member.peer] for member in roster.members}
        prepared = Counter(invitee.prepared for invitee in members.values() if invitee.prepared is not None)
        for version, count in prepared.items():
            if 2 * count > len(members):
                holders = tuple(peer for peer, invitee in members.items() if invitee.prepared == version)
                return messages.Commit(self.round, version, holders)
        return (
            self._gone(members, now)
            or self._rejected(members)
            or self._waited_for(members, now)
            or self._overdue(members, now)
        )

    def _gone(self, members: dict[PeerId, Invitee], now: float) -> Verdict | None:
        if members[self._own].answer is not Answer.ENTERED:
            return GivenUp("our own part has ended")
        elsewhere = [peer for peer, invitee in members.items() if invitee.answer is Answer.ELSEWHERE]
        if elsewhere and 2 * len(elsewhere) >= len(members) - 1:
            return GivenUp("the others follow another leader")
        patience_s = self._rules.silence_s + self._rules.piece_s(self._slowest)
        gone = frozenset(
            peer
            for peer, invitee in members.items()
            if invitee.prepared is None
            and (invitee.answer is not Answer.ENTERED or (peer != self._own and invitee.silent(now, patience_s)))
        )
        refused = any(members[peer].answer is Answer.NOT_YET for peer in gone)
        if refused and self.round.module.stage > 0 and not self._tallies:
            # A replica that was suspended has lost its tallies, and alone it would part from the others.
            return GivenUp("the others do not follow us, and we lack the tallies of work")
        return TryAgain(gone, "silent or gone") if gone else None

    def _rejected(self, members: dict[PeerId, Invitee]) -> Verdict | None:
        accusers = _by_accused({peer: invitee.rejected & members.keys() for peer, invitee in members.items()})
        if not accusers:
            return None
        worst = max(accusers, key=lambda peer: (len(accusers[peer]), peer))
        return self._convicted(worst, accusers[worst], "sent unusable data")

    def _waited_for(self, members: dict[PeerId, Invitee], now: float) -> Verdict | None:
        accusers = credible_accusers({peer: invitee.waiting_for & members.keys() for peer, invitee in members.items()})
        if not accusers:
            self._accused_since = None
            return None
        if self._accused_since is None:
            self._accused_since = now
        # Prefer an accused peer that waits for no other (the others may just pass a delay on), then the most accused.

        def blame(peer: PeerId) -> tuple[bool, int, bool, bytes]:
            order = precedence(self.round.module, self._base, self.round.number, peer)
            return not members[peer].waiting_for, len(accusers[peer]), peer != self._own, order

        worst = max(accusers, key=blame)
        # Delays may pass, so they get two pulses, unless most members complain.
        by_most = len(accusers[worst]) > max(1, (len(members) - 1) // 2)
        if not by_most and now - self._accused_since < 2 * self._rules.pulse_s:
            return None
        return self._convicted(worst, accusers[worst], "its parts did not arrive")

    def _convicted(self, accused: PeerId, accusers: set[PeerId], why: str) -> Verdict:
        # Members that accuse the leader cannot receive its shard: they are excluded, or it gives up if they are half.
        if accused == self._own and self.roster is not None and 2 * len(accusers) >= len(self.roster.members):
            return GivenUp(f"{len(accusers)} of {len(self.roster.members)} members accuse us: {why}")
        if accused == self._own or accusers <= self._doubted:
            return TryAgain(frozenset(accusers - {self._own}), f"accuses others: {why}")
        alone = next(iter(accusers)) if len(accusers) == 1 else None
        return TryAgain(frozenset({accused}), why, alone if alone != self._own else None)

    def _overdue(self, members: dict[PeerId, Invitee], now: float) -> Verdict | None:
        if all(invitee.prepared is not None for invitee in members.values()):
            return TryAgain(frozenset(), "the results differ")
        if now < self._deadline:
            return None
        unprepared = {peer for peer, invitee in members.items() if invitee.prepared is None} - {self._own}
        return TryAgain(frozenset(unprepared) if len(unprepared) < len(members) - 1 else frozenset(), "it is too slow")


def credible_accusers(accusations: dict[PeerId, frozenset[PeerId]]) -> dict[PeerId, set[PeerId]]:
    """Maps accused peers to their accusers. An accused peer that accuses all others is no accuser, if others are."""
    accused = frozenset[PeerId]().union(*accusations.values())
    sweeping = {peer for peer, named in accusations.items() if peer in accused and len(named) == len(accusations) - 1}
    credible = {peer: named for peer, named in accusations.items() if peer not in sweeping}
    return _by_accused(credible) or _by_accused(accusations)


def _by_accused(accusations: dict[PeerId, frozenset[PeerId]]) -> dict[PeerId, set[PeerId]]:
    accusers: defaultdict[PeerId, set[PeerId]] = defaultdict(set)
    for peer, accused in accusations.items():
        for named in accused:
            accusers[named].add(peer)
    return accusers
