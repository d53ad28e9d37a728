"""The talk about lanes: that it ends, that visits stay equal, and that nothing is exchanged twice, whatever becomes of
messages and data nodes."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterator

import pytest

from swarm.routing.cost_model import Costs
from swarm.routing.negotiation.groups import group_of, share_of
from swarm.routing.negotiation.negotiation_events import Action, Arrived, Member, SwarmChanged, TalkRules, Tell, Tick
from swarm.routing.negotiation.negotiator import Negotiator
from swarm.routing.path_rules import PathRules
from swarm.simulation.generate import jittered
from swarm.vocabulary.routing_messages import Abandon, Accept, Decline, Heard, LaneControl, Offer, Told
from swarm.vocabulary.types import PeerId
from tests.swarm.routing.negotiation.talkers import Party, Weather
from tests.swarm.routing.small_swarms import RULES, names, swarm

FIVE = [5, 3, 3, 3, 3, 3]
SLOW = {"1.0": 3.0, "2.1": 2.0, "0.4": 2.5, "4.2": 3.0, "3.0": 2.0}
CALM, STORM = Weather(), Weather(lost=0.25, doubled=0.25, slowest_s=2.5)
LONG = 3000.0


def party(weather: Weather = CALM, seed: int = 0, microbatches: int = 6) -> Party:
    return Party(swarm(FIVE, SLOW), RULES, microbatches, weather, seed)


# ---- what holds whatever happens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weather", [CALM, STORM], ids=["calm", "storm"])
@pytest.mark.parametrize("seed", range(12))
def test_the_talk_ends_and_visits_are_equal(weather: Weather, seed: int) -> None:
    talkers = party(weather, seed)
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()
    talkers.assert_offers_keep_the_sum()
    assert 1 <= len(talkers.decided) <= TalkRules(6).offers
    said = talkers.said.total()
    talkers.run(LONG)
    assert talkers.said.total() == said


@pytest.mark.parametrize("seed", range(25))
def test_a_data_node_may_die_at_any_step(seed: int) -> None:
    talkers = party(STORM, seed)
    for _ in range(talkers.rng.randrange(5, 250)):
        talkers.step()
    talkers.die(talkers.rng.choice(list(talkers.machines)))
    talkers.run(talkers.rng.uniform(0, 5))
    talkers.announce_members(within_s=4.0)
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()
    talkers.assert_offers_keep_the_sum()


@pytest.mark.parametrize("seed", range(12))
def test_a_data_node_may_come_back_with_nothing_in_mind(seed: int) -> None:
    talkers = party(STORM, seed)
    for _ in range(talkers.rng.randrange(20, 250)):
        talkers.step()
    talkers.restart(talkers.rng.choice(list(talkers.machines)))
    talkers.announce_members(within_s=4.0)
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()


@pytest.mark.parametrize("seed", range(12))
def test_who_takes_another_for_dead_for_a_while_stands_afterwards_where_it_stood(seed: int) -> None:
    talkers = party(STORM, seed)
    for _ in range(talkers.rng.randrange(100, 800)):
        talkers.step()
    mistaken, taken_for_dead = talkers.rng.sample(list(talkers.machines), 2)
    fewer = frozenset(member for member in talkers.members() if member.peer != taken_for_dead)
    talkers.push(talkers.now, mistaken, SwarmChanged(fewer, copy.deepcopy(talkers.costs)))
    talkers.run(talkers.rng.uniform(0, 20))
    talkers.push(talkers.now, mistaken, SwarmChanged(talkers.members(), copy.deepcopy(talkers.costs)))
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()
    talkers.assert_offers_keep_the_sum()


@pytest.mark.parametrize("seed", range(12))
def test_another_peer_may_die_at_any_step_and_stages_stay_as_agreed(seed: int) -> None:
    talkers = party(STORM, seed)
    for _ in range(talkers.rng.randrange(5, 250)):
        talkers.step()
    gone = talkers.rng.choice([peer for peers in talkers.costs.stages[1:] for peer in peers])
    talkers.announce_members(within_s=4.0, costs=talkers.costs.without(frozenset({gone})))
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()
    assert all(gone not in route for machine in talkers.machines.values() for route in machine.launches)


@pytest.mark.parametrize("seed", range(8))
def test_data_nodes_that_measure_differently_still_agree(seed: int) -> None:
    talkers = party(STORM, seed)
    for peer in talkers.machines:
        talkers.push(0.0, peer, SwarmChanged(talkers.members(), jittered(talkers.costs, 0.3, talkers.rng)))
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()


@pytest.mark.parametrize("microbatches", [4, 5])
def test_several_lanes_each(microbatches: int) -> None:
    rules = PathRules(stages=4, per_path=2, max_forward_jump=3)
    talkers = Party(swarm([4, 3, 3, 3], {"1.0": 3.0, "0.2": 2.0}), rules, microbatches, STORM, microbatches)
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()


# ---- who knows what -----------------------------------------------------------------------------------------------


def mutable_parts(thing: object, seen: set[int]) -> Iterator[object]:
    """Everything that can change and can be reached from here."""
    if id(thing) in seen or isinstance(thing, type | str | bytes | int | float | None):
        return
    seen.add(id(thing))
    if isinstance(thing, dict):
        inside: list[object] = [*thing.keys(), *thing.values()]
    elif isinstance(thing, tuple | list | set | frozenset):
        inside = list(thing)
    else:
        inside = list(getattr(thing, "__dict__", {}).values())
        inside += [getattr(thing, name) for name in getattr(type(thing), "__slots__", ()) if hasattr(thing, name)]
    frozen = isinstance(thing, tuple | frozenset) or (
        dataclasses.is_dataclass(thing) and type(thing).__dataclass_params__.frozen  # type: ignore[attr-defined]
    )
    if not frozen:
        yield thing
    for part in inside:
        yield from mutable_parts(part, seen)


def test_nothing_that_can_change_is_known_to_two_data_nodes() -> None:
    talkers = party()
    talkers.run(LONG)
    owners: dict[int, PeerId] = {}
    for peer, machine in talkers.machines.items():
        parts = {id(part) for part in mutable_parts(machine, set())}
        assert len(parts) > 10
        assert not parts & owners.keys()
        owners |= dict.fromkeys(parts, peer)


def test_who_hears_nothing_keeps_what_the_ring_dealt() -> None:
    talkers = party(Weather(lost=1.0))
    talkers.run(0.01)
    dealt = [machine.stages for machine in talkers.machines.values()]
    talkers.run(100.0)
    assert [machine.stages for machine in talkers.machines.values()] == dealt
    talkers.assert_equal_visits()
    assert talkers.said["Offer"] > 0
    assert talkers.said["Told"] == 0


def test_views_that_differ_agree_on_nothing() -> None:
    talkers = party()
    talkers.run(LONG)
    first = next(iter(talkers.machines))
    talkers.restart(first)
    decided = len(talkers.decided)
    talkers.push(talkers.now, first, SwarmChanged(talkers.members(), copy.deepcopy(talkers.costs)))
    talkers.run(60.0)
    assert len(talkers.decided) == decided
    talkers.announce_members()
    talkers.run(LONG)
    talkers.assert_equal_visits()
    talkers.assert_settled()


# ---- one offer, step by step --------------------------------------------------------------------------------------

A, B, C = names("0.0", "0.1", "0.2")
ONE = PathRules(stages=4, per_path=1, max_forward_jump=3)


class Three:
    """Three data nodes; messages are handed over by hand. Each has a peer nearby, and the ring deals none its own."""

    def __init__(self) -> None:
        costs = self.costs()
        members = frozenset(map(Member, costs.data_nodes))
        self.now = 0.0
        self.machines = {peer: Negotiator(peer, ONE, TalkRules(1)) for peer in (A, B, C)}
        for peer in self.machines:
            assert not [a for a in self.give(peer, SwarmChanged(members, costs)) if isinstance(a, Tell)]

    @staticmethod
    def costs() -> Costs:
        costs = swarm([3, 1, 1, 1], slots=1)
        near = dict(zip((A, B, C), names("2.0", "3.0", "1.0"), strict=True))
        links = {here: dict(row) for here, row in costs.message_s.items()}
        for data_node in near:
            for peer in names("1.0", "2.0", "3.0"):
                links[data_node][peer] = links[peer][data_node] = 0.1 if near[data_node] == peer else 9.0
        return dataclasses.replace(costs, message_s=links)

    def others(self, peer: PeerId) -> list[PeerId]:
        return [other for other in self.machines if other != peer]

    def give(self, peer: PeerId, event: SwarmChanged | Arrived | Tick) -> list[Action]:
        return self.machines[peer].handle(event, self.now)

    def tick(self, peer: PeerId, seconds: float = 0.0) -> list[tuple[PeerId, LaneControl]]:
        """Time passes for one of them; what it says, and to whom."""
        self.now += seconds
        return [(a.to, a.message) for a in self.give(peer, Tick()) if isinstance(a, Tell)]

    def say(self, sender: PeerId, to: PeerId, message: LaneControl) -> list[LaneControl]:
        """What the other says to it."""
        return [a.message for a in self.give(to, Arrived(sender, message)) if isinstance(a, Tell)]

    def offer(self) -> tuple[PeerId, Offer]:
        """The first offer that one of them makes."""
        for _ in range(20):
            for peer in self.machines:
                for _, message in self.tick(peer, 0.1):
                    assert isinstance(message, Offer)
                    return peer, message
        raise AssertionError("nobody offers")

    def stages(self) -> set[tuple[frozenset[int], ...]]:
        return {machine.stages for machine in self.machines.values()}


def decided() -> tuple[Three, PeerId, Offer, Told]:
    """An offer up to the decision, which is under way."""
    three = Three()
    asking, offer = three.offer()
    told: list[LaneControl] = []
    for other in three.others(asking):
        assert told == []
        assert three.say(asking, other, offer) == [Accept(offer.epoch, offer.number)]
        told = three.say(other, asking, Accept(offer.epoch, offer.number))
    assert len(told) == 2
    assert isinstance(told[0], Told)
    return three, asking, offer, told[0]


def test_an_offer_is_accepted_by_all_and_decided() -> None:
    three, asking, offer, told = decided()
    assert told.number == offer.number
    for other in three.others(asking):
        assert three.say(asking, other, told) == []
    assert [machine.launches for machine in three.machines.values()] == [(names(n),) for n in ("2.0", "3.0", "1.0")]


def test_a_lost_decision_is_asked_for_and_said_again() -> None:
    three, asking, offer, told = decided()
    first, second = three.others(asking)
    three.say(asking, first, told)
    ((to, again),) = three.tick(second, 1.6)
    assert (to, again) == (asking, Accept(offer.epoch, offer.number))
    (answer,) = three.say(second, asking, again)
    assert isinstance(answer, Told)
    assert answer.number == offer.number
    three.say(asking, second, answer)
    assert three.machines[second].launches != ()
    assert three.stages() == {(frozenset({stage}),) for stage in (1, 2, 3)}
    assert "bound" not in three.machines[second].describe()


def test_an_old_offer_and_an_old_acceptance_change_nothing() -> None:
    three, asking, offer, told = decided()
    first, second = three.others(asking)
    three.say(asking, first, told)
    three.say(asking, second, told)
    stood = three.stages()
    (declined,) = three.say(asking, first, offer)
    assert isinstance(declined, Decline)
    assert not declined.busy
    stale = Accept(offer.epoch, offer.number + 1)
    assert three.say(first, asking, stale) == [Abandon(offer.epoch, offer.number + 1)]
    assert three.say(asking, first, Abandon(offer.epoch, offer.number)) == []
    three.say(asking, first, told)
    assert three.stages() == stood


def test_who_does_not_answer_is_asked_again_and_then_all_are_free() -> None:
    three = Three()
    asking, offer = three.offer()
    first, second = three.others(asking)
    (accept,) = three.say(asking, first, offer)
    assert three.say(first, asking, accept) == []
    for _ in range(TalkRules(1).asked - 1):
        assert three.tick(asking, 1.6) == [(second, offer)]
    last = three.tick(asking, 1.6)
    assert last == [(peer, Abandon(offer.epoch, offer.number)) for peer in (first, second)]
    assert "bound" in three.machines[first].describe()
    three.say(asking, first, last[0][1])
    assert "bound" not in three.machines[first].describe()
    assert three.tick(asking, 0.0) == []
    later = [message for _, message in three.tick(asking, 5.0)]
    assert [type(message) for message in later] == [Offer, Offer], "what was found is offered again"


def test_of_two_offers_that_cross_one_wins() -> None:
    three = Three()
    three.now = 10.0
    offers: dict[PeerId, Offer] = {}
    for peer in (A, B):
        ((_, offer), _) = three.tick(peer)
        assert isinstance(offer, Offer)
        offers[peer] = offer
    (declined,) = three.say(B, A, offers[B])
    assert isinstance(declined, Decline)
    assert declined.busy
    said = three.say(A, B, offers[A])
    assert said[:2] == [Abandon(offers[B].epoch, offers[B].number)] * 2
    assert said[2] == Accept(offers[A].epoch, offers[A].number)


def test_somebody_who_is_bound_declines_another_offer_as_busy() -> None:
    three = Three()
    three.now = 10.0
    ((_, one), _), ((_, two), _) = three.tick(A), three.tick(B)
    (accept,) = three.say(B, C, two)
    assert isinstance(accept, Accept)
    (declined,) = three.say(A, C, one)
    assert isinstance(declined, Decline)
    assert declined.busy
    gave_up = three.say(C, A, declined)
    assert {type(message) for message in gave_up} == {Abandon}


@pytest.mark.parametrize(
    "lie", ["other visits", "another version", "somebody left out", "nobody there", "fewer lanes", "much worse"]
)
def test_an_offer_that_may_not_be_is_declined(lie: str) -> None:
    three = Three()
    asking, offer = three.offer()
    other, third = three.others(asking)
    by_peer = {standing.peer: standing for standing in offer.standings}
    (lane,), (far,) = by_peer[other].lanes, by_peer[third].lanes
    changed = {
        "other visits": {other: dataclasses.replace(by_peer[other], lanes=(far,))},
        "another version": {other: dataclasses.replace(by_peer[other], version=7)},
        "somebody left out": {},
        "nobody there": {other: dataclasses.replace(by_peer[other], lanes=(dataclasses.replace(lane, route=(C,)),))},
        "fewer lanes": {other: dataclasses.replace(by_peer[other], lanes=())},
        "much worse": {
            asking: dataclasses.replace(by_peer[asking], lanes=(far,)),
            third: dataclasses.replace(by_peer[third], lanes=by_peer[asking].lanes),
        },
    }[lie]
    standings = {**by_peer, **changed}
    if lie == "somebody left out":
        del standings[third]
    if lie == "much worse":
        three.say(asking, other, dataclasses.replace(offer, number=50))
        three.say(asking, other, Abandon(offer.epoch, 50))
        moved = three.machines[other]._view
        assert moved is not None
        moved.adopt(offer.standings)
        standings = {peer: dataclasses.replace(one, version=one.version + 1) for peer, one in standings.items()}
    (declined,) = three.say(asking, other, Offer(offer.epoch, 99, tuple(standings.values())))
    assert isinstance(declined, Decline)
    assert not declined.busy


def test_nothing_of_another_epoch_counts() -> None:
    three, asking, offer, told = decided()
    other = three.others(asking)[0]
    stood = three.machines[other].stages
    for message in (offer, told, Heard(told.epoch, 1), Abandon(offer.epoch, offer.number)):
        assert three.say(asking, other, dataclasses.replace(message, epoch=b"another.")) == []
    assert three.machines[other].stages == stood


# ---- launching ----------------------------------------------------------------------------------------------------


def around_the_corner(data_nodes: int, slots: int) -> Costs:
    """Stage 2 is on the way to stage 1: the shortest way steps back."""
    costs = swarm([data_nodes, 1, 1, 1], slots=slots)
    place = {**dict.fromkeys(costs.data_nodes, 0), **dict(zip(names("2.0", "1.0", "3.0"), (1, 2, 3), strict=True))}
    links = {here: {there: 0.1 + abs(place[here] - place[there]) for there in place} for here in place}
    for here, there in (names("3.0", data_node) for data_node in costs.data_nodes):
        links[here][there] = links[there][here] = 1.1
    held = {**costs.slots, **dict.fromkeys(costs.data_nodes, 2)}
    return dataclasses.replace(costs, message_s=links, slots=held)


@pytest.mark.parametrize(
    ("data_nodes", "slots", "walked"),
    [
        pytest.param(1, 2, names("2.0", "1.0", "3.0"), id="nobody else"),
        pytest.param(2, 2, names("1.0", "2.0", "3.0"), id="too few slots for both"),
        pytest.param(34, 1000, names("1.0", "2.0", "3.0"), id="another group of which we know nothing"),
    ],
)
def test_lanes_are_walked_in_the_order_of_their_stages_where_a_step_back_could_block(
    data_nodes: int, slots: int, walked: tuple[PeerId, ...]
) -> None:
    rules = PathRules(stages=4, per_path=3, max_forward_jump=2, max_back_stops=1, max_back_distance=1)
    talkers = Party(around_the_corner(data_nodes, slots), rules, 1, CALM, 0)
    stuck = dataclasses.replace(talkers.costs, forward_s=dict.fromkeys(talkers.costs.forward_s, 1.1))
    talkers.announce_members(costs=stuck)
    talkers.run(10.0)
    assert {machine.launches for machine in talkers.machines.values()} == {(walked,)}


# ---- large swarms -------------------------------------------------------------------------------------------------


def test_large_swarms_talk_in_groups_that_share_no_peer() -> None:
    talkers = Party(swarm([70, 40, 40, 40]), PathRules(stages=4, per_path=2, max_forward_jump=3), 1, CALM, 0)
    talkers.run(20.0)
    talkers.assert_equal_visits()
    groups = [group_of(peer, talkers.members()) for peer in sorted(talkers.machines)]
    assert [len(group.members) for group in dict.fromkeys(groups)] == [24, 23, 23]
    users: dict[PeerId, set[int]] = {}
    for peer, machine in talkers.machines.items():
        for route in machine.launches:
            for visited in route:
                users.setdefault(visited, set()).add(group_of(peer, talkers.members()).number)
    assert all(len(numbers) == 1 for numbers in users.values())


def test_a_stage_with_fewer_peers_than_groups_belongs_to_all() -> None:
    costs = swarm([70, 40, 2])
    members = frozenset(Member(peer) for peer in costs.data_nodes)
    shares = [share_of(costs, group_of(peer, members)) for peer in costs.data_nodes]
    assert all(share.stages[2] == costs.stages[2] and not exclusive for share, exclusive in shares)
    assert {peer for share, _ in shares for peer in share.stages[1]} == set(costs.stages[1])


@pytest.mark.parametrize("seed", range(5))
def test_swarms_in_which_visits_cannot_be_equal_in_one_iteration_end_as_dealt(seed: int) -> None:
    costs = jittered(swarm([4, 2, 2, 2, 2, 2]), 0.5, random.Random(seed))
    talkers = Party(costs, RULES, 3, STORM, seed)
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()
