"""Texts go by their routes, to the next best expert if their own is not served, and none waits behind another."""

from collections import Counter, deque
from dataclasses import dataclass

from swarm.membership.membership import Membership
from swarm.routing.launch_queue import LOOK_AHEAD, Launch, LaunchQueue
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.path_rules import PathRules
from swarm.routing.planner import GATHER_S, Planner
from swarm.vocabulary.types import Affinity, ModuleId, PeerId, Route
from tests.swarm.membership.announcements import RUN, announcement

OWN = PeerId("own")
LEFT, RIGHT = (0, 0), (1, 1)
TWO_BY_TWO = PathRules(3, 2, experts=(1, 2, 2))
NOBODY = dict[PeerId, int]()


@dataclass(frozen=True)
class Text:
    route: Route
    number: int = 0

    @property
    def affinity(self) -> Affinity:
        return tuple((9, 1) if expert == 0 else (1, 9) for expert in self.route)


class Line:
    """A data node's line, its texts and its view of who serves what. One peer serves each module, called as it is."""

    def __init__(self, *routes: Route, rules: PathRules = TWO_BY_TWO, lacking: tuple[str, ...] = ()) -> None:
        self.texts = deque(Text(route, number) for number, route in enumerate(routes))
        self.drawn: list[Text] = []
        self.members = Membership(RUN, OWN)
        for stage in range(1, rules.stages):
            for module in rules.modules_at(stage):
                if str(module) not in lacking:
                    self.comes(module, now=0.0)
        self.planner = Planner(rules, self.members, MeasuredTimes(OWN, 1000))
        self.line = LaunchQueue[Text](
            self.planner, lambda: self.texts.popleft() if self.texts else None, self.drawn.append, 0
        )

    def comes(self, module: ModuleId, now: float, sequence: int = 1) -> None:
        self.members.observe(announcement(str(module), module, sequence=sequence), now=now, wall=0.0)

    def next(self, now: float = 0.0) -> Launch[Text] | None:
        return self.line.next(0, NOBODY, now)

    def all(self, now: float = 0.0) -> list[Launch[Text]]:
        found = []
        while (launch := self.next(now)) is not None:
            found.append(launch)
        return found


def modules_of(launch: Launch[Text] | None) -> list[str]:
    return [str(hop.module) for hop in launch.path.hops]


def test_each_goes_by_its_own_route_and_those_that_are_launched_again_come_first() -> None:
    line = Line(LEFT, RIGHT, (0, 1))
    assert [modules_of(each) for each in line.all()] == [["1.0", "2.0"], ["1.1", "2.1"], ["1.0", "2.1"]]
    line = Line(LEFT, RIGHT)
    line.line.retry(Text(RIGHT, 7))
    assert [each.text.number for each in line.all()] == [7, 0, 1]


def test_the_next_best_expert_is_visited_until_its_own_is_served_again() -> None:
    line = Line(*[RIGHT] * 4)
    assert modules_of(line.next()) == ["1.1", "2.1"]
    line.members.give_up(PeerId("2.1"), 0.0)
    assert modules_of(line.next(1.0)) == ["1.1", "2.0"]
    assert line.planner.without(ModuleId(2, 1), 1.0).startswith("expert 2.1 has no peer left; its documents go")
    line.comes(ModuleId(2, 1), now=2.0, sequence=2_000_000)
    assert modules_of(line.next(2.0)) == ["1.1", "2.1"]


def test_a_replica_that_is_out_of_reach_for_a_moment_keeps_no_other_route_waiting() -> None:
    line = Line(RIGHT, LEFT, RIGHT, LEFT)
    line.members.fail(PeerId("1.1"), 0.0)
    assert [each.text.number for each in line.all(0.1)] == [1, 3]
    assert [text.number for text in line.drawn] == [0, 1, 2, 3], "whatever waits has been told of"
    assert [each.text.number for each in line.all(1.5)] == [0, 2], "it is in reach again: they wait no more"


def test_as_many_as_may_wait_go_where_somebody_is_at_once() -> None:
    line = Line(*[RIGHT] * (LOOK_AHEAD + 3))
    line.members.fail(PeerId("1.1"), 0.0)
    gone = line.all(0.1)
    assert [each.text.number for each in gone] == [0, 1, 2, 3]
    assert {each.route for each in gone} == {(0, 1)}
    assert len(line.drawn) == LOOK_AHEAD + 3
    assert [each.route for each in line.all(1.5)] == [RIGHT] * (LOOK_AHEAD - 1)


def test_at_the_beginning_an_expert_is_waited_for_and_without_experts_one_text_waits() -> None:
    line = Line(LEFT, RIGHT, lacking=("1.1",))
    assert line.next(0.0) is None
    assert not line.drawn
    assert line.next(GATHER_S - 1) is None
    assert [modules_of(each) for each in line.all(GATHER_S + 1)] == [["1.0", "2.0"], ["1.0", "2.1"]]
    line = Line((), (), (), rules=PathRules(4, 2), lacking=("3.0",))
    assert [line.line.next(number, NOBODY, 0.0) is not None for number in range(6)].count(True) == 0
    assert len(line.drawn) == 1


def test_a_stage_without_anybody_is_waited_for_or_skipped_as_the_rules_say() -> None:
    for per_path, expected in ((3, []), (2, [["2.1", "3.1"]] * 3)):
        line = Line(*[(1, 1, 1)] * 6, rules=PathRules(4, per_path, experts=(1, 2, 2, 2)))
        for _ in range(3):
            line.next()
        for peer in ("1.0", "1.1"):
            line.members.give_up(PeerId(peer), 1.0)
        assert sorted(map(modules_of, line.all(1.0))) == sorted(expected)


def test_routes_that_alternate_each_skip_every_stage_equally_often() -> None:
    """By a number that both share, one route would always skip the same stages."""
    line = Line(*[(0, 0, 0, 0), (1, 1, 1, 1)] * 12, rules=PathRules(5, 2, experts=(1, 2, 2, 2, 2)))
    visits = Counter(module for each in line.all() for module in modules_of(each))
    assert set(visits.values()) == {6}
    assert len(visits) == 8
