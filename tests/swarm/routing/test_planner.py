import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from swarm.membership.membership import Membership
from swarm.routing.measured_times import Costs, MeasuredTimes
from swarm.routing.path_rules import PathRules
from swarm.routing.planner import CANDIDATES, TRY_EVERY, NoReplica, Planner, StagePrices, cheapest_route
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.pipeline_messages import Direction
from swarm.vocabulary.types import Hop, ModuleId, Path, PeerId, PeerState
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


@pytest.mark.parametrize(("stages", "per_path"), [(2, 1), (5, 4), (5, 3), (5, 1), (8, 5), (13, 7), (21, 13), (4, 0)])
def test_alike_stages_are_visited_equally_often(stages: int, per_path: int) -> None:
    peers = [announcement(f"p{stage}", stage) for stage in range(1, stages)]
    planner, _ = planner_with(*peers, rules=PathRules(stages, per_path))
    paths = [planner.plan(number, (), {}, number / 10).value for number in range(400)]
    assert all(isinstance(path, Path) and len(path.hops) == per_path for path in paths)
    visits = planner.prices.launched
    assert sum(visits) == 400 * per_path
    assert max(visits, default=0) - min(visits, default=0) <= 20


def test_a_weak_stage_is_visited_less_where_the_rules_allow_it() -> None:
    speeds = {1: 400.0, 2: 100.0, 3: 400.0, 4: 400.0}
    peers = [announcement(f"p{stage}", stage, speed=speed) for stage, speed in speeds.items()]
    for ratio in (1.0, 1.5, 2.0):
        planner, _ = planner_with(*peers, rules=PathRules(5, 3, visit_ratio=ratio))
        for number in range(1200):
            if number == 600:  # until then prices rise
                before = planner.prices.launched.copy()
            planner.plan(number, (), {}, number)
        visits = [now - then for now, then in zip(planner.prices.launched, before, strict=True)]
        weak, others = visits[1], (sum(visits) - visits[1]) / 3
        assert others / weak == pytest.approx(ratio, rel=0.2)


def test_a_path_can_be_had_through_any_stages() -> None:
    planner, _ = planner_with(*(announcement(f"p{stage}", stage) for stage in (1, 2, 3)), rules=PathRules(5, 2))
    full = Path(OWN, tuple(Hop(ModuleId(stage), PeerId(f"p{stage}")) for stage in (1, 2, 3)))
    assert planner.plan_through((1, 2, 3), (), {}, 0.0).value == full
    assert planner.plan_through((2, 4), (), {}, 0.0).value == NoReplica((ModuleId(4),))
    with_rival, _ = planner_with(announcement("p1", speed=4000), announcement("slow", speed=1000))
    assert not planner.passes_by(dict.fromkeys(full.hops, True), 0.0)
    assert with_rival.passes_by({full.hops[0]: True}, 0.0)
    assert chosen(with_rival) == SLOW, "p1 was silent"


def test_a_stage_that_has_lost_its_last_peer_is_left_out_until_one_serves_it() -> None:
    peers = [announcement(f"p{stage}", stage) for stage in (1, 2, 3)]
    planner, _ = planner_with(*peers, rules=PathRules(stages=4, per_path=2))
    members = planner._membership

    def stages_of(number: int) -> list[int] | NoReplica:
        path = planner.plan(number, (), {}, NOW).value
        return path if isinstance(path, NoReplica) else [hop.module.stage for hop in path.hops]

    assert {str(stages_of(number)) for number in range(9)} == {"[1, 2]", "[1, 3]", "[2, 3]"}
    members.give_up(PeerId("p2"), NOW)
    assert [stages_of(number) for number in range(3)] == [[1, 3]] * 3
    assert planner.unserved(NOW) == (ModuleId(2),)
    assert [planner.goes_round(ModuleId(stage), NOW) for stage in (1, 2, 3)] == [False, True, False]
    members.give_up(PeerId("p3"), NOW)
    assert stages_of(1) == [1], "one less than usual"
    members.give_up(PeerId("p1"), NOW)
    assert stages_of(1) == NoReplica((ModuleId(1), ModuleId(2), ModuleId(3)))
    assert not planner.goes_round(ModuleId(2), NOW), "whoever reaches nobody goes round nobody"
    for peer in ("p1", "p2", "p3"):
        members.recover(PeerId(peer))
    assert {str(stages_of(number)) for number in range(40)} == {"[1, 2]", "[1, 3]", "[2, 3]"}
    members.fail(PeerId("p2"), NOW)
    assert [stages_of(number) for number in range(3)] == [[1, 3]] * 3, "out of reach for a moment"


def test_what_nobody_has_served_yet_is_waited_for_and_named() -> None:
    assert planner_with(rules=PathRules(1, 0))[0].plan(0, (), {}, 0.0).value == Path(OWN, ()), "nobody is needed"
    planner, _ = planner_with(announcement("p1", 1), announcement("p2", 2), rules=PathRules(stages=4, per_path=2))
    assert planner.plan(0, (), {}, NOW).value == NoReplica((ModuleId(3),)), "before it may be skipped"
    planner, _ = planner_with(announcement("p2", 2), rules=PathRules(5, 4))
    plan = planner.plan(0, (), {}, 0.0)
    assert plan.value == NoReplica((ModuleId(1), ModuleId(3), ModuleId(4)))
    assert all(f"module {stage}.0 has no peer left" in plan.reason for stage in (1, 3, 4))


def test_the_fastest_that_is_not_excluded_is_chosen_and_the_reason_says_so() -> None:
    planner, _ = planner_with(announcement("slow", speed=1000), announcement("fast", speed=4000))
    choice = planner.replica(ModuleId(1), frozenset(), {}, 0.0)
    assert choice.value == FAST
    assert all(words in choice.reason for words in ("250 ms", "announced"))
    assert planner.replica(ModuleId(1), frozenset({FAST}), {}, 0.0).value == SLOW
    assert planner.replica(ModuleId(1), frozenset({FAST, SLOW}), {}, 0.0).value is None


def test_work_in_flight_spreads_the_load_in_proportion_to_speed() -> None:
    speeds = {"a": 1000, "b": 2000, "c": 5000}
    planner, _ = planner_with(*(announcement(peer, speed=speed) for peer, speed in speeds.items()))
    in_flight: dict[PeerId, int] = {}
    for _ in range(80):
        peer = chosen(planner, in_flight)
        in_flight[peer] = in_flight.get(peer, 0) + 1
    for name, speed in speeds.items():
        assert in_flight[PeerId(name)] == pytest.approx(80 * speed / 8000, abs=1)


def test_slots_that_others_have_taken_count_as_a_queue() -> None:
    planner, _ = planner_with(announcement("fast", speed=4000, slots=8, free_slots=0), announcement("slow", speed=1000))
    assert chosen(planner) == SLOW, "1 s against 9 times 0.25 s"
    assert chosen(planner, {SLOW: 2}) == FAST, "3 s against 9 times 0.25 s"
    assert chosen(planner, {FAST: 20, SLOW: 2}) == SLOW, "our own are more than it says are taken"


def test_a_claim_of_speed_does_not_outweigh_completed_work() -> None:
    planner, times = planner_with(announcement("liar", speed=float("inf")), announcement("fast", speed=1000))
    assert chosen(planner) == LIAR, "no replica was measured yet"
    times.visited(FAST, 1.0)
    assert chosen(planner, {FAST: 9}) == FAST
    times.visited(LIAR, 2.0)
    assert chosen(planner) == FAST, "a measurement outlives every further claim"


def test_a_busy_replica_is_waited_for_if_every_other_is_far() -> None:
    planner, times = planner_with(announcement("fast", speed=1000), announcement("slow", speed=1000))
    times.visited(FAST, 1.0)
    times.visited(SLOW, 1.0)
    planner.sent(FAST, 0.5)
    planner.sent(SLOW, 2.0)
    ask = functools.partial(planner.replica, ModuleId(1), frozenset({FAST}), {}, 0.0)
    assert ask(FAST).value == SLOW, "5 s against 2 s"
    planner.sent(SLOW, 100.0)
    assert ask(FAST).value is None
    assert "waiting for the busy fast" in ask(FAST).reason
    assert ask().value == SLOW, "nobody is waited for"
    assert chosen(planner) == FAST


def test_a_node_with_a_whole_path_waits_for_its_own_replica_and_asks_others_only_without_it() -> None:
    members, times = Membership(RUN, OWN), MeasuredTimes(OWN, TOKENS)
    planner = Planner(ONE_STAGE, members, times, {ModuleId(1): SLOW})
    sequence = itertools.count(1)

    def hear(name: str, stage: int = 1, **changes: Any) -> None:
        members.observe(announcement(name, stage, sequence=next(sequence), **changes), now=0, wall=0)

    hear("fast", speed=1000)
    assert planner.gathers(0.0)
    hear("slow", speed=10, state=PeerState.JOINING)
    assert planner.gathers(1e6), "without a limit"
    hear("slow", speed=10)
    assert not planner.gathers(0.0)
    members.recover(FAST)
    times.visited(FAST, 0.01)
    plans = [planner.plan(number, (), {SLOW: 9}, 0.0).value for number in range(2 * TRY_EVERY)]
    assert {plan.hops[0].peer for plan in plans if isinstance(plan, Path)} == {SLOW}
    assert chosen(planner, {SLOW: 9}) == SLOW
    assert [planner.passes_by({Hop(ModuleId(1), peer): False}, 0.0) for peer in (SLOW, FAST)] == [False, True]
    other = functools.partial(planner.replica, ModuleId(1), frozenset({SLOW}), {}, 0.0)
    assert other(SLOW).value is None, "it is busy"
    assert other().value == FAST
    members.give_up(SLOW, 0.0)
    assert chosen(planner) == FAST
    unfit = Planner(ONE_STAGE, members, times, {ModuleId(1): LIAR})
    hear("liar", 2)
    assert not unfit.gathers(0.0), "a replica that did not fit hosts another module"


def test_a_linked_replica_is_preferred_to_a_mere_name() -> None:
    planner, _ = planner_with(announcement("liar", speed=1e9), announcement("slow", speed=10))
    planner._membership.recover(SLOW)
    assert chosen(planner) == SLOW


class Trials:
    """A stage with one linked, proven replica, and new names that promise more."""

    def __init__(self, *new: str) -> None:
        self.planner, self.times = planner_with(announcement("fast"), *(announcement(each, speed=1e9) for each in new))
        self.members = self.planner._membership
        self.members.recover(FAST)
        self.times.visited(FAST, 1.0)

    def link(self, *names: str) -> None:
        for name in names:
            self.members.recover(PeerId(name))

    def hop(self, now: float = 0.0, *, proven_only: bool = False, **in_flight: int) -> PeerId:
        flights = {PeerId(name): count for name, count in in_flight.items()}
        path = self.planner.plan(1, (), flights, now, proven_only=proven_only).value
        assert isinstance(path, Path)
        return path.hops[0].peer


def test_names_without_a_link_get_nothing_beside_a_proven_replica() -> None:
    on = Trials("n1", "n2")
    assert {on.hop() for _ in range(2 * TRY_EVERY)} == {FAST}
    on.link("n1")
    assert on.hop() == "n1"


def test_one_new_replica_of_a_module_is_on_trial_at_a_time_whatever_their_number() -> None:
    on = Trials("n1", "n2", "n3")
    on.link("n1", "n2", "n3")
    first = on.hop()
    assert first != FAST
    assert on.hop(**{first: 1}) == FAST
    assert on.hop(proven_only=True) == FAST, "the text of a lost microbatch"
    on.times.visited(first, 0.01)
    assert on.hop() == first, "it has kept its promise"


def test_trials_pause_longer_after_each_failure() -> None:
    on = Trials("n1", "n2", "n3")
    on.link("n1", "n2", "n3")
    now = 0.0
    for pause_s in (2.0, 4.0, 8.0):
        tried = on.hop(now)
        assert tried != FAST
        on.times.lost(tried, 10.0)
        assert on.hop(now) == FAST
        assert on.hop(now + 0.9 * pause_s) == FAST
        now += pause_s + 0.01
    kept = on.hop(now)
    on.times.visited(kept, 0.1)
    assert on.hop(now) == kept, "a success ends the pauses"


def test_without_a_proven_replica_every_linked_one_gets_work() -> None:
    planner, _ = planner_with(announcement("n1"), announcement("n2"), announcement("name", speed=1e9))
    planner._membership.recover(PeerId("n1"))
    planner._membership.recover(PeerId("n2"))
    paths = [planner.plan(1, (), {PeerId("n1"): busy}, 0.0).value for busy in (0, 5)]
    assert [path.hops[0].peer for path in paths if isinstance(path, Path)] == ["n1", "n2"]


class TwoStages:
    """Two stages with two replicas each, a second for each visit."""

    def __init__(self, **ways_s: float) -> None:
        self.members, self.times = Membership(RUN, OWN), MeasuredTimes(OWN, TOKENS)
        for peer, stage in (("a1", 1), ("a2", 1), ("b1", 2), ("b2", 2)):
            self.members.observe(announcement(peer, stage, slots=64), now=NOW, wall=0.0)
            self.times.visited(PeerId(peer), 1.0)
            self.times.computed(PeerId(peer), Direction.FORWARD, 0.4)
            self.times.computed(PeerId(peer), Direction.BACKWARD, 0.6)
        for one, other in itertools.combinations(("own", "a1", "a2", "b1", "b2"), 2):
            self.times.sent(PeerId(one), PeerId(other), 2 * ways_s.get(one + other, 0.1))
        self.planner = Planner(PathRules(3, 2), self.members, self.times)

    def path(self, number: int, **in_flight: int) -> list[str]:
        plan = self.planner.plan(number, (), {PeerId(peer): count for peer, count in in_flight.items()}, NOW)
        return [hop.peer for hop in plan.value.hops]


def test_the_whole_way_counts_and_our_own_in_flight_and_what_was_waited_by_half() -> None:
    assert TwoStages().path(2) == ["a1", "b1"]
    assert TwoStages(owna1=0.3).path(2) == ["a2", "b1"]
    assert TwoStages(a1b1=0.4, a2b1=0.3).path(2) == ["a1", "b2"]
    on = TwoStages(owna2=0.3)  # there and back: 0.4 s
    assert on.path(2, b2=9) == ["a1", "b1"]
    assert on.path(2, a1=1, b2=9) == ["a2", "b1"], "half a second"
    on.times.waited(PeerId("a2"), 0.2)  # each way: 0.2 s of them are others'
    assert on.path(2, a1=1, b2=9) == ["a1", "b1"]


def test_a_replica_that_is_always_full_of_others_is_left_to_them() -> None:
    on = TwoStages()
    for look in range(60):
        on.members.observe(announcement("a1", 1, slots=2, free_slots=0, sequence=2 + look), now=NOW, wall=0.0)
        path = on.planner.plan(1, (), {}, 3.0 * look).value
    assert path.hops[0].peer == "a2"


def test_every_now_and_then_one_hop_goes_to_who_was_not_measured_for_longest() -> None:
    on = TwoStages()
    on.times.visited(PeerId("a1"), 1.0)
    on.times.visited(PeerId("b1"), 1.0)
    assert on.path(TRY_EVERY - 1) == ["a2", "b1"]
    assert "to measure it again" in on.planner.plan(TRY_EVERY - 1, (), {}, NOW).reason
    on.times.visited(PeerId("a2"), 1.0)
    assert on.path(TRY_EVERY - 1) == ["a1", "b2"]
    assert on.path(TRY_EVERY - 1, b2=1) == ["a1", "b1"], "it is being measured"
    assert on.path(1) == ["a1", "b1"]


@pytest.mark.parametrize("times_slower", [5, 50])
def test_a_replica_that_was_slow_for_a_moment_is_soon_used_again(times_slower: int) -> None:
    on, used = TwoStages(), list[int]()

    def visited(peer: PeerId, seconds: float) -> None:
        on.times.visited(peer, seconds)
        on.times.computed(peer, Direction.FORWARD, 0.4 * seconds)
        on.times.computed(peer, Direction.BACKWARD, 0.6 * seconds)

    for _ in range(20):
        visited(PeerId("a2"), 1.0)
    for _ in range(3):
        visited(PeerId("a2"), times_slower)
    before: list[Hop] = []
    for number in range(1, 20 * TRY_EVERY):
        path = on.planner.plan(number, (), {hop.peer: 1 for hop in before}, number / 10).value
        assert isinstance(path, Path)
        before = list(path.hops)
        for hop in path.hops:
            visited(hop.peer, 1.0)
            if hop.peer == "a2" and number % TRY_EVERY != TRY_EVERY - 1:
                used.append(number)
    assert used[0] < 9 * TRY_EVERY
    assert len([number for number in used if number > 10 * TRY_EVERY]) > 4 * TRY_EVERY, "half of the visits again"


def test_a_launch_compares_a_few_of_many_replicas_and_others_when_these_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = [f"p{number:03}" for number in range(200)]
    planner, times = planner_with(*(announcement(peer, 1, slots=4, free_slots=4) for peer in peers))
    members = planner._membership
    for number, peer in enumerate(map(PeerId, peers)):
        members.linked.add(peer)
        times.visited(peer, 1.0 + number / 1000)
        times.sent(OWN, peer, 2.0 if number < 100 else 0.2)
    compared: list[frozenset[PeerId]] = []

    def searched(costs: Costs, own: PeerId, price: object, among: Sequence[Sequence[PeerId]], *rest: Any) -> Any:
        compared.append(frozenset(among[1]))
        return cheapest_route(costs, own, price, among, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("swarm.routing.planner.cheapest_route", searched)
    path = planner.plan(1, (), {}, NOW).value
    assert isinstance(path, Path)
    assert path.hops[0].peer == "p100", "the sooner of the fast ones and the near ones"
    assert {PeerId("p000"), PeerId("p100")} < compared[-1]
    assert len(compared[-1]) <= sum(CANDIDATES)
    before = compared[-1]
    for peer in before:
        members.fail(peer, NOW)
    other = planner.plan(2, (), {}, NOW).value
    assert isinstance(other, Path)
    assert other.hops[0].peer not in before


def test_what_another_data_node_announces_moves_visits_and_a_lie_moves_them_little() -> None:
    def ahead(times: int) -> list[float]:
        prices = StagePrices(PathRules(3, 1))
        for look in range(1, 101):
            prices.launch([1 + look % 2], (), [1, 2])
            said = [
                replace(announcement("honest", 0), visits=(look // 2, look - look // 2)),
                replace(announcement("other", 0), visits=(times * look, 0)),
            ]
            prices.look(said, [1, 2], float(look))
        return prices.excess

    honest, lie = ahead(1), ahead(10)
    assert honest[0] > 20
    assert honest[0] == -honest[1]
    assert lie[0] <= 1.5 * honest[0]
