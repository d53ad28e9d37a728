"""What a peer knows of the others, and whom it keeps links to."""

from dataclasses import replace

import pytest

from swarm.membership import membership as module_under_test
from swarm.membership.membership import (
    ENOUGH,
    FAR_EVERY_S,
    FIRST_PAUSE_S,
    HARM_PAUSE_S,
    KEPT_S,
    RESTART_S,
    REUSE_S,
    WIDE_AFTER_S,
    LookUps,
    Membership,
    by_worth,
    what_changed,
)
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId, PeerState, RunId, VersionRange
from tests.swarm.membership.announcements import RUN, announcement

OWN, A = PeerId("own"), PeerId("a")


@pytest.fixture
def members() -> Membership:
    return Membership(RUN, OWN)


def is_asked(members: Membership, now: float, stage: int = 1) -> list[PeerId]:
    return [a.peer for a in members.replicas(ModuleId(stage), now)]


def test_newer_announcements_replace_older_ones_and_replays_change_nothing(members: Membership) -> None:
    assert members.observe(announcement("a", sequence=5, speed=5.0), now=0, wall=0)
    assert members.observe(announcement("a", sequence=6, speed=6.0), now=0, wall=0)
    for replayed in (5, 6):
        assert not members.observe(announcement("a", sequence=replayed, speed=9.0, expires_at=2e9), now=0, wall=0)
    assert members.get(A).tokens_per_second == 6.0


def test_replicas_with_a_state_are_those_that_tell_of_one_and_can_be_reached(members: Membership) -> None:
    anchor = AnchorVersion(3, 10, 100, 0, bytes(32))
    states = {"serving": PeerState.SERVING, "draining": PeerState.DRAINING, "joining": PeerState.JOINING}
    for peer, state in states.items():
        members.observe(replace(announcement(peer, state=state), anchor=anchor), now=0, wall=0)
    members.observe(replace(announcement("elsewhere", 2), anchor=anchor), now=0, wall=0)
    members.observe(announcement("without"), now=0, wall=0)
    assert [known.peer for known in members.with_state(ModuleId(1))] == ["serving", "draining"]
    members.give_up(PeerId("serving"), 0)
    assert [known.peer for known in members.with_state(ModuleId(1))] == ["draining"]


def test_what_is_not_for_us_is_ignored(members: Membership) -> None:
    assert not members.observe(announcement("own"), now=0, wall=0)
    assert not members.observe(announcement("a", run=RunId("1" * 64)), now=0, wall=0)
    assert not members.observe(announcement("a", expires_at=50.0), now=0, wall=50.0)
    assert members.peers() == ()


def test_announcements_run_out_by_this_machines_own_clock(members: Membership) -> None:
    members.observe(announcement("a", expires_at=1010.0), now=5.0, wall=1000.0)
    assert (is_asked(members, 14.9), members.expire(14.9)) == ([A], [])
    assert is_asked(members, 15.0) == []
    members.observe(announcement("a", sequence=2, expires_at=1020.0), now=5.0, wall=1000.0)
    assert members.expire(15.0) == [], "renewed"
    assert (members.expire(25.0), members.get(A)) == ([A], None)


def test_a_module_with_an_unlinked_replica_or_none_is_looked_up_each_time(members: Membership) -> None:
    for peer, stage in (("a", 1), ("b", 1), ("c", 2), ("d", None)):
        members.observe(announcement(peer, stage), now=0, wall=0)
    members.recover(PeerId("c"))
    members.recover(A)
    assert members.not_linked([ModuleId(stage) for stage in range(3)]) == [ModuleId(0), ModuleId(1)]


def test_a_module_with_many_links_needs_no_more(members: Membership) -> None:
    for number in range(ENOUGH + 1):
        members.observe(announcement(str(number), 1), now=0, wall=0)
    for number in range(ENOUGH - 1):
        members.recover(PeerId(str(number)))
    module = ModuleId(1)
    assert members.well_linked(ENOUGH) == set()
    members.recover(PeerId(str(ENOUGH)))
    assert members.well_linked(ENOUGH) == {module}
    assert members.not_linked([module]) == [module]
    for number in range(ENOUGH + 1, 16):
        members.observe(announcement(str(number), 1), now=0, wall=0)
        members.recover(PeerId(str(number)))
    assert members.not_linked([module]) == [], "one of sixteen may have no link"


@pytest.mark.parametrize(("fewest", "times"), [(0, 1), (15, 1), (16, 2), (40, 5), (1000, 8)])
def test_far_stages_with_many_replicas_are_looked_up_less_often(fewest: int, times: int) -> None:
    look_ups = LookUps(fewest_far=fewest)
    assert look_ups.looks_far(0.0, whole=False)
    assert not look_ups.looks_far(times * FAR_EVERY_S - 1, whole=False)
    assert look_ups.looks_far(times * FAR_EVERY_S, whole=False)
    assert look_ups.far_kept_s == 2 * times * FAR_EVERY_S


def test_only_those_that_can_take_work_are_asked(members: Membership) -> None:
    for state in PeerState:
        stage = None if state is PeerState.VISITING else 1
        members.observe(announcement(state.name, stage, state=state), now=0, wall=0)
    members.observe(announcement("elsewhere", 2), now=0, wall=0)
    members.observe(announcement("from the future", versions=VersionRange(6, 7)), now=0, wall=0)
    assert is_asked(members, 0) == [PeerId("SERVING")]


def test_after_a_first_failure_it_is_tried_again_soon_and_then_not_before_it_is_heard_of(members: Membership) -> None:
    members.observe(announcement("a", sequence=1), now=0, wall=0)
    members.fail(A, 0.0)
    members.fail(A, 0.5)  # the same outage
    assert is_asked(members, FIRST_PAUSE_S - 0.01) == []
    assert is_asked(members, FIRST_PAUSE_S) == [A]
    assert members.is_served(ModuleId(1), 0.5), "nobody is given up for one link"
    members.fail(A, FIRST_PAUSE_S)
    assert is_asked(members, 59.0) == []
    assert not members.is_served(ModuleId(1), 59.0)
    members.observe(announcement("a", sequence=1), now=59, wall=59)
    assert is_asked(members, 59.0) == [], "an old record says nothing about now"
    members.observe(announcement("a", sequence=59_001), now=59, wall=59)
    assert is_asked(members, 59.0) == [A]


@pytest.mark.parametrize("failures", [1, 2])
def test_what_it_announced_before_it_fell_silent_is_no_sign_of_life(members: Membership, failures: int) -> None:
    """The directory brings news later than a link that breaks."""
    members.observe(announcement("a", sequence=7_000_000), now=10, wall=0)
    members.fail(A, 12.0)
    if failures == 2:
        members.give_up(A, 12.1)
    members.observe(announcement("a", sequence=7_002_000), now=12.2, wall=0)
    assert is_asked(members, 12.2) == []
    members.give_up(A, 12.3)
    members.observe(announcement("a", sequence=7_002_100), now=12.4, wall=0)
    assert is_asked(members, 12.4) == [], "not another one either"
    members.observe(announcement("a", sequence=7_002_301), now=12.5, wall=0)
    assert is_asked(members, 12.5) == [A]


def test_who_announces_but_never_answers_is_tried_less_and_less(members: Membership) -> None:
    members.observe(announcement("a", sequence=1), now=0, wall=0)
    now, pauses = 0.0, []
    members.fail(A, now)
    for later in range(2, 12):
        now += FIRST_PAUSE_S
        members.fail(A, now)
        members.observe(announcement("a", sequence=int(now * 1000) + later), now=now, wall=0)
        tried = (0, 1, 2, 4, 8, 16, 32, REUSE_S.longest_s)
        pauses.append(next(pause for pause in tried if not members.is_suspect(A, now + pause)))
        now += pauses[-1]
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    members.recover(A)
    members.fail(A, now)
    assert is_asked(members, now + FIRST_PAUSE_S) == [A], "a link that stood ends the count"


def test_who_does_harm_is_left_out_longer_each_time_unless_there_is_nobody_else(members: Membership) -> None:
    members.observe(announcement("a", sequence=1), now=0, wall=0)
    assert members.leave_out(A, 0.0) == 60.0
    assert is_asked(members, 0.0) == [A]
    members.observe(announcement("b", sequence=1), now=0, wall=0)
    members.observe(announcement("a", sequence=2), now=0, wall=0)
    members.recover(A)
    assert is_asked(members, 59.0) == [PeerId("b")], "being heard excuses nothing"
    assert is_asked(members, 60.0) == [A, PeerId("b")]
    assert [members.leave_out(A, 1e6 * n) for n in range(1, 8)] == [120, 240, 480, 960, 1920, 3600, 3600]
    assert HARM_PAUSE_S.longest_s == 3600


def test_who_holds_a_microbatch_up_gets_none_until_it_passes_one_on_or_a_moment_later(members: Membership) -> None:
    for name in "ab":
        members.observe(announcement(name, sequence=1), now=0, wall=0)
    members.stalled(A, 5.0)
    assert (is_asked(members, 5.9), is_asked(members, 6.0)) == ([PeerId("b")], [A, PeerId("b")])
    members.stalled(A, 6.0)
    assert is_asked(members, 7.9) == [PeerId("b")], "longer each time"
    members.stalled(PeerId("b"), 7.9)
    assert is_asked(members, 7.9) == [A, PeerId("b")], "there is nobody else"
    members.moved(A)
    assert is_asked(members, 7.9) == [A]


def test_a_link_keeps_its_peer_alive_and_its_end_begins_the_expiry(members: Membership) -> None:
    members.observe(announcement("A", expires_at=60.0), now=0.0, wall=0.0)
    members.recover(PeerId("A"))
    assert members.expire(1e6) == []
    assert members.is_served(ModuleId(1), 1e6)
    members.fail(PeerId("A"), 1e6)
    assert members.expire(1e6 + KEPT_S - 1) == []
    members.fail(PeerId("A"), 1e6 + KEPT_S - 1)
    assert members.expire(1e6 + KEPT_S) == [PeerId("A")]


def test_who_answers_is_used_again_though_it_announces_nothing_new(members: Membership) -> None:
    members.observe(announcement("A"), now=0.0, wall=0.0)
    for now, pause_s in ((10.0, 0.0), (20.0, 0.0), (30.0, REUSE_S.seconds(3)), (40.0, REUSE_S.seconds(4))):
        members.fail(PeerId("A"), now)
        members.give_up(PeerId("A"), now)
        members.answered(PeerId("A"), now + 1)
        assert members.is_suspect(PeerId("A"), now + 1 + pause_s / 2) == (pause_s > 0)
        assert not members.is_suspect(PeerId("A"), now + 1 + pause_s)


def pauses(look_ups: LookUps, now: float, until: float, *missing: int, alone: bool = False) -> tuple[list[float], int]:
    """The pauses between these times, and how many look-ups were wide."""
    found, wide = list[float](), 0
    while now < until:
        wide += look_ups.begin(now).value
        found.append(look_ups.pause(frozenset(map(ModuleId, missing)), now, 0.5, alone=alone).value)
        now += found[-1]
    return found, wide


def test_look_ups_back_off_while_nothing_changes_and_start_over_when_a_module_is_lost() -> None:
    look_ups = LookUps()
    calm = ([0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0], 1)
    for begin, missing in ((0.0, []), (200.0, [2]), (400.0, [])):
        assert pauses(look_ups, begin, begin + 120.0, *missing) == calm
    assert pauses(look_ups, 600.0, 7800.0)[1] == pytest.approx(7200.0 / 480.0, abs=1.0), "of 240"
    assert max(pauses(LookUps(), 0.0, 600.0, alone=True)[0]) == 4.0
    assert LookUps().pause(frozenset(), 0.0, 0.0, alone=False).value == 0.375


def test_a_peer_that_comes_and_goes_makes_nobody_look_up_all_the_time() -> None:
    look_ups, now, count, wide = LookUps(), 0.0, 0, 0
    while now < 600.0:
        wide += look_ups.begin(now).value
        now += look_ups.pause(frozenset(map(ModuleId, range(count % 2))), now, 0.5, alone=False).value
        count += 1
    assert count < 600 / RESTART_S * 6
    assert wide <= 600 / WIDE_AFTER_S + 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sequence": 9, "expires_at": 2e9, "tokens_per_second": 1090.0, "free_slots": 7}, ""),
        ({"tokens_per_second": 890.0}, "tokens_per_second"),
        ({"free_slots": 6}, "free_slots"),
        ({"state": PeerState.DRAINING, "sequence": 9}, "state"),
    ],
)
def test_a_record_is_sent_when_something_in_it_changed(changes: dict[str, object], field: str) -> None:
    before = announcement("A")
    assert what_changed(before, replace(before, **changes)) == field
    assert what_changed(None, before)


def test_strangers_may_fail_and_leave(members: Membership) -> None:
    members.fail(A, 0.0)
    members.recover(A)
    members.forget(A)
    assert not members.is_suspect(A, 0.0)
    members.observe(announcement("a"), now=0, wall=0)
    members.forget(A)
    assert members.peers() == ()


def test_the_view_is_bounded_and_visitors_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "MAX_PEERS", 3)
    members = Membership(RUN, OWN)
    members.observe(announcement("short", expires_at=10.0), now=0, wall=0)
    members.observe(announcement("visitor", None, state=PeerState.VISITING), now=0, wall=0)
    members.observe(announcement("long"), now=0, wall=0)
    members.observe(announcement("a", expires_at=20.0), now=0, wall=0)
    assert {a.peer for a in members.peers()} == {"short", "long", "a"}
    members.observe(announcement("b"), now=0, wall=0)
    assert {a.peer for a in members.peers()} == {"long", "a", "b"}


@pytest.mark.parametrize("visiting", [False, True])
def test_a_flood_pushes_out_none_of_those_that_stay(monkeypatch: pytest.MonkeyPatch, visiting: bool) -> None:
    monkeypatch.setattr(module_under_test, "MAX_PEERS", 4)
    members = Membership(RUN, OWN)
    lasting = {f"lasting{n}" for n in range(4)}
    for peer in lasting:
        members.observe(announcement(peer, expires_at=100.0), now=0, wall=0)
    for n in range(20):
        flood = (
            announcement(f"flood{n}", None, state=PeerState.VISITING)
            if visiting
            else announcement(f"flood{n}", expires_at=1.0)
        )
        assert not members.observe(flood, now=0, wall=0)
    assert {a.peer for a in members.peers()} == lasting


def test_who_counts_from_less_after_a_restart_is_news_once_the_old_record_has_run_out(members: Membership) -> None:
    """It began with a clock far ahead, and has been started again with the right one."""
    members.observe(announcement("a", sequence=9_000_000, expires_at=60.0), now=0, wall=0)
    members.give_up(PeerId("a"), now=1)
    assert not members.observe(announcement("a", sequence=1_000, expires_at=119.0), now=59, wall=59)
    assert members.observe(announcement("a", sequence=1_001, expires_at=120.0), now=60, wall=60)
    assert not members.is_given_up(PeerId("a"))


def dialable(peer: str, stage: int | None = 1, state: PeerState = PeerState.SERVING) -> Announcement:
    return replace(announcement(peer, stage, state=state), addresses=("25.0.0.1:4000",))


def test_neighbours_and_replicas_come_before_others() -> None:
    everybody = [dialable(f"{stage}", stage) for stage in range(6)]
    assert set(by_worth(OWN, ModuleId(2), everybody, ())[:3]) == {"1", "2", "3"}
    assert set(by_worth(OWN, ModuleId(5), everybody, ())[:3]) == {"4", "5", "0"}, (
        "the data node gets the last stage's output"
    )
    assert set(by_worth(OWN, ModuleId(0), everybody, ())[:3]) == {"5", "0", "1"}
    assert len(by_worth(OWN, None, everybody, ())) == 6, "a visitor takes anybody"


def test_another_expert_is_no_replica_and_our_stage_may_be_the_last_though_no_other_peer_serves_it() -> None:
    other = replace(dialable("other", 2), module=ModuleId(2, 1))
    assert by_worth(OWN, ModuleId(2), [other, dialable("far", 4), dialable("next", 3)], ())[0] == "next"
    assert by_worth(OWN, ModuleId(3), [dialable("a", 1), dialable("d", 0)], ()) == ["d", "a"]


def test_who_is_held_on_to_stays_before_its_equals_among_which_many_peers_spread() -> None:
    equals = [dialable(f"p{n}", 5) for n in range(9)]
    last = by_worth(OWN, ModuleId(1), equals, ())[-1]
    assert by_worth(OWN, ModuleId(1), equals, (last,))[0] == last
    assert by_worth(OWN, ModuleId(1), [*equals, dialable("near", 2)], (last,))[:2] == ["near", last]
    equals = [dialable(f"p{n}", 1) for n in range(10)]
    assert len({by_worth(PeerId(f"own{n}"), ModuleId(1), equals, ())[0] for n in range(60)}) > 5


def test_only_who_can_be_dialled_and_stays_is_of_use() -> None:
    useless = [
        announcement("no-address", 1),
        replace(announcement("called", 1), via=(PeerId("p"),)),
        dialable("leaves", 1, PeerState.DRAINING),
        dialable("visits", None, PeerState.VISITING),
        dialable(OWN, 1),
    ]
    assert by_worth(OWN, ModuleId(1), useless, ()) == []
    assert by_worth(OWN, ModuleId(1), [dialable("joins", 1, PeerState.JOINING)], ()) == ["joins"]
