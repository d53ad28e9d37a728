"""One machine, told by hand what befalls it: what it refuses, what it keeps, what it says."""

from dataclasses import replace

import pytest

from swarm.averaging import round_events as events
from swarm.averaging.leader import credible_accusers
from swarm.averaging.roster import make_roster
from swarm.averaging.round_events import Action, RoundRules, SendMessage, SnapshotTaken, Tick, Worked
from swarm.averaging.round_machine import RoundMachine
from swarm.vocabulary import averaging_messages as messages
from swarm.vocabulary.averaging_messages import (
    Declined,
    DeclineReason,
    Entry,
    Invitation,
    Prepared,
    RoundId,
    SignedRoster,
)
from swarm.vocabulary.types import MAX_ROUND, AnchorVersion, Codec, ModuleId, PeerId
from tests.swarm.averaging.round_world import VirtualSigner

MODULE = ModuleId(1)
RULES = RoundRules(inner_steps=10, fragments=1, chunks=8, longest_s=60.0)
US, B, C, D, STRANGER = (PeerId(name) for name in ("us", "b", "c", "d", "stranger"))
BASE = AnchorVersion(4, 40, 4000, 0, b"base")
RESULT = AnchorVersion(5, 50, 4300, 0, b"result")
ATTEMPT = RoundId(MODULE, 5, 0, B)
SIGNER = VirtualSigner()


class Desk:
    """A machine with three others on its anchor, at a clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.machine = RoundMachine(US, MODULE, RULES, BASE, SIGNER)
        self.feed(events.ReplicasChanged(tuple(events.OtherReplica(peer, BASE, True) for peer in (B, C, D))))

    def feed(self, event: events.Event) -> list[Action]:
        return self.machine.handle(event, self.now)

    def hear(self, sender: PeerId, message: messages.RoundControl) -> list[Action]:
        return self.feed(events.MessageArrived(sender, message))

    def invited(self, attempt: RoundId, base: AnchorVersion = BASE) -> list[messages.RoundControl]:
        """What its leader hears in answer."""
        return told(self.hear(attempt.convener, Invitation(attempt, base)), attempt.convener)

    def wait(self, seconds: float) -> list[Action]:
        actions: list[Action] = []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            actions += self.feed(Tick())
        return actions

    def enter(self, attempt: RoundId = ATTEMPT) -> list[Action]:
        self.hear(attempt.convener, Invitation(attempt, BASE))
        return self.feed(SnapshotTaken(attempt, 10, 100, 1.0, 1e6))

    def convene(self) -> RoundId:
        self.feed(Worked(2 * RULES.inner_steps, 1000))
        while self.machine.current_attempt is None:
            self.wait(0.1)
        return self.machine.current_attempt

    def prepare(self) -> None:
        self.enter()
        self.hear(B, signed())
        self.feed(events.Staged(ATTEMPT, RESULT))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def entry(attempt: RoundId = ATTEMPT, peer: PeerId = US, steps: int = 10, staged: AnchorVersion | None = None) -> Entry:
    return SIGNER.sign(Entry(peer, attempt, BASE, steps, 10 * steps, 1.0, (), staged))


def signed(attempt: RoundId = ATTEMPT, staged: AnchorVersion | None = None) -> SignedRoster:
    """`staged` is what we had in hand when we entered."""
    return SignedRoster(attempt, BASE, (entry(attempt, B), entry(attempt, C), entry(attempt, staged=staged)))


def roster(attempt: RoundId = ATTEMPT) -> messages.Roster:
    return make_roster(RULES, signed(attempt))


def told(actions: list[Action], to: PeerId) -> list[messages.RoundControl]:
    return [action.message for action in actions if isinstance(action, SendMessage) and action.to == to]


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]


def test_a_round_from_the_members_side(desk: Desk) -> None:
    actions = desk.hear(B, Invitation(ATTEMPT, BASE))
    assert actions == [SendMessage(B, messages.Accepting(ATTEMPT)), events.TakeSnapshot(ATTEMPT, 0)]
    assert desk.feed(SnapshotTaken(ATTEMPT, 10, 100, 1.0, 1e6)) == [SendMessage(B, entry())]
    assert desk.hear(B, signed()) == [events.Exchange(roster())]
    assert desk.feed(events.Staged(ATTEMPT, RESULT)) == [SendMessage(B, Prepared(ATTEMPT, RESULT))]
    actions = desk.hear(B, messages.Commit(ATTEMPT, RESULT, (B, US)))
    assert actions[0] == events.CommitStaged(roster(), RESULT)
    assert desk.machine.version == RESULT
    assert {peer for peer in (B, C, D) if told(actions, peer) == [messages.Progress(MODULE, RESULT, 0, 0)]} == {B, C, D}
    assert desk.machine.current_attempt is None


def test_a_round_from_the_conveners_side_and_for_those_who_missed_a_message(desk: Desk) -> None:
    actions = desk.feed(Worked(2 * RULES.inner_steps, 1000))
    while desk.machine.current_attempt is None:
        actions = desk.wait(0.1)
    invitations = [a for a in actions if isinstance(a, SendMessage) and isinstance(a.message, Invitation)]
    attempt = desk.machine.current_attempt
    assert attempt == RoundId(MODULE, 5, 0, US)
    assert {invitation.to for invitation in invitations} == {B, C, D}
    desk.hear(B, messages.Accepting(attempt))
    actions = (
        desk.feed(SnapshotTaken(attempt, 20, 1000, 1.0, 1e6))
        + desk.hear(B, entry(attempt, B))
        + desk.hear(C, entry(attempt, C))
    )
    actions += desk.hear(D, Declined(attempt, DeclineReason.BROKEN, BASE))
    (sent,) = [message for message in told(actions, B) if isinstance(message, SignedRoster)]
    assert {entered.peer for entered in sent.entries} == {US, B, C}
    assert told(desk.hear(B, entry(attempt, B)), B) == [sent], "it has missed the roster"
    made = make_roster(RULES, sent)
    result = AnchorVersion(5, made.steps, made.tokens, 0, b"result")
    assert told(desk.feed(events.Staged(attempt, result)), B) == []
    actions = desk.hear(C, Prepared(attempt, result))
    commit = messages.Commit(attempt, result, (C, US))
    assert [commit in told(actions, peer) for peer in (B, C, D)] == [True, True, True]
    assert events.CommitStaged in kinds(actions)
    assert told(desk.hear(B, Prepared(attempt, result)), B) == [commit], "it has missed the commit"


def test_a_convener_for_which_all_have_waited_goes_on_at_once(desk: Desk) -> None:
    attempt = desk.convene()
    for peer in (B, C, D):
        assert desk.hear(peer, entry(attempt, peer)) == []
    actions = desk.feed(SnapshotTaken(attempt, 20, 1000, 1.0, 1e6))
    (sent,) = [message for message in told(actions, B) if isinstance(message, SignedRoster)]
    made = make_roster(RULES, sent)
    assert events.Exchange(made) in actions
    result = AnchorVersion(5, made.steps, made.tokens, 0, b"result")
    for peer in (B, C):
        assert desk.hear(peer, Prepared(attempt, result)) == []
    assert events.CommitStaged in kinds(desk.feed(events.Staged(attempt, result)))


def long_entry(attempt: RoundId, peer: PeerId, steps: int) -> Entry:
    return SIGNER.sign(replace(entry(attempt, peer, steps), norm=1000.0 if steps else 0.0))


def test_a_mean_that_only_a_far_too_long_update_makes_is_neither_followed_nor_led() -> None:
    idle = SnapshotTaken(ATTEMPT, 0, 0, 0.0, 1e6, longest=8.0)
    desk = Desk()
    desk.hear(B, Invitation(ATTEMPT, BASE))
    desk.feed(idle)
    ours = SIGNER.sign(Entry(US, ATTEMPT, BASE, 0, 0, 0.0, (), None))
    actions = desk.hear(B, SignedRoster(ATTEMPT, BASE, (long_entry(ATTEMPT, B, 10), ours)))
    assert [message.reason for message in told(actions, B)] == [DeclineReason.NOT_READY]
    assert events.Caught not in kinds(actions), "the leader may have been deceived"

    desk = Desk()
    attempt = desk.convene()
    for peer, steps in ((B, 10), (C, 0), (D, 0)):
        desk.hear(peer, long_entry(attempt, peer, steps))
    actions = desk.feed(replace(idle, round=attempt))
    assert [type(message) for message in told(actions, C)] == [messages.Dissolved], "without that update there is none"


def test_a_leader_that_is_always_early_or_always_gives_up_is_not_followed(desk: Desk) -> None:
    for number in range(5, 9):  # rounds every ten seconds
        desk.wait(10.0)
        attempt = RoundId(MODULE, number, 0, B)
        base = desk.machine.version
        desk.hear(B, Invitation(attempt, base))
        desk.feed(SnapshotTaken(attempt, 10, 100, 1.0, 1e6))
        entries = tuple(SIGNER.sign(replace(entry(attempt, peer), base=base)) for peer in (B, C, US))
        made = make_roster(RULES, SignedRoster(attempt, base, entries))
        desk.hear(B, SignedRoster(attempt, base, entries))
        result = AnchorVersion(number, made.steps, made.tokens, 0, b"%d" % number)
        desk.feed(events.Staged(attempt, result))
        desk.hear(B, messages.Commit(attempt, result, (B, US)))
        assert desk.machine.version == result
    now, attempt = desk.machine.version, RoundId(MODULE, 9, 0, B)
    desk.wait(1.0)
    assert desk.invited(attempt, now)[0] == Declined(attempt, DeclineReason.NOT_READY, now)
    desk.wait(5.0)
    for number in (0, 1):
        attempt = replace(attempt, attempt=number)
        assert messages.Accepting(attempt) in desk.invited(attempt, now)
        desk.hear(B, messages.Dissolved(attempt, "no"))
    attempt = replace(attempt, attempt=2)
    assert desk.invited(attempt, now) == [Declined(attempt, DeclineReason.OTHER_CONVENER, now)]


@pytest.mark.parametrize(
    ("sender", "attempt"),
    [
        (STRANGER, replace(ATTEMPT, convener=STRANGER)),
        (C, ATTEMPT),
        (B, replace(ATTEMPT, number=2**40)),
        (B, replace(ATTEMPT, attempt=64)),
        (B, replace(ATTEMPT, module=ModuleId(2))),
    ],
)
def test_invitations_that_cannot_be_meant_are_not_answered(sender: PeerId, attempt: RoundId) -> None:
    assert Desk().hear(sender, Invitation(attempt, BASE)) == []


def test_who_stands_elsewhere_or_is_late_is_told_so(desk: Desk) -> None:
    other = replace(BASE, digest=b"other")
    assert desk.invited(ATTEMPT, other) == [Declined(ATTEMPT, DeclineReason.OTHER_ANCHOR, BASE)]
    old = replace(ATTEMPT, number=4, convener=C)
    assert desk.invited(old)[0] == Declined(old, DeclineReason.PAST, BASE)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(signed(), entries=signed().entries[:2]),
        replace(signed(), entries=(*signed().entries[:2], replace(entry(), norm=2.0))),
        replace(signed(), entries=(*signed().entries[:2], entry(steps=11))),
        replace(signed(), entries=(entry(peer=B), replace(entry(peer=C), tokens=1), entry())),
        replace(signed(), entries=(entry(peer=B), entry(replace(ATTEMPT, number=4), C), entry())),
        replace(signed(), codec=Codec.INT8),
    ],
)
def test_a_lying_convener_is_refused_and_not_followed_again_at_this_round(desk: Desk, wrong: SignedRoster) -> None:
    desk.enter()
    actions = desk.hear(B, wrong)
    assert events.Exchange not in kinds(actions)
    assert told(actions, B) == [Declined(ATTEMPT, DeclineReason.NOT_READY, BASE)]
    assert desk.machine.current_attempt is None
    again = replace(ATTEMPT, attempt=1)
    assert desk.invited(again) == [Declined(again, DeclineReason.OTHER_CONVENER, BASE)]
    by_another = replace(again, convener=C)
    assert desk.invited(by_another) == [messages.Accepting(by_another)]


def test_a_convener_takes_no_entry_that_another_has_signed_or_nobody(desk: Desk) -> None:
    attempt = desk.convene()
    for peer, false in ((B, entry(attempt, C)), (C, replace(entry(attempt, C), tokens=7)), (D, entry(ATTEMPT, D))):
        answers = told(desk.hear(peer, replace(false, round=attempt)), peer)
        assert [type(answer) for answer in answers] == [messages.Dissolved]
    actions = desk.feed(SnapshotTaken(attempt, 20, 1000, 1.0, 1e6))
    (alone,) = [action.roster for action in actions if isinstance(action, events.Exchange)]
    assert alone.peers == (US,)


@pytest.mark.parametrize("tallies", [True, False])
def test_a_leader_whose_roster_is_refused_goes_on_alone_only_with_tallies(desk: Desk, tallies: bool) -> None:
    tally = messages.WorkTally(D, MODULE, 1, 0.0, 30.0, (messages.WorkRow(US, 1, 100, 100),))
    desk.feed(events.ReplicasChanged((events.OtherReplica(B, BASE, True),), (tally,) if tallies else ()))
    attempt = desk.convene()
    desk.feed(SnapshotTaken(attempt, 20, 1000, 1.0, 1e6))
    desk.hear(B, entry(attempt, B))
    desk.wait(0.1)
    desk.hear(B, Declined(attempt, DeclineReason.NOT_READY, BASE))
    desk.wait(0.1)
    assert (desk.machine.current_attempt is not None) is tallies


@pytest.mark.parametrize(("accusers", "goes_on"), [((B,), True), ((B, C), False)])
def test_a_leader_whom_few_members_hear_gives_up(desk: Desk, accusers: tuple[PeerId, ...], goes_on: bool) -> None:
    attempt = desk.convene()
    desk.feed(SnapshotTaken(attempt, 20, 1000, 1.0, 1e6))
    for peer in (B, C, D):
        desk.hear(peer, entry(attempt, peer))
    for _ in range(4):
        for peer in (B, C, D):
            desk.hear(peer, messages.Pulse(attempt, (US,) if peer in accusers else ()))
        desk.wait(RULES.pulse_s)
    assert desk.machine.current_attempt == (replace(attempt, attempt=1) if goes_on else None)


def test_of_two_the_one_that_declares_next_to_nothing_has_no_say(desk: Desk) -> None:
    """The lower median of two norms is the smaller: ours would be clipped to it."""
    desk.feed(events.ReplicasChanged((events.OtherReplica(B, BASE, True),)))
    desk.enter()
    tiny = SIGNER.sign(replace(entry(peer=B), norm=1e-30))
    actions = desk.hear(B, SignedRoster(ATTEMPT, BASE, (tiny, entry())))
    assert told(actions, B) == [Declined(ATTEMPT, DeclineReason.NOT_READY, BASE)]
    attempt = desk.convene()
    desk.hear(B, SIGNER.sign(replace(tiny, round=attempt)))
    actions = desk.feed(SnapshotTaken(attempt, 20, 1000, 1.0, 1e6)) + desk.wait(0.1)
    (alone,) = [action.roster for action in actions if isinstance(action, events.Exchange)]
    assert alone.peers == (US,)


def test_a_convener_that_is_heard_and_brings_nothing_to_an_end_is_left(desk: Desk) -> None:
    desk.prepare()
    for _ in range(2000):
        if Declined(ATTEMPT, DeclineReason.NOT_READY, BASE) in told(desk.wait(0.5), B):
            break
        desk.hear(B, messages.Pulse(ATTEMPT))
    assert desk.machine.current_attempt is None
    again = replace(ATTEMPT, attempt=1)
    assert desk.invited(again) == [Declined(again, DeclineReason.OTHER_CONVENER, BASE)]


def test_a_commit_of_what_we_do_not_have_moves_nobody_before_the_others_stand_there(desk: Desk) -> None:
    desk.enter()
    lie = replace(RESULT, digest=b"lie", tokens=2**47)
    actions = desk.hear(B, messages.Commit(ATTEMPT, lie, (B, C, D)))
    actions += desk.wait(1.0)
    assert events.CatchUp not in kinds(actions)
    assert desk.machine.version == BASE
    actions = desk.hear(C, messages.Progress(MODULE, lie, 0, 0)) + desk.hear(D, messages.Progress(MODULE, lie, 0, 0))
    assert events.CatchUp in kinds(actions), "three say it of themselves"


def test_a_process_that_is_held_up_does_not_take_its_convener_for_silent(desk: Desk) -> None:
    desk.enter()
    desk.hear(B, signed())
    for _ in range(8):
        desk.now += 1.9
        desk.feed(Tick())
    assert desk.machine.current_attempt == ATTEMPT


def test_neither_a_leader_nor_members_behind_pieces_on_a_slow_link_are_silent(desk: Desk) -> None:
    desk.enter()
    desk.hear(B, signed())
    desk.wait(RULES.silence_s + RULES.piece_s(1e6) - 0.5)
    assert desk.machine.current_attempt == ATTEMPT
    while desk.machine.current_attempt == ATTEMPT:
        desk.wait(0.1)
    desk.feed(SnapshotTaken(replace(ATTEMPT, attempt=1, convener=US), 20, 1000, 1.0, 1e6))
    assert events.Exchange not in kinds(desk.wait(RULES.answer_s + RULES.piece_s(1e6) - 0.5)), "of us alone"
    assert events.Exchange in kinds(desk.wait(1.0))


def test_rejected_pieces_are_told_with_who_sent_them_and_a_repeated_offender_is_heard_no_more(desk: Desk) -> None:
    desk.enter()
    desk.hear(B, signed())
    actions = desk.feed(events.PieceRejected(ATTEMPT, C, "not finite"))
    assert (told(actions, B), accused(actions)) == ([messages.Pulse(ATTEMPT, (), (C,))], [C])
    desk.feed(events.PieceRejected(ATTEMPT, C, "not finite"))
    desk.hear(B, messages.Dissolved(ATTEMPT, "it ends"))
    assert accused(desk.feed(events.PieceRejected(ATTEMPT, D, "not finite"))) == [D], "even after the attempt"
    desk.wait(4.0)
    assert desk.hear(C, Invitation(RoundId(MODULE, 5, 2, C), BASE)) == []


def accused(actions: list[Action]) -> list[PeerId]:
    return [action.peer for action in actions if isinstance(action, events.Caught)]


def test_a_convener_whose_roster_has_an_entry_that_nobody_signed_is_named(desk: Desk) -> None:
    desk.enter()
    forged = replace(signed(), entries=(entry(peer=B), replace(entry(peer=C), tokens=7), entry()))
    assert accused(desk.hear(B, forged)) == [B]


@pytest.mark.parametrize("what", ["not signed", "somebody else's", "impossible", "of another anchor by now"])
def test_a_guest_whose_entry_is_forged_is_named_and_one_that_has_moved_is_not(desk: Desk, what: str) -> None:
    attempt = desk.convene()
    forged = {
        "not signed": replace(entry(attempt, C), tokens=7),
        "somebody else's": entry(attempt, B),
        "impossible": SIGNER.sign(replace(entry(attempt, C), steps=-1)),
        "of another anchor by now": SIGNER.sign(replace(entry(attempt, C), base=RESULT)),
    }[what]
    assert accused(actions := desk.hear(C, forged)) == ([] if what == "of another anchor by now" else [C])
    assert any(isinstance(said, messages.Dissolved) for said in told(actions, C))


@pytest.mark.parametrize(
    ("waiting", "believed"),
    [
        # A liar among four, of which one has not lost its patience yet: that one seems to hear everybody.
        ({US: {D}, B: {D}, C: set(), D: {US, B, C}}, {D: {US, B}}),
        # One that waits for all is believed if nobody accuses it, or if all accuse all.
        ({US: set(), B: {US, C}, C: set()}, {US: {B}, C: {B}}),
        ({US: {B, C}, B: {US, C}, C: {US, B}}, {US: {B, C}, B: {US, C}, C: {US, B}}),
        # One that cannot reach a reducer is accused by it; the others only pass on what that reducer waits for.
        ({US: {C}, B: {C}, C: {D}, D: set()}, {C: {US, B}, D: {C}}),
    ],
)
def test_who_accuses_all_is_ignored(waiting: dict[PeerId, set[PeerId]], believed: dict[PeerId, set[PeerId]]) -> None:
    assert credible_accusers({peer: frozenset(named) for peer, named in waiting.items()}) == believed


def test_a_broken_update_is_declined(desk: Desk) -> None:
    desk.hear(B, Invitation(ATTEMPT, BASE))
    actions = desk.feed(events.SnapshotBroken(ATTEMPT))
    assert told(actions, B) == [Declined(ATTEMPT, DeclineReason.BROKEN, BASE)]
    assert kinds(actions) == [SendMessage, events.Release]


def test_a_version_that_cannot_be_had_is_tried_again_later(desk: Desk) -> None:
    for peer in (B, C, D):
        actions = desk.hear(peer, messages.Progress(MODULE, RESULT, 0, 0))
    assert desk.machine.describe() == "round 4, catching up to round 5"
    actions = desk.feed(events.CatchUpFailed(RESULT, "nobody has it"))
    actions += desk.wait(4.0)
    assert events.CatchUp not in kinds(actions)
    assert events.CatchUp in kinds(desk.wait(4.0))


IMPLAUSIBLE = AnchorVersion(6, 60, 60_000, 0, b"a" * 32)


def four_alone() -> tuple[Desk, list[Action]]:
    """B and C have each gone on by themselves, and D twice as far; what follows of that."""
    desk = Desk()
    near = [(peer, replace(RESULT, digest=digest * 32)) for peer, digest in ((B, b"b"), (C, b"c"))]
    for peer, version in (*near, (D, IMPLAUSIBLE)):
        desk.hear(peer, messages.Progress(MODULE, version, 0, 0))
    return desk, desk.wait(4.0)


def test_who_stands_farther_away_than_can_be_is_not_followed_nor_invited_whatever_it_stands_on_next() -> None:
    desk, actions = four_alone()
    wanted = [(action.version, action.by_most) for action in actions if isinstance(action, events.CatchUp)]
    assert wanted == [(IMPLAUSIBLE, False)]
    desk.feed(events.CatchUpFailed(IMPLAUSIBLE, "too far", (D,)))
    desk.hear(D, messages.Progress(MODULE, replace(IMPLAUSIBLE, round=7, digest=b"d" * 32), 0, 0))
    caught_up = [action for action in desk.wait(4.0) if isinstance(action, events.CatchUp)]
    assert [action.donors for action in caught_up] == [(C,)], "the next in order of those that are trusted"
    desk.feed(events.CaughtUp(caught_up[0].version))
    desk.hear(B, messages.Progress(MODULE, caught_up[0].version, 0, 0))
    desk.feed(Worked(1000, 1000))
    sent = [action for action in desk.wait(4.0) if isinstance(action, SendMessage)]
    assert {each.to for each in sent if isinstance(each.message, Invitation)} == {B, C}


def test_where_most_stand_who_is_distrusted_is_followed_too() -> None:
    desk, _ = four_alone()
    desk.feed(events.CatchUpFailed(IMPLAUSIBLE, "too far", (D,)))
    for peer in (B, C, D):
        desk.hear(peer, messages.Progress(MODULE, replace(IMPLAUSIBLE, round=8, digest=b"e" * 32), 0, 0))
    desk.wait(4.0)
    actions = desk.feed(events.CaughtUp(replace(RESULT, digest=b"c" * 32)))
    caught_up = [action for action in actions if isinstance(action, events.CatchUp)]
    assert [(action.donors, action.by_most) for action in caught_up] == [((B, C, D), True)]
    assert desk.machine.is_behind, "a node that leaves waits for the download"
    desk.feed(events.CaughtUp(caught_up[0].version))
    assert not desk.machine.is_behind


def test_it_says_where_it_stands(desk: Desk) -> None:
    assert desk.machine.settled
    assert "all 4 replicas have our anchor" in desk.machine.describe()
    desk.enter()
    assert desk.machine.describe() == "round 4; round 5 attempt 0, b leads: waits for the roster"


def test_who_stands_on_the_last_number_there_is_opens_no_round_and_does_not_hang() -> None:
    last = replace(BASE, round=MAX_ROUND)
    machine = RoundMachine(US, MODULE, RULES, last, SIGNER)
    machine.handle(events.ReplicasChanged((events.OtherReplica(B, last, True),)), 0.0)
    actions = machine.handle(Worked(10 * RULES.inner_steps, 1000), 0.1) + machine.handle(Tick(), 0.2)
    assert not any(isinstance(action, SendMessage) and isinstance(action.message, Invitation) for action in actions)


def test_one_that_claims_weeks_of_rounds_does_not_end_those_of_others(desk: Desk) -> None:
    """It says that each of them is over; whoever stands alone on an anchor goes on."""
    far, start = AnchorVersion(50_000, 500_000, 2**40, 0, b"far"), AnchorVersion(0, 0, 0, 0, b"start")
    desk.feed(events.ReplicasChanged((events.OtherReplica(B, far, True), events.OtherReplica(C, start, True))))
    actions = desk.feed(Worked(2 * RULES.inner_steps, 1000)) + desk.wait(1.0)
    attempt = next(action.round for action in actions if isinstance(action, events.TakeSnapshot))
    desk.feed(SnapshotTaken(attempt, 10, 100, 1.0, 1e6))
    desk.hear(B, Declined(attempt, DeclineReason.PAST, far))
    actions = desk.hear(C, Declined(attempt, DeclineReason.OTHER_ANCHOR, start))
    actions += desk.wait(RULES.answer_s + RULES.piece_s(0.0) + 1)
    assert events.Exchange in kinds(actions)


def test_members_commit_what_most_of_them_have_when_their_convener_does_not(desk: Desk) -> None:
    """It is heard all the while, so nobody takes it for dead."""
    desk.prepare()
    for _ in range(6):
        actions = desk.wait(RULES.pulse_s) + desk.hear(B, messages.Pulse(ATTEMPT))
    assert Prepared(ATTEMPT, RESULT) in told(actions, C)
    assert events.CommitStaged not in kinds(desk.hear(D, Prepared(ATTEMPT, RESULT))), "it has no part in this round"
    assert events.CommitStaged not in kinds(desk.hear(C, Prepared(ATTEMPT, replace(RESULT, digest=b"other"))))
    actions = desk.hear(C, Prepared(ATTEMPT, RESULT))
    assert events.CommitStaged(roster(), RESULT) in actions
    assert told(actions, C)[0] == messages.Commit(ATTEMPT, RESULT, tuple(sorted((US, C))))
    assert desk.machine.version == RESULT


def test_members_leave_it_to_a_convener_that_has_had_no_time(desk: Desk) -> None:
    desk.prepare()
    assert events.CommitStaged not in kinds(desk.hear(C, Prepared(ATTEMPT, RESULT)))
    assert told(desk.wait(RULES.pulse_s), C) == []
