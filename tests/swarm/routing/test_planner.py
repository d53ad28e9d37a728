from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from swarm.membership.membership import Membership
from swarm.routing.cost_model import Costs
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.path_rules import PathRules
from swarm.routing.planner import TRY_EVERY, NoReplica, Planner, hop_to_try, in_flight_by_peer, visited_stages
from swarm.routing.stage_balance import Lanes
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import Hop, ModuleId, Path, PeerId
from tests.swarm.membership.announcements import RUN, announcement

NOW = 0.0
OWN, FAST, SLOW, LIAR = PeerId("own"), PeerId("fast"), PeerId("slow"), PeerId("liar")
TOKENS = 1000
ONE_STAGE = PathRules(stages=2, per_path=1)


def planner_with(*announcements: Announcement, rules: PathRules = ONE_STAGE) -> tuple[Planner, MeasuredTimes]:
    members, times = Membership(RUN, OWN), MeasuredTimes(OWN, TOKENS)
    for one in announcements:
        members.observe(one, now=0, wall=0)
    return Planner(rules, members, times), times


def chosen(planner: Planner, in_flight: dict[PeerId, int] | None = None) -> PeerId | None:
    return planner.replica(ModuleId(1), frozenset(), in_flight or {}, 0.0).value


# ---- which stages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "per_path"), [(2, 1), (5, 4), (5, 3), (5, 2), (5, 1), (8, 5), (9, 6), (13, 7), (4, 0)]
)
def test_every_stage_is_visited_equally_often_over_any_window(stages: int, per_path: int) -> None:
    skippable = stages - 1
    for first in range(3 * skippable):
        window = [visited_stages(PathRules(stages, per_path), first + n) for n in range(skippable)]
        assert all(len(visited) == per_path and list(visited) == sorted(set(visited)) for visited in window)
        visits = Counter(stage for visited in window for stage in visited)
        assert visits == {stage: per_path for stage in range(1, stages) if per_path}


def test_without_lanes_a_weak_stage_is_visited_less_where_the_rules_allow_it() -> None:
    speeds = {1: 400.0, 2: 100.0, 3: 400.0, 4: 400.0}
    peers = [announcement(f"p{stage}", stage, speed=speed) for stage, speed in speeds.items()]
    for ratio, expected in ((1.0, {1: 21, 2: 21, 3: 21, 4: 21}), (2.0, {1: 24, 2: 12, 3: 24, 4: 24})):
        planner, _ = planner_with(*peers, rules=PathRules(5, 3, visit_ratio=ratio))
        paths = [planner.plan(number, (), {}, 0.0).value for number in range(28)]
        assert Counter(hop.module.stage for path in paths if isinstance(path, Path) for hop in path.hops) == expected


def test_a_path_goes_through_its_stages_in_order() -> None:
    planner, _ = planner_with(*(announcement(f"p{stage}", stage) for stage in (1, 2, 3)), rules=PathRules(4, 3))
    path = planner.plan(0, (), {}, 0.0).value
    assert path == Path(OWN, tuple(Hop(ModuleId(stage), PeerId(f"p{stage}")) for stage in (1, 2, 3)))


def test_a_path_can_be_had_through_any_stages() -> None:
    planner, _ = planner_with(*(announcement(f"p{stage}", stage) for stage in (1, 2, 3)), rules=PathRules(5, 2))
    full = planner.plan_through((1, 2, 3), (), {}, 0.0).value
    assert full == Path(OWN, tuple(Hop(ModuleId(stage), PeerId(f"p{stage}")) for stage in (1, 2, 3)))
    assert planner.plan_through((2, 4), (), {}, 0.0).value == NoReplica((ModuleId(4),))


@pytest.mark.parametrize("with_lanes", [False, True])
def test_a_stage_that_has_lost_its_last_peer_is_left_out_until_one_serves_it(*, with_lanes: bool) -> None:
    members, rules = Membership(RUN, OWN), PathRules(stages=4, per_path=2)
    for stage in (1, 2, 3):
        members.observe(announcement(f"p{stage}", stage), now=0, wall=0)
    sets = [visited_stages(rules, number) for number in range(3)]
    lanes: Lanes = tuple(tuple(Hop(ModuleId(stage), PeerId(f"p{stage}")) for stage in stages) for stages in sets)
    planner = Planner(rules, members, MeasuredTimes(OWN, TOKENS), lambda: lanes if with_lanes else ())

    def stages_of(number: int) -> list[int] | NoReplica:
        path = planner.plan(number, (), {}, NOW).value
        return path if isinstance(path, NoReplica) else [hop.module.stage for hop in path.hops]

    whole = [stages_of(number) for number in range(3)]
    assert whole == [list(stages) for stages in sets]
    members.give_up(PeerId("p2"), NOW)
    assert [stages_of(number) for number in range(3)] == [[stage for stage in stages if stage != 2] for stages in sets]
    assert planner.unserved(NOW) == (ModuleId(2),)
    assert [planner.goes_round(ModuleId(stage), NOW) for stage in (1, 2, 3)] == [False, True, False]
    members.give_up(PeerId("p3"), NOW)  # two are more than a path may miss
    assert {str(stages_of(number)) for number in range(3) if 1 not in sets[number]} == {
        str(NoReplica((ModuleId(2), ModuleId(3))))
    }
    members.recover(PeerId("p2"))
    members.recover(PeerId("p3"))
    assert [stages_of(number) for number in range(3)] == whole


def test_whoever_reaches_nobody_goes_round_nobody() -> None:
    """It is cut off itself."""
    members = Membership(RUN, OWN)
    for stage in (1, 2):
        members.observe(announcement(f"p{stage}", stage), now=0, wall=0)
    planner = Planner(PathRules(stages=4, per_path=2), members, MeasuredTimes(OWN, TOKENS))
    members.give_up(PeerId("p2"), NOW)
    assert planner.goes_round(ModuleId(2), NOW)
    members.give_up(PeerId("p1"), NOW)
    assert not planner.goes_round(ModuleId(2), NOW)


def test_a_stage_that_nobody_has_served_yet_is_waited_for() -> None:
    planner, _ = planner_with(announcement("p1", 1), announcement("p2", 2), rules=PathRules(stages=4, per_path=2))
    plans = [planner.plan(number, (), {}, NOW).value for number in range(3)]
    assert plans.count(NoReplica((ModuleId(3),))) == 2


def test_a_stage_whose_peer_is_out_of_reach_for_a_moment_is_waited_for() -> None:
    members = Membership(RUN, OWN)
    for stage in (1, 2, 3):
        members.observe(announcement(f"p{stage}", stage), now=0, wall=0)
    planner = Planner(PathRules(stages=4, per_path=2), members, MeasuredTimes(OWN, TOKENS))
    for number in range(3):
        planner.plan(number, (), {}, NOW)
    members.fail(PeerId("p2"), NOW)
    assert [planner.plan(number, (), {}, NOW).value for number in range(3)].count(NoReplica((ModuleId(2),))) == 2


def test_a_path_may_visit_nobody() -> None:
    planner, _ = planner_with(rules=PathRules(1, 0))
    assert planner.plan(0, (), {}, 0.0).value == Path(OWN, ())


def test_all_missing_modules_are_named() -> None:
    planner, _ = planner_with(announcement("p2", 2), rules=PathRules(5, 4))
    plan = planner.plan(0, (), {}, 0.0)
    assert plan.value == NoReplica((ModuleId(1), ModuleId(3), ModuleId(4)))
    assert all(f"module {stage}.0 has no peer left" in plan.reason for stage in (1, 3, 4))


def test_a_skipped_stage_needs_no_peer() -> None:
    rules = PathRules(4, 2)
    planner, _ = planner_with(*(announcement(f"p{stage}", stage) for stage in (1, 2)), rules=rules)
    found = [isinstance(planner.plan(n, (), {}, 0.0).value, Path) for n in range(3)]
    assert found == [3 not in visited_stages(rules, n) for n in range(3)]
    assert any(found)


# ---- which peer ------------------------------------------------------------------------------------------------------


def test_the_fastest_is_chosen_and_the_reason_says_so() -> None:
    planner, _ = planner_with(announcement("slow", speed=1000), announcement("fast", speed=4000))
    choice = planner.replica(ModuleId(1), frozenset(), {}, 0.0)
    assert choice.value == FAST
    assert "250 ms" in choice.reason
    assert "announced" in choice.reason


def test_those_left_out_are_not_chosen() -> None:
    planner, _ = planner_with(announcement("slow", speed=1000), announcement("fast", speed=4000))
    assert planner.replica(ModuleId(1), frozenset({FAST}), {}, 0.0).value == SLOW
    assert planner.replica(ModuleId(1), frozenset({FAST, SLOW}), {}, 0.0).value is None


def test_work_in_flight_spreads_the_load_in_proportion_to_speed() -> None:
    speeds = {"a": 1000, "b": 2000, "c": 5000}
    planner, _ = planner_with(*(announcement(peer, speed=speed) for peer, speed in speeds.items()))
    in_flight: dict[PeerId, int] = {}
    for _ in range(80):
        peer = chosen(planner, in_flight)
        assert peer is not None
        in_flight[peer] = in_flight.get(peer, 0) + 1
    for name, speed in speeds.items():
        assert in_flight[PeerId(name)] == pytest.approx(80 * speed / 8000, abs=1)


def test_slots_that_others_have_taken_count_as_a_queue() -> None:
    planner, _ = planner_with(announcement("fast", speed=4000, slots=8, free_slots=0), announcement("slow", speed=1000))
    assert chosen(planner) == SLOW, "1 s against 9 times 0.25 s"
    assert chosen(planner, {SLOW: 2}) == FAST, "3 s against 9 times 0.25 s"
    assert chosen(planner, {FAST: 20, SLOW: 2}) == SLOW, "our own are more than it says are taken"


def test_a_liar_is_believed_only_until_it_has_been_measured() -> None:
    planner, times = planner_with(announcement("liar", speed=100_000), announcement("fast", speed=1000))
    assert chosen(planner) == LIAR
    times.visited(LIAR, 2.0)
    assert chosen(planner) == FAST


def test_a_measurement_outlives_every_further_lie() -> None:
    planner, times = planner_with(announcement("liar", speed=float("inf")), announcement("fast", speed=1000))
    times.visited(LIAR, 2.0)
    assert chosen(planner) == FAST


def test_who_has_brought_nothing_back_gets_one_at_a_time_where_others_have() -> None:
    planner, times = planner_with(announcement("liar", speed=100_000), announcement("fast", speed=1000))
    assert chosen(planner, {LIAR: 3}) == LIAR, "nobody was measured yet: what is announced is all there is"
    times.visited(FAST, 1.0)
    assert chosen(planner) == LIAR
    assert chosen(planner, {LIAR: 1, FAST: 9}) == FAST
    times.lost(LIAR, 0.2)
    assert chosen(planner, {LIAR: 1}) == FAST, "it has still brought nothing back"
    times.visited(LIAR, 0.01)
    assert chosen(planner, {LIAR: 1}) == LIAR, "it was no lie"


def test_a_lane_is_left_while_its_peer_has_one_and_has_brought_nothing_back() -> None:
    members, times = Membership(RUN, OWN), MeasuredTimes(OWN, TOKENS)
    for one in (announcement("liar", speed=100_000), announcement("fast", speed=1000)):
        members.observe(one, now=0, wall=0)
    lane = (Hop(ModuleId(1), LIAR),)
    planner = Planner(ONE_STAGE, members, times, lambda: (lane,))
    times.visited(FAST, 1.0)
    assert planner.plan(1, (), {}, NOW).value == Path(OWN, lane)
    assert planner.plan(1, (), {LIAR: 1}, NOW).value == Path(OWN, (Hop(ModuleId(1), FAST),))


def test_failing_never_looks_like_speed() -> None:
    planner, times = planner_with(announcement("slow", speed=900), announcement("fast", speed=1000))
    times.visited(FAST, 30.0)
    assert chosen(planner) == SLOW


def test_hops_are_counted_by_peer() -> None:
    one, two = Hop(ModuleId(1), FAST), Hop(ModuleId(2), SLOW)
    assert in_flight_by_peer([Path(OWN, (one, two)), Path(OWN, (one,))]) == {FAST: 2, SLOW: 1}


# ---- lanes -----------------------------------------------------------------------------------------------------------


class OnLanes:
    """Two stages with two replicas each, and two lanes."""

    def __init__(self) -> None:
        first, second = ModuleId(1), ModuleId(2)
        self.lanes: Lanes = (
            (Hop(first, PeerId("a1")), Hop(second, PeerId("b1"))),
            (Hop(second, PeerId("b2")), Hop(first, PeerId("a2"))),
        )
        self.members = Membership(RUN, OWN)
        for peer, stage in (("a1", 1), ("a2", 1), ("b1", 2), ("b2", 2)):
            self.members.observe(announcement(peer, stage), now=NOW, wall=0.0)
        self.times = MeasuredTimes(OWN, TOKENS)
        self.planner = Planner(PathRules(3, 2), self.members, self.times, lambda: self.lanes)

    def path(self, number: int, **in_flight: int) -> list[str]:
        plan = self.planner.plan(number, (), {PeerId(peer): count for peer, count in in_flight.items()}, NOW)
        assert isinstance(plan.value, Path)
        return [hop.peer for hop in plan.value.hops]


def test_lanes_are_taken_in_turn_in_their_own_order() -> None:
    on = OnLanes()
    assert [on.path(number) for number in (1, 2, 3)] == [["b2", "a2"], ["a1", "b1"], ["b2", "a2"]]


def test_a_peer_of_the_lane_that_is_gone_or_crowded_is_replaced_and_the_stages_stay() -> None:
    on = OnLanes()
    assert on.path(2, a1=2, a2=1) == ["a1", "b1"], "half as long again is not much longer"
    assert on.path(2, a1=3) == ["a2", "b1"]
    on.members.give_up(PeerId("b1"), NOW)
    assert on.path(2) == ["a1", "b2"]


def test_what_peers_announce_of_their_queues_does_not_move_anybody_off_a_lane() -> None:
    """All data nodes hear it at once, and it is over when they come."""
    on = OnLanes()
    on.members.observe(announcement("a1", 1, slots=16, free_slots=0, sequence=2), now=NOW, wall=0.0)
    assert on.path(2) == ["a1", "b1"]
    on.lanes = ()
    assert on.planner.replica(ModuleId(1), frozenset(), {}, NOW).value == "a2", (
        "but without a lane it is all that is known"
    )


class ByCosts(OnLanes):
    """The same, and what it takes to be anywhere is known: a second for each visit, and the ways given."""

    def __init__(self, *, back_stops: int = 0, **ways_s: float) -> None:
        super().__init__()
        self.costs = self._costs(ways_s)
        rules = PathRules(3, 2, max_back_stops=back_stops, max_back_distance=back_stops)
        self.planner = Planner(rules, self.members, self.times, lambda: self.lanes, lambda: self.costs)
        for peer in ("a1", "a2", "b1", "b2"):
            self.times.visited(PeerId(peer), 1.0)

    @staticmethod
    def _costs(ways_s: Mapping[str, float]) -> Costs:
        """Ways by the two ends' names, one after the other; 0.1 s where none is given."""
        peers = [OWN, *map(PeerId, ("a1", "a2", "b1", "b2"))]
        way = {
            p: {q: ways_s.get(f"{p}{q}", ways_s.get(f"{q}{p}", 0.1)) if p != q else 0.0 for q in peers} for p in peers
        }
        stages = ((OWN,), tuple(peers[1:3]), tuple(peers[3:]))
        return Costs(stages, dict.fromkeys(peers, 0.4), way, dict.fromkeys(peers, 4))


def test_a_lane_s_stages_are_visited_by_those_that_bring_it_home_soonest() -> None:
    assert ByCosts().path(2) == ["a1", "b1"]
    assert ByCosts(owna1=0.3).path(2) == ["a2", "b1"]
    assert ByCosts(a1b1=0.4, a2b1=0.3).path(2) == ["a1", "b2"], "the whole way counts"
    assert ByCosts(owna2=0.3).path(1) == ["b1", "a1"], "in the lane's own order"


def test_our_own_under_way_count_by_half_and_what_was_waited_by_half() -> None:
    on = ByCosts(owna2=0.3)  # there and back: 0.4 s
    assert on.path(2, b2=9) == ["a1", "b1"]
    assert on.path(2, a1=1, b2=9) == ["a2", "b1"], "half a second"
    on.times.waited(PeerId("a2"), 0.2)  # each way: 0.2 s of them are others'
    assert on.path(2, a1=1, b2=9) == ["a1", "b1"]


def test_whoever_is_gone_new_or_on_trial_is_left_out() -> None:
    on = ByCosts()
    on.members.give_up(PeerId("a1"), NOW)
    assert on.path(2) == ["a2", "b1"]
    on.members.observe(announcement("a0", 1, speed=1e9), now=NOW, wall=0.0)
    assert on.path(2) == ["a2", "b1"], "at the next look there will be costs of it"
    on.costs = replace(on.costs, stages=(*on.costs.stages[:1], (PeerId("a0"), PeerId("a2")), on.costs.stages[2]))
    near = dict.fromkeys([*on.costs.message_s, PeerId("a0")], 0.01)
    ways = {peer: {**ways, PeerId("a0"): 0.01} for peer, ways in on.costs.message_s.items()} | {PeerId("a0"): near}
    on.costs = replace(on.costs, forward_s={**on.costs.forward_s, PeerId("a0"): 0.01}, message_s=ways)
    assert on.path(2) == ["a0", "b1"]
    assert on.path(2, a0=1) == ["a2", "b1"], "it has brought nothing back yet"
    on.members.give_up(PeerId("b1"), NOW)
    on.members.give_up(PeerId("b2"), NOW)
    assert isinstance(on.planner.plan(2, (), {}, NOW).value, NoReplica)


def test_one_hop_is_tried_elsewhere_and_the_others_go_along() -> None:
    on = ByCosts(a1b1=0.9, a1b2=0.3)
    assert on.path(2) == ["a2", "b1"]
    assert on.path(0) == ["a1", "b2"]
    assert "to measure it again" in on.planner.plan(0, (), {}, NOW).reason


def test_lanes_that_may_step_back_are_walked_as_they_were_told() -> None:
    assert ByCosts(back_stops=1, owna1=0.3).path(2) == ["a1", "b1"]


def test_every_now_and_then_one_hop_goes_to_who_was_not_measured_for_longest() -> None:
    on = OnLanes()
    for peer in ("a2", "a1", "b2"):
        on.times.visited(PeerId(peer), 1.0)
    assert on.path(0) == ["a2", "b1"]
    assert on.path(2) == ["a1", "b1"]
    on.lanes = on.lanes[:1]
    assert on.path(0) == ["a2", "b1"]
    tried = {place: number for number in range(3 * TRY_EVERY) if (place := hop_to_try(on.lanes, number)) is not None}
    assert set(tried) == {0, 1}
    assert on.path(tried[1])[1] == "b1", "never measured goes before long ago"


@pytest.mark.parametrize(("count", "length"), [(1, 1), (2, 2), (24, 3), (6, 4), (8, 8)])
def test_every_hop_of_every_lane_is_tried_some_day(count: int, length: int) -> None:
    lane = tuple(Hop(ModuleId(stage), PeerId(f"p{stage}")) for stage in range(length))
    lanes = (lane,) * count
    numbers = range(TRY_EVERY * count * length * 2)
    tried = {(n % count, place) for n in numbers if (place := hop_to_try(lanes, n)) is not None}
    assert len(tried) == count * length


def test_no_stage_waits_for_its_first_try_until_all_lanes_have_had_theirs() -> None:
    lanes = (tuple(Hop(ModuleId(stage), PeerId(f"p{stage}")) for stage in range(12)),) * 24
    assert {hop_to_try(lanes, TRY_EVERY * turn) for turn in range(12)} == set(range(12))


def test_without_lanes_the_ring_decides() -> None:
    on = OnLanes()
    on.lanes = ()
    assert set(on.path(1)) <= {"a1", "a2", "b1", "b2"}
    on.lanes = ((),)
    assert on.path(0) == []
